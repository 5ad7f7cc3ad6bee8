"""Clusters: files, presets, memory limits, topology text and detection."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gdp.base.errors import ClusterError
from gdp.base.units import parse_bytes
from gdp.cluster.detect import (
    Rates,
    local_cluster,
    measure_bandwidth,
    read_topology,
    with_bandwidth,
)
from gdp.cluster.file import (
    cluster_toml,
    parse_max_memory,
    read_cluster,
    with_max_memory,
    write_cluster,
)
from gdp.cluster.presets import (
    cluster_preset,
    device_names,
    device_preset,
    preset_of_model,
    presets,
)
from gdp.cluster.types import Cluster, Device, Link, make_cluster

DEVICE = '[[device]]\nname = "a"\nflop_per_s = 1e9\nbytes_per_s = 1e9\n'
TWO = DEVICE + DEVICE.replace('"a"', '"b"')


def write(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEVICE.replace("flop_per_s = 1e9", "flop_per_s = -1.0"), "flop_per_s.* must be > 0"),
        (DEVICE.replace("\nbytes_per_s = 1e9", "\nbytes_per_s = 0.0"), "bytes_per_s must be > 0"),
        (DEVICE + "memory_bytes = 0\n", r"memory_bytes must be > 0, .* got 0"),
        (DEVICE + 'memory_bytes = "lots"\n', "not a size: 'lots'"),
        (DEVICE + "wheels = 4\n", "unknown field `wheels`"),
        ('[[device]]\nname = "a"\n', "lacks flop_per_s and bytes_per_s"),
        ('[[device]]\nname = "a"\npreset = "k9"\n', "no device preset 'k9'"),
        (DEVICE + DEVICE, "device name 'a' appears twice"),
        (TWO + '[[link]]\nsrc = "a"\ndst = "b"\nbytes_per_s = 0.0\n', "bytes_per_s must be > 0"),
        (TWO + '[[link]]\nsrc = "a"\ndst = "z"\nbytes_per_s = 1.0\n', "no device 'z'"),
        (
            TWO + '[[link]]\nsrc = "a"\ndst = "b"\nbytes_per_s = 1.0\nlatency_s = -1.0\n',
            "latency_s must be >= 0",
        ),
        (
            TWO + '[[link]]\nsrc = "a"\ndst = "b"\nbytes_per_s = 1.0\nchannel = "x"\n'
            "contention = false\n",
            "'a' -> 'b': channel 'x' .* contention = false",
        ),
        ("default_bytes_per_s = -1.0\n" + TWO, "default_bytes_per_s must be > 0"),
        ('host = "z"\n' + TWO, "host 'z' is no device"),
        ("device = []\n", "has no devices"),
        ("[[device\n", "is not a cluster file"),
        ("", "missing required field `device`"),
    ],
)
def test_a_bad_cluster_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read_cluster(write(tmp_path, text))


def test_a_missing_cluster_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"no cluster file '.*none\.toml'"):
        Cluster.load(tmp_path / "none.toml")


def test_links_hold_both_ways_and_named_channels_are_shared(tmp_path: Path) -> None:
    text = (
        TWO + '[[link]]\nsrc = "a"\ndst = "b"\nbytes_per_s = 2e9\nlatency_s = 1e-6\nchannel = "x"\n'
    )
    cluster = read_cluster(write(tmp_path, text))
    assert cluster.link_bytes_per_s.tolist() == [[np.inf, 2e9], [2e9, np.inf]]
    assert cluster.link_latency_s.tolist() == [[0, 1e-6], [1e-6, 0]]
    assert cluster.channel[0, 1] == cluster.channel[1, 0]


def test_unnamed_links_have_a_channel_per_direction() -> None:
    a, b = (Device(name, "cpu", {"default": 1e9}, 1e9) for name in "ab")
    cluster = make_cluster("c", [a, b], [Link("a", "b", 1e9)])
    assert cluster.channel[0, 1] != cluster.channel[1, 0]


def test_links_without_contention_have_no_channel(tmp_path: Path) -> None:
    """One link says so itself; the cluster says so for the others, but not where one is named."""
    link = '[[link]]\nsrc = "a"\ndst = "{}"\nbytes_per_s = 2e9\n'
    three = TWO + DEVICE.replace('"a"', '"c"')
    own = read_cluster(write(tmp_path, three + link.format("b") + "contention = false\n"))
    assert own.queues.tolist() == [[False, False, True], [False, False, True], [True, True, False]]
    text = "contention = false\n" + three + link.format("b") + link.format("c") + 'channel = "x"\n'
    mostly = read_cluster(write(tmp_path, text))
    assert np.argwhere(mostly.queues).tolist() == [[0, 2], [2, 0]]
    for cluster in (own, mostly):
        again = read_cluster(write(tmp_path, cluster_toml(cluster)))
        assert (again.queues == cluster.queues).all()
        assert (again.channel == cluster.channel).all()


@pytest.mark.parametrize("spec", ["2xcpu-core", "4xa100-nvlink", "cpu+2xt4-pcie4", "h100"])
def test_a_cluster_survives_its_file(tmp_path: Path, spec: str) -> None:
    cluster = cluster_preset(spec)
    again = read_cluster(write(tmp_path, cluster_toml(cluster)))
    assert again.devices == cluster.devices
    assert (again.link_bytes_per_s == cluster.link_bytes_per_s).all()
    assert (again.link_latency_s == cluster.link_latency_s).all()
    same = cluster.channel[:, :, None, None] == cluster.channel
    off = ~np.eye(cluster.num_devices, dtype=bool)
    assert (
        same[off][:, off] == (again.channel[:, :, None, None] == again.channel)[off][:, off]
    ).all()


def test_presets_name_devices_and_hosts() -> None:
    cluster = cluster_preset("cpu+2xt4")
    assert cluster.device_names == ("cpu", "t4:0", "t4:1")
    assert cluster.host == 0
    assert cluster_preset("2xcpu-core").device_names == ("core0", "core1")


@pytest.mark.parametrize("spec", ["2xnothing", "0xt4", "t4+", "x", "2x"])
def test_an_unknown_preset_lists_what_exists(spec: str) -> None:
    with pytest.raises(ClusterError, match="devices are a10, a100"):
        Cluster.load(spec)


def test_nvlink_needs_devices_that_have_it() -> None:
    with pytest.raises(ClusterError, match="no NVLink"):
        cluster_preset("2xt4-nvlink")


def test_every_device_preset_is_valid_and_has_a_source() -> None:
    assert {"k80", "rtx3090", "rtx5090", "a100-40", "mi300x", "m4-max", "t4"} <= set(device_names())
    for name, entry in presets().items():
        device = device_preset(name)
        assert entry.source
        assert device.kind == name
        # A driver reports at least 88% of what is printed on the box, in GB of 10^9 bytes or GiB.
        assert 0.88 < device.total_bytes / parse_bytes(entry.memory) < 1.08
        assert 0 < device.reserve_bytes < 0.35 * device.total_bytes


def test_max_memory_counts_accelerators_as_hugging_face_does() -> None:
    cluster = with_max_memory(cluster_preset("cpu+2xt4"), parse_max_memory("1=2GiB,cpu=30GiB"))
    assert cluster.memory_bytes.tolist() == [30 * 2**30, 14 * 2**30, 2 * 2**30]
    with pytest.raises(ClusterError, match="max memory names '7'"):
        with_max_memory(cluster, {7: "1GiB"})
    with pytest.raises(ValueError, match="must look like 0=20GiB"):
        parse_max_memory("20GiB")


TOPOLOGY = """
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tSYS\t0-31\t0
GPU1\tNV12\t X \tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \t32-63\t1

