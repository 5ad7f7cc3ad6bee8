"""What goes into the wheel beside the package: those graphs of the corpus that recipes read."""

import json
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CORPUS, INSIDE = Path("data/corpus"), "gdp/_data/corpus"
MAX_OPS = 2000
"""Of the shipped recipes. Larger graphs are most of the bytes; a checkout makes them by
`python -m pretrain.corpus`."""


class CustomBuildHook(BuildHookInterface):
    """Adds the files that the manifest names."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a wheel is written; an editable one reads the checkout."""
        if version == "editable":
            return
        root = Path(self.root) / CORPUS
        graphs = json.loads((root / "manifest.json").read_text())["graphs"]
        small = [graph["file"] for graph in graphs if graph["num_ops"] <= MAX_OPS]
        for name in ("manifest.json", *small):
            build_data["force_include"][str(root / name)] = f"{INSIDE}/{name}"
