"""What the program defers is not read for an answer, and is whole when it is."""

import subprocess
import sys
from pathlib import Path

import gdp

SCRIPT = """
import sys
from gdp.cli import program
program.prepare_process()
program.prepare_process()
assert sum(type(finder).__name__ == "_Deferring" for finder in sys.meta_path) == 1
from gdp.question.models import load
from gdp.importers.onnx.model import load_onnx
assert load("onnx:light_squeezenet").num_ops > 10
read = lambda: any(name.startswith("sympy.") for name in sys.modules)
print(read())
import onnx_ir
print((onnx_ir.SymbolicDim("n") + 1) * 2, read())
"""


def test_a_model_is_imported_without_reading_sympy_and_symbols_still_work() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True,
        cwd=Path(gdp.__file__).resolve().parent.parent,
    )  # fmt: skip
    assert found.stdout.split("\n")[0] == "False", found.stdout
    assert found.stdout.split("\n")[1].endswith("True")
    assert "n" in found.stdout.split("\n")[1]
