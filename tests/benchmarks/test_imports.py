"""Every benchmark can be imported, so that none breaks unseen when the code that it uses moves."""

import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
# Of extras, which the first environment of the tests does not have.
EXTRAS = {
    "accelerate",
    "gguf",
    "llama_cpp",
    "openvino",
    "pandas",
    "ray",
    "torch",
    "transformers",
    "onnxscript",
}

SCRIPT = """
import importlib, sys
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in sys.argv[1].split(","):
            raise
"""


@pytest.mark.slow
def test_all_benchmarks_can_be_imported() -> None:
    """In a process of their own: some set flags of JAX when they are imported."""
    files = sorted((TOP / "benchmarks").rglob("*.py"))
    names = [".".join(path.relative_to(TOP).with_suffix("").parts) for path in files]
    assert len(names) > 20
    kept = [n.removesuffix(".__init__") for n in names if not n.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(sorted(EXTRAS)), *kept],
        cwd=TOP, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
