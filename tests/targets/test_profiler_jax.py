"""JAX functions: cut into segments that compute what the whole does, each of them timed."""

import itertools
from itertools import repeat
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdp.base.errors import ClusterError
from gdp.cluster.presets import device_preset, kind_of
from gdp.costs.calibrate import calibrate
from gdp.targets.jax.profile import (
    cut,
    jax_device,
    materialise,
    profile_functions,
    quick_profile,
)
from gdp.targets.jax.small_models import small_models


def dense(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x.sum(axis=-1)


def arguments():
    weights = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 4
    return weights, jax.ShapeDtypeStruct((2, 8), jnp.float32)


def test_segments_in_a_row_compute_the_function() -> None:
    values = materialise(arguments())
    segments = cut(dense, values, "dense", 3)
    assert len(segments) == 3  # four products, four activations, one sum
    outputs = [s.function(*s.arguments) for s in segments]
    np.testing.assert_allclose(outputs[-1][-1], dense(*values), rtol=1e-6)


def test_every_segment_is_timed_with_its_ops() -> None:
    made = profile_functions(
        [("dense", "mlp", dense, arguments())], rounds=1, seconds=0.05, equations=3
    )
    assert made.runtime == "jax"
    assert made.device.kind == device_preset("cpu").kind
    whole, *parts = made.models
    assert whole.name == "dense"
    assert sum(len(m.kernels[0].ops) for m in parts) == len(whole.kernels[0].ops)
    assert all(m.latency_s > 0 and m.family == "mlp" for m in made.models)
    flop = sum(m.graph.flop.sum() for m in parts)
    assert flop == pytest.approx(whole.graph.flop.sum())


def test_a_platform_that_is_not_there_is_named() -> None:
    with pytest.raises(ClusterError, match="no device of platform 'quantum'"):
        jax_device("quantum")


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Unheard Of 9", "gpu"),
    ],
)
def test_a_gpu_is_of_the_kind_that_clusters_call_it(model: str, kind: str) -> None:
    """So that a calibration from its profile answers for the presets and for what is detected."""
    assert kind_of("gpu", model) == kind
    assert kind == "gpu" or device_preset(kind).kind == kind


def test_a_quick_profile_is_enough_for_rates() -> None:
    """Of the smallest model of each of two families here, forward and training."""
    chosen = [(f, m) for f, m in small_models() if m.name.startswith(("dense-4x16", "table-64x"))]
    said: list[str] = []
    made = quick_profile(chosen, rounds=1, seconds=0.01, progress=said.append)
    assert said == [m.name for m in made.models] == [m.name for _, m in chosen]
    assert len(made.models) == 4
    step, forward = made.models[1], made.models[0]
    assert step.graph.num_ops > forward.graph.num_ops
    assert made.overheads.session_s is not None
    assert (made.overheads.handover_s is None) == (len(jax.devices("cpu")) < 2)
    assert made.threads >= 1
    rates, _ = calibrate(made, device_preset("cpu"))
    assert all(rates.predictor.op_seconds(m.graph).sum() > 0 for m in made.models)


def test_a_quick_profile_takes_the_median_of_the_best_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds of three runs, 1, 4 and 6 s and then 2, 5 and 7 s, by a clock that says so."""
    chosen = [(f, m) for f, m in small_models() if m.name.startswith("dense-4x16")]
    rounds = [[1.0, 4.0, 6.0], [2.0, 5.0, 7.0]]
    runs = itertools.chain([4.0] * len(chosen), *(r * len(chosen) for r in rounds))
    spent = itertools.chain.from_iterable((0.0, s) for s in itertools.chain(runs, repeat(1.0)))
    clock = SimpleNamespace(perf_counter=itertools.accumulate(spent).__next__)
    monkeypatch.setattr("gdp.measure.record.time", clock)
    made = quick_profile(chosen, rounds=2, seconds=0.01)
    assert [model.latency_s for model in made.models] == [4.0] * len(chosen)
    assert [model.kernels[0].seconds for model in made.models] == [4.0] * len(chosen)
    assert {model.kernels[0].spread for model in made.models} == {0.5}