Legend:
  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def test_a_topology_matrix_becomes_links() -> None:
    links = {(link.src, link.dst): link for link in read_topology(TOPOLOGY, ["a", "b", "c"])}
    assert len(links) == 6
    assert links["a", "b"].bytes_per_s == 12 * 25e9
    assert links["a", "c"].channel == links["b", "c"].channel == "socket"


def test_a_topology_of_another_size_is_an_error() -> None:
    with pytest.raises(ClusterError, match="has 3 GPUs, the cluster 2"):
        read_topology(TOPOLOGY, ["a", "b"])


def test_this_machine_without_gpu_tools_is_its_cores() -> None:
    cluster = local_cluster(max_cores=2, run=lambda command: None)
    assert {d.kind for d in cluster.devices} == {"cpu-core"}
    assert cluster.device_names[0] == "core0"


def test_gpus_that_nvidia_smi_reports_stand_beside_the_cpu() -> None:
    def run(command: list[str]) -> str | None:
        if command[:2] == ["nvidia-smi", "topo"]:
            return "\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tPIX\t X \n"
        if "pcie" in command[1]:
            return lanes
        if command[0] == "nvidia-smi":
            return "Tesla T4, 15360\nNVIDIA A100-SXM4-80GB, 81920\n"
        return None

    lanes = ""
    cluster = local_cluster(run=run)
    assert cluster.device_names == ("cpu", "gpu0", "gpu1")
    assert [d.kind for d in cluster.devices] == ["cpu", "t4", "a100"]
    assert cluster.devices[1].total_bytes == 15360 * 2**20
    assert cluster.devices[1].reserve_bytes == 2**30
    assert cluster.link_bytes_per_s[1, 2] == 31.5e9
    assert list(cluster.link_bytes_per_s[0, 1:]) == [15.75e9, 31.5e9]  # as the cards are
    lanes = "3, 4\n5, 16\n"
    cluster = local_cluster(run=run)
    assert cluster.link_bytes_per_s[0, 1] == cluster.link_bytes_per_s[1, 0] == 15.75e9 / 4
    assert cluster.link_bytes_per_s[0, 2] == 63e9
    lanes = "[N/A], [N/A]\n4, 8\n"
    cluster = local_cluster(run=run)
    assert list(cluster.link_bytes_per_s[0, 1:]) == [15.75e9, 15.75e9]


