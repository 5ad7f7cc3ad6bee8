"""Seconds of collectives: rings by hand, physics on any cluster, and the measured curves."""

import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gdp.base.checkpoint import CheckpointError
from gdp.base.errors import ArgumentError
from gdp.base.files.reading import data_path
from gdp.cluster.detect import read_topology
from gdp.cluster.presets import cluster_preset, device_preset, link_family
from gdp.cluster.types import Cluster, Device, Link, make_cluster
from gdp.costs.base import RuntimeOverheads
from gdp.costs.default import resolve_costs
from gdp.costs.measured.collectives import (
    OPERATIONS,
    Collectives,
    Curve,
    Typical,
    collective_s,
    load_collectives,
    shipped_collectives,
    with_measured_sends,
)
from gdp.costs.measured.kernels import ENGINES
from pretrain.costs.collectives import LINKS, Samples, fit_curve, typical_rings
from pretrain.costs.collectives import _sends as sends

SIZES = np.concatenate([[0.0], np.logspace(0, 11, 56)])
SPECS = ("8xh100-nvlink", "8xl40s-pcie3", "8xv100-nvlink", "8xcpu-core", "16xb200-nvlink")


def _box(count: int, *, channel: str | None = None, speed: float = 1e9) -> Cluster:
    """Devices with links of a speed and 10 us, which may share one channel."""
    devices = [Device(f"d{i}", "gpu", {"default": 1e12}, 1e12) for i in range(count)]
    links = [
        Link(a.name, b.name, speed, 1e-5, channel=channel, one_way=True)
        for a in devices
        for b in devices
        if a is not b
    ]
    return make_cluster("box", devices, links)


def _group(cluster: Cluster, operation: str, count: int) -> list[int]:
    return list(range(2 if operation == "send" else min(count, cluster.num_devices)))


def test_a_ring_of_given_links_by_hand() -> None:
    """400 MB over 1 GB/s and 10 us: of 4 devices each sends 100 MB in each of 6, or 3, steps; in an
    all-to-all over links of their own at once."""
    box = _box(4)
    expected = {
        "all_reduce": 6 * (1e-5 + 0.1), "all_gather": 3 * (1e-5 + 0.1),
        "reduce_scatter": 3 * (1e-5 + 0.1), "all_to_all": 3e-5 + 0.1, "send": 1e-5 + 0.4,
    }  # fmt: skip
    assert set(expected) == set(OPERATIONS)
    for operation, seconds in expected.items():
        devices = _group(box, operation, 4)
        assert float(collective_s(box, devices, operation, 4e8)) == pytest.approx(seconds)


def test_devices_behind_one_root_divide_it() -> None:
    """All four links of a ring, all twelve of an all-to-all, queue on one channel."""
    own, shared = _box(4), _box(4, channel="root")
    for operation in OPERATIONS:
        devices = _group(own, operation, 4)
        alone, together = (collective_s(c, devices, operation, 1e12) for c in (own, shared))
        queued = {"send": 1, "all_to_all": 12}.get(operation, 4)
        assert float(together) == pytest.approx(queued * float(alone), rel=1e-4)


def test_the_slowest_link_of_a_ring_decides() -> None:
    devices = [Device(f"d{i}", "gpu", {"default": 1e12}, 1e12) for i in range(3)]
    slow = Link("d2", "d0", 1e8, 0.0, one_way=True)
    triangle = make_cluster("t", devices, [slow], default_bytes_per_s=1e9, default_latency_s=0.0)
    assert float(collective_s(triangle, [0, 1, 2], "all_gather", 3e8)) == pytest.approx(2.0)
    assert float(collective_s(triangle, [0, 2], "send", 3e8)) == pytest.approx(0.3)
    assert float(collective_s(triangle, [2, 0], "send", 3e8)) == pytest.approx(3.0)


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_steps_and_bytes_of_a_ring_by_the_number_of_devices(count: int) -> None:
    """Of D devices each sends a D-th in each of 2 (D - 1), or D - 1, steps; one sends all in 1."""
    one = count - 1
    wanted = {"all_reduce": 2 * one, "all_gather": one, "reduce_scatter": one, "all_to_all": one}
    for operation, op in OPERATIONS.items():
        steps = wanted.get(operation, 1)
        parts = steps / count if operation in wanted else 1.0
        assert (op.steps(count), op.share(count)) == (steps, pytest.approx(parts)), operation
    box = _box(count)
    for operation, steps in wanted.items():
        bare = float(collective_s(box, range(count), operation, 0.0))
        assert bare == pytest.approx(steps * 1e-5), operation


