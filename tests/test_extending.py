"""The diffs of the pages on extending gdp, applied to a copy, add what the pages say."""

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from gdp.base.rows import imported

TOP = Path(__file__).resolve().parent.parent
PAGES = TOP / "docs" / "how-to"


def applied(text: str, source: str) -> str:
    """A source after a diff whose hunks name no lines: their context occurs once."""
    for hunk in re.split(r"^@@.*\n", text, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines()
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " +")
        if not (old or source):
            return new
        assert source.count(old) == 1, f"found {source.count(old)} times:\n{old}"
        source = source.replace(old, new)
    return source


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A tree with gdp and the files that travel with it."""
    # With the kernels that are compiled already, which go by the time of their source.
    shutil.copytree(TOP / "gdp", tmp_path / "gdp", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("checkpoints", "data", "pretrain", "finetune"):
        (tmp_path / name).symlink_to(TOP / name)
    return tmp_path


def extend(copy: Path, page: str) -> None:
    """Apply all diffs of a page to the copy."""
    diffs = re.findall(r"```diff\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    assert diffs
    for diff in diffs:
        path = copy / re.findall(r"^\+\+\+ b/(\S+)$", diff, re.MULTILINE)[0]
        path.parent.mkdir(exist_ok=True)  # of a file that the page adds
        path.write_text(applied(diff, path.read_text() if path.exists() else ""))


def gdp(copy: Path, *arguments: str) -> str:
    """Standard output of a command of the copy."""
    done = subprocess.run(
        [sys.executable, "-m", "gdp", *arguments], cwd=copy, check=False, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": str(copy)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_swish(path: Path) -> None:
    """Two operators of a domain that no schema knows."""
    fact = helper.make_tensor_value_info
    nodes = [
        helper.make_node("SquaredSwish", ["x"], ["y"], name="first", domain="my.ops"),
        helper.make_node("SquaredSwish", ["y"], ["z"], name="second", domain="my.ops"),
    ]
    graph = helper.make_graph(
        nodes, "swish", [fact("x", TensorProto.FLOAT, [4, 8])],
        [fact("z", TensorProto.FLOAT, [4, 8])],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my.ops", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


@pytest.mark.slow
def test_the_diffs_add_an_exporter_and_an_op(copy: Path, tmp_path: Path) -> None:
    extend(copy, "extending.md")
    write_swish(tmp_path / "swish.onnx")
    inspected = gdp(copy, "inspect", "swish.onnx", "--json")
    assert '"flop": ' in inspected
    assert "estimated" not in gdp(copy, "inspect", "swish.onnx")
    gdp(
        copy, "place", "swish.onnx", "--cluster", "2xt4-pcie4", "--method", "single", "-o", "p.json"
    )
    gdp(copy, "export", "p.json", "--model", "swish.onnx", "--to", "csv", "-o", "out")
    rows = list(csv.DictReader((tmp_path / "out" / "placement.csv").read_text().splitlines()))
    assert {row["device"] for row in rows} == {"t4:0"}
    assert {"first", "second"} <= {row["op"] for row in rows}


@pytest.mark.slow
def test_the_diff_and_the_program_add_a_method(copy: Path, tmp_path: Path) -> None:
    extend(copy, "adding-a-method.md")
    program = (PAGES / "adding-a-method.md").read_text().split("```python\n")[1].split("```")[0]
    (copy / "gdp" / "methods" / "random_blocks.py").write_text(program)
    write_swish(tmp_path / "swish.onnx")
    extend(copy, "extending.md")
    table = gdp(copy, "compare", "swish.onnx", "--cluster", "2xt4-pcie4", "--methods",
                "single,random_blocks", "--evaluations", "20")  # fmt: skip
    assert "random_blocks" in table


@pytest.mark.slow
def test_the_diff_and_the_program_add_an_objective(copy: Path, tmp_path: Path) -> None:
    extend(copy, "adding-an-objective.md")
    program = (PAGES / "adding-an-objective.md").read_text().split("```python\n")[1]
    (copy / "gdp" / "sim" / "rent.py").write_text(program.split("```")[0])
    write_swish(tmp_path / "swish.onnx")
    extend(copy, "extending.md")
    answer = gdp(copy, "place", "swish.onnx", "--cluster", "cpu+t4", "--objective", "rent",
                 "--evaluations", "20")  # fmt: skip
    assert re.search(r"^rent .* \$$", answer, re.MULTILINE)


@pytest.mark.parametrize("function", ["gdp.targets.table:nothing", "gdp.targets.nowhere:plan"])
def test_a_row_that_names_no_function_is_named(function: str) -> None:
    with pytest.raises(LookupError, match=f"row of a table of gdp names '{function}'"):
        imported(function)
