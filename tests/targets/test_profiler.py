"""Profiling: every executed kernel is traced back to the ops that it stands for."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gdp.base.cores import usable_cores
from gdp.base.errors import ClusterError
from gdp.costs.profile import load_profile, save_profile
from gdp.importers.onnx.model import load_onnx
from gdp.targets.jax.profile import bandwidth, statistic, timed_rounds
from gdp.targets.onnx_source import load_source
from gdp.targets.onnxruntime.profile import (
    HELPERS,
    ProfileConfig,
    kernel_nodes,
    profile_models,
    profile_source,
    tagged,
)

QUICK = ProfileConfig(rounds=2, seconds=0.02, min_runs=2, max_runs=3)


def small_network(path: Path) -> Path:
    """Conv -> BatchNormalization -> Relu -> MaxPool -> Flatten -> Gemm -> Softmax."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array(rng.random(shape, dtype=np.float32) + 0.5, name)

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"], name="norm"),
        helper.make_node("Relu", ["n"], ["r"], name="relu"),
        helper.make_node("MaxPool", ["r"], ["p"], name="pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "g"], ["l"], name="dense"),
        helper.make_node("Softmax", ["l"], ["y"], name="soft"),
    ]
    weights = [weight("w", 16, 8, 3, 3), weight("g", 256, 10)]
    weights += [weight(name, 16) for name in "sbmv"]
    graph = helper.make_graph(
        nodes, "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])], weights,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, ir_version=8, opset_imports=opsets), path)
    return path


def test_bandwidth_is_the_slope_and_leaves_the_latency_out() -> None:
    """10 us, and 1 us for every further 1,000 bytes."""
    sizes = [1000, 2000, 5000]
    assert bandwidth(sizes, [11e-6, 12e-6, 15e-6]) == pytest.approx(1e9)
    assert bandwidth(sizes, [11e-6] * 3) == pytest.approx(1e13)  # no slower for more


def test_rounds_share_their_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls of 10 ms, 1 s in 5 rounds is 20 a round, and one to see how long they take."""
    clock = iter(np.arange(10_000) * 10e-3)
    monkeypatch.setattr("gdp.measure.record.time.perf_counter", lambda: next(clock))
    calls: list[int] = []
    times = timed_rounds(lambda: calls.append(1), rounds=5, seconds=1.0)
    assert times.shape[0] == 5
    assert 19 <= times.shape[1] <= 20
    assert len(calls) == times.size + 1
    assert times == pytest.approx(10e-3)


def test_every_op_is_in_the_kernel_that_replaced_it(tmp_path: Path) -> None:
    path = small_network(tmp_path / "small.onnx")
    graph = load_onnx(str(path))
    model = profile_source(load_source(path), graph, "small", "small", QUICK)
    of_op = {graph.op_names[op]: k for k in model.kernels if k.type not in HELPERS for op in k.ops}
    assert of_op["conv"].type == "Conv"
    assert of_op["conv"].name == of_op["norm"].name == of_op["relu"].name
    assert of_op["pool"].type == "MaxPool"
    assert of_op["dense"].type in ("Gemm", "FusedGemm")
    assert len({id(of_op[name]) for name in ("conv", "pool", "dense", "soft")}) == 4
    assert all(kernel.seconds >= 0 for kernel in model.kernels)
    assert model.latency_s > 0


def test_the_run_that_warms_up_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time that the profiler wrote for a kernel is 1 us here, all others are 7 us."""
    from gdp.targets.onnxruntime import profile as ort

    def written(text: str) -> list[dict]:
        seen: set[str] = set()
        events = json.loads(text)
        for event in events:
            event["dur"] = 7 if event["name"] in seen else 1
            seen.add(event["name"])
        return events

    monkeypatch.setattr(ort, "json", SimpleNamespace(loads=written))
    path = small_network(tmp_path / "small.onnx")
    model = profile_source(load_source(path), load_onnx(str(path)), "small", "small", QUICK)
    assert [kernel.seconds for kernel in model.kernels] == pytest.approx(
        [7e-6] * len(model.kernels)
    )


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        # Two fused in one, known by the tensor it makes.
        ([("Gelu", "anything", ["a"], ["d"])], [[0, 1, 2]]),
        # Tags in names, nothing fused.
        (
            [("Div", "gdp0_", ["a"], ["b"]), ("Erf", "gdp1_", ["b"], ["c"]),
             ("Mul", "gdp2_", ["c"], ["d"])],
            [[0], [1], [2]],
        ),
        # A blocked kernel is named after the tensor it made; what follows it was taken up by it.
        (
            [("Div", "b_nchwc", ["a"], ["reorder"]), ("ReorderOutput", "x", ["reorder"], ["d"])],
            [[0, 1, 2], [0, 1, 2]],
        ),
    ],
)  # fmt: skip
def test_kernels_are_delimited_by_the_tensors_that_survive(kernels, expected) -> None:
    """a -> Div b -> Erf c -> Mul d."""
    nodes = [
        helper.make_node(kind, [x], [y])
        for kind, x, y in (("Div", "a", "b"), ("Erf", "b", "c"), ("Mul", "c", "d"))
    ]
    model = tagged(helper.make_model(helper.make_graph(nodes, "g", [], [])))
    assert [node.name for node in model.graph.node] == ["gdp0_", "gdp1_", "gdp2_"]
    made = [helper.make_node(kind, x, y, name=name) for kind, name, x, y in kernels]
    optimised = helper.make_model(helper.make_graph(made, "o", [], []))
    assert kernel_nodes(model, optimised) == expected