@pytest.mark.parametrize("slow", [(0, 1), (1, 2), (2, 0), (1, 0), (0, 2)])
def test_the_slowest_latency_among_the_devices_is_that_of_every_step(slow: tuple[int, int]) -> None:
    devices = [Device(f"d{i}", "gpu", {"default": 1e12}, 1e12) for i in range(3)]
    link = Link(f"d{slow[0]}", f"d{slow[1]}", 1e9, 5e-4, one_way=True)
    cluster = make_cluster("t", devices, [link], default_bytes_per_s=1e9, default_latency_s=1e-6)
    assert float(collective_s(cluster, [0, 1, 2], "all_reduce", 0.0)) == pytest.approx(4 * 5e-4)
    assert float(collective_s(cluster, slow, "send", 0.0)) == pytest.approx(5e-4)


def made_up(curves: dict[int, Curve]) -> Collectives:
    """NVLink of the fifth generation with curves of our own, and round typical numbers."""
    shipped = shipped_collectives()
    halves = {"nvlink": ((2, 0.5), (8, 0.25)), "pcie": ((2, 0.5),)}
    meta = msgspec.structs.replace(
        shipped.meta, typical=Typical(3e-6, 1e-6, halves, {"nvlink": 0.5, "pcie": 0.5})
    )
    return Collectives(meta, {("nvlink5", "all_reduce", "torch"): curves} if curves else {})


def test_curves_are_interpolated_in_the_logarithm_of_the_number_of_devices() -> None:
    fast = {2: Curve(1e-3, 1e15, 0.0, 1.0), 8: Curve(5e-3, 1e15, 0.0, 1.0)}
    box, size = cluster_preset("16xb200-nvlink"), np.array([1.0])
    for count, wanted in (
        (2, 1e-3),
        (4, 3e-3),
        (8, 5e-3),
        (3, 1e-3 + 4e-3 * np.log(1.5) / np.log(4)),
    ):
        found = made_up(fast).seconds(box, range(count), "all_reduce", size, "torch")
        assert float(found[0]) == pytest.approx(wanted), count
    # Beyond what was measured a ring of 16 has 16 steps more than one of 8.
    found = made_up(fast).seconds(box, range(16), "all_reduce", size, "torch")
    assert float(found[0]) == pytest.approx(5e-3 + 16e-6)


@pytest.mark.parametrize(("count", "share"), [(2, 0.5), (4, 0.375), (8, 0.25), (16, 0.25)])
def test_a_ring_that_was_not_measured_starts_steps_and_sends(count: int, share: float) -> None:
    """3 us and 1 us a step; the share of the bandwidth is interpolated in the logarithm."""
    box, steps = cluster_preset("16xb200-nvlink"), 2 * (count - 1)
    speed = float(box.link_bytes_per_s[0, 1])
    for size in (0.0, 1e9):
        found = made_up({}).seconds(box, range(count), "all_reduce", np.array([size]), "torch")
        wanted = 3e-6 + steps * 1e-6 + steps / count * size / speed / share
        assert float(found[0]) == pytest.approx(wanted)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("spec", SPECS)
