"""The shipped costs, fitted to a processor of another speed from the kernels of a few models."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from made_up import chain_graph

from gdp.cli.main import cli
from gdp.costs.calibrate import refit
from gdp.costs.cost_file import load_costs
from gdp.costs.default import shipped, shipped_for, shipped_rates
from gdp.costs.features import kernel_features
from gdp.costs.profile import (
    DeviceRecord,
    Kernel,
    Overheads,
    Profile,
    ProfiledModel,
    ProfileError,
    save_profile,
)

KNOWN = shipped_for("cpu-core")
SIZES = [[(r, i, c) for r in (8, 64, 300) for c in (30, 400)] for i in (20, 90, 256, 700)]


def profile(factor: float, count: int = 3, **changed) -> Profile:
    """Chains of products on a processor whose kernels all take `factor` times the shipped ones."""
    models = []
    for k, layers in enumerate(SIZES[:count]):
        graph = chain_graph(f"m{k}", layers)
        group = np.repeat(np.arange(len(layers)), 2)
        seconds = factor * KNOWN.networks.seconds(kernel_features(graph, group))
        kernels = tuple(
            Kernel(f"k{g}", "FusedMatMul", (2 * g, 2 * g + 1), float(s), 0.0)
            for g, s in enumerate(seconds)
        )
        total = float(seconds.sum())
        models.append(ProfiledModel(f"m{k}", f"f{k}", graph, total, kernels, 5, 3))
    device = DeviceRecord("cpu-core", "Other avx512", ("avx512f",))
    made = Profile(
        device, "onnxruntime", 1, "all", {"onnxruntime": "9"}, "2030-01-01", tuple(models)
    )
    return msgspec.structs.replace(made, **changed)


@pytest.mark.parametrize("factor", [0.5, 1.7])
def test_a_model_that_the_fit_never_saw_is_predicted(factor: float) -> None:
    found = refit(KNOWN, profile(factor))
    graph = chain_graph("new", SIZES[3])
    features = kernel_features(graph, np.repeat(np.arange(len(SIZES[3])), 2))
    truth_s = factor * KNOWN.networks.seconds(features)
    np.testing.assert_allclose(found.networks.seconds(features), truth_s, rtol=0.1)
    assert (found.device.model, found.date) == ("Other avx512", "2030-01-01")
    assert found.mean_error is None


def test_the_same_speed_changes_nothing_and_a_second_fit_starts_anew() -> None:
    assert refit(KNOWN, profile(1.0)).networks.transfer == pytest.approx([0.0] * 9, abs=1e-6)
    twice = refit(refit(KNOWN, profile(3.0)), profile(0.5))
    assert twice.networks.transfer == pytest.approx(refit(KNOWN, profile(0.5)).networks.transfer)


def test_what_a_segment_costs_is_taken_where_it_was_measured() -> None:
    assert refit(KNOWN, profile(1.7)).segment_s == KNOWN.segment_s
    charged = profile(1.7, overheads=Overheads(session_s=1e-6, cut_s=2e-6))
    assert refit(KNOWN, charged).segment_s == pytest.approx(3e-6)


def test_other_kinds_and_empty_profiles_are_refused() -> None:
    rates = shipped_rates()
    assert rates is not None
    of_jax = profile(1.0, device=rates.device, runtime="jax")
    with pytest.raises(ProfileError, match="fitted anew: calibrate without --base"):
        refit(rates, of_jax)
    with pytest.raises(ProfileError, match="cannot be fitted to a profile of cpu with jax"):
        refit(KNOWN, profile(1.0, device=DeviceRecord("cpu", ""), runtime="jax"))
    with pytest.raises(ProfileError, match="holds no models"):
        refit(KNOWN, profile(1.0, models=()))
    kinds = ", ".join(dict.fromkeys(c.device.kind for c in shipped()))
    with pytest.raises(ProfileError, match=f"no costs of a100 ship, only of {kinds}"):
        shipped_for("a100")


def test_the_command_writes_costs_of_this_processor(tmp_path: Path) -> None:
    made, path, costs = profile(1.7), str(tmp_path / "p.json"), tmp_path / "costs"
    save_profile(made, path)
    args = ["calibrate", path, "--base", "shipped", "-o", str(costs)]
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.output.count("predicted") == 3
    assert load_costs(costs).networks.transfer == pytest.approx(
        refit(KNOWN, made).networks.transfer, abs=1e-3
    )
