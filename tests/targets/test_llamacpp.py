"""llama.cpp's flags: what they say is the placement, and the plan is the best they can say."""

import bisect
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf_models import MIB, VOCABULARY, box, sayable, write_gguf

import gdp
from gdp.api.ask import require_answerable
from gdp.api.run import export
from gdp.base.errors import ClusterError, InfeasibleError, PlacementError
from gdp.cli.main import cli
from gdp.cluster.file import cluster_of_toml, cluster_toml, load_cluster, read_cluster
from gdp.cluster.types import Cluster, Device, Link, make_cluster
from gdp.costs.base import roofline
from gdp.costs.default import resolve_costs
from gdp.costs.llamacpp import LlamaCosts
from gdp.costs.offload import COPY_BYTES_PER_S, unpinned_bytes_per_s
from gdp.graph.op_graph import OUTPUT, OpDetail, OpGraph, make_graph
from gdp.placement.constraints import Constraints, Pin
from gdp.placement.placement import make_placement
from gdp.question import solve
from gdp.question.models import load
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.targets.llamacpp.blocks import _crossing, llama_blocks
from gdp.targets.llamacpp.flags import flags_of, slots_of
from gdp.targets.llamacpp.plan import plan_llamacpp


def replayed(graph: OpGraph, arguments: list[str], cluster: Cluster) -> list[str]:
    """The device of every op, as llama.cpp's `load_tensors` reads the flags: slots from
    `n_layer + 1 - n_gpu_layers` on, `upper_bound` in the running shares, the first pattern that is
    found in a tensor's name."""
    told = dict(zip(arguments[::2], arguments[1::2], strict=True))
    gpus = [device.name for device in cluster.devices if not device.is_cpu]
    blocks = 1 + max(int(s.split(".")[1]) for s in graph.scope if s.startswith("blk."))
    on_gpu = int(told["--n-gpu-layers"])
    first, active = max(blocks + 1 - on_gpu, 0), min(on_gpu, blocks + 1)
    shares = np.array(told.get("--tensor-split", "1").split(","), np.float32)
    ends = (np.cumsum(shares) / shares.sum()).tolist()

    def device(op: int) -> str:
        scope, name = graph.scope[op], f"{graph.op_names[op]}.weight"
        for rule in filter(None, told.get("--override-tensor", "").split(",")):
            pattern, _, buffer = rule.partition("=")
            if re.search(pattern, name):
                return {"CPU": "cpu"}[buffer]
        if scope in ("", "token_embd"):
            return "cpu"
        slot = int(scope.split(".")[1]) if scope.startswith("blk.") else blocks
        if slot < first:
            return "cpu"
        return gpus[bisect.bisect_right(ends, float(np.float32(slot - first) / np.float32(active)))]

    return [device(op) for op in range(graph.num_ops)]


def test_all_that_the_flags_can_say_is_said_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', experts=4)}?decode")
    for cluster in (box(MIB), box(MIB, MIB), box(MIB, MIB, MIB)):
        found = sayable(graph, cluster)
        assert len(found) > 10
        for placement in found:
            arguments = flags_of(graph, placement, cluster).arguments()
            names = [cluster.device_names[d] for d in placement.device]
            assert replayed(graph, arguments, cluster) == names


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("sizes", [(1.1,), (2.2,), (9.0,), (1.0, 1.6)])
def test_the_plan_is_the_best_that_the_flags_can_say(
    experts: int, sizes: tuple[float, ...], tmp_path: Path
) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', experts=experts)}?decode&sequence=64")
    cluster = box(*(int(size * MIB) for size in sizes))
    scores = [
        solve.simulate(Question(graph, cluster), placement) for placement in sayable(graph, cluster)
    ]
    best = min(score.latency_s for score in scores if score.feasible)
    found = plan_llamacpp(Question(graph, cluster))
    assert found.score.feasible
    # Less than a share of one op apart: memory for what flows is kept free, and traffic inside
    # fused ops is counted.
    assert found.value_s <= best * 1.03
    flags_of(graph, found.placement, cluster)


