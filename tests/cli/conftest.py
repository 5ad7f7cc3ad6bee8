"""The program in the tests' own process, and a small model file."""

import sys
from pathlib import Path

import pytest
from refusals import Run, small

from gdp.cli import main
from gdp.graph.file import save_graph


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in this process: (exit code, stdout, stderr)."""

    def program(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gdp", *map(str, args)])
        with pytest.raises(SystemExit) as done:
            main.main()
        out, err = capfd.readouterr()
        return int(done.value.code or 0), out, err

    return program


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_graph(small(), tmp_path / "small.json")
    return tmp_path / "small.json"
