"""The public surface is listed here, and importing it stays light."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import gdp
from gdp.base.version import DISTRIBUTION
from gdp.cli.main import cli

PUBLIC = [
    "ArgumentError", "Cluster", "ClusterError", "Constraints", "Device", "GdpError", "Generation",
    "InfeasibleError", "Link", "Measuring", "ModelError", "OpGraph", "Pin", "Placement",
    "PlacementError", "Problem", "Result", "Search", "Split", "Traffic", "compare", "explain",
    "export", "finetune", "learn_kernels", "learn_runs", "load", "load_placement", "make_cluster",
    "make_placement", "on_devices", "place", "place_models", "place_pipeline", "report", "run",
    "save_placement", "serve", "simulate", "trace", "trace_torch", "tune",
]  # fmt: skip


def test_the_public_names_are_these() -> None:
    assert gdp.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(gdp, name).__module__.startswith("gdp.")


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert re.match(r"\d+[.+]", gdp.__version__)


def test_the_command_tells_the_same_version() -> None:
    said = CliRunner().invoke(cli, ["--version"])
    assert (said.exit_code, said.output) == (0, f"gdp, version {gdp.__version__}\n")


def test_every_hint_to_install_names_an_extra_and_asks_how_gdp_was_installed() -> None:
    top = Path(gdp.__file__).parents[1]
    project = tomllib.loads((top / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    texts = [path.read_text() for path in Path(gdp.__file__).parent.rglob("*.py")]
    hints = [hint for text in texts for hint in re.findall(r"install_command\(['\"](\w+)", text)]
    assert len(hints) >= 9
    assert set(hints) <= set(project["optional-dependencies"])
    assert not [text for text in texts if re.search(r"pip install '?[\w.-]+\[", text)]


def test_a_type_checker_reads_the_annotations() -> None:
    assert (Path(gdp.__file__).parent / "py.typed").exists()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'wheel'"):
        _ = gdp.wheel  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", ["gdp", "gdp.cli.main"])
def test_importing_loads_no_heavy_library(module: str) -> None:
    code = f"import sys, json, {module}; print(json.dumps(list(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"jax", "numba", "onnx", "onnx_ir", "onnxruntime", "scipy", "jinja2", "rich"}
    assert not heavy & set(json.loads(out.stdout))
