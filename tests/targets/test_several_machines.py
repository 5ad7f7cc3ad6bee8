"""Plans over several machines: a command for each, ranks machine by machine, or a refusal."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gdp
from gdp.base.errors import PlacementError
from gdp.base.files.writing import OWN_FILES_ONLY
from gdp.cluster.machines import in_order_of_machines, machines, numbers_on_machine
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster, Device, Link, make_cluster
from gdp.costs.base import roofline
from gdp.methods.chain import layer_row
from gdp.placement.placement import Placement, make_placement
from gdp.question.question import Question
from gdp.targets.sglang.export import arguments as of_sglang
from gdp.targets.sglang.export import why as why_of_sglang
from gdp.targets.table import EXPORTERS, PLANNERS
from gdp.targets.target import ExportJob
from gdp.targets.torchrun import torchrun_lines
from gdp.targets.vllm.export import VllmOptions, vllm_options
from gdp.targets.vllm.groups import arrangements, grouped
from tests.decoders import Sizes, decoder

LARGE = Sizes(layers=4, hidden=512, heads=8, keys=4, head=64, inner=2048, vocabulary=1024)


def rooms(
    *sizes: int, network: float = 1e9, latency_s: float = 1e-4, size: int = 1 << 30
) -> Cluster:
    """Machines with so many alike GPUs each, interleaved in the cluster's order."""
    names = [(m, k) for k in range(max(sizes)) for m, count in enumerate(sizes) if k < count]
    cpus = [Device(f"cpu{m}", "cpu", {"default": 1e11}, 1e10, 1 << 40) for m in range(len(sizes))]
    gpus = [
        Device(f"m{m}g{k}", "a", {"default": 1e14}, 1e12, size, reserve_bytes=size // 9)
        for m, k in names
    ]  # fmt: skip
    between = [
        Link(f"m{m}g{k}", f"m{n}g{j}", *((1e12, 1e-7) if m == n else (network, latency_s)))
        for i, (m, k) in enumerate(names)
        for n, j in names[:i]
    ]
    ways = [Link(f"cpu{m}", f"m{m}g{k}", 2.5e10, 1e-5) for m, k in names]
    return make_cluster(
        "rooms", [*cpus, *gpus], [*between, *ways], default_bytes_per_s=1e9, default_latency_s=1e-4
    )


def planned(cluster: Cluster, sizes: Sizes = LARGE, **asked: object) -> gdp.Result:
    return PLANNERS["vllm"].plan(
        Question(decoder(sizes), cluster, costs=roofline, target="vllm", **asked)  # pyright: ignore[reportArgumentType]
    )


def options_of(result: gdp.Result) -> VllmOptions:
    question = result.question
    return vllm_options(
        question.graph, result.placement, question.cluster, np.array(result.score.peak_bytes)
    )


def test_devices_are_on_the_machine_of_the_processor_that_reaches_them() -> None:
    cluster = rooms(2, 1)
    assert cluster.device_names == ("cpu0", "cpu1", "m0g0", "m1g0", "m0g1")
    assert machines(cluster) == (0, 1, 0, 1, 0)
    assert numbers_on_machine(cluster) == (None, None, 0, 0, 1)
    assert set(machines(cluster_preset("cpu+4xt4-pcie4"))) == {0}
    assert set(machines(cluster_preset("4xcpu-core"))) == {0}
    assert machines(cluster_preset("2xdgx-spark-pcie4")) == (0, 1)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (1, 1), (3, 3), (2, 2, 2), (4,)])
def test_what_engines_can_number_is_what_is_looked_at(sizes: tuple[int, ...]) -> None:
    """Ranks are numbered machine by machine, as many on each."""
    cluster = rooms(*sizes)
    at, gpus = machines(cluster), [d for d in range(cluster.num_devices) if d >= len(sizes)]
    for size, copies in itertools.product(range(1, len(gpus) + 1), (1, 2, 3)):
        groups = {group[0]: group for group in grouped(cluster, gpus, size)}
        for twins, every in arrangements(cluster, list(groups.values()), copies, gpus):
            rows = list(zip(*([lead, *others] for lead, others in twins.items()), strict=True))
            assert len(rows) == copies
            used = [d for row in rows for lead in row for d in groups[lead]]
            assert len(set(used)) == len(used)
            for row in rows:
                where = [at[d] for lead in row for d in groups[lead]]
                if len(set(where)) > 1:
                    assert len({where.count(m) for m in set(where)}) == 1
                    assert every or len(row) == 1
                    assert copies == 1


