"""What MkDocs adds from the code and the repository: verbs, file schemas, pages kept elsewhere."""

import json
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from schemas import formats, schema

TOP = Path(__file__).resolve().parent.parent
PAGES = {
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "measured.md": "benchmarks/measured/README.md",
}

# Pages link to files of the repository, which exist in a checkout, too; these have pages.
LINKS = {TOP / source: page for page, source in PAGES.items()} | {
    TOP / "data/clusters/devices.toml": "reference/devices.md",
    TOP / "gdp/cluster/reserve.py": "reference/devices.md#reserves",
}
SCHEMAS = TOP / "docs/schemas.py"


DEVICES = """# Devices and reserves

`gdp devices --presets` prints this table. Devices report less memory than is printed on their
boxes, and a plan may fill what is reported less a reserve. Sizes and speeds that are wrong for your
machine go into a [TOML file](../how-to/unequal-gpus.md).
"""


def devices_page() -> str:
    """The tables of device presets and of reserves, from the data and the code."""
    from gdp.base.units import format_bytes
    from gdp.cluster.presets import device_preset, presets
    from gdp.cluster.reserve import RESERVES

    lines = [
        DEVICES,
        "| preset | printed | reported | reserve | GB/s | TFLOP/s | source |",
        "|---" * 7 + "|",
    ]
    for name, entry in presets().items():
        device = device_preset(name)
        speeds = ", ".join(f"{k} {v / 1e12:.4g}" for k, v in entry.flop_per_s.items())
        lines.append(
            f"| `{name}` | {entry.memory} | {format_bytes(device.total_bytes)} | "
            f"{format_bytes(device.reserve_bytes)} | {entry.bytes_per_s / 1e9:.4g} | {speeds} | "
            f"{entry.source} |"
        )
    lines += ["", "## Reserves", "", "| devices | planned for | source |", "|---|---|---|"]
    for row in RESERVES.values():
        lines.append(f"| {row.devices} | {row.runtime or 'anything'} | {row.source} |")
    return "\n".join([*lines, ""])


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and schemas."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(TOP / source).read_text()))
    files.append(File.generated(config, "reference/devices.md", content=devices_page()))
    for name in formats():
        text = json.dumps(schema(name), indent=2) + "\n"
        files.append(File.generated(config, f"reference/schemas/{name}.json", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to files of the repository at the pages made of them, also from these pages."""
    docs, name = TOP / "docs", page.file.src_uri
    folder = (TOP / PAGES[name] if name in PAGES else docs / name).parent

    def built(match: re.Match[str]) -> str:
        path, mark, anchor = match[1].partition("#")
        source = Path(os.path.normpath(folder / path))
        if source == SCHEMAS:
            target = f"reference/schemas/{anchor}.json"
        elif source in LINKS:
            target = LINKS[source]
        elif name in PAGES and source.is_relative_to(docs):
            target = str(source.relative_to(docs)) + mark + anchor
        else:
            return match[0]
        return f"]({os.path.relpath(docs / target, (docs / name).parent)})"

    return re.sub(r"\]\(([^)\s]+)\)", built, markdown)
