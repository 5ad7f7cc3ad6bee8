"""Facts of presets, and devices whose names resemble others'."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gdp.base.errors import ClusterError
from gdp.cli.main import cli
from gdp.cluster.file import cluster_of_toml, cluster_toml
from gdp.cluster.links import links_line
from gdp.cluster.presets import cluster_preset, device_preset, presets
from gdp.cluster.reserve import default_reserve
from gdp.cluster.table import compute_capability, has_bfloat16
from gdp.cluster.types import APPLE_KINDS, Device, Link, make_cluster
from gdp.costs.measured.collectives import pace_s
from gdp.graph.file import save_graph
from gdp.learn.instances import random_graph

GIB = 2**30
CARDS = ("m4000", "m10", "m40", "m60", "m2000", "m6000", "m6", "m0", "tesla-m4", "m5-mini")


def names_near_apples(seed: int) -> list[str]:
    """Letters, digits and words around those of Apple's chips, none of them one of them."""
    rng = np.random.default_rng(seed)
    parts = ("m", "mx", "gm", ""), ("", "-pro", "-max", "-ultra", "-m", "pro", "-maxq", "-pro-max")
    made = {
        f"{rng.choice(parts[0])}{rng.integers(0, 10 ** rng.integers(1, 5))}{rng.choice(parts[1])}"
        for _ in range(200)
    }
    return sorted(made - APPLE_KINDS)


def test_apples_kinds_are_those_of_the_presets() -> None:
    assert {name for name, entry in presets().items() if entry.maker == "apple"} == APPLE_KINDS
    for name in APPLE_KINDS:
        device = device_preset(name)
        assert device.is_apple
        assert replace(device, unified=None).is_apple


@pytest.mark.parametrize("seed", range(3))
def test_no_other_kind_is_an_apple(seed: int) -> None:
    """Neither its memory nor its machine: a card keeps 1 GiB for itself and needs a processor."""
    for kind in (*CARDS, *names_near_apples(seed)):
        card = Device("x", kind, {"default": 6.8e12}, 288e9, memory_bytes=24 * GIB)
        assert not card.is_unified, kind
        assert default_reserve(card) == GIB, kind
        assert not replace(card, unified=True).is_apple, kind


def test_a_file_says_what_no_name_does() -> None:
    """A Tesla M4 has the name of a Mac, and a Mac may have another name."""
    text = 'host = "a"\n' + "".join(
        f'[[device]]\nname = "{name}"\nkind = "{kind}"\nflop_per_s = 2e12\nbytes_per_s = 88e9\n'
        f"memory_bytes = {4 * GIB}\n{more}\n"
        for name, kind, more in (
            ("a", "m4", "unified = false"), ("b", "m4", ""), ("c", "m9-pro", "unified = true"),
        )
    )  # fmt: skip
    cluster = cluster_of_toml(text, "three")
    again = cluster_of_toml(cluster_toml(cluster), "three")
    assert again.devices == cluster.devices
    assert [d.is_unified for d in again.devices] == [False, True, True]
    assert [d.is_apple for d in again.devices] == [False, True, False]
    assert again.devices[0].reserve_bytes == GIB < again.devices[1].reserve_bytes


CAPABILITIES = {
    "k80": 3.7, "p100": 6.0, "p4": 6.1, "v100": 7.0, "t4": 7.5, "a100": 8.0, "rtx3090": 8.6,
    "l40s": 8.9, "h20": 9.0, "b200": 10.0, "b300": 10.3, "rtx5090": 12.0, "dgx-spark": 12.1,
}  # fmt: skip


def test_every_gpu_of_nvidia_has_its_compute_capability() -> None:
    for name, entry in presets().items():
        device = device_preset(name)
        assert (compute_capability(device) > 0) == (entry.maker == "nvidia"), name
        assert bool(entry.maker) == bool(entry.family) == (not device.is_cpu), name
        bare = Device("x", name, {"default": 1.0}, 1.0)  # as in files of a kind without a preset
        assert compute_capability(bare) == compute_capability(device)
    for name, capability in CAPABILITIES.items():
        assert compute_capability(device_preset(name)) == capability
        assert has_bfloat16(device_preset(name)) == (capability >= 8)


