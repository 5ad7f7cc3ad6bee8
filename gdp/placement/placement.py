"""The artefact: which device runs each op, as JSON with a schema version.

Its file keeps the question that it answers, so that later commands need the file alone: model,
machine, objective, demands, costs, and the runtime that it was planned for. Code is asked for.
"""

import dataclasses
import hashlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from jaxtyping import Int
from msgspec.structs import replace

from gdp.base.errors import PlacementError
from gdp.base.files.reading import Kind, is_file, is_there, read_bytes, read_json
from gdp.base.files.writing import indented_json, write_atomic
from gdp.base.terminal import html_table
from gdp.cluster.file import cluster_of_toml, cluster_toml
from gdp.cluster.reserve import default_reserve
from gdp.cluster.types import Cluster, Device
from gdp.graph.op_graph import OpGraph
from gdp.placement.constraints import Constraints
from gdp.placement.device_maps import DeviceMap, apply_device_map, read_device_map

LOG = logging.getLogger(__name__)

SCHEMA = 3
_KIND = Kind("placement file", PlacementError)
_COSTS_KIND = Kind("cost file", PlacementError)
COST_FILES = ("costs.npz", "gdp.json", "meta.json", "recipe.toml")
"""Files of a folder of costs, sorted; see `gdp.costs.cost_file`."""
_Rank = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_Index = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
MOST_FAULTS = 5
"""Of a file that are told at once."""
MOST_DRAFT_TOKENS = 64
"""Tokens that a small model proposes in a pass, at most."""
_DraftTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_DRAFT_TOKENS)]
_DRAFT_TEXT = re.compile(r"(\d{1,2}) (.+)")
_Share = Annotated[int, msgspec.Meta(ge=1, le=2**31)]

Teams = tuple[tuple[int, ...], ...]
"""Devices that take the samples of a full pipeline in turn: sample i runs on member i modulo their
number, each of which holds the weights. The ops of a team are placed on its first member. Members
ascend, a device is in one team at most, and inputs and outputs of the graph belong to none."""

DIVIDED = (
    "several devices compute each of its ops together, which PyTorch (gdp run of hf: models, --to "
    "tensor-parallel) and vLLM (--to vllm) do alone"
)
"""Why a runtime or a format does not take splits."""


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices that compute each op together, in shares of its heads or columns. Its ops are placed
    on the first one. A team of replicas has the first devices of its splits as members."""

    devices: tuple[_Index, ...]  # ascending, as indices into device_names
    experts: bool = False  # each holds whole experts, instead of columns of all
    shares: tuple[_Share, ...] = ()  # of each device, in proportion to each other; (): equal ones

    @property
    def parts(self) -> tuple[int, ...]:
        """The share of each device, equal ones as 1."""
        return self.shares if len(set(self.shares)) > 1 else (1,) * len(self.devices)

    @property
    def is_even(self) -> bool:
        """True where all devices have one share."""
        return len(set(self.parts)) == 1


class DraftModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Draft model of speculative decoding, placed with the target model."""

    model: str  # its configuration, with or without "hf:"
    tokens: _DraftTokens  # that it proposes in a pass


class QuestionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `Question` in the file of a placement, which keeps the digest of the graph."""

    model: str = ""  # path or spec with its options; empty for a graph or traced model
    dims: dict[str, int] = {}
    cluster: str = ""  # as TOML, memory limits included
    objective: str = "latency"
    constraints: Constraints = msgspec.field(default_factory=Constraints)
    costs: str = ""  # path, or "shipped"; empty for the default or a callable
    costs_sha256: str = ""  # of the files there
    target: str = ""  # runtime that was planned for
    granularity: str = ""
    offload: str = ""
    role: str = ""  # "prefill" or "decode" of disaggregated serving
    draft: DraftModel | str | None = None  # in older files a text, "K MODEL"; see `draft_model`
    whole: tuple[str, ...] = ()  # paths of the modules that the granularity kept whole

    def machine(self) -> Cluster | None:
        """The cluster, limits included."""
        return cluster_of_toml(self.cluster, "the placement's cluster") if self.cluster else None

    @property
    def draft_model(self) -> DraftModel | None:
        """The draft model; raises `PlacementError` if an older file's text of it is malformed."""
        if not isinstance(self.draft, str):
            return self.draft
        if not self.draft:
            return None
        told = _DRAFT_TEXT.fullmatch(self.draft)
        if told is None or not 1 <= int(told[1]) <= MOST_DRAFT_TOKENS:
            raise PlacementError(
                f"the placement has the draft {self.draft!r}, which must be an object such as "
                '{"model": "hf:small", "tokens": 4}'
            )
        return DraftModel(told[2], int(told[1]))

    def located(self, folder: Path) -> "QuestionRecord":
        """The question with paths that are found in a folder and not here made to lead there."""
        model, costs, draft = _found(self.model, folder), _found(self.costs, folder), None
        if self.draft_model is not None:
            draft = replace(self.draft_model, model=_found(self.draft_model.model, folder))
        return replace(self, model=model, costs=costs, draft=draft)

    def require_costs(self) -> str | None:
        """The costs, None for the default; raises `PlacementError` where their files changed."""
        if self.costs_sha256 and digest_of(self.costs) != self.costs_sha256:
            raise PlacementError(
                f"the placement was made with other costs than {self.costs!r} holds now; give "
                "--costs, or place again"
            )
        return self.costs or None

    def require_cluster(self, given: Cluster) -> None:
        """Raise `PlacementError` with the first difference where another cluster is given; devices
        with more memory than was planned with, or with the default reserve of as much, are
        the same."""
        own = self.machine()
        if own is None:
            return
        if own.device_names == given.device_names:
            limited = map(_limited_as, given.devices, own.devices)
            given = dataclasses.replace(given, devices=tuple(limited))
        if cluster_toml(given) != self.cluster:
            raise PlacementError(
                f"the placement was made for another cluster: {_difference(own, given)}; leave "
                "--cluster out to use its own, or place again"
            )

    def require_constraints(self, given: Constraints) -> None:
        """Raise `PlacementError` where other demands are given than the placement was made with."""
        if given not in (Constraints(), self.constraints):
            raise PlacementError(
                "the placement was made with other constraints; leave these out to use its own, or "
                "place again"
            )


def _limited_as(given: Device, own: Device) -> Device:
    """A device with the limit, reserve and pool of another one, where it has room for these."""
    room = given.memory_bytes
    if given.reserve_bytes == default_reserve(given):  # nothing was said of it
        room = given.total_bytes
    if room < own.memory_bytes or not own.total_bytes <= given.total_bytes:
        return given
    return dataclasses.replace(
        given, memory_bytes=own.memory_bytes, reserve_bytes=own.reserve_bytes,
        memory_pool=own.memory_pool,
    )  # fmt: skip


def digest_of(path: str) -> str:
    """SHA-256 of a file, or of a folder of costs: of the files that gdp writes there, with their
    names. "" where there is none. Nothing else of a folder is read, whatever a placement names."""
    root = Path(path)
    if is_file(root):
        return hashlib.sha256(read_bytes(root, _COSTS_KIND, unpack=False)).hexdigest()
    files = [root / name for name in COST_FILES if is_file(root / name)]
    if not files:
        return ""
    whole = hashlib.sha256()
    for file in files:
        data = read_bytes(file, _COSTS_KIND, unpack=False)
        whole.update(f"{file.name}\0".encode() + hashlib.sha256(data).digest())
    return whole.hexdigest()


def _found(spec: str, folder: Path) -> str:
    """The spec, or with its path below a folder if only that file exists."""
    prefix = "hf:" if spec.startswith("hf:") else ""
    path, mark, options = spec.removeprefix(prefix).partition("?")
    if not path or is_there(path) or not is_there(folder / path):
        return spec
    return f"{prefix}{folder / path}{mark}{options}"


