"""What fits: a row for every machine and request, its reason where it does not."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gdp
from gdp.api.fit import _best_of, _carried, fit
from gdp.cli.main import cli
from gdp.costs.base import roofline
from gdp.question import Question
from gdp.solve import evaluate
from gdp.targets.free import plan_freely
from tests.gguf_models import write_gguf
from tests.tiny import plain_graph

QUICK = ["--new", "4", "--seconds", "0.1"]


def test_rows_say_what_fits_and_why_not(tmp_path: Path) -> None:
    """The longest bar of the picture is that of the fastest row."""
    model, small = write_gguf(tmp_path / "m.gguf", layers=1), tmp_path / "small<.toml"
    small.write_text(
        'name = "small<"\nhost = "d"\n[[device]]\nname = "d"\npreset = "cpu"\n'
        "memory_bytes = 600000\n"
    )
    words = ["fit", str(model), "--clusters", f"cpu+t4,{small}", "--prompt", "8,64",
             "--batch", "1,2", *QUICK]  # fmt: skip
    svg = tmp_path / "fit.svg"
    done = CliRunner().invoke(cli, [*words, "--picture", str(svg), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output.splitlines()[-1])["rows"]
    assert [(r["cluster"], r["prompt"], r["batch"]) for r in rows] == [
        (name, prompt, batch)
        for name in ("cpu+t4", "small<") for prompt in (8, 64) for batch in (1, 2)
    ]  # fmt: skip
    fits = [row["fits"] for row in rows]
    assert fits == [True] * 4 + [False] * 4
    assert "fit" in rows[-1]["limit"]
    drawn = svg.read_text()
    assert drawn.count("does not fit") == 4
    assert "small&lt;" in drawn
    speeds = [row["tokens_per_s"] for row in rows[:4]]
    widths = [float(width) for width in re.findall(r'<rect [^>]* width="([\d.]+)"', drawn)]
    assert widths == pytest.approx([310 * speed / max(speeds) for speed in speeds], abs=0.05)


@pytest.mark.parametrize("names", ["", ",cpu+t4", "cpu+t4,"])
def test_machines_have_names(tmp_path: Path, names: str) -> None:
    model = write_gguf(tmp_path / "m.gguf", layers=2)
    done = CliRunner().invoke(cli, ["fit", str(model), "--clusters", names, *QUICK])
    assert (done.exit_code, "has an empty name" in done.output) == (2, True)


def test_rows_are_those_that_a_runtime_can_follow(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf", layers=2)
    words = ["fit", str(model), "--cluster", "cpu+t4", "--prompt", "8", *QUICK, "--json"]
    told = [CliRunner().invoke(cli, [*words, *more]) for more in ([], ["--for", "llamacpp"])]
    assert [done.exit_code for done in told] == [0, 0], told
    free, own = (json.loads(done.output.splitlines()[-1])["rows"][0] for done in told)
    assert free["fits"]
    assert own["fits"]
    # llama.cpp keeps the table of tokens on the processor.
    assert own["request_s"] >= free["request_s"]
    assert own["layout"] == ""


def test_a_row_takes_the_plan_of_another_that_is_better_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row's own plan is the processor alone; that of the longer prompt is a GPU's, and it
    is faster for the shorter one, too, as it is on a machine with another GPU."""
    model = write_gguf(tmp_path / "m.gguf", layers=2)
    calls: list[str] = []

    def poor(question: Question) -> Any:
        calls.append(question.cluster.name)
        pins = gdp.Constraints(pins=(gdp.Pin("*", ("cpu",)),))
        if len(calls) != 2:
            question = replace(question, constraints=pins)
        return plan_freely(question)

    monkeypatch.setattr("gdp.api.fit.plan_freely", poor)
    once = gdp.Search(seconds=None, evaluations=20)
    two = gdp.Cluster.load("cpu+t4"), gdp.Cluster.load("cpu+2xt4-pcie3")
    first, second = fit(model, two[:1], prompts=[8, 64], new=4, search=once)
    assert len(calls) == 2
    assert first.tokens_per_s is not None
    assert second.tokens_per_s is not None
    assert first.request_s is not None
    alone = gdp.place(gdp.Generation(model, prompt=8, new=4), two[0], search=once)
    assert first.request_s <= alone.value_s * (1 + 1e-9)
    assert first.gap is not None
    assert 0 <= first.gap < 1


def test_a_plan_is_carried_by_the_names_of_devices(tmp_path: Path) -> None:
    """From one GPU to a machine that has another of that name, and not the other way."""
    graph = gdp.load(gdp.Generation(write_gguf(tmp_path / "m.gguf", layers=2), prompt=8, new=4))
    small = gdp.make_cluster("small", [gdp.Device(n, n, {"default": 1e9}, 1e9) for n in "ab"])
    large = gdp.make_cluster("large", [gdp.Device(n, n, {"default": 1e9}, 1e9) for n in "cba"])
    on_b = gdp.make_placement(graph, small, np.where(graph.is_io, small.host, 1))
    carried = _carried(on_b, graph, large)
    assert carried is not None
    assert set(carried.device[~graph.is_io].tolist()) == {1}
    on_c = gdp.make_placement(graph, large, np.zeros(graph.num_ops, np.int64))
    assert _carried(on_c, graph, small) is None


@pytest.mark.parametrize(("memory_bytes", "faster", "carried"), [
    (1 << 30, True, True), (1 << 30, False, False), (64, True, False),
])  # fmt: skip
def test_a_plan_is_carried_only_where_it_fits_and_is_faster(
    memory_bytes: int, faster: bool, carried: bool
) -> None:
    """From "a" to "b", ten times as fast or as slow: where its memory holds the weights."""
    graph = plain_graph(2, [(0, 1)], weight_bytes=[100, 100], flop=[1.0, 1.0])
    speed = 10.0 if faster else 0.1
    devices = [
        gdp.Device("a", "a", {"default": 1.0}, 1e18, memory_bytes=1 << 30),
        gdp.Device("b", "b", {"default": speed}, 1e18, memory_bytes=memory_bytes),
    ]
    machine = gdp.make_cluster("two", devices)
    own, other = (gdp.make_placement(graph, machine, np.full(2, d)) for d in (0, 1))
    result = evaluate(Question(graph, machine, costs=roofline), own)
    fitted = _best_of(result, [own, other])
    assert (fitted.placement.device == int(carried)).all()


def test_the_row_of_a_scheme_names_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.generating_configs import generating_config

    (tmp_path / "config.json").write_text(json.dumps(generating_config("llama")))
    words = ["fit", f"hf:{tmp_path}", "--cluster", "cpu+t4", "--prompt", "8", *QUICK]
    done = CliRunner().invoke(cli, [*words, "--quantize", "int8"])
    assert done.exit_code == 0, done.output
    header, row, *_ = done.stdout.splitlines()
    assert header.split()[:5] == ["machine", "tokens", "batch", "quantised", "fits"]
    assert row.split()[:5] == ["cpu+t4", "8+4", "1", "int8", "yes"]


def test_only_configurations_are_fitted() -> None:
    done = CliRunner().invoke(cli, ["fit", "model.onnx", "--cluster", "cpu"])
    assert done.exit_code == 2
    assert "gdp fit takes hf:CONFIG and .gguf models, not 'model.onnx'" in done.output
