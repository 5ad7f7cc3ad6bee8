"""Which gdp this is."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "gdp-placement"
"""What pip calls this package: the name gdp belongs to another project there."""


def gdp_version() -> str:
    """The version of the installed distribution, or "0+unknown" in a tree that is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "0+unknown"