def test_bfloat16_of_other_makers_is_that_of_their_rates() -> None:
    assert has_bfloat16(device_preset("mi300x"))
    assert not has_bfloat16(device_preset("flex-170"))


def test_a_devices_own_capability_precedes_its_kinds(tmp_path: Path) -> None:
    own = replace(device_preset("t4"), compute_capability=8.0)
    assert compute_capability(own) == 8.0
    assert has_bfloat16(own)
    text = cluster_toml(cluster_preset("t4")).replace("= 7.5", "= 8.7")
    assert cluster_of_toml(text, "x").devices[0].compute_capability == 8.7
    with pytest.raises(ClusterError, match="compute_capability must be below 30, "):
        replace(own, compute_capability=86.0)


def test_a_presets_links_are_those_of_its_cards() -> None:
    """Of cards the lower generation of card and host with the card's lanes, of boards NVLink."""
    rows = {
        "cpu+rtx3090+rtx3060": ({31.5e9}, {31.5e9}),
        "cpu+2xt4": ({15.75e9}, {15.75e9}),
        "cpu+2xrtx4060": ({15.75e9}, {15.75e9}),  # PCIe 4 with eight lanes
        "cpu+2xrtx5090": ({63e9}, {63e9}),
        "cpu-ddr4+2xrtx5090": ({31.5e9}, {31.5e9}),
        "cpu+rtx5090+rtx3090": ({63e9, 31.5e9}, {31.5e9}),
        "cpu+rtx5060+rtx4090": ({31.5e9}, {31.5e9}),  # PCIe 5 x8 and PCIe 4 x16
        "cpu-server-ddr5+8xh100": ({63e9}, {450e9}),
        "cpu-server-ddr5+8xh20": ({63e9}, {450e9}),
        "cpu-server+4xa100": ({31.5e9}, {300e9}),
        "cpu-server+4xa100+a100-40": ({31.5e9}, {300e9, 31.5e9}),
        "cpu-server+2xa6000": ({31.5e9}, {31.5e9}),  # the bridge is bought separately
        "cpu-server+2xa6000-nvlink": ({31.5e9}, {56.25e9}),
        "cpu-server+2xh100-pcie4": ({31.5e9}, {31.5e9}),
        "cpu+2xrtx4060-pcie5": ({31.5e9}, {31.5e9}),
        "cpu-server-ddr5+8xmi300x": ({63e9}, {64e9}),
        "cpu-server-ddr5+2xgb200": ({225e9}, {900e9}),
        "2xdgx-spark": (set(), {25e9}),
        "m4-max+m1": (set(), {5e9}),
    }  # fmt: skip
    for spec, (to_host, among) in rows.items():
        cluster = cluster_preset(spec)
        rate = cluster.link_bytes_per_s
        gpus = [d for d, device in enumerate(cluster.devices) if not device.is_cpu]
        assert {float(rate[0, d]) for d in gpus if cluster.devices[0].is_cpu} == to_host, spec
        assert {float(rate[i, j]) for i in gpus for j in gpus if i != j} == among, spec
        assert np.array_equal(rate, rate.T), spec


