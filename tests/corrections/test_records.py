"""Memory of measured runs: kept, listed, exchanged, and refused where they cannot be."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gdp.base.errors import GdpError
from gdp.corrections import records
from gdp.corrections.features import EngineStack
from gdp.corrections.process import Lesson
from gdp.corrections.records import RunRecord
from gdp.corrections.run import MeasurementFileError
from tests.corrections.made_up import BOTH, H100, STACKS, a_pass

COSTS = "made-up costs"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all that is remembered."""
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def a_run(stack: EngineStack = H100, **changed: Any) -> RunRecord:
    """A measured run with lessons on both phases."""
    own = RunRecord(
        date="2026-01-01T00:00:00+00:00", tool="vllm bench serve", stack=stack, model="up-8b",
        format="", costs=COSTS, prompt=1000.0, new=200.0, concurrency=8.0,
        measured={"ttft_s": 0.2, "tpot_s": 0.01}, predicted={"ttft_s": 0.1, "tpot_s": 0.008},
        passes=tuple(Lesson(one, 0.2) for one in BOTH),
    )  # fmt: skip
    return msgspec.structs.replace(own, **changed)


def test_runs_are_remembered_once_and_forgotten_by_their_stack(data: Path) -> None:
    other = a_run(STACKS[1])
    assert records.remember([a_run(), other]) == data / "runs"
    records.remember([a_run(date="2026-02-01T00:00:00+00:00", predicted={"tpot_s": 0.5})])
    known = list(records.remembered().values())
    assert [run.stack for run in known] == [other.stack, H100]  # the oldest first
    assert known[1].predicted == {"tpot_s": 0.5}  # read twice, it counts once, as it was read last
    assert known[0] == other
    assert records.forget([H100.key]) == 1
    assert records.forget([H100.key]) == 0
    assert list(records.remembered().values()) == [other]
    assert records.forget() == 1
    assert records.remembered() == {}


def test_whole_numbers_are_the_run_that_is_read_back() -> None:
    run = a_run(prompt=512, new=0, concurrency=1)
    records.remember([run])
    assert next(iter(records.remembered().values())).subject == run.subject
    records.remember(list(records.remembered().values()))
    assert len(records.remembered()) == 1


def test_other_runs_of_a_stack_are_runs_of_their_own() -> None:
    runs = [a_run(), a_run(prompt=900.0), a_run(new=1.0), a_run(concurrency=9.0),
            a_run(measured={"tpot_s": 0.01}), a_run(model="up-9b"), a_run(tool="x"),
            a_run(format="fp8"), a_run(STACKS[1])]  # fmt: skip
    records.remember(runs)
    assert len(records.remembered()) == len(runs)


def test_an_exported_file_is_imported_as_it_was(tmp_path: Path) -> None:
    runs = (a_run(), a_run(STACKS[2], concurrency=0.0))
    path = tmp_path / "runs.json"
    path.write_bytes(records.exported(runs))
    assert records.read_runs(path) == runs
    records.remember(records.read_runs(path))
    found = {run.subject: run for run in records.remembered().values()}
    assert found == {run.subject: run for run in runs}
    lesson = records.read_runs(path)[0].passes[1]
    assert lesson == Lesson(BOTH[1], 0.2)


def test_runs_of_a_stack_are_those_of_its_costs_and_version() -> None:
    newer = msgspec.structs.replace(H100, version="0.20.1")
    alike = msgspec.structs.replace(H100, version="0.19.9")
    runs = [
        a_run(date="1"), a_run(alike, date="2"), a_run(newer, date="3"),
        a_run(newer, date="4", costs="others", prompt=1.0), a_run(STACKS[1], date="5"),
        a_run(date="6", passes=(), prompt=2.0),
        a_run(msgspec.structs.replace(H100, host="cpu"), date="7"),
    ]  # fmt: skip
    records.remember(runs)

    def dates(stack: EngineStack, costs: str = COSTS) -> list[str]:
        return [run.date for run in records.runs_of(stack, costs)]

    assert dates(H100) == ["1", "2"]
    assert dates(newer) == ["3"]
    assert dates(newer, "others") == ["4"]
    assert dates(msgspec.structs.replace(H100, version="")) == ["3"]  # measured last
    assert dates(msgspec.structs.replace(H100, version="0.21.0")) == []


