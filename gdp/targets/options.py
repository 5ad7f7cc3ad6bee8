"""Options of a runtime's command line, each with its reason, and the files that hold them."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gdp.base.files.writing import OverwritePolicy, indented_json, new_contents

ADDRESSES = "put the address of a machine in the place of its name"


class Option(NamedTuple):
    """An option or a variable, and why it is there."""

    name: str
    value: str  # "": none follows
    why: str  # "": it goes with one before


Row = tuple[str, object, str]


def given(*rows: Row) -> list[Option]:
    """The options of rows of a name, a value and a reason: of those without a value none (False, 0,
    "", None), and of True the name alone.

    >>> given(("--port", 0, ""), ("--size", 2, "GPUs"), ("--fast", True, ""))
    [Option(name='--size', value='2', why='GPUs'), Option(name='--fast', value='', why='')]
    """
    return [
        Option(name, "" if value is True else str(value), why) for name, value, why in rows if value
    ]


def arguments(options: Iterable[Option]) -> list[str]:
    """The options as arguments of a program."""
    return [word for option in options for word in option[:2] if word]


def variables(options: Iterable[Option]) -> dict[str, str]:
    """The options as variables of its environment."""
    return {option.name: option.value for option in options}


def reasons(options: Iterable[Option]) -> dict[str, str]:
    """Reasons by name; of names with dots, which set one thing together, by their first part."""
    return {option.name.partition(".")[0]: option.why for option in options if option.why}


def write_commands(
    engine: str, document: Mapping[str, Any], commands: Sequence[Mapping[str, Any]],
    why: Mapping[str, str], output: Path, overwrite: OverwritePolicy,
) -> list[Path]:  # fmt: skip
    """Write `ENGINE.json`, and environment and arguments of each command as a line for a shell."""
    whole = {**document, **commands[0], "why": why}
    whole |= {"servers": commands} if len(commands) > 1 else {}
    lines = {
        "environment.txt": "\n".join(
            " ".join(f"{name}={value}" for name, value in own["environment"].items())
            for own in commands
        ),
        "arguments.txt": "\n".join(shlex.join(own["arguments"]) for own in commands),
    }
    with new_contents(output, f"export to {engine}", overwrite) as folder:
        (folder / f"{engine}.json").write_bytes(indented_json(whole) + b"\n")
        for name, line in lines.items():
            (folder / name).write_text(line + "\n")
    return [output / name for name in (f"{engine}.json", *lines)]
