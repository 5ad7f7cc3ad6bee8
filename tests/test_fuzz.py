"""A short run of the fuzzer; `python -m tests.fuzz.run --mutants 20000` is the long one."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.modules import any_module
from tests.fuzz.targets import TARGETS


def test_modules_are_drawn_from_a_seed_and_are_python() -> None:
    texts = [any_module(random.Random(seed)) for seed in range(300)]
    for text in texts:
        compile(text, "module.py", "exec")
    assert texts == [any_module(random.Random(seed)) for seed in range(300)]
    assert len(set(texts)) == 300


@pytest.mark.slow
def test_mutants_of_every_kind_of_file_are_read_or_refused_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", "--mutants", "500", "--seed", "0"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +(\d+) mutants, +(\d+) refused", done.stdout, re.MULTILINE)
    assert {kind for kind, _, _ in rows} == {t.name for t in TARGETS if t.is_possible}
    assert len(rows) >= 12
    assert sum(int(count) for _, count, _ in rows) == 500
    # Neither all refused, which would fuzz nothing beyond the parser, nor none.
    assert all(0 < int(bad) < int(count) for _, count, bad in rows if int(count) >= 50)
