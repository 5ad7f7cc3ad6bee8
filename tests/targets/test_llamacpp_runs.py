"""Placements of GGUF files run by llama.cpp, here a stand-in of it whose seconds are known."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from gguf_models import box, write_gguf

import gdp
from gdp.base.errors import ClusterError, ModelError
from gdp.cli.main import cli
from gdp.cluster.file import write_cluster
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.graph.request import DECODE
from gdp.question.models import load
from gdp.question.question import Question
from gdp.targets.llamacpp import run as runtime
from gdp.targets.llamacpp.flags import Flags, slots_of
from gdp.targets.llamacpp.plan import plan_llamacpp
from gdp.targets.llamacpp.run import cores_of, parse_gguf_spec, pieces_of, tokens_of
from gdp.targets.measured_files import read_runs

LAYERS = 3
CPU_S, LENT_S = 0.003, 0.001
"""Seconds of a block, or of the output, in a pass of the stand-in."""


class StandIn(runtime.Worker):
    """Answers as the worker does; a prompt takes ten times a step."""

    def __init__(self, core: int, lent: list[int]) -> None:
        self.loaded: dict[str, Any] = {}

    def ask(self, verb: str, name: str, **more: Any) -> dict[str, Any]:
        if verb == "load":
            self.loaded[name] = more
            return {"layers": [], "moved": {}}
        if verb == "logits":
            return {"logits": [1.0, -2.0]}
        given = self.loaded[name]
        told = dict(zip(given["arguments"][::2], given["arguments"][1::2], strict=True))
        count = int(told.get("--n-gpu-layers", LAYERS + 1))
        prompt, new, _ = more["tokens"]
        parts = {"l": CPU_S * (LAYERS + 1 - count), "result_output": LENT_S * count}
        if not count:
            parts = {"result_output": parts["l"]}
        step_s = sum(parts.values())
        if verb == "sample":
            return {"prompt_s": 10 * step_s if prompt else 0.0, "steps_s": new * step_s}
        own = {e: parts.get("l" if e[0] == "l" else e, 0.0) for e in given["ends"]}
        # A callback makes all of it slower, which is no business of the report.
        return {"prompt": {e: 20 * s for e, s in own.items()} if prompt else {},
                "steps": {e: 2 * new * s for e, s in own.items()}}  # fmt: skip

    def close(self) -> None:
        pass


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "Worker", StandIn)
    monkeypatch.setattr(runtime, "_require_package", lambda: None)
    monkeypatch.setattr(runtime, "versions", lambda *names: {})


def lent_core() -> Cluster:
    """A core, and another one that is lent: equal by their datasheet."""
    devices = [
        Device(name, kind, {"default": 5e8}, 1.5e8, 1 << 30, dispatch_s=1e-6,
               dispatch_per="segment")
        for name, kind in (("core0", "cpu-core"), ("lent", "rpc-core"))
    ]  # fmt: skip
    return make_cluster("lent", devices, default_latency_s=1e-6)


def test_pieces_are_stretches_of_one_device_in_each_phase(tmp_path: Path) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', experts=4)}?prompt=8&new=4")
    slots, device = slots_of(graph), np.zeros(graph.num_ops, np.int64)
    for slot in (1, 2, 3):
        device[slots.layers[slot]] = device[slots.experts[slot]] = 1
    device[slots.experts[2]] = 0
    found = pieces_of(graph, slots, device)
    wanted = [(0, "l_out-0"), (1, "ffn_moe_topk-2"), (0, "ffn_moe_down-2"), (1, "result_output")]
    assert [(p.device, p.end) for p in found["prompt"]] == wanted
    assert [(p.device, p.end) for p in found["steps"]] == wanted
    ops = np.concatenate([piece.ops for piece in found["steps"]])
    assert len(ops) == len(set(ops.tolist()))
    step = load(f"{tmp_path / 'm.gguf'}?decode&sequence=8")
    alone = pieces_of(step, slots_of(step), np.zeros(step.num_ops, np.int64))
    assert [len(alone[phase]) for phase in ("prompt", "steps")] == [0, 1]
    assert (graph.phase[ops] == DECODE).any()


@pytest.mark.parametrize(
    ("query", "tokens"),
    [("sequence=8", (8, 0, 0)), ("sequence=8&decode", (0, 1, 7)), ("prompt=8&new=4", (8, 4, 0))],
)
def test_a_sample_is_what_the_graph_is_of(query: str, tokens: tuple[int, ...]) -> None:
    assert tokens_of(parse_gguf_spec(f"m.gguf?{query}")) == tokens


@pytest.mark.usefixtures("stand_in")
def test_seconds_are_those_of_llama_cpp_and_pieces_share_them(tmp_path: Path) -> None:
    path, cluster = write_gguf(tmp_path / "m.gguf", layers=LAYERS), lent_core()
    spec = f"{path}?prompt=8&new=4"
    graph = load(spec)
    slots, device = slots_of(graph), np.zeros(graph.num_ops, np.int64)
    device[np.concatenate(slots.layers[1:])] = 1
    placed = gdp.make_placement(graph, cluster, device)
    report = gdp.run(spec, cluster, placed, measuring=gdp.Measuring(seconds=2.0))
    step_s = CPU_S + LAYERS * LENT_S
    assert report["measured_latency_s"] == pytest.approx(14 * step_s)
    assert report["baselines"]["single_device"]["latency_s"] == pytest.approx(14 * 4 * CPU_S)
    assert report["baselines"]["runtime_default"]["latency_s"] == pytest.approx(14 * 4 * LENT_S)
    spent = {"core0": 0.0, "lent": 0.0}
    for segment in report["segments"]:
        spent[segment["device"]] += segment["measured_s"]
    assert spent == pytest.approx({"core0": 14 * CPU_S, "lent": 14 * LAYERS * LENT_S})
    told = f"prompt {8 / (10 * step_s):.1f} tokens/s, decode {1 / step_s:.1f} tokens/s"
    assert told in report["note"]
    assert report["outputs_equal"]
    (tmp_path / "report.json").write_text(json.dumps(report))
    (measured,) = read_runs(tmp_path / "report.json")[0].loads
    assert (measured.prompt, measured.new, measured.context) == (8, 4, 0)
    assert (measured.ttft_s, measured.tpot_s) == pytest.approx((10 * step_s, step_s))


@pytest.mark.usefixtures("stand_in")
def test_tuning_finds_the_faster_device_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lent core is three times as fast as the first, which the datasheet does not say."""
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))
    path, cluster = write_gguf(tmp_path / "m.gguf", layers=LAYERS), lent_core()
    spec = f"{path}?prompt=8&new=4"
    start = gdp.Constraints(pins=(gdp.Pin("blk.0", ("core0",)),))
    tuned = gdp.tune(spec, cluster, runs=4, constraints=start,
                     measuring=gdp.Measuring(seconds=1.0))  # fmt: skip
    assert tuned.rounds[-1].off < 0.2
    graph = load(spec)
    found = plan_llamacpp(Question(graph, cluster))
    assert found.placement.ops_on["lent"] > graph.num_ops / 2
    assert "this machine" in found.costs