def _difference(own: Cluster, given: Cluster) -> str:
    """The first thing that two clusters do not share."""
    if own.device_names != given.device_names:
        return f"devices {', '.join(own.device_names)}, not {', '.join(given.device_names)}"
    parts: tuple[tuple[str, Callable[[Cluster, int], Any]], ...] = (
        ("memory", lambda c, d: c.devices[d].memory_bytes),
        ("kind", lambda c, d: c.devices[d].kind),
        ("speed", lambda c, d: (c.devices[d].flop_per_s, c.devices[d].bytes_per_s)),
        ("description", lambda c, d: c.devices[d]),
    )
    for what, part in parts:
        for d, name in enumerate(own.device_names):
            if part(own, d) != part(given, d):
                return f"{what} of {name} differs"
    return "host or links differ" if own.name == given.name else f"{own.name!r}, not {given.name!r}"


@dataclass(frozen=True, eq=False)
class Assignment:
    """A device and a priority for every op of a problem, as arrays."""

    device: Int[np.ndarray, "N"]
    rank: Int[np.ndarray, "N"] | None = None  # None: first ready first
    teams: Teams = ()  # of replicated stages; their ops are on the first member
    splits: tuple[Split, ...] = ()  # whose first devices stand for all of their members


@dataclass(frozen=True, eq=False)
class Placement:
    """A device, and a priority, for every op of one graph."""

    graph_digest: str
    op_names: tuple[str, ...]
    device_names: tuple[str, ...]
    device: Int[np.ndarray, "N"]  # index into device_names
    rank: Int[np.ndarray, "N"]  # smallest first among ready ops; all equal: first ready first
    made_by: str = ""
    teams: Teams = ()  # of replicated stages, as indices into device_names
    simplicity_cost: float = 0.0  # share of the best value found that fewer cuts cost
    streamed_bytes: int = 0  # kept free for offloaded weights; see gdp.costs.offload
    question: QuestionRecord | None = None  # that it answers
    read_from: str = ""  # its file: what the question names, nobody has typed in this process
    splits: tuple[Split, ...] = ()  # devices that compute each op together

    def __post_init__(self) -> None:
        self.device.setflags(write=False)
        self.rank.setflags(write=False)

    @property
    def ops_on(self) -> dict[str, int]:
        """Number of ops on each device; those of replica groups and splits count for each of their
        members."""
        counts = np.bincount(self.device, minlength=len(self.device_names))
        for d, home in self.homes.items():
            counts[d] = counts[home]
        return dict(zip(self.device_names, counts.tolist(), strict=True))

    @property
    def homes(self) -> dict[int, int]:
        """The device on which the ops are placed that each member of replica groups and splits
        computes, too."""
        lead = {d: team[0] for team in self.teams for d in team}
        firsts = {d: split.devices[0] for split in self.splits for d in split.devices}
        return lead | {d: lead.get(first, first) for d, first in firsts.items()}

    def device_map(self) -> dict[str, str]:
        """The device's name of every op, by the op's name; `make_placement` takes such a map."""
        return {op: self.device_names[d] for op, d in zip(self.op_names, self.device, strict=True)}

    def __repr__(self) -> str:
        ops = ", ".join(f"{name} {count}" for name, count in self.ops_on.items())
        return f"<Placement of {len(self.op_names)} ops: {ops}; {self.made_by or 'made by hand'}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return html_table(("device", "ops"), self.ops_on.items())


@runtime_checkable
class HasPlacement(Protocol):
    """An object that carries a placement, such as a `Result`."""

    @property
    def placement(self) -> Placement:
        """The artefact."""
        ...


Placed = str | os.PathLike[str] | Placement | HasPlacement | DeviceMap
"""Everything that library calls accept as a placement: a path, a placement, a result, a map."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON form of a placement."""

    schema: int
    graph_digest: str
    made_by: str
    devices: list[str]
    ops: list[str]
    device: list[_Index]
    rank: list[_Rank]
    teams: list[list[_Index]] = []
    simplicity_cost: float = 0.0
    streamed_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0
    question: QuestionRecord | None = None
    splits: list[Split] = []