def test_more_bytes_take_longer_and_none_outruns_its_link(
    spec: str, operation: str, engine: str
) -> None:
    cluster = cluster_preset(spec)
    for count in (2, 6, 16):
        devices = _group(cluster, operation, count)
        seconds = collective_s(cluster, devices, operation, SIZES, engine)
        assert seconds.shape == SIZES.shape
        assert (np.diff(seconds) > 0).all()
        assert seconds[0] > 0
        share = (len(devices) - 1) / len(devices)
        on_a_link = 1 / len(devices)
        sent = {"send": 1.0, "all_reduce": 1.0, "all_to_all": on_a_link}.get(operation, share)
        assert (seconds >= sent * SIZES / cluster.link_bytes_per_s[0, 1] * (1 - 1e-12)).all()
        one = collective_s(cluster, devices, operation, float(SIZES[30]), engine)
        assert float(one) == seconds[30]


@pytest.mark.parametrize("seed", range(3))
def test_faster_links_never_make_a_collective_slower(seed: int) -> None:
    rng = np.random.default_rng(seed)
    speed, times = 10 ** rng.uniform(6, 12), rng.uniform(1, 10)
    for operation in OPERATIONS:
        for count in (2, 5, 8):
            slow, fast = _box(count, speed=speed), _box(count, speed=speed * times)
            devices = _group(slow, operation, count)
            before = collective_s(slow, devices, operation, SIZES)
            assert (collective_s(fast, devices, operation, SIZES) <= before).all()


def test_links_are_recognised_by_what_gdp_knows_of_them() -> None:
    known = {
        "4xa100-nvlink": "nvlink3", "2xh200-nvlink": "nvlink4", "h100+h200-nvlink": "nvlink4",
        "8xgb200-nvlink": "nvlink5", "4xl40s-pcie4": "pcie4-l40s", "2xl40s": "pcie4-l40s",
        "2xrtx-pro-6000-pcie5": "pcie5-rtx-pro-6000", "2xarc-b60-pcie5": "pcie5x8-arc-b60",
        "4xv100-nvlink": None, "2xmi300x-nvlink": None, "l40s+rtx-pro-6000-pcie4": None,
        "4xh100-pcie5": None, "2xcpu-core": None, "cpu+h100-nvlink": None,
    }  # fmt: skip
    for spec, link in known.items():
        cluster = cluster_preset(spec)
        assert shipped_collectives().link_of(cluster, range(cluster.num_devices)) == link, spec


def test_numbers_that_somebody_gave_are_used_as_they_are() -> None:
    devices = [device_preset("l40s", name) for name in "ab"]
    own = make_cluster("own", devices, [Link("a", "b", 12e9, 1e-5)])
    assert link_family(own, 0, 1) == ""
    assert shipped_collectives().link_of(own, [0, 1]) is None
    assert float(collective_s(own, [0, 1], "send", 12e9)) == pytest.approx(1 + 1e-5)
    preset = cluster_preset("2xl40s-pcie4")
    assert [link_family(preset, 0, i) for i in (0, 1)] == ["", "pcie"]


def test_more_cards_than_two_divide_a_host_that_presets_do_not_describe() -> None:
    """A ring of eight sends less than twice what one of two sends; measured it takes far longer."""
    for spec in ("8xl40s-pcie4", "8xrtx3090-pcie4"):
        box = cluster_preset(spec)
        two, eight = (collective_s(box, range(d), "all_reduce", 1e8) for d in (2, 8))
        assert eight > 4 * two, spec


def test_serving_engines_start_small_all_reduces_sooner_than_the_library() -> None:
    box = cluster_preset("8xh100-nvlink")
    library, *engines = (
        float(collective_s(box, range(8), "all_reduce", 16384, e)) for e in ENGINES
    )
    assert [seconds < library / 2 for seconds in engines] == [True] * 3
    gathered = {float(collective_s(box, range(8), "all_gather", 16384, e)) for e in ENGINES}
    assert len(gathered) == 1