@pytest.mark.usefixtures("stand_in")
def test_the_command_line_places_runs_and_says_tokens(tmp_path: Path) -> None:
    path, box_file = str(write_gguf(tmp_path / "m.gguf", layers=LAYERS)), tmp_path / "box.toml"
    write_cluster(lent_core(), box_file)
    words = ["run", path, "--sequence", "8", "--decode", "--cluster", str(box_file),
             "--runtime", "llamacpp", "--measure-seconds", "0.5"]  # fmt: skip
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    note = json.loads(done.stdout)["note"]
    assert "decode" in note
    assert "prompt" not in note
    (tmp_path / "report.json").write_text(done.stdout)
    (measured,) = read_runs(tmp_path / "report.json")[0].loads
    assert (measured.prompt, measured.new, measured.context, measured.ttft_s) == (0, 1, 7, None)
    done = CliRunner().invoke(cli, words)
    assert "tokens/s, by llama.cpp's own timings" in done.output


def test_what_cannot_run_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"one sequence of a \.gguf model"):
        tokens_of(parse_gguf_spec("m.gguf?batch=2"))
    mixed = make_cluster("mixed", [*lent_core().devices, *box(1 << 30).devices[1:]])
    with pytest.raises(ClusterError, match="rpc-core devices beside others"):
        cores_of(mixed)
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="llamacpp does not execute"):
        gdp.run("onnx:light_squeezenet", "cpu", runtime="llamacpp")
    with pytest.raises(ModelError, match="onnxruntime does not execute"):
        gdp.run(str(path), "cpu", runtime="onnxruntime")


def test_the_program_that_runs_llama_cpp_knows_every_flag_of_a_plan() -> None:
    flags = Flags(3, (2, 1), ("x=CPU",), 64, op_offload=False)
    source = Path(runtime.__file__).with_name("worker.py").read_text(encoding="utf-8")
    known = re.findall(r'add_argument\("(--[a-z-]+)"', source)
    asked = [word for word in flags.arguments() if word.startswith("--")]
    assert "--no-op-offload" in asked
    assert set(asked) <= set(known)
