"""Pins, forbidden devices and ops kept together are found by glob and refused when they clash."""

from pathlib import Path

import numpy as np
import pytest

from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster
from gdp.constraints import (
    Constraints,
    Pin,
    allowed_mask,
    merge,
    parse_pin,
    read_constraints,
    together_ids,
)
from gdp.errors import InfeasibleError
from gdp.graph.op_graph import INPUT, OpGraph, make_graph


def chain() -> OpGraph:
    """input -> enc/a -> enc/b -> dec/c, with scopes."""
    return make_graph(
        "chain", ["input:x", "enc/a", "enc/b", "dec/c"], [INPUT, "Relu", "Relu", "Relu"],
        [(0, 4), (1, 4), (2, 4)], [(0, 1), (1, 2), (2, 3)], scope=["", "enc", "enc", "dec"],
    )  # fmt: skip


def two() -> Cluster:
    return cluster_preset("2xcpu-core")


def test_a_pin_leaves_only_its_devices_and_not_the_inputs() -> None:
    allowed = allowed_mask(Constraints(pins=(Pin("*", ("core1",)),)), chain(), two())
    assert allowed.tolist() == [[True, True]] + [[False, True]] * 3


def test_a_scope_can_be_forbidden_a_device() -> None:
    allowed = allowed_mask(Constraints(forbid=(Pin("enc", ("core0",)),)), chain(), two())
    assert allowed[:, 0].tolist() == [True, False, False, True]


def test_ops_kept_together_share_an_id() -> None:
    ids = together_ids(Constraints(together=("enc/*",)), chain())
    assert ids is not None
    assert ids[1] == ids[2]
    assert len(np.unique(ids)) == 3


def test_clashing_demands_are_named() -> None:
    clash = Constraints(pins=(Pin("enc/a", ("core0",)),), forbid=(Pin("enc/*", ("core0",)),))
    with pytest.raises(InfeasibleError, match=r"pin enc/a=core0 and forbid enc/\*=core0 leave"):
        allowed_mask(clash, chain(), two())


def test_a_glob_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no op or scope .* matches 'attention/\*'"):
        allowed_mask(Constraints(pins=(Pin("attention/*", ("core0",)),)), chain(), two())


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="names device 'gpu9'"):
        allowed_mask(Constraints(pins=(Pin("*", ("gpu9",)),)), chain(), two())


@pytest.mark.parametrize("text", ["x", "=core0", "a="])
def test_a_malformed_pin_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must look like GLOB=DEVICE"):
        parse_pin(text)


def test_a_constraints_file_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('together = ["enc/*"]\n[[pin]]\nmatch = "dec"\ndevices = ["core1"]\n')
    assert read_constraints(path) == Constraints((Pin("dec", ("core1",)),), (), ("enc/*",))
    path.write_text('[[pin]]\nmatch = "dec"\ndevice = "core1"\n')
    with pytest.raises(ValueError, match="unknown field `device`"):
        read_constraints(path)


def test_replicas_are_forbidden_by_any_source(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("replicas = false\n")
    forbids = read_constraints(tmp_path / "c.toml")
    assert Constraints().replicas
    assert not forbids.replicas
    assert not merge([forbids, Constraints()]).replicas
