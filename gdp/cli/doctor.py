"""The verb that says what works here: `gdp doctor`."""

import sys
from collections.abc import Mapping
from typing import Any

import click

from gdp.cli import options
from gdp.cli.show import show


@click.command()
@options.as_json
def doctor() -> None:
    """Show what is installed, which devices and runtimes are seen, what fails and what to do.

    Exits with 1 where something fails that gdp needs.
    """
    from gdp.commands.doctor import examine

    found = examine()
    show(found, lambda: doctor_text(found))
    if not found["healthy"]:
        sys.exit(1)


def doctor_text(found: Mapping[str, Any]) -> str:
    """What `gdp doctor` prints: an area a block, and at the end what to do."""
    from gdp.cli.text import shown, table

    lines = [f"gdp {found['gdp']}, Python {found['python']}, {found['platform']}"]
    for area in dict.fromkeys(check["area"] for check in found["checks"]):
        checks = [check for check in found["checks"] if check["area"] == area]
        width = max(len(check["name"]) for check in checks)
        lines += ["", area]
        lines += [
            f"  {check['status']:4}  {check['name'].ljust(width)}  {check['found']}"
            for check in checks
        ]
    todo: dict[str, list[str]] = {}
    for check in found["checks"]:
        if check["advice"] and check["status"] != "ok":
            todo.setdefault(check["advice"], []).append(check["name"])
    if todo:
        rows = [[", ".join(names), advice] for advice, names in todo.items()]
        lines += ["", table(["what to do", ""], rows)]
    lines += ["", _verdict(found)]
    return shown(lines)


def _verdict(found: Mapping[str, Any]) -> str:
    """The last line; what is not installed and not needed does not count."""
    if not found["healthy"]:
        return "something that gdp needs fails"
    return "gdp works; see the warnings" if found["warns"] else "all is well"
