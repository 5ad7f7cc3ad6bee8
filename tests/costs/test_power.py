"""Power of devices: joules of single ops by hand, limits, presets, and bad input."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import plain_graph

import gdp
from gdp.cluster.file import cluster_of_toml, cluster_toml, parse_power_limit, with_power_limit
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.power import (
    BUSY,
    BYTES,
    FLOP,
    IDLE,
    Power,
    idle_watts_of,
    joules_above_idle,
    require_power,
    watts_of,
)


def card(**fields) -> Device:
    """100 W, 20 W idle; 1 FLOP/s, 2 in float16; 4 bytes a second."""
    power = {"watts": 100.0, "idle_watts": 20.0} | fields
    return Device("card", "unheard-of", {"default": 1.0, "float16": 2.0}, 4.0, **power)


def one(device: Device) -> Cluster:
    return make_cluster("one", [device])


def test_joules_of_an_op_are_those_of_its_seconds_flop_and_bytes() -> None:
    """10 s with 2 FLOP (2 s of the peak) and 4 bytes (1 s of the bandwidth)."""
    graph = replace(plain_graph(1, [], flop=[2.0]), memory_traffic_bytes=np.array([4.0]))
    joules = joules_above_idle(graph, one(card()), np.array([[10.0]]))
    assert joules[0, 0] == pytest.approx(80.0 * (BUSY * 10.0 + FLOP * 2.0 + BYTES * 1.0))


def test_runs_of_an_op_add_up() -> None:
    graph = replace(
        plain_graph(1, [], flop=[2.0]), memory_traffic_bytes=np.array([4.0]),
        repeats=np.array([3]),
    )  # fmt: skip
    once = replace(graph, repeats=np.array([1]))
    many = joules_above_idle(graph, one(card()), np.array([[30.0]]))
    assert many == pytest.approx(3 * joules_above_idle(once, one(card()), np.array([[10.0]])))


def test_a_limit_caps_what_an_op_draws() -> None:
    """At full arithmetic the shares exceed the limit, at a lower one nearly all do."""
    graph = plain_graph(1, [], flop=[10.0])
    seconds = np.array([[10.0]])
    assert joules_above_idle(graph, one(card()), seconds)[0, 0] == pytest.approx(800.0)
    capped = joules_above_idle(graph, one(card(power_limit=30.0)), seconds)
    assert capped[0, 0] == pytest.approx(100.0)
    assert idle_watts_of(card(power_limit=10.0)) == 10.0


def test_no_op_works_faster_than_its_device() -> None:
    graph = plain_graph(1, [], flop=[1e9])
    seconds = np.array([[1e-3]])
    assert joules_above_idle(graph, one(card()), seconds)[0, 0] == pytest.approx(0.08)


def test_ops_that_cannot_run_and_inputs() -> None:
    graph = plain_graph(2, [(0, 1)])
    joules = joules_above_idle(graph, one(card()), np.array([[np.inf], [0.0]]))
    assert np.isinf(joules[0, 0])
    assert joules[1, 0] == 0.0


def test_watts_are_those_of_the_preset_of_a_kind_unless_given() -> None:
    h100 = cluster_preset("cpu+h100").devices[1]
    assert (watts_of(h100), idle_watts_of(h100)) == (700.0, 140.0)
    own = replace(h100, watts=500.0)
    assert (watts_of(own), idle_watts_of(own)) == (500.0, IDLE * 500.0)
    assert watts_of(card(watts=0.0, idle_watts=0.0)) == 0.0


def test_every_preset_with_watts_has_a_plausible_figure() -> None:
    """Idle below half of the limit; 1 GFLOP/s to 20 TFLOP/s (4 bits, 2025) a watt."""
    from gdp.cluster.table import presets

    known = {name: entry for name, entry in presets().items() if entry.watts}
    assert len(known) > 90
    for name, entry in known.items():
        assert 0 <= entry.idle_watts < entry.watts / 2, name
        per_watt = max(entry.flop_per_s.values()) / entry.watts
        assert 1e9 < per_watt < 2e13, name


def test_files_of_clusters_keep_the_power_of_devices() -> None:
    cluster = one(card(power_limit=60.0))
    again = cluster_of_toml(cluster_toml(cluster), "one")
    assert again.devices == cluster.devices
    assert "watts" not in cluster_toml(cluster_preset("cpu+h100"))


@pytest.mark.parametrize(
    ("text", "limits"),
    [("250W", {"": 250.0}), ("0=250,cpu=65W", {"0": 250.0, "cpu": 65.0})],
)
def test_power_limits_are_read(text: str, limits: dict[str, float]) -> None:
    assert parse_power_limit(text) == limits


@pytest.mark.parametrize("text", ["", "W", "0W", "-5W", "=250W", "250kW", "0=", "nan"])
def test_malformed_power_limits_are_refused(text: str) -> None:
    with pytest.raises(gdp.GdpError, match="must look like 250W or 0=250W"):
        parse_power_limit(text)


def test_a_power_limit_without_a_device_is_that_of_accelerators() -> None:
    cluster = with_power_limit(cluster_preset("cpu+2xh100"), {"": 300.0})
    assert Power.of(cluster).limit.tolist() == [65.0, 300.0, 300.0]
    with pytest.raises(gdp.GdpError, match="power limit names 'gpu7'"):
        with_power_limit(cluster, {"gpu7": 300.0})


def test_a_device_of_unknown_watts_is_named() -> None:
    with pytest.raises(gdp.GdpError, match="no watts are known of device 'card'"):
        require_power(one(card(watts=0.0, idle_watts=0.0)))
    require_power(one(card()))


@pytest.mark.parametrize(
    "fields",
    [{"watts": -1.0}, {"watts": 1e9}, {"idle_watts": 120.0}, {"power_limit": float("nan")}],
)
def test_impossible_watts_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(gdp.GdpError, match=r"watts|power_limit"):
        card(**fields)


def test_weights_at_rest_draw_on_the_device_that_computes() -> None:
    rest = replace(card(), name="rest", runs_on="card", watts=0.0, idle_watts=0.0)
    cluster = make_cluster("two", [card(), rest])
    assert Power.of(cluster).watts.tolist() == [100.0, 100.0]
