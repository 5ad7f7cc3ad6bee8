"""Version of gdp, and the commands that install it."""

import json
from importlib.metadata import Distribution, PackageNotFoundError, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "gdp-placement"
"""Name of the package on the index: the name gdp belongs to another project there."""


def gdp_version() -> str:
    """The version of the installed distribution, or "0+unknown" in a tree that is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"


def install_command(extra: str = "") -> str:
    """The command that installs gdp, with an extra, from where it came: the checkout, named `.`
    where that is the current folder, or the distribution.

    pip records the checkout and whether it is editable in `direct_url.json` (PEP 610); a tree that
    is not installed is one itself.
    """
    source, editable = _checkout()
    named = DISTRIBUTION if source is None else "." if source == Path.cwd() else str(source)
    wanted = f"{named}[{extra}]" if extra else named
    return f"pip install {'-e ' if editable else ''}'{wanted}'"


def _checkout() -> tuple[Path | None, bool]:
    """(the checkout that gdp was installed from, None if from none or it is gone; editable)."""
    try:
        record = Distribution.from_name(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        record = None
    origin = json.loads(record or "{}")
    url, editable = (
        urlsplit(origin.get("url", "")),
        origin.get("dir_info", {}).get("editable", False),
    )
    tree = Path(__file__).resolve().parents[2]
    if url.scheme == "file" and "dir_info" in origin:
        tree = Path(unquote(url.path))
    elif (tree / "pyproject.toml").is_file():
        editable = True  # the tree itself runs
    return (tree, editable) if (tree / "pyproject.toml").is_file() else (None, False)
