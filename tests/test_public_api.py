"""The public surface is listed here, and importing it stays light."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gdp

PUBLIC = [
    "Cluster", "ClusterError", "Constraints", "Device", "GdpError", "InfeasibleError", "Link",
    "Measuring", "ModelError", "OpGraph", "Pin", "Placement", "PlacementError", "Result", "Search",
    "compare", "export", "finetune", "load", "load_placement", "make_cluster", "place", "run",
    "save_placement", "simulate", "trace",
]  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert gdp.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(gdp, name).__module__.startswith("gdp.")


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert re.match(r"\d+[.+]", gdp.__version__)


def test_a_type_checker_reads_the_annotations() -> None:
    assert (Path(gdp.__file__).parent / "py.typed").exists()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'wheel'"):
        _ = gdp.wheel  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["gdp", "gdp.cli.main"])
def test_importing_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, json, {module}; print(json.dumps(list(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"jax", "numba", "onnx", "onnx_ir", "onnxruntime", "scipy", "plotly", "rich"}
    assert not heavy & set(json.loads(out.stdout))
