"""Options that say which machine, with which limits, and where independent tasks run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gdp.base.errors import ClusterError
from gdp.cli.options.decorators import alone, option, pass_dataclass, pass_one, prefix_errors

if TYPE_CHECKING:
    from gdp.base.tasks import Engine
    from gdp.cluster.types import Cluster
    from gdp.graph.op_graph import OpGraph
    from gdp.placement.device_maps import DeviceMap
    from gdp.placement.placement import Placement


NO_BACKEND = "--backend is of llama.cpp alone: it is for .gguf models, leave it out for others"


@dataclass(frozen=True)
class ClusterOptions:
    """A cluster, and limits of its memory."""

    cluster: str | None = option(
        "--cluster",
        metavar="CLUSTER",
        help="TOML file, or preset such as cpu+2xt4-pcie4 or 2xcpu-core; default: this machine.",
    )
    max_memory: tuple[str, ...] = option(
        "--max-memory", metavar="0=20GiB,cpu=30GiB", multiple=True,
        help="Memory limits by device; may be repeated.",
    )  # fmt: skip
    reserve: tuple[str, ...] = option(
        "--reserve", metavar="SIZE|0=2GiB,cpu=8GiB", multiple=True,
        help="Memory kept free of each accelerator or device, for drivers and runtimes; default: "
        "what `gdp devices` shows. 0: none.",
    )  # fmt: skip

    backend: str | None = option(
        "--backend", metavar="cuda|rocm|vulkan|sycl|metal",
        help="Backend of llama.cpp on all GPUs; default: cuda, rocm, sycl or metal, by the maker.",
    )  # fmt: skip

    def load(self) -> "Cluster":
        """The file, preset or this machine, under the memory limits; raises `ClusterError`."""
        from gdp.cluster.types import Cluster

        return self._limited(Cluster.load(self.cluster))

    def require_backend(self, graph: "OpGraph | None") -> None:
        """Raise `UsageError` where a backend of llama.cpp is given for a graph that nothing but
        other runtimes compute, or for none."""
        if self.backend is not None and (graph is None or graph.source != "gguf"):
            raise click.UsageError(NO_BACKEND)

    def _limited(self, cluster: "Cluster") -> "Cluster":
        return limited([cluster], self.max_memory, self.reserve, self.backend)[0]

    def of(self, placed: "Placement | DeviceMap") -> "Cluster":
        """The cluster of a placement, this machine if it names none, under its own limits and
        reserves unless `--max-memory` or `--reserve` set others; raises `PlacementError` if another
        cluster is given."""
        from gdp.cluster.types import Cluster

        question = getattr(placed, "question", None)
        machine = None if question is None else question.machine()
        if question is None or machine is None:
            return self.load()
        if self.cluster is not None:
            question.require_cluster(Cluster.load(self.cluster))
        return self._limited(machine)


def limited(
    clusters: "Iterable[Cluster]", max_memory: Sequence[str], reserve: Sequence[str],
    backend: str | None = None,
) -> "list[Cluster]":  # fmt: skip
    """Clusters under the values of `--max-memory`, `--reserve` and `--backend`, each under those of
    the devices that it has; raises `ClusterError` where none has a device that is named."""
    from gdp.cluster.file import parse_max_memory, with_backend, with_max_memory
    from gdp.cluster.reserve import parse_reserve, with_reserve

    clusters = list(clusters)
    for flag, texts, parse, limit in (
        ("--reserve", reserve, parse_reserve, with_reserve),
        ("--max-memory", max_memory, parse_max_memory, with_max_memory),
    ):
        with prefix_errors(flag):
            sizes = parse(",".join(texts)) if texts else {}
            own = [{key: sizes[key] for key in sizes if _has(c, key)} for c in clusters]
            if unknown := {key: sizes[key] for key in sizes if not any(key in o for o in own)}:
                limit(clusters[0], unknown)  # raises
            clusters = [limit(c, mine) for c, mine in zip(clusters, own, strict=True)]
    with prefix_errors("--backend"):
        return [with_backend(c, backend) for c in clusters]


def _has(cluster: "Cluster", key: str) -> bool:
    """True where a cluster has the device that a key of a limit means."""
    from gdp.cluster.types import devices_of_key

    try:
        return bool(devices_of_key(cluster, key, ""))
    except ClusterError:
        return False


cluster = pass_dataclass("cluster", ClusterOptions)
max_memory, reserve = alone(ClusterOptions, "max_memory"), alone(ClusterOptions, "reserve")
backend = alone(ClusterOptions, "backend")
"""Of a command that takes several clusters: what `limited` takes."""


def _engine(processes: int | None, ray: str | None) -> "Engine":
    from gdp.base.cores import num_cores
    from gdp.base.tasks import Engine

    return Engine(processes or num_cores(), ray)


engine = pass_one("engine", _engine, {
    "processes": click.option("--processes", type=click.IntRange(1),
                              help="On this machine; default: one a core."),
    "ray": click.option("--ray", metavar="ADDRESS",
                        help='A Ray cluster instead: HOST:PORT, "auto", or "local" for one here.'),
})  # fmt: skip
"""Processes or Ray cluster for independent tasks."""
