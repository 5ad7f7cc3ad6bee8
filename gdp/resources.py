"""Where the files that travel with gdp are: in the wheel, or in a source checkout."""

from pathlib import Path


def data_path(*parts: str) -> Path:
    """A file or folder shipped with gdp, such as `data_path("clusters", "devices.toml")`."""
    package = Path(__file__).parent
    if (packaged := package / "_data").is_dir():
        return packaged.joinpath(*parts)
    # A source checkout: data/clusters and checkpoints lie beside the package.
    root = package.parent if parts[0] == "checkpoints" else package.parent / "data"
    return root.joinpath(*parts)
