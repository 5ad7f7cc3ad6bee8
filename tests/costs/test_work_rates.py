"""Rates of what XLA compiles: fitted back from made-up times, and used for graphs of JAX alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from gdp.cluster.presets import device_preset
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.calibrate import calibrate
from gdp.costs.cost_file import load_costs, save_costs
from gdp.costs.default import resolve_costs, shipped_rates
from gdp.costs.learned import LearnedCosts
from gdp.costs.profile import DeviceRecord, Kernel, Overheads, Profile, ProfiledModel, ProfileError
from gdp.costs.work_rates import PRIOR, WorkRates, fit_rates, left_out_seconds, work
from gdp.graph.op_graph import OpGraph
from gdp.importers.jax.trace import trace
from gdp.methods.base import Search
from gdp.question import solve
from gdp.question.models import load
from gdp.question.question import Question
from gdp.targets.jax.small_models import small_models

CALL_S = 5e-6
KINDS = list(PRIOR)


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def two_branches(weights, x):
    """Two products that know nothing of each other."""
    a, b = weights
    return jnp.tanh(x @ a), jnp.tanh(x @ b)


def branches():
    return trace(two_branches, [f32(512, 512)] * 2, f32(256, 512), weight_argnums=0)


@pytest.fixture(scope="module")
def models() -> list[ProfiledModel]:
    """A third of the corpus as a device of known rates would run it."""
    rates = np.array([rate * (1.5 if i % 2 else 0.6) for i, rate in enumerate(PRIOR.values())])
    made = []
    for family, model in itertools.islice(small_models(), 0, None, 3):
        graph = model.trace().graph
        seconds = CALL_S + float(work(graph).sum(axis=0) @ rates)
        kernel = Kernel("", "jit", (), seconds, 0.0)
        made.append(ProfiledModel(model.name, family, graph, seconds, (kernel,), 1, 1))
    return made


def profile(models, **changed) -> Profile:
    made = Profile(
        DeviceRecord("cpu", "made up"), "jax", 2, "jit", {"jax": "0"}, "2026-01-01", tuple(models),
        Overheads(session_s=CALL_S, handover_s=3e-5, handover_bytes_per_s=1e10),
    )  # fmt: skip
    return replace(made, **changed)


def test_work_is_counted_by_kind() -> None:
    found = dict(zip(KINDS, work(branches()).sum(axis=0), strict=True))
    assert found["product_flop"] == 2 * 2 * 256 * 512 * 512
    assert (found["product_small"], found["product_large"]) == (2 * 256 * 512, 2 * 512 * 512)
    assert found["function"] == found["product_out"] == 2 * 256 * 512
    assert found["array"] == 2
    assert found["kernel"] == 4  # no loop is fused into a product
    assert found["convolution"] == found["slow_function"] == found["cold_bytes"] == 0


def test_convolutions_and_reductions_are_told_apart() -> None:
    def convolved(channels: int, groups: int = 1):
        return trace(
            lambda x, k: jax.lax.conv_general_dilated(
                x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            ),
            f32(2, 6, 6, channels), f32(3, 3, channels // groups, 16),
        )  # fmt: skip

    def of(graph) -> dict[str, float]:
        return dict(zip(KINDS, work(graph).sum(axis=0), strict=True))

    even, odd, grouped = of(convolved(16)), of(convolved(3)), of(convolved(16, groups=16))
    assert even["odd_patch_bytes"] == even["grouped_flop"] == 0
    # A window of 3 x 3 x 3 floats for each of 2 x 6 x 6 pixels, border included or not.
    assert odd["odd_patch_bytes"] == odd["convolution_flop"] / (2 * 16) * 4
    assert 0.7 < odd["odd_patch_bytes"] / (4 * 27 * 72) <= 1
    assert (grouped["convolution_flop"], grouped["odd_patch_bytes"]) == (0, 0)
    assert grouped["grouped_flop"] > 0
    sums = [of(trace(lambda x, a=axis: x.sum(a), f32(4, 5))) for axis in (0, 1, None)]
    assert [s["reduction_across"] for s in sums] == [20, 0, 0]
    assert [s["reduction"] for s in sums] == [0, 20, 20]


@pytest.mark.slow
def test_rates_are_found_again(models) -> None:
    """Exact times of a device whose rates lie around the start: every model within 15%."""
    row = np.array(list(fit_rates(models, CALL_S).values()))
    made = np.array([work(m.graph).sum(axis=0) @ row + CALL_S for m in models])
    errors = made / np.array([m.latency_s for m in models]) - 1
    assert np.abs(errors).max() < 0.15
    assert np.median(np.abs(errors)) < 0.03


def test_one_disturbed_model_moves_little(models) -> None:
    slow = replace(models[3], latency_s=10 * models[3].latency_s)
    plain = np.array(list(fit_rates(models, CALL_S).values()))
    found = np.array(list(fit_rates([*models[:3], slow, *models[4:]], CALL_S).values()))
    total = np.array([work(m.graph).sum(axis=0) for m in models])
    change = np.delete((total @ found) / (total @ plain) - 1, 3)
    assert np.median(np.abs(change)) < 0.03


def test_a_family_is_predicted_without_it(models) -> None:
    measured_s = np.array([m.latency_s for m in models])
    assert np.median(np.abs(left_out_seconds(models, CALL_S) / measured_s - 1)) < 0.15


def test_rates_of_a_device_a_hundred_times_as_fast_are_found(models) -> None:
    """Also of kinds of work that no model has much of, as the prior is scaled to the device."""
    fast = [replace(m, latency_s=CALL_S + (m.latency_s - CALL_S) / 100) for m in models]
    profiled = profile(fast, device=DeviceRecord("a100", "made up"))
    calibration, report = calibrate(profiled, device_preset("a100"))
    assert isinstance(calibration.predictor, WorkRates)
    ratio = np.array([calibration.predictor.rates[kind] / PRIOR[kind] for kind in KINDS])
    assert ((ratio > 0.002) & (ratio < 0.03)).mean() > 0.7
    assert {m.model for m in report.models} == {m.name for m in models}
    cluster = Cluster.load("cpu+a100")
    seconds = LearnedCosts((calibration,))(branches(), cluster)
    np.testing.assert_array_equal(
        seconds[:, 1],
        np.where(branches().is_io, np.inf, calibration.predictor.op_seconds(branches())),
    )


def test_rates_survive_the_file(models, tmp_path) -> None:
    rates, report = calibrate(profile(models), device_preset("cpu"))
    save_costs(rates, tmp_path / "costs", report=report.summary())
    assert load_costs(tmp_path / "costs") == rates
    _, label = resolve_costs(tmp_path / "costs", Cluster.load("2xcpu-core"), branches())
    assert label.startswith(rates.label())
    assert "held out" in label
    text = (tmp_path / "costs" / "meta.json").read_text()
    (tmp_path / "costs" / "meta.json").write_text(text.replace('"kernel"', '"colonel"'))
    with pytest.raises(ProfileError, match="rates of kernel"):
        load_costs(tmp_path / "costs")


def test_a_profile_without_what_rates_need_is_refused(models) -> None:
    with pytest.raises(ProfileError, match="two families and overheads"):
        calibrate(profile(models, overheads=Overheads()), device_preset("cpu"))
    with pytest.raises(ProfileError, match="two families"):
        calibrate(profile(models[:2]), device_preset("cpu"))


def test_graphs_of_jax_alone_get_the_shipped_rates(tmp_path) -> None:
    cluster, onnx = Cluster.load("2xcpu-core"), load("onnx:light_squeezenet")
    assert (branches().source, onnx.source) == ("jax", "onnx")
    rates = shipped_rates()
    assert rates is not None

    def takes_rates(cluster: Cluster, graph: OpGraph) -> bool:
        model, label = resolve_costs(None, cluster, graph)
        takes = isinstance(model, LearnedCosts) and model.calibrations == (rates,)
        assert takes == ("jax" in label)
        return takes

    assert takes_rates(cluster, branches())
    assert not takes_rates(cluster, onnx)
    assert not takes_rates(Cluster.load("cpu+t4"), branches()), "no core such as was measured"
    old = make_cluster("old", [Device("c", "cpu-core", {"default": 1e9}, 1e9, model="X avx2")])
    assert not takes_rates(old, branches())
    save_costs(rates, tmp_path / "costs")
    with pytest.raises(ProfileError, match="the model is not of JAX"):
        resolve_costs(tmp_path / "costs", cluster, onnx)


def test_processors_are_charged_as_one_and_accelerators_are_left_alone(models) -> None:
    costs = LearnedCosts((calibrate(profile(models), device_preset("cpu"))[0],))
    cluster = make_cluster(
        "mixed",
        [Device("a", "cpu", {"default": 1e9}, 1e9), Device("b", "cpu-core", {"default": 1e9}, 1e9),
         Device("gpu", "t4", {"default": 1e12}, 1e11, dispatch_s=7e-6)],
    )  # fmt: skip
    found = costs.with_runtime_overheads(cluster)
    assert [d.processor for d in found.devices] == ["xla-cpu", "xla-cpu", ""]
    assert [d.dispatch_s for d in found.devices] == [CALL_S, CALL_S, 7e-6]
    assert found.link_latency_s[0, 1] == 3e-5
    assert found.link_latency_s[0, 2] == cluster.link_latency_s[0, 2]
    seconds = costs(branches(), cluster)
    working = ~branches().is_io
    np.testing.assert_array_equal(seconds[working, 0], seconds[working, 1])


def test_auto_answers_one_of_the_devices_that_xla_makes_of_a_processor() -> None:
    """Two equal branches would take half as long on two devices, were these two."""
    cluster = Cluster.load("4xcpu-core")
    search = Search(seed=0, seconds=None, evaluations=100)
    result = solve.solve(Question(branches(), cluster, search=search))
    assert len(set(result.placement.device.tolist())) == 1
    independent = solve.solve(Question(branches(), cluster, search=search, costs=plain))
    assert len(set(independent.placement.device.tolist())) == 2
    assert independent.value_s < 0.8 * result.value_s


def plain(graph, cluster):
    """The same seconds, on devices that are independent."""
    rates = shipped_rates()
    assert rates is not None
    return LearnedCosts((rates,))(graph, cluster)


plain.reads_unfused = True  # type: ignore[attr-defined]
