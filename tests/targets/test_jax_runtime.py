"""Placements of JAX functions are executed on two virtual CPU devices, and a wrong one shows.

JAX fixes its number of devices when it starts, so the two devices live in a process of their own.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdp.api.run import export
from gdp.base.errors import ClusterError, ModelError
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.graph.file import save_graph
from gdp.measure.request import RunRequest
from gdp.placement.constraints import Constraints
from gdp.placement.placement import make_placement, save_placement
from gdp.question.models import load, traced_model
from gdp.question.question import Question
from gdp.targets.jax.program import Layout, SegmentedJaxProgram, argument_values, as_numpy
from gdp.targets.jax.run import jax_devices, run_jax

TESTS = Path(__file__).parents[1]
MODELS = ("attention_model", "cnn", "training_step", "stacked_layers", "written_step")


def devices(count: int, kind: str = "cpu-core") -> Cluster:
    stem = "core" if kind == "cpu-core" else kind
    return make_cluster(
        "test", [Device(f"{stem}{i}", kind, {"default": 5e10}, 1e10) for i in range(count)]
    )


def scattered(graph, seed: int, blocks: int = 6):  # type: ignore[no-untyped-def]
    """Half of the runs of ops on either device; ops that must stay together follow the first."""
    shuffled = np.random.default_rng(seed).permutation(np.arange(blocks) % 2)
    device = shuffled[np.arange(graph.num_ops) * blocks // graph.num_ops]
    _, first, group = np.unique(graph.colocate, return_index=True, return_inverse=True)
    device = device[first][group]
    return np.where(graph.is_io, 0, device).astype(np.int64)


SCRIPT = """
import json, sys
import jax, numpy as np
from gdp.question.models import traced_model
from gdp.targets.jax.run import run_jax
from gdp.measure.measuring import Measuring
from gdp.measure.request import RunRequest
from test_jax_runtime import MODELS, devices, scattered

assert len(jax.devices()) == 2
for index, name in enumerate(MODELS):
    model = traced_model(f"python:jax_models:{name}")
    graph = model.trace().graph
    objective = ("latency", "throughput")[index % 2]
    report = run_jax(RunRequest(
        model, graph, devices(2), scattered(graph, index), objective=objective,
        measuring=Measuring(seconds=0.1),
    ))
    ops = int((~graph.is_io).sum())
    print(json.dumps({"name": name, "graph_ops": ops} | report.to_json()))
