"""A placed JAX function gives the function's results, a placed step trains, on two devices.

JAX fixes its number of devices when it starts, so the two devices live in a process of their own.
"""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax_models import f32, scanned_layers
from test_jax_runtime import devices, run_python

import gdp
from gdp.base.errors import ArgumentError, ModelError, PlacementError

SCRIPT = """
import json, sys
import jax, numpy as np, optax
import gdp
from gdp.importers.jax.trace import jax_model
from gdp.targets.jax.program import _filled
from jax_models import attention_model, scanned_layers, stacked_layers
from test_jax_runtime import devices, scattered

def real(model, seed):
    fn, args, *options = model()
    rng = np.random.default_rng(seed)
    return fn, tuple(_filled(tree, i == 0, rng) for i, tree in enumerate(args)), *options

def placed_on_two(parts, seed, blocks=6):
    graph = jax_model(parts, "model").trace().graph
    placement = gdp.make_placement(graph, devices(2), scattered(graph, seed, blocks))
    return gdp.on_devices(parts, placement, None, devices(2))

def differences(one, two):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)

def held(program):
    return [(a.shape, next(iter(a.devices())).id) for a in program.arrays.values()]

for name, model in (("attention", attention_model), ("scanned", scanned_layers)):
    fn, args, *options = real(model, 1)
    placed = placed_on_two((fn, args, *options), 2)
    result = placed(*args[1:])
    other = jax.tree.map(lambda a: a[..., ::-1] if a.dtype.kind == "f" else 1 - a, args[1:])
    print(json.dumps({
        "name": name, "difference": differences(result, fn(*args)),
        "other": differences(placed(*other), fn(args[0], *other)),
        "same_form": jax.tree.structure(result) == jax.tree.structure(fn(*args)),
        "held": held(placed._weights), "on": [d.id for d in result.devices()],
    }))

loss, (params, batch), options = real(stacked_layers, 3)
step = placed_on_two((loss, (params, batch), options), 1, blocks=60)
optimizer, wanted = options["optimizer"], params
state, inner = step.init(), options["optimizer"].init(params)
for k in range(3):
    state, value = step(state, batch + k)
    expected, gradient = jax.value_and_grad(loss)(wanted, batch + k)
    updates, inner = optimizer.update(gradient, inner, wanted)
    wanted = optax.apply_updates(wanted, updates)
    print(json.dumps({"name": f"step {k}", "difference": abs(float(value) - float(expected))}))
homes = {next(iter(row.devices())).id for leaf in state.parameters for row in leaf}
print(json.dumps({
    "name": "trained", "difference": differences(step.parameters(state), wanted),
    "homes": sorted(homes), "moved": differences(params, wanted),
}))
"""


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    done = run_python("-c", SCRIPT)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", ["attention", "scanned"])
def test_results_are_those_of_the_function_for_any_input(name: str, rows: dict) -> None:
    row = rows[name]
    assert row["difference"] < 1e-4
    assert row["other"] < 1e-4
    assert row["same_form"]
    assert row["on"] == [0]


def test_layers_of_a_stacked_weight_lie_on_their_own_devices(rows: dict) -> None:
    """Four layers of two matrices: every matrix once, none as the whole stack."""
    shapes = [tuple(shape) for shape, _ in rows["scanned"]["held"]]
    assert sorted(shapes) == sorted([(8, 16), (16, 8)] * 4)
    assert {device for _, device in rows["scanned"]["held"]} == {0, 1}


def test_a_step_trains_as_the_optimizer_does_and_its_state_stays(rows: dict) -> None:
    for k in range(3):
        assert rows[f"step {k}"]["difference"] < 1e-4
    assert rows["trained"]["difference"] < 1e-4 < rows["trained"]["moved"]
    assert rows["trained"]["homes"] == [0, 1]


def _loss(params, x):
    return jnp.square(x @ params["w"] + params["b"]).mean()


def _on_one(parts, **changed):
    graph = gdp.trace(*(parts[0], *parts[1]), **changed)
    placement = gdp.make_placement(graph, devices(1), np.zeros(graph.num_ops, np.int64))
    return placement, devices(1)


def test_misuse_is_refused_in_one_line() -> None:
    params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
    parts = (_loss, (params, f32(3, 4)))
    placement, machine = _on_one(parts)
    placed = gdp.on_devices(parts, placement, None, machine)
    assert float(placed(jnp.ones((3, 4)))) == 16.0
    with pytest.raises(ArgumentError, match=r"shape \(3, 4\) was placed, got \(2, 4\)"):
        placed(jnp.ones((2, 4)))
    with pytest.raises(ArgumentError, match="arguments of the form"):
        placed(params, jnp.ones((3, 4)))
    shapes = {"w": f32(4, 2), "b": f32(2)}
    with pytest.raises(ModelError, match="weights are shapes without values"):
        gdp.on_devices((_loss, (shapes, f32(3, 4))), placement, None, machine)
    with pytest.raises(PlacementError, match="another"):
        gdp.on_devices(scanned_layers(), placement, None, machine)
    with pytest.raises(ModelError, match="no optimizer"):
        gdp.on_devices((_loss, (params, f32(3, 4)), {"optimizer": None}), placement, None, machine)
    with pytest.raises(ArgumentError, match="got function"):
        gdp.on_devices(_loss, placement, None, machine)


def test_a_state_of_another_form_is_refused() -> None:
    params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
    parts = (_loss, (params, f32(3, 4)), {"optimizer": optax.sgd(0.1)})
    from gdp.importers.jax.trace import jax_model

    graph = jax_model(parts, "model").trace().graph
    placement = gdp.make_placement(graph, devices(1), np.zeros(graph.num_ops, np.int64))
    step = gdp.on_devices(parts, placement, None, devices(1))
    with pytest.raises(ArgumentError, match="parameters have the form"):
        step.init([params["w"]])
    with pytest.raises(ArgumentError, match="the state has 1 arrays"):
        step(step.init()._replace(parameters=[params["w"]]), jnp.ones((3, 4)))