def test_the_newest_runs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_RUNS", 3)
    records.remember([a_run(prompt=float(n), date=f"{n}") for n in range(1, 6)])
    assert [run.date for run in records.runs_of(H100, COSTS)] == ["3", "4", "5"]


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"[]", lambda b: b"\xff" + b,
     lambda b: b'{"schema": 1, "runs": []}', lambda b: b.replace(b'"schema": 1', b'"schema": 9')],
)  # fmt: skip
def test_damaged_files_cost_their_run_alone(damage: Callable[[bytes], bytes], data: Path) -> None:
    records.remember([a_run(), a_run(STACKS[1])])
    path = next(path for path, run in records.remembered().items() if run.stack == H100)
    path.write_bytes(damage(path.read_bytes()))
    (data / "runs" / "a.json").mkdir()
    assert [run.stack for run in records.remembered().values()] == [STACKS[1]]


def _document() -> dict[str, Any]:
    return json.loads(records.exported([a_run()]))


def _changed(*path: str | int, value: Any) -> dict[str, Any]:
    document = _document()
    at: Any = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return document


RUN = ("runs", 0)
ASKED = (*RUN, "passes", 0, "asked")
REFUSED = {
    "a foreign key": _changed(*RUN, "user", value="me"),
    "a foreign key of a stack": _changed(*RUN, "stack", "uuid", value="GPU-1"),
    "a foreign cause": _changed(*ASKED, "parts_s", "luck", value=1.0),
    "a schema": _changed("schema", value=2),
    "huge tokens": _changed(*ASKED, "tokens", value=1e300),
    "huge seconds": _changed(*ASKED, "parts_s", "bandwidth", value=1e9),
    "negative seconds": _changed(*ASKED, "parts_s", "bandwidth", value=-1.0),
    "a residual": _changed(*RUN, "passes", 0, "residual", value=99.0),
    "a share": _changed(*RUN, "passes", 0, "shown", value=1.5),
    "no sequences": _changed(*ASKED, "sequences", value=0),
    "no bandwidth": _changed(*RUN, "stack", "bytes_per_s", value=0.0),
    "huge bandwidth": _changed(*RUN, "stack", "bytes_per_s", value=1e30),
    "bits of no weight": _changed(*ASKED, "bits", value=0),
    "a huge prompt": _changed(*RUN, "prompt", value=1e300),
    "a negative concurrency": _changed(*RUN, "concurrency", value=-1.0),
    "a huge measured time": _changed(*RUN, "measured", "ttft_s", value=1e300),
    "a text for a number": _changed(*RUN, "new", value="200"),
    "a long name": _changed(*RUN, "model", value="x" * 10_000),
    "many passes": _changed(*RUN, "passes", value=_document()["runs"][0]["passes"] * 50),
}


@pytest.mark.parametrize("document", REFUSED.values(), ids=REFUSED)
def test_files_of_runs_that_cannot_be_are_refused_in_a_sentence(
    document: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(document))
    with pytest.raises(MeasurementFileError) as refused:
        records.read_runs(path)
    assert "\n" not in str(refused.value)
    assert "runs.json" in str(refused.value)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-Infinity"])
def test_what_is_no_number_is_refused(number: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(_document()).replace("0.2", number, 1))
    with pytest.raises(MeasurementFileError):
        records.read_runs(path)
    missing = r"no file of measured runs .*write one with gdp learn --export"
    with pytest.raises(MeasurementFileError, match=missing):
        records.read_runs(tmp_path / "missing.json")


def test_without_a_home_folder_nothing_is_known_and_none_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GDP_DATA_DIR")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    assert records.runs_folder() is None
    assert records.remembered() == {}
    with pytest.raises(OSError, match="GDP_DATA_DIR"):
        records.remember([a_run()])


def test_causes_that_no_pass_has_are_refused() -> None:
    with pytest.raises(ValueError, match="other causes than bandwidth"):
        a_pass(parts_s={"bandwidth": 1e-3, "luck": 1e-3})


def test_files_are_read_again_once_they_change() -> None:
    """What a process has read of them holds for as long as they stay the same."""
    records.remember([a_run()])
    (path,) = records.remembered()
    path.write_bytes(records.exported([a_run(date="9999")]))
    assert [run.date for run in records.remembered().values()] == ["9999"]
    path.unlink()
    assert records.remembered() == {}


@pytest.mark.skipif(os.name != "posix", reason="modes of folders are those of POSIX")
def test_the_folder_is_the_users_own(data: Path) -> None:
    folder = records.remember([a_run()])
    assert folder.stat().st_mode & 0o077 == 0
    assert re.fullmatch(r"[0-9a-f]{24}\.json", next(folder.iterdir()).name)
    assert issubclass(MeasurementFileError, GdpError)
    assert folder.is_relative_to(data)