"""


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    done = run_python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    return {report["name"]: report for report in map(json.loads, done.stdout.splitlines())}


def run_python(*arguments: str, cpus: int = 2) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS.parent), str(TESTS), str(TESTS / "targets")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={cpus}",
    }
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_scattered_placement_computes_what_the_function_does(name: str, reports: dict) -> None:
    report = reports[name]
    assert report["outputs_equal"], report["max_relative_diff"]
    assert report["max_relative_diff"] < 1e-4
    assert {segment["device"] for segment in report["segments"]} == {"core0", "core1"}
    assert sum(segment["ops"] for segment in report["segments"]) == report["graph_ops"]
    for key in ("measured_latency_s", "measured_throughput_per_s", "predicted_latency_s"):
        assert report[key] > 0
    trains = name in ("training_step", "stacked_layers")
    assert ("replicas" in report["baselines"]) != trains
    assert {"single_device", "runtime_default"} <= set(report["baselines"])


def test_a_training_step_is_compared_with_all_its_new_state(reports: dict) -> None:
    assert reports["training_step"]["compared_tensors"] == 1 + 2 * 6  # loss, parameters, momentum
    assert reports["stacked_layers"]["compared_tensors"] == 1 + 3 * 2 + 1  # Adam and its count


def layout_of(segment: np.ndarray) -> Layout:
    import jax

    count = int(segment.max()) + 1
    return Layout(segment, np.zeros(count, np.int64), range(count), [jax.devices()[0]], 0)


@pytest.mark.parametrize(("name", "ops"), [("cnn", 1), ("while_loop", 1), ("training_step", 9)])
def test_segments_of_few_ops_compute_the_same(name: str, ops: int) -> None:
    """With one op each, the finest cut there is, every value of the graph crosses."""
    model = traced_model(f"python:jax_models:{name}")
    assert not isinstance(model, type(load("python:jax_models:graph_only")))
    recorded = model.record()
    arguments = argument_values(model, seed=3)
    segment = np.arange(recorded.graph.num_ops) // ops
    program = SegmentedJaxProgram(recorded, layout_of(segment))
    given = program.given(dict(zip(recorded.arguments, arguments, strict=True)))
    assert len(program.pieces) == len(set(segment[~recorded.graph.is_io]))
    expected = [as_numpy(array) for array in model.uncut()(*arguments)]
    for found, wanted in zip(program.run(given), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_what_no_later_piece_reads_is_let_go() -> None:
    """Six products in pieces of their own: beside the argument a piece finds at most the result of
    the one before it, and the memory of a device is that of the simulator."""
    import jax

    import gdp
    from gdp.importers.jax.trace import JaxModel

    shape, seen = (47, 47), []

    def products(x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = x @ x
        return x

    model = JaxModel("products", products, (np.eye(47, dtype=np.float32),), {})
    recorded = model.record()
    graph = recorded.graph
    program = SegmentedJaxProgram(recorded, layout_of(np.arange(graph.num_ops)))
    given = program.given(dict(zip(recorded.arguments, model.args, strict=True)))

    def live() -> int:
        return sum(array.shape == shape for array in jax.live_arrays())

    def watched(call: Any) -> Any:
        def function(*arrays: jax.Array) -> Any:
            seen.append(live() - before)
            return call.function(*arrays)

        return replace(call, function=function)

    program._calls = [watched(call) for call in program._calls]
    before = live()
    np.testing.assert_allclose(program.run(given)[0], model.args[0])
    assert seen == [0, 1, 1, 1, 1, 1]
    kept = program._issue(given)
    assert sum(array is not None for array in kept) == 1
    one = devices(1)
    alone = gdp.make_placement(graph, one, np.zeros(graph.num_ops, np.int64))
    assert gdp.simulate(graph, alone, one).peak_bytes.tolist() == [2 * 4 * 47 * 47]


def test_the_reference_of_microbatches_is_the_sum_over_slices() -> None:
    """Two microbatches against gradients written by hand, without the importer."""
    import jax

    model = traced_model("python:jax_models:training_step")
    arguments = argument_values(model, seed=1)
    params = jax.tree.unflatten(jax.tree.structure(model.args[0]), arguments[:6])
    batches = [arguments[12:14], arguments[14:16]]
    losses = [model.fn(params, tuple(batch)) for batch in batches]
    gradients = [jax.grad(model.fn)(params, tuple(batch)) for batch in batches]
    first = params[0][0] - 0.1 * (gradients[0][0][0] + gradients[1][0][0])  # momentum starts at 0
    found = model.uncut()(*arguments)
    np.testing.assert_allclose(found[0], losses[0] + losses[1], rtol=1e-5)
    np.testing.assert_allclose(found[1], first, rtol=1e-5)


def test_too_few_devices_are_counted_and_the_way_out_named() -> None:
    with pytest.raises(ClusterError, match=r"has 2 CPU devices, JAX has 1 .*_device_count=2"):
        jax_devices(devices(2))
    with pytest.raises(ClusterError, match=r"has 1 accelerators, JAX sees 0"):
        jax_devices(devices(1, "gpu"))


def test_a_graph_of_another_function_is_refused() -> None:
    graph = load("python:jax_models:cnn")
    with pytest.raises(ModelError, match="changed since"):
        run_jax(
            RunRequest(
                traced_model("python:jax_models:while_loop"), graph, devices(1),
                np.zeros(graph.num_ops, np.int64),
            )
        )  # fmt: skip


def test_the_same_seed_draws_the_same_arguments() -> None:
    model = traced_model("python:jax_models:attention_model")
    one, two, three = (argument_values(model, seed) for seed in (5, 5, 6))
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
    assert any((a != b).any() for a, b in zip(one, three, strict=True))


def test_an_exported_placement_runs_by_itself(tmp_path: Path) -> None:
    """On the devices that kinds say, whatever these are called."""
    model = "python:jax_models:cnn"
    speed = {"default": 5e10}
    cores = [Device(name, "cpu-core", speed, 1e10) for name in ("fast", "slow")]
    graph, cluster = load(model), make_cluster("names of my own", cores)
    placement = make_placement(graph, cluster, scattered(graph, 1))
    save_placement(placement, tmp_path / "p.json")
    with pytest.raises(ValueError, match="give the cluster"):
        export(placement, model, "jax", tmp_path / "out")
    written = export(placement, model, "jax", tmp_path / "out", cluster)
    assert [path.name for path in written] == ["placement.json", "run.py"]
    done = run_python(str(written[1]), "--measure-seconds", "0.3", cpus=1)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["outputs_equal"]
    assert {segment["device"] for segment in report["segments"]} == {"fast", "slow"}
    save_graph(graph, tmp_path / "graph.json.gz")
    with pytest.raises(ModelError, match="python:"):
        export(placement, str(tmp_path / "graph.json.gz"), "jax", tmp_path / "out", cluster)


def test_replicas_are_refused_and_left_out_where_the_model_is_placed_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gdp.api import run as execute

    placed: list[object] = []
    stop = RuntimeError("placed")

    def solve(question: Question, planners: object = None) -> None:
        del planners
        placed.append(question.constraints)
        raise stop

    monkeypatch.setattr("gdp.question.solve.solve", solve)
    with pytest.raises(RuntimeError, match="placed"):
        execute.run("python:jax_models:cnn", devices(2), objective="throughput")
    assert placed == [Constraints(replicas=False)]
    graph = load("python:jax_models:cnn")
    given = make_placement(graph, devices(2), np.zeros(graph.num_ops, np.int64), teams=((0, 1),))
    with pytest.raises(ModelError, match=r"take samples in turn .* --no-replicas"):
        execute.run("python:jax_models:cnn", devices(2), given, objective="throughput")
