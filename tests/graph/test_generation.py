"""A prompt and a step of decoding become one graph, whose times and bytes are known by hand."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.base.errors import ModelError
from gdp.costs.base import roofline
from gdp.graph.file import decode_graph, encode_graph
from gdp.graph.fuse import fuse
from gdp.graph.generation import generation_graph, single_step, with_context
from gdp.graph.op_graph import INPUT, OUTPUT, SAMPLING_OPS, GraphBuilder, OpGraph
from gdp.graph.request import DECODE, PREFILL, CacheGrowth, Request
from gdp.methods.scoring import proven_misfit
from gdp.problem.problem import make_problem
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question
from gdp.sim.latency import simulate
from tests.tiny import plain_graph, unit_cluster


def phase(tokens: int, work: float, cache: int = 0) -> OpGraph:
    """Two modules in a row, of 100 and 50 bytes of weights; the first may hold a cache."""
    b = GraphBuilder()
    x = b.make_tensor(b.add_op("ids", INPUT), tokens)
    x = b.make_tensor(
        b.add_op(
            "m/mul",
            "mm",
            reads=[x],
            flop=work,
            scope="m",
            weight_bytes=100 + cache,
            cache_bytes=cache,
        ),
        tokens,
    )
    last = b.add_op("n/mul", "mm", reads=[x], flop=work, weight_bytes=50, scope="n")
    b.add_op("out", OUTPUT, reads=[b.make_tensor(last, 2)])
    return b.build("phase")


@pytest.fixture
def joint() -> OpGraph:
    return generation_graph("g", phase(4, 8.0), phase(1, 3.0, cache=10), Request(4, 5), 1.5)


def test_weights_count_once_and_the_cache_is_full(joint: OpGraph) -> None:
    assert joint.weight_bytes.sum() == 100 + 50 + 15
    assert joint.cache_bytes.sum() == 15
    held = dict(zip(joint.op_names, joint.weight_bytes.tolist(), strict=True))
    assert [held[x] for x in ("m/mul", "n/mul", "step/m/mul", "step/n/mul")] == [100, 50, 15, 0]
    # Three weights: a cache is none of the prompt's.
    assert len(set(joint.weight_id[joint.weight_bytes > 0].tolist())) == 3


def test_a_module_shares_a_device_in_both_phases(joint: OpGraph) -> None:
    of = dict(zip(joint.op_names, joint.colocate.tolist(), strict=True))
    assert of["m/mul"] == of["step/m/mul"] != of["n/mul"] == of["step/n/mul"]
    assert of[SAMPLING_OPS[0]] == of[SAMPLING_OPS[1]]


def test_a_step_holds_what_the_prompt_does_not_read_of_a_module() -> None:
    """The prompt reads 10 bytes of a module, the step two weights of 10 and 4 bytes of it."""

    def reading(*weights: int) -> OpGraph:
        b = GraphBuilder()
        x = b.make_tensor(b.add_op("ids", INPUT), 1)
        for k, size in enumerate(weights):
            op = b.add_op(f"m/{k}", "mm", reads=[x], weight_bytes=size, scope="m")
            x = b.make_tensor(op, 1)
        b.add_op("out", OUTPUT, reads=[x])
        return b.build("phase")

    graph = generation_graph("g", reading(10), reading(10, 4), Request(4, 5))
    held = dict(zip(graph.op_names, graph.weight_bytes.tolist(), strict=True))
    assert [held[name] for name in ("m/0", "step/m/0", "step/m/1")] == [10, 0, 4]


def test_ops_of_no_module_are_free_where_they_hold_nothing() -> None:
    """Those that hold weights lie together; a ReLU beside them is free in each phase."""
    b = GraphBuilder()
    x = b.make_tensor(b.add_op("ids", INPUT), 1)
    x = b.make_tensor(b.add_op("a", "mm", reads=[x], weight_bytes=5), 1)
    x = b.make_tensor(b.add_op("act", "relu", reads=[x]), 1)
    b.add_op("out", OUTPUT, reads=[x])
    graph = generation_graph("g", b.build("phase"), b.build("phase"), Request(4, 5))
    of = dict(zip(graph.op_names, graph.colocate.tolist(), strict=True))
    assert of["a"] == of["step/a"]
    assert len({of["a"], of["act"], of["step/act"]}) == 3


def test_the_last_token_leads_from_the_prompt_to_the_step(joint: OpGraph) -> None:
    names, (first, then) = np.array(joint.op_names), SAMPLING_OPS
    edges = {(str(a), str(b)) for a, b in zip(*(names[e] for e in joint.edges), strict=True)}
    assert edges == {
        ("ids", "m/mul"), ("m/mul", "n/mul"), ("n/mul", first), (first, "step/m/mul"),
        ("step/m/mul", "step/n/mul"), ("step/n/mul", then), (then, "step/out"),
    }  # fmt: skip
    assert joint.request == Request(4, 5, 1)
    assert phase(4, 8.0).request is None
    assert (single_step(joint).repeats == 1).all()


def test_what_reads_nothing_waits_for_the_token() -> None:
    b = GraphBuilder()
    x = b.make_tensor(b.add_op("ids", INPUT), 1)
    positions = b.make_tensor(b.add_op("arange", "arange"), 1)
    b.add_op("out", OUTPUT, reads=[b.make_tensor(b.add_op("a", "add", reads=[x, positions]), 2)])
    graph = generation_graph("g", phase(4, 8.0), b.build("step"), Request(4, 5))
    src, dst = graph.edges
    readers = {graph.op_names[d] for s, d in zip(src, dst, strict=True)
               if graph.op_names[s] == SAMPLING_OPS[0]}  # fmt: skip
    assert readers == {"step/arange", "step/a"}


def test_a_step_takes_its_time_for_every_token(joint: OpGraph) -> None:
    """On one device: 8 + 8, then five times 3 + 3 and twice the 2 of taking a token."""
    problem = prepare_problem(Question(joint, unit_cluster(1), costs=roofline))
    once = prepare_problem(Question(single_step(joint), unit_cluster(1), costs=roofline))
    nowhere = np.zeros(problem.num_ops, dtype=np.int64)
    assert simulate(problem, nowhere).latency_s == pytest.approx(16 + 5 * (6 + 2 + 2))
    assert simulate(once, nowhere).latency_s == pytest.approx(16 + 6 + 2 + 2)


def test_a_border_is_crossed_once_and_by_every_step(joint: OpGraph) -> None:
    """m on d0, n and what takes tokens on d1; links of 0.5 s and one byte per second.

    Of the prompt 4 bytes cross, of each step one from m to n and one back: beside the 66 s of
    work, 4 + 5 + 5 s and eleven latencies, of which the simulator sees three of (1 + 5) / 2 each.
    """
    cluster = unit_cluster(2, latency_s=0.5)
    problem = prepare_problem(Question(joint, cluster, costs=roofline))
    names = problem.graph.op_names
    on_d1 = ["n/" in name or "next_token" in name for name in names]
    run = simulate(problem, np.array(on_d1, dtype=np.int64))
    last = 5 * 1.0 + 3 * 0.5  # the tokens, to the host
    assert run.latency_s == pytest.approx(66 + 4 + 5 + 5 + 3 * 3 * 0.5 + last)


def test_dispatch_is_paid_by_every_run(joint: OpGraph) -> None:
    cluster = unit_cluster(1)
    slow = replace(cluster.devices[0], dispatch_s=1.0)
    cluster = replace(cluster, devices=(slow,))
    problem = prepare_problem(Question(joint, cluster, costs=roofline))
    plain = prepare_problem(Question(joint, unit_cluster(1), costs=roofline))
    more = problem.compute_s - plain.compute_s
    steps = problem.graph.repeats > 1
    assert more[steps & ~problem.graph.is_io].ravel().tolist() == [4.0] * 4
    assert not more[~steps].any()


def test_every_request_of_a_pipeline_has_its_cache(joint: OpGraph) -> None:
    two = prepare_problem(
        Question(joint, unit_cluster(2), objective="throughput", costs=roofline)
    ).graph
    assert two.weight_bytes.sum() == 150 + 2 * 15
    one = prepare_problem(
        Question(joint, unit_cluster(2), objective="latency", costs=roofline)
    ).graph
    assert one.weight_bytes.sum() == 150 + 15


def test_a_file_keeps_runs_and_caches(joint: OpGraph) -> None:
    again = decode_graph(encode_graph(joint), "g")
    assert again.digest == joint.digest != single_step(joint).digest
    assert (again.cache_bytes == joint.cache_bytes).all()


def test_a_request_and_its_phases_follow_their_graph() -> None:
    """Into a file, and into the fused graph; by its digest placements of earlier versions, whose
    graphs had it as attributes of the sampling ops, still know it."""
    request = Request(4, 5, 2, requests=3, passes=2, is_served=True, is_draft=True, pass_tokens=64)
    growth = CacheGrowth((9, 64), 64)
    graph = generation_graph("g", phase(4, 8.0), phase(1, 3.0, cache=10), request, growth)
    assert graph.digest.startswith("f53dd95406dd878b")
    longer = with_context(graph, 32)
    assert longer.digest.startswith("66b7e3f814b891d4")
    for other in (decode_graph(encode_graph(longer), "g"), fuse(longer).graph):
        assert (other.request, other.growth) == (request._replace(context=32), growth)
        steps = [name.startswith("step/") for name in other.op_names]
        assert other.phase.tolist() == [DECODE if step else PREFILL for step in steps]
    assert not phase(4, 8.0).phase.any()


def test_phases_tell_graphs_without_a_request_apart() -> None:
    graph = phase(4, 8.0)
    decodes = replace(graph, phase=np.full(graph.num_ops, DECODE, np.int8))
    assert decodes.digest != graph.digest
    with pytest.raises(ModelError, match="phase has an entry below 0 or above 2"):
        replace(graph, phase=np.full(graph.num_ops, 3, np.int8))


def test_a_phase_without_an_output_is_named() -> None:
    b = GraphBuilder()
    b.add_op("a", "mm", reads=[b.make_tensor(b.add_op("ids", INPUT), 1)])
    with pytest.raises(ModelError, match="graph 'half' of the prompt has no output"):
        generation_graph("g", b.build("half"), phase(1, 1.0), Request(1, 1))


def test_links_carry_every_run_and_devices_hold_one() -> None:
    """Three ops of 5 bytes that run 1,000 times, in halves: 3 bytes held, 5,000 sent."""
    graph = plain_graph(3, [(0, 1), (1, 2)], 5, repeats=[1000] * 3, chunks=[2] * 3)
    assert graph.held_bytes.tolist() == [3] * 3
    assert graph.sent_bytes.tolist() == [5000] * 3
    problem = make_problem(graph, unit_cluster(2, memory_bytes=6), np.ones((3, 2)))
    apart = simulate(problem, np.array([0, 1, 1]))
    assert apart.latency_s == 1 + 5000 + 1 + 1
    assert apart.peak_bytes.tolist() == [3, 6]
    assert proven_misfit(problem) is None
    assert decode_graph(encode_graph(graph), "g").digest == graph.digest
    assert replace(graph, chunks=np.ones(3, np.int64)).digest != graph.digest


def test_runs_that_no_sum_holds_are_refused() -> None:
    with pytest.raises(ModelError, match=r"tensor_bytes times repeats are 1e\+19 bytes"):
        plain_graph(1, [], 10**10, repeats=[10**9])
    with pytest.raises(ModelError, match="chunks has an entry below 1"):
        plain_graph(1, [], chunks=[0])


def test_memory_does_not_grow_with_the_tokens_that_are_written(joint: OpGraph) -> None:
    many = replace(joint, repeats=np.where(joint.repeats > 1, 10**6, 1))
    peaks = []
    for graph in (joint, many):
        problem = prepare_problem(Question(graph, unit_cluster(2), costs=roofline))
        placed = np.where(problem.graph.is_io, 0, 1)
        peaks.append(simulate(problem, placed).peak_bytes.tolist())
    assert peaks[0] == peaks[1]