def make_placement(
    graph: OpGraph,
    cluster: Cluster,
    device: Int[np.ndarray, "N"] | DeviceMap,
    rank: Int[np.ndarray, "N"] | None = None,
    made_by: str = "",
    teams: Teams = (),
    splits: tuple[Split, ...] = (),
) -> Placement:
    """A placement of `graph` on `cluster`; without ranks, first ready first.

    `device` is an index into the cluster's devices for every op, or a map from names of ops or
    module paths to devices (the longest path that holds an op counts, "" holds all): names, as
    `Placement.device_map` returns, or numbers of accelerators, "cpu" and "disk", as in a
    `device_map` of accelerate. What is an input or output of the model is on the host unless it is
    named; ops without weights that a map of modules leaves out are where their inputs are made.
    Raises `PlacementError` for an op that the map leaves out or a device that is unknown.
    """
    names, streamed = cluster.device_names, 0
    if isinstance(device, Mapping):
        names, device, streamed = apply_device_map(graph, cluster, device)
    return Placement(
        graph_digest=graph.digest,
        op_names=graph.op_names,
        device_names=names,
        device=np.array(device, dtype=np.int64),
        rank=np.zeros(graph.num_ops, np.int64) if rank is None else np.array(rank, np.int64),
        made_by=made_by,
        teams=teams,
        streamed_bytes=streamed,
        splits=splits,
    )


def team_faults(teams: Teams, num_devices: int) -> Iterable[str]:
    """Violations of the replica groups, whatever the cluster."""
    members = [d for team in teams for d in team]
    for team in teams:
        if len(team) < 2 or list(team) != sorted(set(team)):
            yield f"team {_short(team)} must be two devices or more, ascending"
    if any(not 0 <= d < num_devices for d in members):
        yield f"a team names a device outside 0..{num_devices - 1}"
    twice = _given_twice(members)
    if twice and all(len(set(team)) == len(team) for team in teams):
        yield f"device {min(twice)} is in two teams"


def _given_twice(members: Iterable[int]) -> list[int]:
    return [device for device, times in Counter(members).items() if times > 1]


def _short(numbers: Sequence[int]) -> str:
    text = str(list(numbers[:20]))
    return text if len(numbers) <= 20 else f"{text[:-1]}, ...]"


def split_faults(splits: Iterable[Split], teams: Teams, num_devices: int) -> Iterable[str]:
    """Violations of the splits, whatever the cluster."""
    splits = list(splits)
    members = [d for split in splits for d in split.devices]
    for split in splits:
        if len(split.devices) < 2 or list(split.devices) != sorted(set(split.devices)):
            yield f"split {_short(split.devices)} must be two devices or more, ascending"
        if split.shares and len(split.shares) != len(split.devices):
            yield f"split {_short(split.devices)} has {len(split.shares)} shares; give one a device"
        if any(not isinstance(share, int) or share < 1 for share in split.shares):
            yield f"shares {_short(split.shares)} must be whole numbers of 1 and more, such as 7, 3"
    if any(not 0 <= d < num_devices for d in members):
        yield f"a split names a device outside 0..{num_devices - 1}"
    if twice := _given_twice(members):
        yield f"device {min(twice)} is in two splits"
    others = {d for split in splits for d in split.devices[1:]}
    for d in sorted(others & {d for team in teams for d in team}):
        yield f"device {d} is in a team, of which only the first device of a split can be"


