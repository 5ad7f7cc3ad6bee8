"""A short run of the fuzzer; `python -m benchmarks.fuzz.run --mutants 20000` is the long one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_mutants_of_every_kind_of_file_are_read_or_refused_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz.run", "--mutants", "1000", "--seed", "0"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^(\w+) +(\d+) mutants, +(\d+) refused", done.stdout, re.MULTILINE)
    assert len(rows) == 12
    assert sum(int(count) for _, count, _ in rows) == 1000
    # Neither all refused, which would fuzz nothing beyond the parser, nor none.
    assert all(0 < int(bad) < int(count) for _, count, bad in rows)