def test_numbers_of_devices_between_the_measured_ones_lie_between() -> None:
    box = cluster_preset("16xb200-nvlink")
    seconds = [float(collective_s(box, range(d), "all_reduce", 1e5)) for d in (2, 3, 4, 6, 8, 12)]
    assert (np.diff(seconds) > 0).all()


def test_one_device_has_nothing_to_wait_for() -> None:
    box = cluster_preset("2xh100-nvlink")
    assert (collective_s(box, [1], "all_reduce", SIZES) == 0).all()


@pytest.mark.parametrize(
    ("devices", "operation", "size", "engine", "message"),
    [
        ([0, 1], "broadcast", 1.0, "torch", "no collective operation 'broadcast'; there are all_"),
        ([0, 1], "send", 1.0, "mpi", "no engine 'mpi'; there are torch"),
        ([0, 0], "all_reduce", 1.0, "torch", r"different indices below 4, got \[0, 0\]"),
        ([0, 4], "all_reduce", 1.0, "torch", "different indices below 4"),
        ([], "all_reduce", 1.0, "torch", "different indices below 4"),
        ([0, 1, 2], "send", 1.0, "torch", "a send has two devices"),
        ([0, 1], "send", -1.0, "torch", "must be >= 0"),
        ([0, 1], "send", float("nan"), "torch", "must be >= 0"),
    ],
)
def test_wrong_arguments_are_named(
    devices: list[int], operation: str, size: float, engine: str, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        collective_s(_box(4), devices, operation, size, engine)


def test_what_ships_is_whole() -> None:
    """Every measured link has every operation of its library, and no number is negative."""
    shipped = shipped_collectives()
    assert shipped.meta.links == LINKS
    for link in LINKS:
        for operation in OPERATIONS:
            if (link, operation) != ("pcie5x8-arc-b60", "all_to_all"):  # oneCCL's was not measured
                curves = shipped.curves_of(link, operation, "torch")
                assert 2 in curves, (link, operation)
                assert all(np.isfinite(c).all() and min(c) >= 0 for c in curves.values())
    assert {name for name in shipped.meta.errors if " " not in name} == set(OPERATIONS)
    assert max(mean for mean, _ in shipped.meta.errors.values()) < 0.1


def test_damaged_curves_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "collectives"
    shutil.copytree(data_path("checkpoints", "collectives"), folder)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"sha256": "0" * 64}))
    with pytest.raises(CheckpointError, match="damaged"):
        load_collectives(folder)
    (folder / "meta.json").write_text(json.dumps(meta | {"curves": meta["curves"][1:]}))
    with pytest.raises(CheckpointError, match="another network"):
        load_collectives(folder)


def test_a_fit_finds_the_curve_behind_its_samples() -> None:
    size = 2.0 ** np.arange(9, 30, 2)
    truth = Curve(8e-6, 2e11, 2e-5, 1e6)
    found = fit_curve(Samples(size, truth.seconds(size)))
    assert found.seconds(size) == pytest.approx(truth.seconds(size), rel=0.01)
    plain = fit_curve(Samples(size, Curve(8e-6, 2e11, 0.0, 1.0).seconds(size)), plain=True)
    assert (plain.latency_s, plain.extra_s) == pytest.approx((8e-6, 0.0), rel=0.01)


def test_a_send_is_the_fastest_exchange_of_as_many_bytes() -> None:
    """Of two devices a gather of 2 MB and an all-reduce of 1 MB both send 1 MB each way."""
    size = np.array([1e6, 2e6])
    rows = {
        ("nvlink4", "all_gather", "torch", 2): Samples(size, np.array([3.0, 4.0])),
        ("nvlink4", "all_reduce", "torch", 2): Samples(size, np.array([5.0, 6.0])),
        ("nvlink4", "all_reduce", "torch", 8): Samples(size, np.array([1.0, 1.0])),
        ("nvlink5", "all_reduce", "torch", 2): Samples(size, np.array([1.0, 1.0])),
    }
    least = sends(rows, "nvlink4")
    assert least.size_bytes.tolist() == [5e5, 1e6, 2e6]
    assert least.seconds.tolist() == [3.0, 4.0, 6.0]