def check(placement: Placement, graph: OpGraph, cluster: Cluster) -> list[str]:
    """All that keeps a placement from fitting a graph and a cluster; empty when it fits."""
    problems: list[str] = []
    if placement.op_names != graph.op_names:
        missing = sorted(set(graph.op_names) - set(placement.op_names))
        extra = sorted(set(placement.op_names) - set(graph.op_names))
        parts = [f"the placement is for another graph than {graph.name!r}"]
        if missing:
            parts.append(f"{len(missing)} ops have no device, first {missing[0]!r}")
        if extra:
            parts.append(f"{len(extra)} ops are unknown, first {extra[0]!r}")
        if not (missing or extra):
            parts.append("the ops come in another order")
        problems.append("; ".join(parts))
    elif placement.graph_digest not in graph.digests:
        problems.append(
            f"the placement is for another version of graph {graph.name!r}: the op names agree but "
            "sizes or edges differ; place the model again"
        )
    if placement.device_names != cluster.device_names:
        problems.append(
            f"the placement names devices {', '.join(placement.device_names)}, "
            f"cluster {cluster.name!r} has {', '.join(cluster.device_names)}"
        )
    if len(placement.device) and (
        placement.device.min() < 0 or placement.device.max() >= len(placement.device_names)
    ):
        problems.append("a device index lies outside the list of devices")
    faults = list(team_faults(placement.teams, len(placement.device_names)))
    faults += split_faults(placement.splits, placement.teams, len(placement.device_names))
    if placement.splits and not (problems or faults):
        faults = list(_split_misfits(placement, graph))
    if placement.teams and not (problems or faults):
        faults = list(_team_misfits(placement, graph, cluster))
    return problems + faults or _misplaced(placement, graph, cluster)


def _split_misfits(placement: Placement, graph: OpGraph) -> Iterable[str]:
    """Ops on members of a split that are not its first."""
    others = [d for split in placement.splits for d in split.devices[1:]]
    stray = np.flatnonzero(np.isin(placement.device, others) & ~graph.is_io)
    if stray.size:
        name = placement.device_names[placement.device[stray[0]]]
        yield (
            f"op {graph.op_names[stray[0]]!r} is on {name}, which shares the ops of a split; they "
            "are placed on its first device"
        )


def _team_misfits(placement: Placement, graph: OpGraph, cluster: Cluster) -> Iterable[str]:
    """Violations of the replica groups of a placement on a graph and a cluster."""
    if graph.is_backward.any():
        yield f"graph {graph.name!r} is a training step, whose stages cannot be replicated"
    names = cluster.device_names
    at_home = np.isin(graph.colocate, graph.colocate[graph.is_io]) & ~graph.is_io
    for team in placement.teams:
        bound = np.flatnonzero((placement.device == team[0]) & at_home)
        if bound.size:
            yield (
                f"op {graph.op_names[bound[0]]!r} must be where an input or output of the model "
                f"is, so that {', '.join(names[d] for d in team)} cannot take its samples in turn"
            )
        here = [cluster.devices[d] for d in team]
        if len({(device.kind, device.supported) for device in here}) > 1:
            kinds = ", ".join(f"{device.name} ({device.kind})" for device in here)
            yield f"the devices of a team must be of one kind, got {kinds}"
        stray = np.flatnonzero(np.isin(placement.device, team[1:]) & ~graph.is_io)
        if stray.size:
            op = int(stray[0])
            yield (
                f"op {graph.op_names[op]!r} is on {names[placement.device[op]]}, which serves in "
                f"the team of {names[team[0]]}; ops of a team are placed on its first device"
            )


def _misplaced(placement: Placement, graph: OpGraph, cluster: Cluster) -> list[str]:
    """Ops on devices that cannot hold them, of a placement whose names agree."""
    problems: list[str] = []
    device, names = placement.device, cluster.device_names

    def name(ops: Int[np.ndarray, "M"], what: str) -> None:
        if ops.size:
            op = int(ops[0])
            problems.append(
                f"{what}: {ops.size} of {graph.num_ops} ops, first {graph.op_names[op]!r} "
                f"({graph.op_types[op]}) on {names[device[op]]}"
            )

    away = np.flatnonzero(graph.is_io & (device != cluster.host))
    name(away, f"inputs and outputs of the model belong to the host {names[cluster.host]}")
    for d, entry in enumerate(cluster.devices):
        if entry.supported is not None:
            mine = np.flatnonzero((device == d) & ~graph.is_io)
            alien = [op for op in mine if graph.op_types[op] not in entry.supported]
            name(np.array(alien, np.int64), f"{entry.name} does not support what it is given")
    _, first, group = np.unique(graph.colocate, return_index=True, return_inverse=True)
    torn = np.flatnonzero(device != device[first[group]])
    name(torn, "ops that must share a device do not")
    return problems


