"""The examples run, and say what the documentation says of them."""

import runpy
import sys
import tempfile
from pathlib import Path

import pytest
import tiny

import gdp
from gdp.sim.score import score

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run an example as `python examples/NAME` does."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_onnx_example_cuts_a_model_into_files_that_run_without_gdp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("onnx_file.py", monkeypatch, "onnx:light_squeezenet", str(tmp_path / "cut"))
    written = {path.name for path in (tmp_path / "cut").iterdir()}
    assert {"manifest.json", "run.py", "segment_000.onnx"} <= written
    assert "import gdp" not in (tmp_path / "cut" / "run.py").read_text()
    assert "ms a sample" in capsys.readouterr().out


def test_the_onnx_example_leaves_nothing_in_the_folder_where_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run("onnx_file.py", monkeypatch, "onnx:light_squeezenet")
    assert list(Path().iterdir()) == []
    assert Path(capsys.readouterr().out.splitlines()[-1]).exists()


def test_the_jax_example_is_faster_on_two_gpus_than_on_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("jax_step.py", monkeypatch)
    one, two = (float(line.split()[1]) for line in capsys.readouterr().out.splitlines())
    assert two < one


def test_the_jax_example_is_what_the_readme_places_from_a_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    assert gdp.load("python:examples.jax_step:training_step").num_ops > 20


def test_the_example_with_little_memory_fits_and_names_what_can_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("unequal_devices.py", monkeypatch)
    said = capsys.readouterr().out
    peaks = {
        line.split(":")[0].strip(): int(line.split(":")[1].split()[0])
        for line in said.splitlines()
        if line.endswith("MiB") and ":" in line
    }
    assert 0 < peaks["fast"] <= 200
    assert 0 < peaks["slow"] <= 500
    assert "MiB missing" in said


def test_the_example_that_takes_memory_away_ends_where_the_weights_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("little_memory.py", monkeypatch)
    *placed, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in placed] == ["1024", "512", "400"]
    assert last.startswith("300 MiB a GPU")
    assert "missing" in last
    seconds = [float(line.split(": ")[1].split()[0]) for line in placed]
    assert seconds[-1] >= seconds[0]


def test_the_example_that_compares_lists_methods_and_a_placer_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compare_methods.py", monkeypatch, "onnx:light_squeezenet")
    said = capsys.readouterr().out.splitlines()
    ms = {name: float(rest.split()[0]) for name, rest in (line.split(": ") for line in said)}
    assert list(ms) == ["single", "heft", "etf", "local_search", "equal shares"]
    assert ms["local_search"] <= ms["equal shares"]


def python_of(page: str) -> str:
    """The first Python program on a page."""
    text = (EXAMPLES.parent / page).read_text()
    return text.split("```python\n")[1].split("```")[0]


def test_the_program_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = python_of("README.md").replace("model.onnx", "onnx:light_squeezenet")
    exec(code.replace("seconds=5", "seconds=None, evaluations=50"), {})
    assert float(capsys.readouterr().out.split()[0]) > 0


def test_the_cost_model_of_the_how_to_page_makes_convolutions_slower() -> None:
    graph, cluster = gdp.load("onnx:light_squeezenet"), gdp.Cluster.load("2xt4-pcie4")
    names = {"graph": graph, "cluster": cluster}
    exec(python_of("docs/how-to/your-own-costs.md").rpartition("gdp.place(")[0], names)
    plain, slow = (
        gdp.place(graph, cluster, method="single", costs=costs).value_s
        for costs in ("datasheet", names["slow_convolutions"])
    )
    assert slow > plain


def test_the_method_of_the_how_to_page_answers_with_what_fits() -> None:
    names: dict = {}
    exec(python_of("docs/how-to/adding-a-method.md"), names)
    placed = 0
    for seed in range(8):
        problem, search = tiny.random_problem(seed), gdp.Search(seed=3, evaluations=50)
        answer, again = (names["random_blocks"](problem, search) for _ in range(2))
        if answer.assignment is None:
            assert answer.reason
            continue
        placed += 1
        device = answer.assignment.device
        assert (device == again.assignment.device).all()
        assert problem.allowed[range(problem.num_ops), device].all()
        assert score(problem, device).feasible
    assert placed