@pytest.mark.parametrize(
    ("model", "gib", "preset"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, "a100"),
        ("NVIDIA A100-PCIE-40GB", 40, "a100-40"),
        ("NVIDIA A10", 22, "a10"),
        ("NVIDIA L40S", 45, "l40s"),
        ("NVIDIA L40", 45, None),
        ("NVIDIA T400", 4, None),
        ("NVIDIA RTX A6000", 48, "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", 48, "rtx6000-ada"),
        ("NVIDIA GeForce RTX 4060 Ti", 8, "rtx4060ti-8"),
        ("NVIDIA GeForce RTX 4060 Ti", 16, "rtx4060ti"),
        ("NVIDIA GeForce RTX 4070", 12, "rtx4070"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16, "rtx4070tisuper"),
        ("NVIDIA GeForce RTX 4090 D", 24, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, None),
        ("NVIDIA GeForce RTX 3080 with Max-Q Design", 8, None),
        ("NVIDIA RTX A5000 Laptop GPU", 16, None),
        ("NVIDIA RTX 5000 Ada Generation", 32, "rtx5000-ada"),
        ("NVIDIA RTX 5000 Ada Generation Laptop GPU", 16, None),
        ("Quadro RTX 5000 (Mobile)", 16, None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 96, "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000D", 84, None),
        ("NVIDIA RTX PRO 4500 Blackwell", 32, None),
        ("NVIDIA RTX PRO 3000 Blackwell Generation Laptop GPU", 12, None),
        ("Intel(R) Data Center GPU Flex 170", 16, "flex-170"),
        ("Intel(R) Data Center GPU Flex 140", 6, None),
        ("Intel(R) Arc(TM) A770 Graphics", 16, "arc-a770"),
        ("Intel(R) Arc(TM) A750 Graphics", 8, None),
        ("Intel(R) Arc(TM) Pro B60 Graphics", 24, "arc-b60"),
        ("Intel(R) Arc(TM) B580 Graphics", 12, "arc-b580"),
        ("Intel(R) Arc(TM) B570 Graphics", 10, None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, "rtx-pro-6000-workstation"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 8, "rtx4070-laptop"),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 8, "rtx4060-laptop"),
        ("NVIDIA GeForce RTX 2080 SUPER", 8, None),
        ("NVIDIA H100 NVL", 94, "h100-nvl"),
        ("Tesla M40 24GB", 24, "m40"),
        ("Tesla P40", 24, "p40"),
        ("Quadro M4000", 8, None),
        ("Orin (nvgpu)", 61, "jetson-agx-orin"),
        ("AMD Radeon RX 7900 XT", 20, "rx7900xt"),
        ("AMD Radeon RX 7900 XTX", 24, "rx7900xtx"),
        ("AMD Radeon RX 9070", 16, "rx9070"),
        ("AMD Radeon RX 9070 XT", 16, "rx9070xt"),
        ("AMD Radeon RX 9070 GRE", 12, None),
        ("AMD Radeon RX 6700", 10, None),
        ("AMD Radeon AI PRO R9700", 32, "r9700"),
        ("AMD Instinct MI355X", 288, "mi355x"),
        ("Apple M5 Pro", 64, "m5-pro"),
        ("TPU v5 lite", 16, "tpu-v5e"),
        ("AMD Instinct MI300X", 192, "mi300x"),
        ("AMD Instinct MI300A", 128, None),
        ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", 96, "ryzen-ai-max-395"),
        ("AMD Ryzen AI Max 385", 96, None),
        ("Apple M2 Max", 96, "m2-max"),
        ("Apple M2 Pro", 32, "m2-pro"),
    ],
)
def test_a_drivers_name_is_that_of_one_product(model: str, gib: int, preset: str | None) -> None:
    assert preset_of_model(model, gib << 30) == preset


