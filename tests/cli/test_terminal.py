"""What a model calls its ops never reaches a terminal as anything but text."""

import json
import logging
import unicodedata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from gdp.base.errors import GdpError
from gdp.base.terminal import PrintableFormatter, printable
from gdp.cli.main import cli, run_program
from gdp.cli.text import table
from gdp.graph.file import load_graph, save_graph
from gdp.graph.op_graph import make_graph

# Clears the screen, sets the title, turns the direction of writing, overwrites the line, rings.
EVIL = "\x1b[2J\x1b]0;owned\x07a\u202eb\rc\nd\u2028e\x9b31m"


def save(path: Path, *, evil: bool) -> str:
    names = [f"{EVIL if evil else 'op'}{i}" for i in range(4)]
    graph = make_graph(
        EVIL if evil else "g", names, [EVIL if evil else "Conv"] * 4,
        [(0, 1000), (1, 1000), (2, 1000)], [(0, 1), (0, 2), (1, 3), (2, 3)],
        flop=[1e9, 5e9, 5e9, 1e9], weight_bytes=[1000] * 4,
        scope=[EVIL if evil else "s"] * 4,
    )  # fmt: skip
    save_graph(graph, path)
    return str(path)


def printed(*arguments: str) -> str:
    found = CliRunner().invoke(cli, arguments)
    return found.stdout + ("" if found.exception is None else str(found.exception))


def harmless(text: str) -> bool:
    return all(c == "\n" or c == " " or unicodedata.category(c)[0] not in "CZ" for c in text)


COMMANDS = {
    "inspect": ("inspect", "MODEL", "--ops"),
    "place": ("place", "MODEL", "--cluster", "2xcpu-core", "--method", "single"),
    "compare": ("compare", "MODEL", "--cluster", "2xcpu-core", "--methods", "single,blocks"),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_evil_names_are_written_out_and_take_no_line_of_their_own(
    verb: str, tmp_path: Path
) -> None:
    texts = [
        printed(*(model if word == "MODEL" else word for word in COMMANDS[verb]))
        for model in (save(tmp_path / "m.json", evil=False), save(tmp_path / "e.json", evil=True))
    ]
    tame, evil = texts
    assert harmless(evil)
    assert "\\x1b[2J" in evil
    assert len(evil.splitlines()) == len(tame.splitlines())


def test_json_keeps_names_as_they_are(tmp_path: Path) -> None:
    model = save(tmp_path / "e.json", evil=True)
    found = json.loads(printed("inspect", model, "--ops", "--json"))
    assert found["ops"][0]["name"] == load_graph(Path(model)).op_names[0]


def test_errors_and_logs_are_one_harmless_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise GdpError(f"no op {EVIL}")

    monkeypatch.setattr("sys.argv", ["gdp"])
    with pytest.raises(SystemExit):
        run_program(click.Command("refuse", callback=refuse))
    said = capsys.readouterr().err
    assert harmless(said)
    assert said.count("\n") == 1
    record = logging.LogRecord("gdp", logging.INFO, "", 0, "op %s", (EVIL,), None)
    text = PrintableFormatter("gdp: %(message)s").format(record)
    assert harmless(text)
    assert "\n" not in text


def test_tables_stay_aligned() -> None:
    lines = table(["a", "b"], [["x\ny", "1"], ["long name", "2"]]).splitlines()
    assert lines == ["a          b", "x\\ny       1", "long name  2"]


@pytest.mark.parametrize("text", ["plain name", "größe", "层/卷积", "a\\nb"])
def test_ordinary_names_stay_as_they_are(text: str) -> None:
    assert printable(text) == text
    assert printable(printable(EVIL)) == printable(EVIL)
    assert printable("\ud800\U000e0001") == "\\ud800\\U000e0001"
