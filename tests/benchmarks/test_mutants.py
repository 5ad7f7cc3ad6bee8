"""The table of mutants belongs to the tree as it is."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = runpy.run_path(str(ROOT / "benchmarks" / "mutants.py"))
TABLE = BENCH["read_table"]()


def test_the_table_is_long_and_covers_every_part() -> None:
    assert len(TABLE) >= 60
    assert len({mutant.name for mutant in TABLE}) == len(TABLE)
    parts = {mutant.file.split("/")[1] for mutant in TABLE}
    assert {"methods", "sim", "policy", "learn", "costs", "runtime"} <= parts


@pytest.mark.parametrize("mutant", TABLE, ids=lambda mutant: mutant.name)
def test_a_mutant_still_applies_and_is_another_program(mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    changed = BENCH["mutated"](source, mutant)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    for test in mutant.tests:
        path, _, function = test.partition("::")
        text = (ROOT / path).read_text()
        assert not function or f"def {function.partition('[')[0]}(" in text


def test_a_text_that_is_gone_or_occurs_twice_is_named() -> None:
    mutant = TABLE[0]
    for source, times in (("", 0), (mutant.text * 2, 2)):
        with pytest.raises(ValueError, match=f"occurs {times} times in {mutant.file}"):
            BENCH["mutated"](source, mutant)


def test_kernels_that_call_a_changed_one_are_compiled_anew() -> None:
    folder = ROOT / "gdp"
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
        for path in folder.rglob("*.py")
    }
    proposals = next(m.file for m in TABLE if m.file.endswith("/moves_kernels.py"))
    module = proposals.removesuffix(".py").replace("/", ".")
    found = BENCH["dependants"](sources, module)
    assert module in found
    assert any(name.endswith("annealer_kernels") for name in found)
    assert not any(name.endswith("repair_kernels") for name in found)


def test_survivors_are_listed_with_their_reason() -> None:
    outcome, summary = BENCH["Outcome"], BENCH["summary"]
    outcomes = [
        outcome(TABLE[0].name, "killed", 1.0, "t"),
        outcome(TABLE[1].name, "survived", 1, ""),
    ]
    text = summary(TABLE, outcomes)
    assert text.splitlines()[0] == "1 of 2 killed (50%)"
    assert TABLE[1].name in text
