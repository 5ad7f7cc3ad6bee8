"""Memory that plans leave alone: tables by hand, files, limits and runtimes."""

from dataclasses import replace
from pathlib import Path

import pytest

from gdp.base.errors import ClusterError
from gdp.cluster.file import cluster_toml, read_cluster, with_max_memory
from gdp.cluster.presets import cluster_preset, device_preset
from gdp.cluster.reserve import (
    GIB,
    RESERVES,
    default_reserve,
    for_runtime,
    parse_reserve,
    reserved,
    with_reserve,
)
from gdp.cluster.types import Cluster, Device, fullness, make_cluster, nearly_full


def gib(cluster: Cluster) -> list[tuple[float, float]]:
    """GiB for plans and kept, of each device."""
    return [(d.memory_bytes / GIB, d.reserve_bytes / GIB) for d in cluster.devices]


def test_a_desktop_keeps_what_its_system_needs_and_a_card_one_gibibyte() -> None:
    """64 GiB: 1 of the first 4, 0.8 of the next 4, 0.8 of the next 8, 2.88 of the other 48."""
    assert gib(cluster_preset("cpu+t4")) == [(pytest.approx(58.52), pytest.approx(5.48)), (14, 1)]
    assert all(row.source for row in RESERVES.values())


@pytest.mark.parametrize(
    ("kind", "total", "kept"),
    [
        ("gpu", 24, 1.0), ("gpu", 2, 0.5), ("gpu", 1, 0.0),
        ("m1", 16, 16 / 3), ("m2-max", 96, 24.0), ("cpu", 8, 1.8), ("cpu", 256, 1.6 + 6.72 + 3.56),
    ],
)  # fmt: skip
def test_reserves_by_kind_and_size(kind: str, total: int, kept: float) -> None:
    device = Device("d", kind, {"default": 1e12}, 1e12, memory_bytes=total * GIB)
    if kind == "cpu" and total == 256:
        kept = 1.0 + 0.8 + 0.8 + 6.72 + 0.02 * 128
    assert default_reserve(device) / GIB == pytest.approx(kept)


def test_a_limit_for_exercises_and_an_unknown_memory_keep_nothing() -> None:
    small = Device("d", "gpu", {"default": 1.0}, 1.0, memory_bytes=100)
    assert reserved(small) == small
    endless = Device("d", "gpu", {"default": 1.0}, 1.0)
    assert reserved(endless) == endless
    assert reserved(endless, GIB) == endless


def test_a_file_states_what_a_device_reports_and_may_state_its_reserve(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(
        '[[device]]\nname = "a"\npreset = "rtx4090"\nmemory_bytes = "24GiB"\n'
        '[[device]]\nname = "b"\npreset = "t4"\nreserve_bytes = "3GiB"\n'
        '[[device]]\nname = "c"\nflop_per_s = 1e12\nbytes_per_s = 1e11\n'
        'memory_bytes = "8GiB"\nreserve_bytes = 0\n'
    )
    cluster = read_cluster(path)
    assert gib(cluster) == [(23, 1), (12, 3), (8, 0)]
    path.write_text(cluster_toml(cluster))
    assert read_cluster(path).devices == cluster.devices
    path.write_text('[[device]]\nname = "a"\npreset = "t4"\nreserve_bytes = "15GiB"\n')
    with pytest.raises(ClusterError, match=r"device 'a': a reserve of .* leaves nothing"):
        read_cluster(path)


def test_a_reserve_is_given_by_device_by_kind_or_for_all_accelerators() -> None:
    base = cluster_preset("cpu+2xt4")
    kept = with_reserve(base, parse_reserve("2GiB,1=3GiB,cpu=0"))
    assert gib(kept) == [(64, 0), (13, 2), (12, 3)]
    assert gib(with_reserve(kept, {"": 0}))[1:] == [(15, 0), (15, 0)]
    cores = with_reserve(cluster_preset("2xcpu-core"), {"": "1GiB"})
    assert gib(cores) == [(15, 1), (15, 1)]
    with pytest.raises(ClusterError, match=r"reserve names '5', cluster .* has cpu, t4:0"):
        with_reserve(base, {5: 1})
    with pytest.raises(ValueError, match="must look like 2GiB"):
        parse_reserve("=2GiB")


def test_a_memory_limit_is_what_plans_may_fill_and_the_rest_is_kept() -> None:
    limited = with_max_memory(cluster_preset("2xt4"), {"0": "10GiB", "1": "15GiB"})
    assert gib(limited) == [(10, 5), (15, 0)]


def test_a_runtime_keeps_more_unless_a_reserve_was_given() -> None:
    """accelerate: a tenth of 80 GiB; llama.cpp 1 GiB; 2 GiB given by hand stay."""
    base = cluster_preset("cpu+2xa100")
    assert gib(for_runtime(base, "accelerate"))[1:] == [(72, 8), (72, 8)]
    assert for_runtime(base, "llamacpp").devices == base.devices
    given = with_reserve(base, {"0": "2GiB"})
    assert gib(for_runtime(given, "accelerate"))[1:] == [(78, 2), (72, 8)]


def test_an_apple_preset_is_a_whole_machine() -> None:
    assert gib(cluster_preset("m1-max")) == [(48, 16)]
    with pytest.raises(ClusterError, match="m1-max shares the memory of its own processor"):
        cluster_preset("cpu+m1-max")


def test_devices_of_one_memory_fill_it_together() -> None:
    devices = [
        replace(device_preset("t4", name), memory_bytes=100, memory_pool=pool)
        for name, pool in (("a", "ram"), ("b", "ram"), ("c", ""))
    ]
    cluster = make_cluster("box", devices)
    assert fullness(cluster, [50, 45, 90]) == [0.95, 0.95, 0.9]
    assert "a (95%" in nearly_full(cluster, [50, 45, 90])
    assert "c (" not in nearly_full(cluster, [50, 45, 90])
    assert nearly_full(cluster, [50, 40, 90]) == ""
