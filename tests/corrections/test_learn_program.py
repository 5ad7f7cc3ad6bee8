"""`gdp learn`: what it says of a run, and how runs are listed, forgotten and exchanged."""

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import gdp
from gdp.api.measured.words import words_of
from gdp.corrections import records
from gdp.corrections.process import Lesson
from tests.corrections.made_up import BOTH, STACKS, a_pass
from tests.corrections.test_records import a_run
from tests.gguf_models import write_gguf
from tests.targets.measured.result_files import bench_row

Run = Callable[..., tuple[int, str, str]]
SUITE = os.environ["GDP_DATA_DIR"]
"""As tests/conftest.py sets it."""


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all that is remembered."""
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model, its plan, and a file of llama-bench with steps that take twice as long."""
    model = write_gguf(tmp_path / "up-1b.gguf", context=8192)
    plan, bench = tmp_path / "plan.json", tmp_path / "bench.json"
    placed = gdp.place(f"{model}?prompt=512&new=128", "cpu")
    gdp.save_placement(placed.placement, plan)
    step_s = gdp.place(f"{model}?prompt=1&new=128", "cpu").of_request().token_s
    read_s = placed.of_request().first_token_s
    rows = [bench_row(512, 0, read_s), bench_row(0, 128, 2 * 128 * step_s)]
    rows = [row | {"model_size": model.stat().st_size} for row in rows]
    bench.write_text(json.dumps(rows))
    return model, plan, bench


def test_the_suite_reads_no_runs_of_the_developers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Path(SUITE).parent == Path(tempfile.gettempdir())
    monkeypatch.setenv("GDP_DATA_DIR", SUITE)
    folder = records.runs_folder()
    assert folder is not None
    assert folder.is_relative_to(tempfile.gettempdir())
    assert records.remembered() == {}


def test_a_run_is_learned_from_listed_and_forgotten(
    run: Run, files: tuple[Path, Path, Path], data: Path
) -> None:
    _, plan, bench = files
    code, out, _ = run("learn", bench, "--plan", plan, "--no-keep")
    assert code == 0
    assert "nothing is remembered (--no-keep)" in out
    assert not data.exists()
    code, out, _ = run("learn", bench, "--plan", plan)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["tokens", "requests", "at", "once", "TTFT", "predicted", "TPOT",
                                "predicted"]  # fmt: skip
    assert lines[1].startswith("512 + 0 ")
    assert "learned: prefill passes take what was predicted (1.00 times)" in lines
    assert "learned: decode passes take 2.00 times what was predicted" in lines
    assert lines[-1].startswith("predictions of these runs were ")
    stack = "llamacpp|6789|cpu|cpu|cpu"
    assert lines[-1].endswith(f"2 measured runs of {stack}, remembered in {data / 'runs'}")
    _, out, _ = run("learn", "--list")
    assert [line.split() for line in out.splitlines()] == [
        ["stack", "runs", "models", "last"],
        [stack, "2", "up-1b.gguf", next(iter(records.remembered().values())).date[:10]],
    ]
    _, out, _ = run("learn", "--list", "--json")
    assert json.loads(out)["stacks"][0]["runs"] == 2
    code, _, err = run("learn", "--forget", "none")
    assert code != 0
    assert "no run of a stack 'none', nor kernels of such a card; gdp learn --list names" in err
    assert run("learn", "--forget", stack)[1] == "forgot 2 measured runs\n"
    assert "no run was learned from yet: gdp learn FILE --plan" in run("learn", "--list")[1]
    assert run("learn", "--forget", "all")[1] == "forgot 0 measured runs\n"


def test_json_holds_what_is_learned(run: Run, files: tuple[Path, Path, Path], data: Path) -> None:
    model, plan, bench = files
    code, out, _ = run("learn", bench, "--plan", plan, "--json")
    assert code == 0
    told = json.loads(out)
    assert told["off"] < 0.5 * told["off_before"]
    assert (told["runs"], told["known"], told["stack"]) == (2, 2, "llamacpp|6789|cpu|cpu|cpu")
    assert told["remembered_in"] == str(data / "runs")
    assert told["loads"][0]["measured"].keys() == {"ttft_s"}
    assert told["loads"][1]["measured"]["tpot_s"] == pytest.approx(
        2 * told["loads"][1]["predicted"]["tpot_s"], rel=0.1
    )
    code, out, _ = run("learn", bench, "--model", model, "--cluster", "cpu", "--no-keep", "--json")
    assert code == 0
    again = json.loads(out)
    assert again["learned"] == told["learned"]
    assert again["remembered_in"] is None
    code, out, _ = run("place", f"{model}?prompt=512&new=128", "--cluster", "cpu", "--json")
    assert code == 0
    assert json.loads(out)["generation"]["correction"]["runs"] == 2
    assert "2 measured runs of this stack" in run(
        "place", f"{model}?prompt=512&new=128", "--cluster", "cpu"
    )[1]  # fmt: skip


def test_runs_are_exchanged(run: Run, tmp_path: Path, data: Path) -> None:
    runs, path = [a_run(), a_run(STACKS[1])], tmp_path / "runs.json"
    records.remember(runs)
    assert run("learn", "--export", path)[1] == f"2 measured runs written to {path}\n"
    code, _, err = run("learn", "--export", path)
    assert code != 0
    assert "--force" in err
    assert run("learn", "--export", path, "--force")[0] == 0
    records.forget()
    assert f"2 measured runs remembered in {data / 'runs'}" in run("learn", "--import", path)[1]
    assert {r.subject for r in records.remembered().values()} == {r.subject for r in runs}
    path.write_text("{}")
    code, _, err = run("learn", "--import", path, "--json")
    assert code != 0
    assert "runs.json" in err


def test_names_of_an_imported_file_do_not_write_to_the_terminal(run: Run) -> None:
    records.remember([a_run(model="\x1b[31mred\n")])
    out = run("learn", "--list")[1]
    assert "\x1b" not in out
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize(
    "words", [[], ["--list", "--export", "x"], ["f.json", "--list"], ["--forget", "a", "--list"]]
)
def test_one_thing_is_asked_at_a_time(run: Run, words: list[str]) -> None:
    code, _, err = run("learn", *words)
    assert code == 2
    assert "give FILEs, or one of --list, --forget, --export and --import" in err


def test_words_tell_hosts_from_bandwidth_by_several_loads() -> None:
    """Steps that all take 2 ms more, and steps of whose seconds the reading takes 1.5 times."""
    steps = [a_pass(parts_s={"bandwidth": b, "dispatch": 1e-3}) for b in (3e-3, 6e-3, 2e-2)]
    host = [s.seconds + 2e-3 for s in steps]
    reads = [s.seconds + 0.5 * s.parts_s["bandwidth"] for s in steps]
    for measured, word in (
        (host, "the host adds 2.000 ms a step"),
        (reads, "weights and caches are read at 0.67 of the predicted rate"),
    ):
        lessons = [Lesson(s, math.log(m / s.seconds)) for s, m in zip(steps, measured, strict=True)]
        assert words_of(lessons)[1:] == (word,)
    one = words_of([Lesson(steps[1], 0.5)])[1]
    assert one.endswith("which one run cannot tell apart")
    assert words_of([Lesson(BOTH[0], 0.7)]) == (
        "prefill passes take 2.01 times what was predicted",
    )
    assert words_of([Lesson(BOTH[1], 0.01)]) == (
        "decode passes take what was predicted (1.01 times)",
    )
    assert words_of([Lesson(steps[1], -0.3)])[1].startswith("each step takes")
    assert words_of([]) == ()