@pytest.mark.parametrize("seed", range(4))
def test_no_link_is_faster_than_either_end(seed: int) -> None:
    """Random cards in one machine: another generation never slows a link beside it, and the
    links of a file that names the presets are those of the spec."""
    rng = np.random.default_rng(seed)
    cards = [n for n, x in presets().items() if x.pcie and x.maker and not x.nvlink_bytes_per_s]
    names = [str(rng.choice(cards)) for _ in range(4)]
    cpu = str(rng.choice(["cpu", "cpu-ddr4", "cpu-server", "cpu-server-ddr5"]))
    whole = cluster_preset("+".join([cpu, *names]))
    lane = {3: 15.75e9 / 16, 4: 31.5e9 / 16, 5: 63e9 / 16}
    own = [lane[min(presets()[d.kind].pcie, presets()[cpu].pcie)] * presets()[d.kind].lanes
           for d in whole.devices]  # fmt: skip
    for i in range(5):
        for j in range(5):
            if i != j:
                ends = [own[d] for d in (i, j) if d]
                assert whole.link_bytes_per_s[i, j] == min(ends)
    text = f'host = "{cpu}"\n' + "".join(
        f'[[device]]\nname = "{d.name}"\npreset = "{d.kind}"\n' for d in whole.devices
    )
    file = cluster_of_toml(text, "file")
    assert np.array_equal(file.link_bytes_per_s, whole.link_bytes_per_s)
    slow = cluster_of_toml("default_bytes_per_s = 2e9\n" + text, "file")
    assert set(slow.link_bytes_per_s[~np.eye(5, dtype=bool)]) == {2e9}


def test_a_mesh_sends_to_all_others_concurrently() -> None:
    """Two MI300X have one of the seven links of 64 GB/s, eight have all of them; a switch has its
    whole rate for two."""
    for spec, one, all_of_eight in (("8xmi300x", 64e9, 7 * 64e9), ("8xh100", 450e9, 450e9)):
        box = cluster_preset(spec)
        two, eight = (1 / pace_s(box, range(d), "all_reduce") for d in (2, 8))
        assert (two, eight) == pytest.approx((one, all_of_eight))


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("cpu+rtx3090+rtx3060", "PCIe 4.0 x16 (31.5 GB/s) between cpu and rtx3090, rtx3060 (from "
         "the cards' datasheets)"),
        ("cpu+2xt4-pcie4", "PCIe 4.0 x16 (31.5 GB/s) between cpu and t4:0, t4:1"),
        ("8xh100", "NVLink (450 GB/s) between 8 h100 (from the cards' datasheets)"),
        ("cpu+rtx5090+rtx4060", "PCIe 5.0 x16 (63 GB/s) between cpu and rtx5090; PCIe 4.0 x8 "
         "(15.75 GB/s) between cpu and rtx4060 (from the cards' datasheets)"),
        ("cpu-server+2xa6000-nvlink", "PCIe 4.0 x16 (31.5 GB/s) between cpu-server and a6000:0, "
         "a6000:1; NVLink (56.25 GB/s) between a6000:0, a6000:1"),
        ("2xcpu-core", ""), ("t4", ""),
    ],
)  # fmt: skip
def test_the_links_of_a_cluster_are_a_line(spec: str, line: str) -> None:
    assert links_line(cluster_preset(spec)) == line


def test_links_of_own_numbers_are_named_by_them() -> None:
    cards = [device_preset("cpu"), device_preset("rtx3090")]
    cluster = make_cluster("own", cards, [Link("cpu", "rtx3090", 11e9)])
    assert links_line(cluster) == "11 GB/s between cpu and rtx3090"


def test_every_answer_names_the_links_it_was_planned_on(tmp_path: Path) -> None:
    """Of place as JSON and of explain as text and as JSON; `place` prints it under -v."""
    graph, placed = str(tmp_path / "g.json"), str(tmp_path / "p.json")
    save_graph(random_graph("layered-20-0"), Path(graph))
    line = "PCIe 4.0 x16 (31.5 GB/s) between cpu and rtx3060 (from the cards' datasheets)"

    def ran(*words: str) -> str:
        answer = CliRunner().invoke(cli, [*words, "--cluster", "cpu+rtx3060"])
        assert answer.exit_code == 0, answer.output
        return answer.stdout

    ran("place", graph, "--method", "heft", "-o", placed)
    assert line in ran("explain", placed, "--op", "*1*")
    placing = json.loads(ran("place", graph, "--method", "heft", "--json"))
    told = json.loads(ran("explain", placed, "--op", "*1*", "--json"))
    assert placing["links"] == told["links"] == line