@pytest.mark.parametrize(("network", "spans"), [(1e9, False), (1e12, True)])
def test_one_command_a_machine(network: float, spans: bool) -> None:
    """Two GPUs on two machines each: stages are cut between the machines where memory wants it, and
    all four divide the layers where the network is as fast as what is inside."""
    latency_s = 1e-7 if spans else 1e-4
    result = planned(rooms(2, 2, network=network, latency_s=latency_s, size=16_000_000))
    options = options_of(result)
    assert options.tensor * len(options.partition) == 4
    assert (options.tensor == 4) == spans == ("are on 2 machines" in result.notes[-1])
    first, second = options.commands
    for rank, own in enumerate((first, second)):
        words = own.arguments()
        assert words[words.index("--nnodes") :][:6] == [
            "--nnodes", "2", "--node-rank", str(rank), "--master-addr", "cpu0",
        ]  # fmt: skip
        assert own.environment()["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert ("--headless" in words) == (rank == 1)
        words = of_sglang(own)
        assert words[words.index("--host") :][:8] == [
            "--host", f"cpu{rank}", "--dist-init-addr", "cpu0:20000", "--nnodes", "2",
            "--node-rank", str(rank),
        ]  # fmt: skip
    assert "--nnodes" in options.why()
    assert "--nnodes" in why_of_sglang(options)


def test_stages_over_unequal_machines_are_as_many_on_each() -> None:
    """Only one GPU of each machine, or both of the first, can be ranks."""
    result = planned(rooms(2, 1, size=24_000_000), replace(LARGE, keys=1, heads=7))
    options = options_of(result)
    assert [own.environment()["CUDA_VISIBLE_DEVICES"] for own in options.commands] == ["0,1"]
    assert "--nnodes" not in options.arguments()


def test_copies_on_several_machines_are_servers_of_their_own() -> None:
    options = options_of(planned(rooms(2, 2), objective="throughput", copies=2))
    assert options.data == 2
    assert [own.nodes for own in options.servers] == [("cpu0",), ("cpu1",)]
    assert [own.environment()["CUDA_VISIBLE_DEVICES"] for own in options.commands] == ["0,1", "0,1"]
    ports = {own.arguments()[own.arguments().index("--port") + 1] for own in options.commands}
    assert len(ports) == 2
    assert "share their experts" not in options.why()["servers"]


def test_caches_are_sent_from_machine_to_machine() -> None:
    both = VllmOptions((4,), (0, 0), 0.9, 64, data=2, role="prefill", machines=("a", "b"))
    hosts = [own.environment()["VLLM_NIXL_SIDE_CHANNEL_HOST"] for own in both.commands]
    assert hosts == ["a", "b"]
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in both.why()
    one = replace(both, machines=())
    assert all("VLLM_NIXL_SIDE_CHANNEL_HOST" not in own.environment() for own in one.commands)
    assert [of_sglang(own)[-2:] for own in both.commands] == [["--host", "a"], ["--host", "b"]]


def used(placement: Placement) -> set[str]:
    return {name for name, count in placement.ops_on.items() if count}


@pytest.mark.parametrize("target", [name for name, row in PLANNERS.items() if not row.machines])
def test_one_process_is_on_the_machine_of_the_host(target: str) -> None:
    """Either its plan is, or there is none for another kind of model than these."""
    graph, cluster = decoder(), rooms(1, 2)
    question = Question(graph, cluster, costs=roofline, target=target, offload=None,
                        search=gdp.Search(seconds=None, evaluations=20))  # fmt: skip
    try:
        result = PLANNERS[target].plan(question)
    except gdp.GdpError:
        return
    assert used(result.placement) <= {"cpu0", "m0g0"}
    assert any("devices of other machines" in note for note in result.notes)


@pytest.mark.parametrize("target", [name for name, row in EXPORTERS.items() if not row.machines])
def test_no_export_for_one_process_names_the_device_of_another_machine(
    target: str, tmp_path: Path
) -> None:
    graph, cluster = decoder(), rooms(1, 1)
    where = np.where(graph.is_io, cluster.host, 3)
    placement = make_placement(graph, cluster, where)
    job = ExportJob(Question(graph, cluster), placement, tmp_path / "out", OWN_FILES_ONLY)
    with pytest.raises(PlacementError, match="'m1g0' is on the machine of 'cpu1'"):
        EXPORTERS[target].write(job)


def test_torchrun_numbers_ranks_machine_by_machine() -> None:
    cluster = rooms(2, 1)
    lines = torchrun_lines(cluster, [2, 4, 3], "run.py")
    assert [line.split()[1:7] for line in lines] == [
        ["--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "2"],
        ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "1"],
    ]
    assert torchrun_lines(cluster, [2, 4], "run.py") == []
    with pytest.raises(PlacementError, match="machine by machine"):
        torchrun_lines(cluster, [2, 3, 4], "run.py")


def test_devices_that_divide_ops_in_torch_go_machine_by_machine() -> None:
    question = Question(decoder(LARGE), rooms(2, 2, network=1e12, latency_s=1e-7), costs=roofline)
    result = PLANNERS["tensor-parallel"].plan(question)
    assert in_order_of_machines(question.cluster, result.placement.splits[0].devices)


def test_layers_follow_each_other_machine_by_machine() -> None:
    graph, cluster = decoder(LARGE), rooms(2, 2, size=9_000_000)
    options = options_of(planned(cluster))
    assert options.machines == tuple(sorted(options.machines))
    assert layer_row(graph).num_layers == sum(options.partition)