def test_every_preset_of_a_gpu_answers_to_its_product() -> None:
    """The number at a name's end is kept where it tells products apart: of each preset the next
    number up is no preset."""
    for name, entry in presets().items():
        product = entry.product or name
        if name.startswith("cpu"):
            continue
        assert preset_of_model(product, parse_bytes(entry.memory_bytes)) == name
        if re.search(r"\d", product) and not re.search(r"-(40|8)$", product):
            assert preset_of_model(re.sub(r"\d+", lambda n: f"{int(n[0]) + 11}", product)) is None


def test_cores_share_the_bandwidth_that_was_measured() -> None:
    measured = Rates(one_core=12e9, all_cores=30e9, cores=4)
    cores = with_bandwidth(cluster_preset("4xcpu-core"), measured)
    assert {d.bytes_per_s for d in cores.devices} == {7.5e9}
    few = with_bandwidth(cluster_preset("2xcpu-core"), measured)
    assert {d.bytes_per_s for d in few.devices} == {12e9}
    mixed = with_bandwidth(cluster_preset("cpu+t4"), measured)
    assert [d.bytes_per_s for d in mixed.devices] == [30e9, 320e9]
    assert [d.copy_bytes_per_s for d in mixed.devices] == [6e9, 0.0]


def test_bandwidth_is_measured() -> None:
    measured = measure_bandwidth(1, seconds=0.01)
    assert 1e8 < measured.one_core == measured.all_cores < 1e13


def test_links_that_contradict_each_other_are_refused() -> None:
    a, b = (Device(name, "cpu", {"default": 1e9}, 1e9) for name in "ab")
    one = Link("a", "b", 1e9)
    assert make_cluster("two", [a, b], [one, one]).link_bytes_per_s[0, 1] == 1e9
    for other in (
        Link("a", "b", 2e9), Link("b", "a", 1e9, latency_s=1.0), Link("a", "b", 1e9, channel="x"),
        Link("b", "a", 2e9, one_way=True),
    ):  # fmt: skip
        with pytest.raises(ClusterError, match="is given twice with different values"):
            make_cluster("two", [a, b], [one, other])
    there, back = Link("a", "b", 1e9, one_way=True), Link("b", "a", 2e9, one_way=True)
    assert make_cluster("two", [a, b], [there, back]).link_bytes_per_s[1, 0] == 2e9


def test_devices_answer_for_themselves() -> None:
    """A processor that pays for segments, and three cards of which one computes nothing and one has
    another memory."""
    rate = {"default": 1e12}
    cluster = make_cluster(
        "four",
        [
            Device("cpu", "cpu", rate, 1e11, dispatch_s=3e-6, dispatch_per="segment"),
            Device("a", "gpu", rate, 1e12, dispatch_s=5e-6, memory_pool="board"),
            Device("b", "gpu", rate, 1e12, dispatch_s=5e-6),
            Device("c", "gpu", rate, 1e12, dispatch_s=5e-6, memory_bytes=10),
        ],
    )
    cluster = cluster.idling(np.array([False, False, False, True]))
    assert cluster.op_dispatch_s.tolist() == [0.0, 5e-6, 5e-6, 5e-6]
    assert cluster.segment_dispatch_s.tolist() == [3e-6, 0.0, 0.0, 0.0]
    assert cluster.computes.tolist() == [True, True, True, False]
    assert cluster.gpus == (1, 2)
    assert cluster.alike.tolist() == [0, 1, 1, 3]
    assert cluster.with_dispatch(2 * cluster.dispatch_s).op_dispatch_s[1] == 1e-5


def test_the_disk_of_a_machine_is_read_back(tmp_path: Path) -> None:
    cluster = replace(Cluster.load("cpu+2xt4"), disk_bytes_per_s=3.5e9)
    write_cluster(cluster, tmp_path / "box.toml")
    assert read_cluster(tmp_path / "box.toml").disk_bytes_per_s == 3.5e9
    with pytest.raises(ClusterError, match="disk_bytes_per_s must be > 0"):
        replace(cluster, disk_bytes_per_s=-1.0)


def test_a_part_of_a_cluster_keeps_its_links_and_its_host() -> None:
    whole = Cluster.load("cpu+3xa100-nvlink")
    part = whole.part([3, 2])
    assert part.device_names == (whole.device_names[0], *whole.device_names[2:])
    assert part.host == 0
    assert part.link_bytes_per_s[1, 2] == whole.link_bytes_per_s[2, 3]
    pairs, before = ((0, 1, 0, 2), (1, 2, 2, 1)), ((0, 2, 0, 3), (2, 3, 3, 2))
    shared = [part.channel[i, j] == part.channel[k, m] for i, j, k, m in pairs]
    as_before = [whole.channel[i, j] == whole.channel[k, m] for i, j, k, m in before]
    assert shared == as_before