def test_light_models_profile_and_round_trip(tmp_path: Path) -> None:
    made = profile_models(
        [("squeezenet", "squeezenet", "onnx:light_squeezenet")], QUICK, overheads=False
    )
    (model,) = made.models
    covered = {op for kernel in model.kernels for op in kernel.ops}
    working = set(np.flatnonzero(~model.graph.is_io).tolist())
    assert covered <= working
    assert len(covered) == len(working)
    convs = [k for k in model.kernels if k.type == "Conv"]
    assert len(convs) == 26
    # Each convolution took its activation up.
    assert all(len(k.ops) >= 2 for k in convs)
    save_profile(made, tmp_path / "p.json.gz")
    assert load_profile(tmp_path / "p.json.gz").models[0].graph.digest == model.graph.digest


def test_the_statistic_ignores_disturbances() -> None:
    rng = np.random.default_rng(0)
    times = 1.0 + rng.exponential(0.5, size=(5, 40))
    times[2] += 10.0
    assert 1.0 <= statistic(times)[0] < 1.1


def test_the_statistic_is_the_mean_of_the_fastest_quarter_of_the_best_round() -> None:
    """Two of eight runs: 2 s and 3 s; the runs that were fastest by luck decide nothing alone."""
    slow, fast = [9.0, 2.0, 9.0, 9.0, 4.0, 9.0, 9.0, 9.0], [1.0, 9.0, 9.0, 3.0, 9.0, 9.0, 9.0, 9.0]
    assert statistic(np.array([slow, fast])) == (2.0, 0.25)
    assert statistic(np.array([fast])) == (2.0, 0.0)


def test_a_core_that_is_not_there_is_named() -> None:
    with pytest.raises(ClusterError, match="core 4096 is not usable"):
        profile_models([], ProfileConfig(core=4096))


def test_config_bounds() -> None:
    with pytest.raises(ValueError, match="min_runs"):
        ProfileConfig(min_runs=1)
    with pytest.raises(ValueError, match="threads"):
        ProfileConfig(threads=0)


def test_the_chain_that_measures_cuts_runs_in_few_and_in_many_pieces() -> None:
    from gdp.targets.onnxruntime.overheads import CUT_PIECES, cut_chain, measure_cut_s

    core = usable_cores()[0]
    for pieces in CUT_PIECES:
        with cut_chain([core], pieces) as pipeline:
            trace = pipeline.run(4)
        assert len(trace.stage_s) == pieces
    assert measure_cut_s(core, core, rounds=1, samples=4) >= 0.0
