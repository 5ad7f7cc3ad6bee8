"""Options of files that a command writes, and of its output."""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from gdp.base.files.writing import (
    OverwritePolicy,
    TargetError,
    check_file_writable,
    check_folder_writable,
    is_stream,
)
from gdp.cli.options.decorators import Decorator, pass_one
from gdp.cli.show import AS_JSON


@dataclass(frozen=True)
class Outputs:
    """Requested output paths of a command, by kind."""

    paths: Mapping[str, str]
    force: bool

    def require(
        self, *read: str | os.PathLike[str] | None, folder: str | None = None
    ) -> OverwritePolicy:
        """Check before the work that the paths may be written.

        Args:
            *read: Models and files that the command reads, which are never overwritten.
            folder: Kind of the path that is a folder.

        Raises:
            TargetError: if a path may not be written.
        """
        overwrite = overwrite_policy(*read, force=self.force)
        if folder is not None:
            check_folder_writable(self.paths[folder], folder, overwrite)
        taken: dict[str, str] = {}
        for kind, path in self.paths.items():
            if kind == folder:
                continue
            check_file_writable(path, kind, overwrite)
            place = os.path.realpath(path)
            if place in taken and not is_stream(path):
                raise TargetError(f"{path!r} is given for the {taken[place]} and for the {kind}")
            taken[place] = kind
        return overwrite


def overwrite_policy(*read: str | os.PathLike[str] | None, force: bool) -> OverwritePolicy:
    """Permission to overwrite, for a command that reads these models and files."""

    def sources() -> list[Path]:
        from gdp.question.models import source_files

        given = [os.fspath(spec) for spec in read if spec is not None]
        return [path for spec in given for path in (Path(spec), *source_files(spec))]

    return OverwritePolicy(sources, force)


def outputs(**options: Callable[..., Decorator]) -> Decorator:
    """Options of paths to write, by kind, and `--force`; passes the command `outputs`."""
    kinds = {f"write_{kind}": kind for kind in options}

    def make(force: bool, **paths: str | None) -> Outputs:
        return Outputs({kinds[name]: p for name, p in paths.items() if p is not None}, force)

    named = {name: options[kind](name) for name, kind in kinds.items()}
    return pass_one("outputs", make, named | {"force": _force})


written = functools.partial(functools.partial, click.option)
"""An option of `outputs`, whose name is still to come."""
required = functools.partial(written, "-o", "--output", required=True)
report = written("--report", metavar="R.html", help="Write an HTML report.")
trace = written("--trace", metavar="T.json", help="Write a Chrome/Perfetto trace of the schedule.")
_force = click.option(
    "--force", is_flag=True, help="Write over, or among, files that gdp did not write."
)
as_json = click.option(
    "--json", is_flag=True, expose_value=False, help="Print one JSON object on stdout.",
    callback=lambda context, _, value: context.meta.update({AS_JSON: value}),
)  # fmt: skip
