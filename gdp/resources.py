"""Paths of the files that ship with gdp, in the wheel or in a source checkout."""

import os
from pathlib import Path


def data_path(*parts: str) -> Path:
    """A file or folder shipped with gdp, such as `data_path("clusters", "devices.toml")`."""
    package = Path(__file__).parent
    if (packaged := package / "_data").is_dir():
        return packaged.joinpath(*parts)
    # A source checkout: these lie beside the package, all else in data/.
    beside = parts[0] in ("checkpoints", "pretrain", "finetune")
    return (package.parent if beside else package.parent / "data").joinpath(*parts)


def shipped(path: str | os.PathLike[str]) -> str:
    """The path itself if it exists, else the shipped file of that name if there is one: recipes and
    commands name files by their place in a checkout."""
    name = os.fspath(path)
    parts = Path(name).parts
    if Path(name).exists() or not parts or Path(name).is_absolute():
        return name
    found = data_path(*(parts[1:] if parts[0] == "data" and parts[1:] else parts))
    return str(found) if found.exists() else name