def test_experts_go_to_the_cpu_where_the_gpu_is_small(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", experts=8, layers=4)
    graph, cluster = load(f"{path}?decode&sequence=64"), box(4 * MIB)
    found = plan_llamacpp(Question(graph, cluster))
    flags = flags_of(graph, found.placement, cluster)
    assert flags.n_gpu_layers >= 4
    (rule,) = flags.override_tensor
    assert re.fullmatch(r"\^blk\\\.\([\d|]+\)\\\.ffn_\(down\|gate\|up\)_exps\\\.=CPU", rule)
    assert 0 < len(re.findall(r"\d", rule)) < 4
    written = export(found, f"{path}?decode&sequence=64", "llamacpp", tmp_path / "out", cluster)
    told = json.loads(written[0].read_text())
    assert told["arguments"] == flags.arguments()
    assert list(told["why"]) == [word for word in flags.arguments() if word.startswith("--")]
    assert "--ctx-size 64" in written[1].read_text()


@pytest.mark.parametrize(
    ("query", "kind", "ubatch", "said"),
    [
        ("sequence=64", "f16", 64, "room for the tensors of 64, and logits of so many"),
        ("sequence=1024", "f16", 512, "room for the tensors of 512, and logits of so"),
        ("decode&sequence=1024&cache=q8_0", "q8_0", 512, "tensors of 1, and logits of so"),
        ("prompt=8&new=600&cache=bf16", "bf16", 512, "tensors of 8, and logits of so"),
    ],
)
def test_flags_say_cache_and_batch_as_planned(
    query: str, kind: str, ubatch: int, said: str, tmp_path: Path
) -> None:
    graph, cluster = load(f"{write_gguf(tmp_path / 'm.gguf')}?{query}"), box(64 * MIB)
    flags = flags_of(graph, plan_llamacpp(Question(graph, cluster)).placement, cluster)
    told = {option.name: option for option in flags.options()}
    assert told["--cache-type-k"].value == told["--cache-type-v"].value == kind
    assert told["--ubatch-size"].value == str(ubatch)
    assert re.search(said, told["--ubatch-size"].why)
    assert (told["--fit"].value, told["--flash-attn"].value) == ("off", "auto")


def test_one_plan_serves_the_prompt_and_the_steps(tmp_path: Path) -> None:
    """Weights count once, the token is taken on the CPU, and no plan that the flags can say is
    faster."""
    path = write_gguf(tmp_path / "m.gguf", experts=4)
    # 1.8 MiB beside logits of a micro-batch, and its mask.
    cluster = box(int(1.8 * MIB) + 4 * 512 * VOCABULARY + 2 * 512 * 256)
    graph = load(f"{path}?prompt=24&new=40")
    found = plan_llamacpp(Question(graph, cluster))
    scores = [
        solve.simulate(Question(graph, cluster), placement) for placement in sayable(graph, cluster)
    ]
    best = min(score.latency_s for score in scores if score.feasible)
    assert found.score.feasible
    assert found.value_s <= best * 1.03
    flags = flags_of(graph, found.placement, cluster)
    assert flags.ctx_size == 64
    assert flags.n_gpu_layers > 0
    alone = load(f"{path}?decode&sequence=64")
    latencies_s = (
        llama_blocks(Question(own, cluster), slots_of(own)).move_s(0, 1, 0)
        for own in (graph, alone)
    )
    assert list(latencies_s) == pytest.approx([41e-6, 1e-6])  # by the prompt, and by every step
    devices = (replace(d, dispatch_s=1e-3, dispatch_per="segment") for d in cluster.devices)
    cut = replace(cluster, devices=tuple(devices))
    begun_s = [
        llama_blocks(Question(own, cut), slots_of(own)).segment_s.tolist() for own in (graph, alone)
    ]
    assert begun_s == [pytest.approx([41e-3] * 2), [1e-3] * 2]  # likewise
    assert (
        flags_of(alone, plan_llamacpp(Question(alone, cluster)).placement, cluster).ctx_size == 64
    )


@pytest.mark.parametrize("experts", [0, 4])
def test_a_small_cpu_makes_it_frugal_and_a_small_box_is_infeasible(
    experts: int, tmp_path: Path
) -> None:
    """Experts that are quicker on the CPU, which has no room for them, too."""
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', experts=experts)}?decode")
    quick_cpu = box(8 * MIB, cpu_bytes=MIB)
    cpu, gpu = quick_cpu.devices
    devices = (replace(cpu, bytes_per_s=1e12), replace(gpu, bytes_per_s=1e9))
    found = plan_llamacpp(Question(graph, replace(quick_cpu, devices=devices)))
    assert found.score.feasible
    assert found.placement.ops_on["gpu0"] > 30
    with pytest.raises(InfeasibleError):
        plan_llamacpp(Question(graph, box(MIB // 4, cpu_bytes=MIB)))


def test_a_gpu_that_is_slow_to_launch_is_left_out(tmp_path: Path) -> None:
    graph, cluster = load(f"{write_gguf(tmp_path / 'm.gguf')}?decode"), box(64 * MIB)
    assert (
        flags_of(graph, plan_llamacpp(Question(graph, cluster)).placement, cluster).n_gpu_layers > 0
    )
    cpu, gpu = cluster.devices
    slow = replace(cluster, devices=(cpu, replace(gpu, dispatch_s=1.0, dispatch_per="op")))
    found = plan_llamacpp(Question(graph, slow))
    assert flags_of(graph, found.placement, slow).n_gpu_layers == 0
    assert found.method == "llamacpp"  # by its own seconds, not by llama.cpp's own plan


def test_a_gpu_from_which_logits_come_back_late_is_left_out(tmp_path: Path) -> None:
    graph, cluster = load(f"{write_gguf(tmp_path / 'm.gguf')}?decode"), box(64 * MIB)
    rates = cluster.link_bytes_per_s.copy()
    rates[1, 0] = 1e3
    late = replace(cluster, link_bytes_per_s=rates)
    found = plan_llamacpp(Question(graph, late))
    assert flags_of(graph, found.placement, late).n_gpu_layers == 0
    assert found.method == "llamacpp"


def test_a_quick_cpu_keeps_what_fits_beside_the_embedding(tmp_path: Path) -> None:
    """Each device has room for about two thirds of the weights: of the plans that the flags can
    say, the one with the most on the CPU is the quickest."""
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', layers=6)}?decode&sequence=64")
    room = int(0.65 * graph.weight_bytes.sum())
    cluster = box(room, cpu_bytes=room)
    cpu, gpu = cluster.devices
    cluster = replace(cluster, devices=(replace(cpu, flop_per_s={"default": 1e13},
                                                bytes_per_s=1e12), gpu))  # fmt: skip
    scores = [
        solve.simulate(Question(graph, cluster), placement) for placement in sayable(graph, cluster)
    ]
    best = min(score.latency_s for score in scores if score.feasible)
    assert plan_llamacpp(Question(graph, cluster)).value_s <= best * 1.03


def two_blocks(small: int, large: int, embedding: int = 1) -> OpGraph:
    """A row of embedding, two blocks with experts of these bytes, the output, and its reader."""
    scope = ["token_embd", "blk.0", "blk.0.experts", "blk.1", "blk.1.experts", "output_norm"]
    names = ["token_embd", "blk.0.attn_q", "blk.0.ffn_up_exps", "blk.1.attn_q", "blk.1.ffn_up_exps"]
    n = len(scope) + 2
    return make_graph(
        "blocks", [*names, "output_norm", "output", "logits"], ["MatMul"] * (n - 1) + [OUTPUT],
        [(i, 1) for i in range(n - 1)], [(i, i + 1) for i in range(n - 1)],
        weight_bytes=[embedding, 1, small, 1, large, 1, 1, 0], scope=[*scope, "output", ""],
        detail=[OpDetail(attributes={"context": 64})] * n,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("gpu_bytes", "away_s", "away"),
    [
        # Without 56 bytes of experts nothing fits: the small ones are dearer a byte, but enough.
        (1050, (2.0, 6.0), [2]),
        # Without 155 bytes nothing fits: the large ones leave.
        (950, (2.0, 6.0), [4]),
        # There is room for all; on the CPU the experts of the first block are quicker.
        (10**6, (0.5, 6.0), [2]),
        (10**6, (2.0, 6.0), []),
    ],
)
def test_experts_leave_where_that_costs_least_or_is_quicker(
    gpu_bytes: int, away_s: tuple[float, float], away: list[int]
) -> None:
    """Ops take 1 s on the GPU and 100 s on the CPU, but for the experts and the embedding."""
    graph, cluster = two_blocks(100, 1000), box(gpu_bytes)
    cluster = replace(cluster, link_latency_s=np.zeros((2, 2)))

    seconds = np.tile([100.0, 1.0], (graph.num_ops, 1))
    seconds[[0, 2, 4], 0] = 1.0, *away_s
    seconds[graph.is_io] = 0.0
    assert quickest(graph, cluster, seconds) == [0, *away]


def quickest(graph: OpGraph, cluster: Cluster, seconds: np.ndarray) -> list[int]:
    """The ops on the CPU in gdp's plan, which is as fast as the best that the flags can say."""

    def costs(graph: OpGraph, cluster: Cluster) -> np.ndarray:
        return seconds

    found = plan_llamacpp(Question(graph, cluster, costs=costs))
    scores = [
        solve.simulate(Question(graph, cluster, costs=costs), p) for p in sayable(graph, cluster)
    ]
    assert found.value_s == pytest.approx(min(s.latency_s for s in scores if s.feasible))
    return np.flatnonzero((found.placement.device == 0) & ~graph.is_io).tolist()


def test_blocks_share_the_cpu_with_the_embedding() -> None:
    """The CPU is quicker for whole blocks, and has 70 bytes besides the embedding: for the first
    block alone."""
    graph = two_blocks(40, 400, embedding=500)
    seconds = np.ones((graph.num_ops, 2))
    seconds[1:4, 0], seconds[4, 0], seconds[5:, 0] = 0.1, 1.5, 100.0
    seconds[graph.is_io] = 0.0
    cluster = replace(box(10**6, cpu_bytes=570), link_latency_s=np.zeros((2, 2)))
    assert quickest(graph, cluster, seconds) == [0, 1, 2]


def test_a_gpu_that_is_far_away_is_left_out() -> None:
    """Six seconds on the GPU and three each way, or ten and a half on the CPU."""
    graph = two_blocks(40, 400)
    seconds = np.tile([1.75, 1.0], (graph.num_ops, 1))
    seconds[graph.is_io] = 0.0
    far = replace(box(10**6), link_latency_s=3.0 * (1 - np.eye(2)))
    assert quickest(graph, far, seconds) == list(range(7))
    near = replace(far, link_latency_s=0.5 * (1 - np.eye(2)))
    assert quickest(graph, near, seconds) == [0]


@pytest.mark.parametrize(("latency_s", "away"), [(0.6, []), (0.4, [2])])
def test_experts_on_the_cpu_wait_for_both_ways(latency_s: float, away: list[int]) -> None:
    """Experts of 2 s on the GPU and 1 s on the CPU, there and back over a link."""
    graph = two_blocks(40, 400)
    seconds = np.tile([100.0, 1.0], (graph.num_ops, 1))
    seconds[0, 0], seconds[2] = 1.0, (1.0, 2.0)
    seconds[graph.is_io] = 0.0
    cluster = replace(box(10**6), link_latency_s=latency_s * (1 - np.eye(2)))
    assert quickest(graph, cluster, seconds) == [0, *away]


def test_experts_that_are_quicker_on_a_cpu_without_room_stay_on_the_gpu() -> None:
    """Beside the embedding the CPU has 70 bytes: for the experts of neither block."""
    graph, cluster = two_blocks(80, 400, embedding=500), box(10**6, cpu_bytes=570)
    seconds = np.tile([100.0, 1.0], (graph.num_ops, 1))
    seconds[[0, 2, 4], 0] = 1.0, 0.5, 0.5
    seconds[graph.is_io] = 0.0
    near = replace(cluster, link_latency_s=np.zeros((2, 2)))
    assert quickest(graph, near, seconds) == [0]


def test_a_tensor_crosses_once_however_many_ops_read_it() -> None:
    """Ops 1 and 2 read the 100 bytes of op 0, and one of them the other's 30; op 3 reads both."""
    graph = make_graph(
        "fan", list("abcd"), ["MatMul"] * 4, [(0, 100), (1, 30), (2, 7)],
        [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)],
    )  # fmt: skip
    assert _crossing(graph, np.array([1, 2])) == (100, 37)
    assert _crossing(graph, np.array([0])) == (0, 100)


def test_experts_on_another_gpu_than_their_block_are_refused() -> None:
    graph, cluster = two_blocks(40, 400), box(MIB, MIB)
    device = np.array([0, 1, 2, 1, 1, 1, 1, 0])
    with pytest.raises(PlacementError, match="experts of block 0 are on another GPU"):
        flags_of(graph, make_placement(graph, cluster, device), cluster)
    device[2] = 0
    flags = flags_of(graph, make_placement(graph, cluster, device), cluster)
    assert len(flags.override_tensor) == 1


def test_a_machine_without_a_processor_is_told_of_unified_memory(tmp_path: Path) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', layers=2)}?decode&sequence=64")
    gpu = Device("pc", "gfx1151", {"default": 1e12}, 1e11, 64 * MIB)
    with pytest.raises(PlacementError, match=r"needs a CPU; .* has none: .* `unified = true`"):
        plan_llamacpp(Question(graph, make_cluster("pc", [gpu])))
    found = plan_llamacpp(Question(graph, make_cluster("pc", [replace(gpu, unified=True)])))
    assert found.score.feasible


def test_demands_are_kept_or_refused(tmp_path: Path) -> None:
    graph, cluster = load(write_gguf(tmp_path / "m.gguf")), box(64 * MIB)
    kept = plan_llamacpp(
        Question(graph, cluster, constraints=Constraints(pins=(Pin("blk.1", ("cpu",)),)))
    )
    assert flags_of(graph, kept.placement, cluster).n_gpu_layers == 2
    with pytest.raises(ValueError, match="latency of one pass"):
        plan_llamacpp(Question(graph, cluster, objective="throughput"))
    with pytest.raises(ValueError, match="planned by one program, not by 'heft'"):
        require_answerable(Question(graph, cluster, target="llamacpp", method="heft"))
    with pytest.raises(ValueError, match="leave out --together"):
        plan_llamacpp(Question(graph, cluster, constraints=Constraints(together=("*",))))


@pytest.mark.parametrize(
    ("moved", "device", "said"),
    [
        ("blk.0", 1, "block 1 on 'cpu' follows one on 'gpu0'"),
        ("token_embd", 1, "keeps token_embd on the CPU .--cluster"),
        ("blk.1.attn_q", 1, "ops of 'blk.1' lie on several devices"),
    ],
)
def test_other_placements_are_refused(moved: str, device: int, said: str, tmp_path: Path) -> None:
    graph, cluster = load(write_gguf(tmp_path / "m.gguf")), box(64 * MIB)
    at = np.array(
        [device if moved in (s, n) else 0 for s, n in zip(graph.scope, graph.op_names, strict=True)]
    )
    with pytest.raises(PlacementError, match=f"{said}.*--for llamacpp$"):
        flags_of(graph, make_placement(graph, cluster, at), cluster)


def test_from_the_header_to_the_flags_on_the_command_line(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", experts=8))
    placed, asked = str(tmp_path / "p.json"), ["--decode", "--sequence", "128"]
    box_flags = ["--cluster", "cpu+rtx4090"]
    # A token of so small a model is quickest on the CPU; here it shall not be.
    demands = ["--forbid", "output=cpu", "--forbid", "blk.?=cpu", "--pin", "blk.1.experts=cpu",
               "--costs", "datasheet"]  # fmt: skip
    runner = CliRunner()
    done = runner.invoke(
        cli, ["place", path, *asked, *box_flags, *demands, "--for", "llamacpp", "-o", placed]
    )
    assert done.exit_code == 0, done.output
    command = ["export", placed, "--model", path, *asked, *box_flags, "--to", "llamacpp", "--json"]
    done = runner.invoke(cli, [*command, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    rule = r"'^blk\.(1)\.ffn_(down|gate|up)_exps\.=CPU'"
    wanted = (
        f"--fit off --n-gpu-layers 4 --override-tensor {rule} --ctx-size 128 --cache-type-k f16 "
        "--cache-type-v f16 --flash-attn auto --ubatch-size 128"
    )
    told = json.loads(done.stdout)
    assert told["arguments"] == wanted
    done = runner.invoke(cli, [*command[:-1], "-o", str(tmp_path / "text")])
    assert wanted in done.output
    assert all(f"{flag}: {why}" in done.output for flag, why in told["why"].items())
    for flag, value in (("--method", "heft"), ("--seconds", "5"), ("--checkpoint", "c")):
        done = runner.invoke(cli, ["place", path, *box_flags, "--for", "llamacpp", flag, value])
        assert done.exit_code == 2
        assert f"leave out {flag}" in done.output
    done = runner.invoke(cli, ["place", path, "--task", "causal-lm"])
    assert done.exit_code == 2
    assert "--task is for hf:CONFIG models" in done.output


def test_a_block_without_ops_is_a_layer_of_the_flags(tmp_path: Path) -> None:
    """Blocks that an architecture search emptied count among llama.cpp's layers, in the middle
    and at the end."""
    whole = load(f"{write_gguf(tmp_path / 'm.gguf', layers=5)}?decode")
    kept = load(f"{write_gguf(tmp_path / 'n.gguf', layers=5, empty=(1, 4))}?decode")
    cluster = box(64 * MIB)
    for graph in (whole, kept):
        device = np.where(np.array(graph.scope) == "token_embd", 0, 1)
        device[graph.is_io] = 0
        assert flags_of(graph, make_placement(graph, cluster, device), cluster).n_gpu_layers == 6
        found = plan_llamacpp(Question(graph, cluster)).placement
        assert flags_of(graph, found, cluster).n_gpu_layers > 0


@pytest.mark.parametrize(("tokens", "sent"), [(31, 0), (32, 1), (512, 1), (1025, 3)])
def test_weights_on_the_cpu_go_to_the_first_gpu_for_a_prompt(
    tokens: int, sent: int, tmp_path: Path
) -> None:
    """Once for each 512 tokens; of experts those that are chosen, here nearly all. What lies
    between two products is computed there, too; the embedding and the head, of one token, stay."""
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', experts=4)}?sequence={tokens}")
    cluster = box(64 * MIB, 64 * MIB)
    plain = LlamaCosts(None, roofline)(graph, cluster)
    costs, _ = resolve_costs(None, cluster, graph)
    seconds = costs(graph, cluster)
    # Each micro-batch copies the keys and values so far, of 2 heads of 64 numbers in F16, to the
    # GPU, and its own ones, in F32, back.
    ends = [min(tokens, 512 * (i + 1)) for i in range(sent)]
    caches = sum(ends) / max(len(ends), 1) * sent * 2 * 128 * 2 + tokens * 2 * 128 * 4
    moved = {"blk.1.ffn_up_exps": None, "blk.1.attn_q": None, "blk.1.ffn_norm": None,
             "blk.1.attention": caches, "blk.1.attn_add": 0, "token_embd": -1,
             "output": -1}  # fmt: skip
    for name, size in moved.items():
        op = graph.op_index[name]
        size = sent * graph.weight_bytes[op] if size is None else size
        link_s = size / unpinned_bytes_per_s(cluster, 0, 1) + sent * 2e-6 * (size > 0)
        wanted_s = plain[op, 1] + link_s if sent and size >= 0 else plain[op, 0]
        assert seconds[op, 0] == pytest.approx(wanted_s, rel=2e-3)
        assert seconds[op, 1:].tolist() == plain[op, 1:].tolist()


def test_a_slow_link_leaves_the_prompt_to_the_cpu(tmp_path: Path) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', experts=4)}?sequence=512")
    quick, gpus = box(64 * MIB), 1 - np.eye(2)
    slow = replace(quick, link_bytes_per_s=np.where(gpus, 1e6, np.inf))
    alone = replace(quick, devices=(quick.devices[0], replace(quick.devices[1], kind="rpc-core")))
    device = np.zeros(graph.num_ops, dtype=np.int64)
    on_gpu = np.where(np.isin(graph.scope, ["token_embd", ""]), 0, 1)
    for cluster, where, told in ((quick, device, False), (slow, device, True),
                                 (slow, on_gpu, False), (alone, device, False)):  # fmt: skip
        flags = flags_of(graph, make_placement(graph, cluster, where), cluster)
        assert ("--no-op-offload" in flags.arguments()) == told
    costs, _ = resolve_costs(None, slow, graph)
    assert (costs(graph, slow) == LlamaCosts(None, roofline)(graph, slow)).all()


def two_machines(*, lan: float = 1e9) -> Cluster:
    """A processor and a GPU here, a processor and two GPUs behind a network."""
    gpu = Device("a-gpu", "gpu", {"default": 1e12}, 100e9, 64 * MIB)
    cpu = Device("a-cpu", "cpu", {"default": 1e11}, 10e9, 64 * MIB)
    names = [("b-gpu0", gpu), ("a-cpu", cpu), ("a-gpu", gpu), ("b-cpu", cpu), ("b-gpu1", gpu)]
    devices = [replace(device, name=name) for name, device in names]
    near = [Link(name[0] + "-cpu", name, 25e9) for name, _ in names if "gpu" in name]
    return make_cluster("two", devices, near, default_bytes_per_s=lan, host="a-cpu")


def test_gpus_of_another_machine_are_lent_by_rpc(tmp_path: Path) -> None:
    """Named after that machine's processor; devices in the order of the plan."""
    graph, cluster = load(f"{write_gguf(tmp_path / 'm.gguf')}?decode"), two_machines()
    here = np.where(np.isin(graph.scope, ["token_embd", ""]), 1, 2)
    device = np.where(np.isin(graph.scope, ["output", "output_norm"]), 4, here)
    flags = flags_of(graph, make_placement(graph, cluster, device), cluster)
    told = dict(zip(flags.arguments()[::2], flags.arguments()[1::2], strict=True))
    assert told["--rpc"] == "b-cpu:50052"
    assert told["--device"] == "RPC0,CUDA0,RPC1"
    assert told["--tensor-split"] == "0,3,1"
    # A machine whose GPUs compute nothing lends none.
    alone = flags_of(graph, make_placement(graph, cluster, here), cluster)
    assert (alone.rpc, alone.device, alone.tensor_split, alone.n_gpu_layers) == ((), (), (), 4)
    for same in (two_machines(lan=20e9), box(64 * MIB, 64 * MIB)):
        at = np.where(np.isin(graph.scope, ["token_embd", ""]), same.host, 2)
        arguments = flags_of(graph, make_placement(graph, same, at), same).arguments()
        assert not {"--rpc", "--device"} & set(arguments)


def test_weights_are_not_sent_to_the_gpu_of_another_machine(tmp_path: Path) -> None:
    graph, cluster = load(f"{write_gguf(tmp_path / 'm.gguf')}?sequence=64"), two_machines()
    seconds = resolve_costs(None, cluster, graph)[0](graph, cluster)
    op = graph.op_index["blk.1.attn_q"]
    sent_s = graph.weight_bytes[op] / COPY_BYTES_PER_S
    latency_s = 2 * cluster.link_latency_s[1, 2]
    assert seconds[op, 1] == pytest.approx(seconds[op, 2] + sent_s + latency_s)


def test_a_device_in_one_memory_with_its_processor_needs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    entry = 'kind = "x"\nmemory_bytes = "{}MiB"\nflop_per_s = 1e12\nbytes_per_s = 1e11\n'
    entry += "unified = true\n"
    path.write_text("".join(f'[[device]]\nname = "{n}"\n' + entry.format(4) for n in "ab"))
    cluster = read_cluster(path)
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', experts=4, layers=4)}?decode&sequence=64")
    found = plan_llamacpp(Question(graph, cluster))
    flags = flags_of(graph, found.placement, cluster)
    assert flags.n_gpu_layers == 5
    assert min(flags.tensor_split) > 0
    assert flags.rpc == ("b",)
    assert flags.device == ("CUDA0", "RPC0")
    assert not flags.override_tensor
    assert cluster_of_toml(cluster_toml(cluster), "two").devices == cluster.devices
    alone = load_cluster("dgx-spark")
    assert alone.devices[0].reserve_bytes < 0.1 * alone.devices[0].total_bytes
    whole = plan_llamacpp(Question(graph, alone)).placement
    assert whole.ops_on == {"dgx-spark": graph.num_ops}
    with pytest.raises(ClusterError, match="shares the memory of its own processor"):
        load_cluster("cpu+dgx-spark")


def test_a_larger_micro_batch_sends_weights_less_often(tmp_path: Path) -> None:
    """A prompt of 4096 tokens with all blocks on the processor, whose weights cross the link for
    each micro-batch: of the sizes that can be asked for the fastest is taken, and a size that was
    asked for is kept."""
    path = write_gguf(tmp_path / "m.gguf", experts=4)
    near = box(64 * MIB, cpu_bytes=999 * MIB)
    cluster = replace(near, link_bytes_per_s=np.where(1 - np.eye(2), 1e9, np.inf))
    blocks = Constraints(pins=(Pin("*blk.*", ("cpu",)),))

    def placed(asked: str) -> Result:
        spec = f"{path}?prompt=4096&new=2{asked}"
        return gdp.place(spec, cluster, target="llamacpp", constraints=blocks)

    def size(result: Result) -> int:
        return flags_of(result.question.graph, result.placement, cluster).ubatch_size

    each = {n: placed(f"&ubatch={n}") for n in (512, 1024, 2048, 4096)}
    assert [size(result) for result in each.values()] == list(each)
    free = placed("")
    assert free.value_s <= 1.02 * min(result.value_s for result in each.values())
    assert free.value_s < 0.9 * each[512].value_s
    assert any(note.startswith(f"--ubatch-size {size(free)}") for note in free.notes)
    record = free.placement.question
    assert record is not None
    assert load(record.model).digest == free.question.graph.digest