def test_typical_rings_are_those_that_were_made_up() -> None:
    """Rings of 5 us and 2 us a step at half of NVLink and a quarter of PCIe."""
    made = {}
    for link, part in (("nvlink4", 0.5), ("pcie4-l40s", 0.25)):
        for operation in ("all_reduce", "all_gather"):
            for count in (2, 8):
                op = OPERATIONS[operation]
                rate = part * LINKS[link].bytes_per_s / op.share(count)
                made[link, operation, "torch", count] = Curve(
                    5e-6 + 2e-6 * op.steps(count), rate, 0.0, 1.0
                )
        made[link, "send", "torch", 2] = Curve(1e-6, LINKS[link].bytes_per_s, 0.0, 1.0)
    typical = typical_rings(made)
    assert (typical.start_s, typical.step_s) == pytest.approx((5e-6, 2e-6), rel=0.02)
    assert typical.share_of_peak("nvlink", "all_reduce", 4) == pytest.approx(0.5)
    assert typical.share_of_peak("pcie", "all_gather", 64) == pytest.approx(0.25)
    assert typical.share_of_peak("pcie", "send", 2) == pytest.approx(1.0)


def test_links_of_the_fifth_generation_are_detected_as_twice_as_fast() -> None:
    text = "GPU0 X NV18\nGPU1 NV18 X\n"
    for kind, speed in (("h100", 450e9), ("b200", 900e9)):
        assert read_topology(text, ["a", "b"], [kind, kind])[0].bytes_per_s == speed
    assert read_topology(text, ["a", "b"], ["b200", "h100"])[0].bytes_per_s == 450e9


def test_links_of_presets_send_as_fast_as_was_measured() -> None:
    """Those measured at their own rate, others at a typical one; hosts and given numbers stay."""
    typical = shipped_collectives().meta.typical.sends
    for spec, least, most in (
        ("2xh100-nvlink", 300e9, 340e9), ("2xrtx-pro-6000-pcie5", 35e9, 40e9),
        ("2xl40s-pcie3", 15.75e9, 15.75e9),
    ):  # fmt: skip
        named = cluster_preset(spec)
        cluster = with_measured_sends(named)
        speed = cluster.link_bytes_per_s[0, 1]
        assert least <= speed <= most, spec
        large = float(collective_s(named, [0, 1], "send", 1e12))
        assert large == pytest.approx(1e12 / speed, rel=1e-3), spec
        assert (cluster.link_latency_s == named.link_latency_s).all()
    for spec, family in (("2xt4-pcie4", "pcie"), ("2xv100-nvlink", "nvlink")):
        named = cluster_preset(spec)
        peak = named.link_bytes_per_s[0, 1]
        assert with_measured_sends(named).link_bytes_per_s[0, 1] == peak * typical[family]
    for named in (cluster_preset("cpu+t4-pcie4"), cluster_preset("2xcpu-core"), _box(3)):
        assert (with_measured_sends(named).link_bytes_per_s == named.link_bytes_per_s).all()


def test_only_learned_costs_know_the_measured_links() -> None:
    cluster = cluster_preset("cpu+2xt4-pcie4")
    learned, _ = resolve_costs("shipped", cluster)
    assert isinstance(learned, RuntimeOverheads)
    slower = learned.with_runtime_overheads(cluster).link_bytes_per_s < cluster.link_bytes_per_s
    assert slower.tolist() == [[False] * 3, [False, False, True], [False, True, False]]
    assert not isinstance(resolve_costs("datasheet", cluster)[0], RuntimeOverheads)
