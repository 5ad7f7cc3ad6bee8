"""Calibration: a known law is recovered, larger never costs less, unseen kernels stay rooflines."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from made_up import chain_graph, law_s, profile

from gdp.base.files import writing
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import roofline
from gdp.costs.calibrate import (
    calibrate,
    fit_transfer,
    report_text,
    split,
    weighted_quantile,
    write_plot,
)
from gdp.costs.cost_file import load_costs, save_costs
from gdp.costs.default import resolve_costs
from gdp.costs.features import kernel_features, shares, transfer_design
from gdp.costs.fit import FitConfig, network
from gdp.costs.learned import (
    LearnedCosts,
    encode,
    forward,
    predict,
)
from gdp.costs.profile import DeviceRecord, ProfileError
from gdp.graph.op_graph import make_graph

CONFIG = FitConfig(members=3, hidden=16, embedding=4, steps=600, batch=96, learning_rate=1.5e-2)
CORE = Device("core0", "cpu-core", {"default": 7e10}, 1e10, dispatch_per="segment")


@pytest.fixture(scope="module")
def fitted():
    """Fitted to eight families of ten, tested on the other two."""
    return calibrate(profile(), CORE, held_out=["f8", "f9"], config=CONFIG)


def test_a_known_law_is_recovered_on_held_out_families(fitted) -> None:
    """The law adds three terms up; the noise is 2 percent."""
    _, report = fitted
    figures = report.summary()
    assert figures["held_out_families"] == ["f8", "f9"]
    assert figures["kernel_error"]["learned"]["median"] < 0.08
    assert figures["model_error"]["learned"]["mean"] < 0.06
    assert (
        figures["model_error"]["learned"]["mean"] < figures["model_error"]["roofline"]["mean"] / 2
    )
    assert "whole models" in report_text(report)


def test_larger_batches_never_cost_less(fitted) -> None:
    """Rows from 1 to 4096 with everything else fixed, for many shapes."""
    calibration, _ = fitted
    rng = np.random.default_rng(1)
    for inner, columns in rng.integers(2, 600, size=(20, 2)).tolist():
        graph = chain_graph("g", [(2**i, inner, columns) for i in range(13)])
        features = kernel_features(graph, np.repeat(np.arange(13), 2))
        # One kernel per row count, the alignment of which is not a matter of size.
        free = features.other.copy()
        free[:] = features.other[0]
        seconds = predict(calibration.networks.ensemble, replace(features, other=free))
        assert (np.diff(seconds) >= -1e-9).all()


def test_numpy_answers_what_jax_was_fitted_to(fitted) -> None:
    calibration, _ = fitted
    ensemble = calibration.networks.ensemble
    features = kernel_features(chain_graph("g", [(3, 50, 70), (64, 9, 9)]), np.array([0, 0, 1, 1]))
    terms, other, _ = encode(ensemble, features)
    ours = forward(ensemble.layers, terms, other)
    for member in range(3):
        params = {name: array[member] for name, array in ensemble.layers.items()}
        inputs = (jnp.asarray(x) for x in (terms, other))
        theirs = network(params, *inputs, len(ensemble.other_mean))
        np.testing.assert_allclose(ours[member], np.asarray(theirs), atol=1e-4)


def test_kernels_never_measured_cost_their_roofline(fitted) -> None:
    calibration, _ = fitted
    graph = make_graph(
        "g", ["a"], ["Mystery"], [(0, 4000)], [], flop=[1e9], memory_traffic_bytes=[8000]
    )
    features = kernel_features(graph, np.array([0]))
    np.testing.assert_array_equal(
        predict(calibration.networks.ensemble, features), features.size[:, 0]
    )


def test_costs_of_a_graph_add_up_to_the_law(fitted) -> None:
    calibration, _ = fitted
    graph = chain_graph("g", [(100, 200, 300), (100, 300, 50)])
    cluster = make_cluster("two", [CORE, replace(CORE, name="x", kind="tpu")])
    costs = LearnedCosts((calibration,))
    seconds = costs(graph, cluster)
    truth = sum(law_s(graph, op) for op in (0, 2))
    assert seconds[:, 0].sum() == pytest.approx(truth, rel=0.15)
    assert (seconds[:, 1] == roofline(graph, cluster)[:, 1]).all()


def test_cost_files_come_back_and_say_what_they_are(fitted, tmp_path: Path) -> None:
    calibration, report = fitted
    save_costs(calibration, tmp_path / "costs", report=report.summary())
    found = load_costs(tmp_path / "costs")
    graph, cluster = chain_graph("g", [(64, 64, 64)]), make_cluster("one", [CORE])
    np.testing.assert_allclose(
        LearnedCosts((found,))(graph, cluster), LearnedCosts((calibration,))(graph, cluster),
        rtol=1e-4,
    )  # fmt: skip
    model, label = resolve_costs(tmp_path / "costs", cluster)
    assert isinstance(model, LearnedCosts)
    assert "calibrated on Made-up avx2" in label
    assert "2026-01-02" in label


def test_a_damaged_cost_file_is_named(fitted, tmp_path: Path) -> None:
    save_costs(fitted[0], tmp_path / "costs")
    (tmp_path / "costs" / "costs.npz").write_bytes(b"half")
    with pytest.raises(ProfileError, match="damaged"):
        load_costs(tmp_path / "costs")
    with pytest.raises(ProfileError, match="no cost file"):
        load_costs(tmp_path / "nowhere")


def test_other_kinds_fall_back_to_datasheets_and_say_so() -> None:
    unknown = [(None, "2xp100"), (None, "2xk80"), (None, "m1"), (roofline, "2xa100-nvlink")]
    for costs, cluster in unknown:
        model, label = resolve_costs(costs, Cluster.load(cluster))
        kind = Cluster.load(cluster).devices[0].kind
        if kind == "p100":  # its units are known, and kernels of its family
            assert label.startswith("p100: learned from kernels of")
        else:
            assert model is roofline
            assert label == f"roofline from datasheets ({kind})"


def test_a_model_of_another_framework_is_not_called_calibrated() -> None:
    """ONNX's and ATen's names of one product: only the first was measured."""
    cluster = Cluster.load("2xcpu-core")
    labels = [
        resolve_costs(None, cluster, make_graph("g", ["a"], [kind], [], [], flop=[1e9]))[1]
        for kind in ("MatMul", "linear")
    ]
    assert labels[0].startswith("calibrated on")
    assert labels[1].startswith("roofline from datasheets, as no such op was measured")


def test_a_processor_with_other_vectors_does_not_match(fitted) -> None:
    calibration, _ = fitted
    assert calibration.matches(CORE)
    assert calibration.matches(replace(CORE, model="Another avx2"))
    assert not calibration.matches(replace(CORE, model="Another avx512"))


def test_an_accelerator_matches_by_kind_or_by_its_full_name(fitted) -> None:
    """Detection gives unknown models the kind of the nearest preset; a processor of one name is one
    core or all of them, which is not the same device."""
    made = replace(fitted[0], device=DeviceRecord("gpu", "Unheard Of 9"))
    near = replace(CORE, kind="a100", model="Unheard Of 9")
    assert made.matches(near)
    assert not made.matches(replace(near, model="Unheard Of 8"))
    assert not fitted[0].matches(replace(CORE, kind="cpu", model=fitted[0].device.model))


def test_families_are_held_out_whole() -> None:
    train, held, note = split(profile(8, 2).models, None)
    assert not {m.family for m in train} & {m.family for m in held}
    assert {m.family for m in held} == {"f3", "f7"}
    assert note == ""
    with pytest.raises(ProfileError, match="no family 'zoo'"):
        split(profile(2, 1).models, ["zoo"])
    assert split(profile(2, 1).models, None)[2].startswith("fewer than four families")


def test_transfer_learns_another_speed_from_few_kernels(fitted) -> None:
    """A device three times as slow at arithmetic and twice at traffic, known by datasheets to be
    equal: eight kernels bring the error from over a half to under a fifth."""
    calibration, _ = fitted
    graph = chain_graph(
        "g", [(r, i, c) for r in (8, 100, 400) for i in (16, 300) for c in (9, 500)]
    )
    kernel = np.repeat(np.arange(12), 2)
    features = kernel_features(graph, kernel)
    known_s = np.exp(predict(calibration.networks.ensemble, features))
    truth_s = known_s * np.exp(shares(features) @ np.log([3.0, 2.0, 1.0]))
    at = [0, 1, 3, 5, 6, 8, 10, 11]
    assert set(fit_transfer(_take(features, []), known_s[[]], truth_s[[]])) == {0.0}
    few = fit_transfer(_take(features, at), known_s[at], truth_s[at])
    made = known_s * np.exp(transfer_design(features, known_s) @ few)
    assert np.abs(made / truth_s - 1).max() < 0.2
    assert np.abs(known_s / truth_s - 1).max() > 0.5
    other = replace(calibration, predictor=replace(calibration.networks, transfer=few))
    cluster = make_cluster("one", [CORE])
    assert LearnedCosts((other,))(graph, cluster).sum() == pytest.approx(made.sum(), rel=1e-6)


def _take(features, at: list[int]):
    """Some of the kernels."""
    rows = np.array(at, dtype=np.int64)
    return replace(
        features,
        lead_type=tuple(features.lead_type[i] for i in at),
        member_types=tuple(features.member_types[i] for i in at),
        size=features.size[rows],
        other=features.other[rows],
        lead=features.lead[rows],
    )


def test_weighted_quantiles_by_hand() -> None:
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])
    assert weighted_quantile(values, weights, 0.5) == 2.0
    assert weighted_quantile(values, weights, 0.25) == 1.0
    assert weighted_quantile(values, weights, 0.9) == 3.0


def test_the_plot_is_written(fitted, tmp_path: Path) -> None:
    write_plot(fitted[1], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_crash_while_costs_are_written_leaves_the_old_ones_whole(
    fitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arrays belong to the folder that is put in place, not to a step after it."""
    save_costs(fitted[0], tmp_path / "costs")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "replace_folder", crash)
    with pytest.raises(KeyboardInterrupt):
        save_costs(replace(fitted[0], date="2030-01-01"), tmp_path / "costs")
    assert load_costs(tmp_path / "costs").date == fitted[0].date
    assert "costs.npz" in (tmp_path / "costs" / "gdp.json").read_text()
