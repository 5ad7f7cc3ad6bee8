"""What a run has found, as one page that opens without a network, in the style of gdp's reports."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from gdp.files.writing import write_atomic
from gdp.units import format_bytes, format_seconds

TEMPLATE = Path(__file__).with_name("page.html")


def write_page(found: dict[str, Any], folder: Path) -> None:
    """Write gpu.html beside gpu.json."""
    write_atomic(folder / "gpu.html", page(found).encode())


def page(found: dict[str, Any]) -> str:
    """The page's text."""
    from jinja2 import Environment, StrictUndefined

    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    made.filters |= {"seconds": format_seconds, "bytes": format_bytes}
    results = found["results"]
    return made.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        found=found,
        about=found.get("about", {}),
        style=(files("gdp.reports") / "page" / "page.css").read_text(encoding="utf-8"),
        executed={name.removeprefix("execute "): row for name, row in results.items()
                  if name.startswith("execute ")},
        profiled={name.removeprefix("profile "): row for name, row in results.items()
                  if name.startswith("profile ")},
        predicted=[row for name in ("calibrate torch", "calibrate jax")
                   for row in results.get(name, {}).get("models", [])],
        transfers=results.get("transfers"),
    )  # fmt: skip
