"""The command that tries mutants, on a package of one function and one constant."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = '''"""A toy."""

LIMIT = 10


class Adder:
    def add(self, a: int, b: int) -> int:
        """The sum, at most LIMIT."""
        total = a + b  # renamed or moved, it stays in place
        return min(
            total,
            LIMIT,
        )
'''
TESTS = """from toy.adder import Adder

def test_sums() -> None:
    assert Adder().add(2, 3) == 5

def test_ends() -> None:
    assert Adder().add(1, 0) == 1
"""
ROWS = [
    ("Adder.add", 'body = "return 6"', "", "killed {}: tests/test_adder.py::test_sums"),
    ("Adder.add", 'old = "a + b"\nnew = "a - b"', "::test_ends", "survived {}: "),
    ("Adder.add", 'old = "total = a + b"\nnew = """\nif a:\n    total = 4\n"""', "",
     "killed {}: tests/test_adder.py::test_sums"),
    ("LIMIT", 'body = "5"\nsurvives = "none is larger"', "", "survived {}: none is larger"),
    ("Adder.add", 'old = "total"\nnew = "a"', "", "stale {}: its tokens occur 2 times"),
    ("Adder.add", 'old = "a * b"\nnew = "a"', "", "stale {}: its tokens occur 0 times"),
    ("Adder.add", 'old = "a + b"\nnew = "a+b"', "", "stale {}: it changes nothing"),
    ("Adder.add", 'old = "a + b"\nnew = "a +"', "", "stale {}: it makes no Python of"),
    ("Adder.sub", 'body = "return 6"', "", "stale {}: no Adder.sub"),
    ("LIMIT", 'body = "3"', "::test_gone", "stale {}: no test tests/test_adder.py::test_gone"),
]  # fmt: skip


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on the toy package, with the rows as m0, m1, ..."""
    table = 'copied = ["toy", "tests"]\n'
    for k, (function, change, test, _) in enumerate(ROWS):
        table += f'[[mutant]]\nname = "m{k}"\nfunction = "toy.adder.{function}"\n{change}\n'
        table += f'tests = ["tests/test_adder.py{test}"]\n'
    files = {"toy/adder.py": SOURCE, "tests/test_adder.py": TESTS, "mutants.toml": table}
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    command = [sys.executable, str(ROOT / "tests/mutants.py"), "--root", str(folder)]
    command += ["--table", str(folder / "mutants.toml"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_mutant_is_killed_survives_or_is_stale(tmp_path: Path) -> None:
    done = run(tmp_path)
    said = [row[3].format(f"m{k}") for k, row in enumerate(ROWS)]
    said.sort(key=lambda line: not line.startswith("stale"))  # they are known at once
    lines = done.stdout.splitlines()
    assert len(lines) == len(said) + 1, done.stderr
    for line, wanted in zip(lines, said, strict=False):
        assert line.startswith(wanted)
    assert lines[-1] == "2 killed, 1 survived, 1 survived as meant, 6 stale"
    assert done.returncode == 1
    assert (tmp_path / "toy/adder.py").read_text() == SOURCE


def test_rows_are_chosen_by_name_and_can_be_looked_at_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "--list", "--only", "m[34]")
    assert done.stdout.splitlines() == [
        "stale m4: its tokens occur 2 times", "0 killed, 0 survived, 0 survived as meant, 1 stale"
    ]  # fmt: skip
    assert "no mutant has such a name" in run(tmp_path, "--only", "zz").stderr
