"""ONNX Runtime sends nothing and keeps nothing about the user, however gdp starts it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import gdp
from gdp.targets.onnxruntime import export as exporter

PACKAGE = Path(gdp.__file__).parent
SWITCH = "ORT_DISABLE_TELEMETRY"
SESSION = """
import os
from onnx import TensorProto, helper
from gdp.targets.onnxruntime.telemetry import ort
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", ends[:1], ends[1:])
model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
print(os.environ["ORT_DISABLE_TELEMETRY"])
"""


def test_a_session_leaves_nothing_in_the_users_home(tmp_path: Path) -> None:
    """Without the variable it leaves a device id and a database there, in version 1.31."""
    kept = {k: v for k, v in os.environ.items() if k not in (SWITCH, "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", SESSION], capture_output=True, text=True, check=False,
        env=kept | {"HOME": str(tmp_path), SWITCH: "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    assert list(tmp_path.rglob("*")) == []


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def test_the_runtime_is_imported_in_one_module_and_in_the_exported_runner() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "onnxruntime" in imports(ast.parse(path.read_text()))
    }
    assert found == {"targets/onnxruntime/telemetry.py", "targets/onnxruntime/runner_template.py"}


def test_both_switch_it_off_before_they_import_it() -> None:
    for path in (
        PACKAGE / "targets" / "onnxruntime" / "telemetry.py",
        Path(exporter.__file__).parent / "runner_template.py",
    ):
        lines = path.read_text().splitlines()
        switch = lines.index(f'os.environ["{SWITCH}"] = "1"')
        assert switch < next(i for i, x in enumerate(lines) if x.startswith("import onnxruntime"))
