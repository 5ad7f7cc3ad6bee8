"""What verbs that write share: `--force`, and asking before the work whether they may."""

import os
from collections.abc import Mapping
from pathlib import Path

import click

from gdp.files import is_stream
from gdp.targets import Permit, TargetError, require_file

force_option = click.option(
    "--force", is_flag=True, help="Write over, or among, files that gdp did not write."
)


def permit_of(*read: str | os.PathLike[str] | None, force: bool) -> Permit:
    """What a verb that reads these models and files may write over."""

    def sources() -> list[Path]:
        from gdp.models import source_files

        given = [os.fspath(spec) for spec in read if spec is not None]
        return [path for spec in given for path in (Path(spec), *source_files(spec))]

    return Permit(sources, force)


def require_files(outputs: Mapping[str, str | None], permit: Permit) -> None:
    """Raise `TargetError` where a file of some kind may not be written; None asks for none."""
    taken: dict[str, str] = {}
    for kind, path in outputs.items():
        if path is None:
            continue
        require_file(path, kind, permit)
        place = os.path.realpath(path)
        if place in taken and not is_stream(path):
            raise TargetError(f"{path!r} is given for the {taken[place]} and for the {kind}")
        taken[place] = kind