def require(placement: Placement, graph: OpGraph, cluster: Cluster) -> None:
    """Raise `PlacementError` with every violation."""
    if problems := check(placement, graph, cluster):
        raise PlacementError("; ".join(problems))
    if placement.graph_digest == graph.earlier_digest:
        LOG.warning(
            "the placement was made by an earlier version, whose files do not say which ops share "
            "weights or run backward; it is taken as it is, place the model again to be sure"
        )


def save_placement(placement: Placement, path: str | os.PathLike[str]) -> None:
    """Write the JSON file; an interrupted write leaves the previous file intact."""
    document = _File(
        schema=SCHEMA,
        graph_digest=placement.graph_digest,
        made_by=placement.made_by,
        devices=list(placement.device_names),
        ops=list(placement.op_names),
        device=placement.device.tolist(),
        rank=placement.rank.tolist(),
        teams=[list(team) for team in placement.teams],
        simplicity_cost=placement.simplicity_cost,
        streamed_bytes=placement.streamed_bytes,
        question=placement.question,
        splits=list(placement.splits),
    )
    write_atomic(path, indented_json(document))


def read_placed(placed: Placed) -> Placement | DeviceMap:
    """The placement or device map of a path, a placement, a result or a map."""
    if isinstance(placed, str | os.PathLike) and (entries := read_device_map(placed)) is not None:
        return entries
    return placed if isinstance(placed, Mapping) else load_placement(placed)


def placement_on(placed: Placed, graph: OpGraph, cluster: Cluster) -> Placement:
    """The placement that anything that stands for one is on a graph and a cluster."""
    read = read_placed(placed)
    if isinstance(read, Placement):
        return read
    return make_placement(graph, cluster, read, made_by="a device map")


def load_placement(path: Placed) -> Placement:
    """Read a placement file; raises `PlacementError` when it is malformed.

    A placement is returned as it is, and that of a result.
    """
    if isinstance(path, Placement):
        return path
    if isinstance(path, HasPlacement):
        return path.placement
    if not isinstance(path, str | os.PathLike):
        raise PlacementError(
            "a placement is a file, what gdp.load_placement or gdp.make_placement return, or a "
            f"result of gdp.place, not of type {type(path).__name__}"
        )
    document = read_json(path, _KIND, _File)
    if document.schema != SCHEMA:
        raise PlacementError(f"{path} has schema {document.schema}, this gdp reads {SCHEMA}")
    n = len(document.ops)
    if len(document.device) != n or len(document.rank) != n:
        raise PlacementError(
            f"{path}: {n} ops, {len(document.device)} devices, {len(document.rank)} ranks; "
            "the three lists must be equally long"
        )
    device = np.array(document.device, dtype=np.int64)
    if n and (device.min() < 0 or device.max() >= len(document.devices)):
        raise PlacementError(f"{path}: a device index lies outside 0..{len(document.devices) - 1}")
    teams = tuple(tuple(team) for team in document.teams)
    count = len(document.devices)
    faults = chain(team_faults(teams, count), split_faults(document.splits, teams, count))
    if first := list(islice(faults, MOST_FAULTS)):
        raise PlacementError(f"{path}: {'; '.join(first)}")
    return Placement(
        graph_digest=document.graph_digest,
        op_names=tuple(document.ops),
        device_names=tuple(document.devices),
        device=device,
        rank=np.array(document.rank, dtype=np.int64),
        made_by=document.made_by,
        teams=teams,
        simplicity_cost=document.simplicity_cost,
        streamed_bytes=document.streamed_bytes,
        question=document.question and document.question.located(Path(path).parent),
        read_from=os.fspath(path),
        splits=tuple(document.splits),
    )
