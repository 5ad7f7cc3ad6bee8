"""Problems to learn from: graphs of the corpus by split and random ones, random clusters, memory
from ample to just enough.

An instance is named by its graph, a seed and the objective, so that labels can refer to it.
"""

import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from jaxtyping import Float

from gdp.base.errors import GdpError
from gdp.base.files.reading import Kind, is_below, is_there, read_bytes, read_json, shipped
from gdp.base.files.writing import indented_json, write_atomic
from gdp.cluster.types import UNLIMITED_BYTES, Cluster, Device, Link, make_cluster
from gdp.costs.base import roofline
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph
from gdp.problem.problem import Problem, make_problem

LINK_SPEEDS = {"ethernet": 3e9, "pcie3": 12e9, "pcie4": 25e9, "pcie5": 50e9, "nvlink": 200e9}
"""Typical bytes per second one way."""


class Instance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a problem."""

    graph: str  # as the source of graphs knows it
    cluster: int  # seed of the random cluster
    objective: Literal["latency", "throughput"] = "latency"
    memory: float = 0.0  # limit over the fair share of the footprint; 0: unlimited

    @property
    def key(self) -> str:
        """The text that names it in files; `parse_key` reads it back."""
        return f"{self.graph}|{self.cluster}|{self.objective}|{self.memory:g}"

    @property
    def text(self) -> str:
        """The problem in words.

        >>> Instance("bert", 3, "latency", 1.2).text
        'bert on random machine 3, latency, memory 1.2 times the fair share'
        """
        memory = f"memory {self.memory:g} times the fair share" if self.memory else "ample memory"
        return f"{self.graph} on random machine {self.cluster}, {self.objective}, {memory}"


def parse_key(key: str) -> Instance:
    """The instance of a key; raises `ValueError` on anything else.

    >>> parse_key("layered-60-1|3|latency|0").cluster
    3
    """
    parts = key.split("|")
    if len(parts) != 4:
        raise ValueError(f"an instance is GRAPH|CLUSTER|OBJECTIVE|MEMORY, got {key!r}")
    raw = {"graph": parts[0], "cluster": parts[1], "objective": parts[2], "memory": parts[3]}
    return msgspec.convert(raw, Instance, strict=False)


Source = Callable[[str], OpGraph]
"""Function from a name to its graph."""


def make(instance: Instance, source: Source, cluster: Cluster | None = None) -> Problem:
    """The problem that an instance names; on a given cluster instead of the random one."""
    graph = source(instance.graph)
    if cluster is None:
        cluster = random_cluster(instance.cluster, graph)
    problem = make_problem(graph, cluster, roofline(graph, cluster), instance.objective)
    return limit_memory(problem, instance.memory) if instance.memory else problem


def draw(
    rng: np.random.Generator,
    graphs: list[str],
    *,
    limited: float = 0.3,
    memory: tuple[float, float] = (1.15, 2.5),
) -> Instance:
    """A random instance over the graphs named, a share of them with limited memory."""
    tight = rng.random()
    factor = 0.0 if tight < 1.0 - limited else round(float(rng.uniform(*memory)), 2)
    return Instance(
        graph=graphs[int(rng.integers(len(graphs)))],
        cluster=int(rng.integers(1 << 30)),
        objective="throughput" if rng.random() < 0.25 else "latency",
        memory=factor,
    )


def limit_memory(problem: Problem, factor: float) -> Problem:
    """The problem with `factor` times its fair share of memory on every device.

    The fair share is the footprint on one device over the number of devices, and at least what the
    largest group of ops needs by itself.
    """
    graph, d = problem.graph, problem.num_devices
    limit = int(factor * max(footprint_bytes(problem) / d, largest_group_bytes(problem)))
    devices = tuple(replace(x, memory_bytes=limit) for x in problem.cluster.devices)
    old = problem.cluster
    cluster = Cluster(
        old.name, devices, old.link_bytes_per_s, old.link_latency_s, old.channel, old.host
    )
    return make_problem(graph, cluster, problem.compute_s, problem.objective)


def footprint_bytes(problem: Problem) -> int:
    """Peak memory of the whole graph on its best single device, limits aside."""
    from gdp.methods.priorities import priority
    from gdp.sim.score import score

    device = int(np.argmin(np.where(problem.allowed, problem.compute_s, 1e6).sum(axis=0)))
    devices = np.where(problem.allowed[:, device], device, problem.allowed.argmax(axis=1))
    return int(score(problem, devices.astype(np.int64), priority(problem)).peak_bytes.sum())


def largest_group_bytes(problem: Problem) -> int:
    """Weights, inputs and outputs of the group of ops that needs most."""
    graph = problem.graph
    need = graph.weight_bytes.astype(np.int64).copy()
    np.add.at(need, graph.producer, graph.held_bytes)
    np.add.at(need, graph.use_op, graph.held_bytes[graph.use_tensor])
    group = np.zeros(problem.num_groups, dtype=np.int64)
    np.maximum.at(group, problem.group, need - graph.weight_bytes)
    np.add.at(group, problem.group, graph.weight_bytes)
    return int(group.max())


def random_cluster(seed: int, graph: OpGraph | None = None) -> Cluster:
    """2 to 8 devices, identical or up to 20 times as fast as each other; links from Ethernet to
    NVLink.

    With a graph, half of the clusters have links scaled such that moving all its tensors takes 0.05
    to 5 times as long as its arithmetic: where placement is neither trivial nor hopeless.
    """
    rng = np.random.default_rng(seed)
    d = int(rng.choice([2, 2, 3, 4, 4, 4, 5, 6, 8, 8]))
    speeds = _speeds(rng, d)
    flop_per_s = 10 ** rng.uniform(12.0, 14.0) / speeds
    dispatch_s = float(rng.choice([0.0, 0.0, 5e-6, 10e-6]))
    per_segment = rng.random() < 0.15
    devices = [
        Device(
            name=f"d{i}",
            kind="random",
            flop_per_s={"default": float(flop_per_s[i])},
            bytes_per_s=float(flop_per_s[i] / rng.choice([10.0, 20.0, 50.0])),
            memory_bytes=UNLIMITED_BYTES,
            dispatch_s=dispatch_s * (5 if per_segment else 1),
            dispatch_per="segment" if per_segment else "op",
        )
        for i in range(d)
    ]
    if speeds.min() == speeds.max():
        devices = [replace(devices[0], name=x.name) for x in devices]
    base = float(rng.choice(list(LINK_SPEEDS.values())))
    if graph is not None and rng.random() < 0.5:
        work_s = roofline(graph, make_cluster("one", devices[:1])).sum() + 1e-9
        moved = max(float(graph.tensor_bytes.sum()), 1.0)
        base = float(np.clip(moved / (work_s * 10 ** rng.uniform(-1.3, 0.7)), 1e8, 1e12))
    latency_s = float(rng.choice([1e-6, 5e-6, 10e-6, 25e-6]))
    return make_cluster(
        f"random{seed}",
        devices,
        _links(rng, d, base, latency_s),
        default_bytes_per_s=base,
        default_latency_s=latency_s,
    )


def _speeds(rng: np.random.Generator, d: int) -> Float[np.ndarray, "D"]:
    """Factor by which each device is slower than the fastest."""
    kind = rng.random()
    if kind < 0.5:
        return np.ones(d)
    if kind < 0.75:
        return np.where(np.arange(d) < max(1, d // 2), 1.0, rng.uniform(1.5, 6.0))
    return 10 ** rng.uniform(0.0, 1.3, size=d)


def _links(rng: np.random.Generator, d: int, base: float, latency_s: float) -> list[Link]:
    """Equal links, one shared bus, fast pairs, or every link its own speed."""
    pairs = [(i, j) for i in range(d) for j in range(i + 1, d)]
    kind = rng.random()
    if kind < 0.5:
        return []
    if kind < 0.65:
        return [Link(f"d{i}", f"d{j}", base, latency_s, channel="bus") for i, j in pairs]
    if kind < 0.85:
        fast = [(i, i + 1) for i in range(0, d - 1, 2)]
        return [Link(f"d{i}", f"d{j}", 6 * base, latency_s) for i, j in fast]
    return [
        Link(f"d{i}", f"d{j}", base * 10 ** rng.uniform(-0.5, 0.5), latency_s) for i, j in pairs
    ]


@functools.lru_cache(maxsize=4096)
def random_graph(name: str) -> OpGraph:
    """A random graph by name: `layered-OPS-SEED` or `series-OPS-SEED`."""
    if not is_random(name) or int(name.split("-")[1]) > MOST_RANDOM_OPS:
        raise GdpError(
            f"no graph {name[:80]!r}: a random one is layered-OPS-SEED or series-OPS-SEED with "
            f"{LEAST_RANDOM_OPS} to {MOST_RANDOM_OPS} ops, others are in the corpus"
        )
    kind, ops, seed = name.split("-")
    rng = np.random.default_rng([int(seed), int(ops), len(kind)])
    edges = _layered(rng, int(ops)) if kind == "layered" else _series_parallel(rng, int(ops))
    return _dress(name, rng, edges)


def _layered(rng: np.random.Generator, n: int) -> list[tuple[int, int]]:
    """Layers of random width; every op reads one to three ops of the layers just before."""
    width = max(2.0, n ** rng.uniform(0.2, 0.6))
    layer: list[int] = []
    level = 0
    while len(layer) < n:
        layer += [level] * int(rng.integers(1, int(2 * width)))
        level += 1
    layer = layer[:n]
    by_layer = [np.flatnonzero(np.array(layer) == k) for k in range(layer[-1] + 1)]
    edges = set()
    for op in range(len(by_layer[0]), n):
        for _ in range(int(rng.integers(1, 4))):
            back = min(int(rng.geometric(0.7)), layer[op])
            edges.add((int(rng.choice(by_layer[layer[op] - back])), op))
    return sorted(edges)


def _series_parallel(rng: np.random.Generator, n: int) -> list[tuple[int, int]]:
    """Chains of blocks; a block forks into branches of chains and joins again, some skip ahead."""
    edges: set[tuple[int, int]] = set()
    last, count = 0, 1
    while count < n - 1:
        ends = []
        for _ in range(int(rng.integers(1, 7))):
            tail = last
            for _ in range(int(rng.integers(1, 6))):
                if count >= n - 1:
                    break
                edges.add((tail, count))
                tail = count
                count += 1
            if tail != last:
                ends.append(tail)
        for end in ends:
            edges.add((end, count))
        if not ends:
            edges.add((last, count))
        last, count = count, count + 1
    return sorted(edges)


def _dress(name: str, rng: np.random.Generator, edges: list[tuple[int, int]]) -> OpGraph:
    """Ops with work, weights and tensors around a bare DAG, graph input and output included."""
    n = max(max(e) for e in edges) + 1
    heavy = rng.random(n) < rng.uniform(0.1, 0.6)
    flop = np.where(heavy, 10 ** rng.uniform(8.0, 10.5, n), 10 ** rng.uniform(5.0, 8.0, n))
    size = (10 ** rng.uniform(4.0, 6.8, n)).astype(np.int64)
    weight = np.where(heavy & (rng.random(n) < 0.7), 10 ** rng.uniform(5.0, 7.0, n), 0)
    sources = sorted(set(range(n)) - {b for _, b in edges})
    sinks = sorted(set(range(n)) - {a for a, _ in edges})
    tensors = [(i, int(size[i])) for i in range(n)] + [(n, int(size[sources[0]]))]
    uses = list(edges) + [(n, s) for s in sources] + [(s, n + 1) for s in sinks]
    types = ["MatMul" if h else "Add" for h in heavy] + [INPUT, OUTPUT]
    traffic = size.astype(float)  # each op reads and writes
    np.add.at(traffic, [b for _, b in edges], size[[a for a, _ in edges]])
    return make_graph(
        name, [f"op{i}" for i in range(n)] + ["input", "output"], types, tensors, uses,
        flop=np.concatenate([flop, [0, 0]]),
        memory_traffic_bytes=np.concatenate([traffic, [0, 0]]),
        weight_bytes=np.concatenate([weight, [0, 0]]).astype(np.int64),
    )  # fmt: skip


# The problems of a run, made when asked for


_MANIFEST = Kind(
    "manifest of graphs",
    GdpError,
    "make one of your own models: gdp corpus build --from MODEL... -o FOLDER (data/corpus travels "
    "with gdp)",
)

_GRAPH = Kind("graph of a corpus", GdpError, "build the corpus again")

KEPT = 1500
"""Problems kept in memory, the least recently used leave first."""


MANIFEST = "manifest.json"


class CorpusEntry(msgspec.Struct):
    """One graph of a corpus."""

    name: str
    file: str  # from the folder of the manifest
    num_ops: int
    split: Literal["train", "validation", "test"]
    family: str = ""  # models of one architecture, which are held out together
    kind: str = "model"  # forward, training, microbatched, or a model that was imported
    num_uses: int = 0
    gigaflop: float = 0.0
    arguments: dict[str, Any] = {}  # of its builder, or the model that it is from
    sha256: str = ""  # of the file; not checked where empty


class CorpusManifest(msgspec.Struct):
    """The graphs of a corpus, their source and licence."""

    graphs: list[CorpusEntry]
    source: str = ""
    licence: str = ""


def read_corpus(folder: Path) -> CorpusManifest:
    """The manifest of a corpus folder; raises `GdpError` where there is none, or it names files
    elsewhere."""
    manifest = read_json(folder / MANIFEST, _MANIFEST, CorpusManifest)
    for entry in manifest.graphs:
        if not is_below(entry.file):
            raise GdpError(
                f"{folder / MANIFEST}: the file of graph {entry.name!r} is {entry.file!r}, which "
                "leads out of the corpus; its graphs lie in its folder"
            )
    return manifest


def write_corpus(manifest: CorpusManifest, folder: Path) -> None:
    """Write the manifest, graphs sorted by name."""
    manifest.graphs.sort(key=lambda entry: entry.name)
    write_atomic(folder / MANIFEST, indented_json(manifest) + b"\n")


@dataclass
class Problems:
    """Names by split, and a cache of problems."""

    train: list[str]
    validation: list[str]
    test: list[str] = field(default_factory=list)
    corpus: Path | None = None
    files: dict[str, CorpusEntry] = field(default_factory=dict)
    get: Callable[[Instance], Problem] = field(init=False, repr=False)  # the problem it names

    def __post_init__(self) -> None:
        self.get = functools.lru_cache(maxsize=KEPT)(lambda instance: make(instance, self.graph))

    def family(self, name: str) -> str:
        """The family of a graph; random graphs are one."""
        return self.files[name].family if name in self.files else ""

    def graph(self, name: str) -> OpGraph:
        """A graph by name: from the corpus, or a random one."""
        if name in self.files:
            assert self.corpus is not None
            return _load(str(self.corpus / self.files[name].file), self.files[name].sha256)
        return random_graph(name)


@functools.lru_cache(maxsize=512)
def _load(path: str, sha256: str) -> OpGraph:
    from gdp.graph.file import load_graph
    from gdp.graph.fuse import fuse

    if sha256 and hashlib.sha256(read_bytes(path, _GRAPH, unpack=False)).hexdigest() != sha256:
        raise GdpError(f"{path} is not the file of its manifest; build the corpus again")
    # What is placed is what runtimes fuse, as in `gdp.place`.
    return fuse(load_graph(path)).graph


LEAST_RANDOM_OPS = 8
"""Fewer make no graph of layers or branches."""
MOST_RANDOM_OPS = 100_000
"""More take minutes to draw; names of random graphs come from files, too."""


def random_names(count: int, seed: int, min_ops: int, max_ops: int) -> list[str]:
    """Names of random graphs, half layered and half series-parallel, sizes log-uniform."""
    rng = np.random.default_rng([seed, 77])
    least, max_ops = max(min_ops, LEAST_RANDOM_OPS), min(max_ops, MOST_RANDOM_OPS)
    sizes = np.exp(rng.uniform(np.log(least), np.log(max(max_ops - 2, least)), size=count)).astype(
        int
    )
    return [
        f"{'layered' if k % 2 else 'series'}-{size}-{seed * 10000 + k}"
        for k, size in enumerate(sizes)
    ]


def is_random(name: str) -> bool:
    """True for a graph that is generated from its name, so that its label serves every recipe."""
    return re.fullmatch(r"(layered|series)-\d{1,9}-\d{1,18}", name) is not None


def load_problems(corpus: str, *, random_graphs: int, min_ops: int, max_ops: int) -> Problems:
    """The graphs of a corpus folder between two sizes, by its own split, and random graphs.

    A tenth of the random graphs, and all of them where there is no corpus, serve validation too.
    """
    drawn = random_names(random_graphs, 0, min_ops, max_ops)
    held = random_names(max(4, random_graphs // 10), 1, min_ops, max_ops)
    if not corpus:
        return Problems(train=drawn, validation=held)
    folder = Path(shipped(corpus))
    split: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    files = {}
    for entry in read_corpus(folder).graphs:
        if min_ops <= entry.num_ops <= max_ops and is_there(folder / entry.file):
            split[entry.split].append(entry.name)
            files[entry.name] = entry
    return Problems(
        train=split["train"] + drawn,
        validation=split["validation"],
        test=split["test"],
        corpus=folder,
        files=files,
    )
