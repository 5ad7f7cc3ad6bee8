"""Parts of a decoder's parameters on the devices of a split.

The division of the graph (`gdp.splits`) says which ops have columns or rows of a weight; here these
are spans along an axis of the parameters of modules, and the sums and joins behind modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gdp.base.errors import PlacementError
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.ops.rule import EXPERTS
from gdp.placement.placement import Placement, Split
from gdp.splits.division import Division, Pieces, Role, Unit
from gdp.splits.members import known_division
from gdp.splits.sharding import Shares, unit_span

Span = tuple[int, int]
"""First index of an axis, and the one behind the last."""


@dataclass(frozen=True)
class DividedParameter:
    """One parameter, divided along an axis: the spans of each rank, joined in their order."""

    axis: int
    size: int  # of the whole axis
    spans: tuple[tuple[Span, ...], ...]


@dataclass
class Shards:
    """Differences of a rank from the whole model, by paths of parameters or modules."""

    parameters: dict[str, DividedParameter] = field(default_factory=dict)
    first_only: list[str] = field(default_factory=list)  # biases, added by the first rank alone
    sums: list[str] = field(default_factory=list)  # modules whose outputs are added up
    look_ups: list[str] = field(default_factory=list)  # tables, each rank with some rows
    joins: list[str] = field(default_factory=list)  # modules whose outputs are joined
    heads: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # and those of keys


def the_split(graph: OpGraph, placement: Placement, cluster: Cluster) -> Split:
    """The split that computes the whole model.

    Raises:
        PlacementError: Ops are elsewhere, or experts are divided as a whole.
    """
    if len(placement.splits) != 1 or placement.teams:
        raise cannot(f"{len(placement.splits)} groups of devices compute it, and one has to")
    (split,) = placement.splits
    stray = np.flatnonzero((placement.device != split.devices[0]) & ~graph.is_io)
    if stray.size:
        name = cluster.device_names[int(placement.device[stray[0]])]
        raise cannot(f"op {graph.op_names[stray[0]]!r} is on {name!r} alone")
    if split.experts:
        raise cannot("whole experts are on each device, and only their columns can be divided")
    return split


def cannot(why: str) -> PlacementError:
    """An error with the reason and the remedy."""
    return PlacementError(
        f"modules of transformers cannot be divided so: {why}; place the model with --for "
        "tensor-parallel"
    )


def shards_of(graph: OpGraph, split: Split, module: Any) -> Shards:
    """Parameters and modules of a decoder as the devices of a split divide them.

    Args:
        graph: Of the module, of one phase or of a request.
        split: Its devices and their shares.
        module: The model of transformers; may lie on the meta device.

    Raises:
        PlacementError: A divided op belongs to a module of unknown form.
        ModelError: The layers do not divide so in whole units.
    """
    division, shards = known_division(graph), Shards()
    ranks = _Ranks(division, Shares(split.parts))
    partial, detail = set(division.partial), graph.detail
    attends = np.flatnonzero(division.columns.role == Role.ATTEND).tolist()
    head_sizes = {shape[-1] for op in attends for shape in detail[op].input_shapes[:3]}
    is_experts = graph.has_kernel(EXPERTS)
    for op, role in enumerate(division.columns.role.tolist()):
        path, holds = graph.scope[op], graph.weight_bytes[op] > graph.cache_bytes[op]
        if role == Role.ATTEND:
            shards.heads[path] = ranks.heads(op)
        elif role == Role.INNER and (
            op in partial or (holds and not _of_each_head(module, path, head_sizes))
        ):
            raise cannot(f"{path!r} has weights of divided heads, or reads all of them")
        elif holds and role in (Role.COLUMN, Role.ROW, Role.LOOK_UP):
            own = module.get_submodule(path)
            if is_experts[op]:
                _divide_experts(shards, ranks, op, path, own)
            else:
                _divide_module(shards, ranks, op, path, own)
    for op in division.gathered:
        shards.joins.append(graph.scope[op])
    shards.sums, shards.joins, shards.look_ups, shards.first_only = (
        list(dict.fromkeys(paths))
        for paths in (shards.sums, shards.joins, shards.look_ups, shards.first_only)
    )
    return shards


def _of_each_head(module: Any, path: str, sizes: set[int]) -> bool:
    """True for weights of the size of a head that all heads share, such as those of norms."""
    own = module.get_submodule(path).named_parameters(recurse=False)
    return all(parameter.shape[-1] in sizes and parameter.dim() == 1 for _, parameter in own)


@dataclass(frozen=True, eq=False)
class _Ranks:
    """Pieces of each rank."""

    division: Division
    shares: Shares

    def unit(self, op: int) -> Unit:
        return self.division.units[self.division.columns.unit[op]]

    def pieces(self, op: int) -> list[tuple[int, int, int]]:
        """(first, behind the last, in all) of each rank."""
        return [unit_span(self.unit(op), self.shares, r) for r in range(self.shares.size)]

    def heads(self, op: int) -> list[tuple[int, int]]:
        """(heads, heads of keys) of each rank at an attention."""
        unit = self.unit(op)
        keys = Unit(Pieces.KEYS, unit.keys, unit.keys)
        queries = Unit(Pieces.HEADS, unit.total, unit.keys)
        found = []
        for rank in range(self.shares.size):
            own = [unit_span(one, self.shares, rank) for one in (queries, keys)]
            found.append((own[0][1] - own[0][0], own[1][1] - own[1][0]))
        return found

    def part(self, op: int, axis: int, size: int, width: int) -> DividedParameter:
        """A parameter whose axis holds `width`, or some times as many, indices in pieces: gate and
        up in one are two such stretches."""
        spans = []
        for first, last, total in self.pieces(op):
            if width % total:
                raise cannot(f"{width} indices are not {total} whole pieces")
            piece = width // total
            spans.append(tuple(
                (base + first * piece, base + last * piece) for base in range(0, size, width)
            ))  # fmt: skip
        return DividedParameter(axis, size, tuple(spans))


def _divide_module(shards: Shards, ranks: _Ranks, op: int, path: str, module: Any) -> None:
    """A linear layer by columns or rows, or a table by its rows."""
    from torch import nn

    role, unit = ranks.division.columns.role[op], ranks.unit(op)
    is_table = role == Role.LOOK_UP and isinstance(module, nn.Embedding)
    if not is_table and type(module) is not nn.Linear:
        raise cannot(f"{path!r} is a {type(module).__name__}, not a linear layer")
    if unit.kind == Pieces.BOTH:
        raise cannot(f"{path!r} makes queries, keys and values in one product")
    columns, rows = (int(size) for size in module.weight.shape)
    if role == Role.ROW:
        shards.parameters[f"{path}.weight"] = ranks.part(op, 1, rows, rows)
        shards.sums.append(path)
    else:
        width = unit.total if unit.kind == Pieces.COLUMNS else columns
        shards.parameters[f"{path}.weight"] = ranks.part(op, 0, columns, width)
        shards.look_ups += [path] if is_table else []
    if getattr(module, "bias", None) is None:
        return
    if role == Role.ROW:
        shards.first_only.append(f"{path}.bias")
    else:
        shards.parameters[f"{path}.bias"] = shards.parameters[f"{path}.weight"]


def _divide_experts(shards: Shards, ranks: _Ranks, op: int, path: str, module: Any) -> None:
    """Experts by columns: gate and up in one parameter, down in the other."""
    named = {name: tuple(map(int, p.shape)) for name, p in module.named_parameters(recurse=False)}
    inner = ranks.unit(op).total
    up, down = named.get("gate_up_proj", ()), named.get("down_proj", ())
    if len(named) != 2 or up[1:2] != (2 * inner,) or down[2:3] != (inner,):
        raise cannot(f"{path!r} keeps its experts in another form than gate_up_proj and down_proj")
    if ranks.division.columns.role[op] == Role.ROW:
        shards.parameters[f"{path}.down_proj"] = ranks.part(op, 2, inner, inner)
        shards.sums.append(path)
    else:
        shards.parameters[f"{path}.gate_up_proj"] = ranks.part(op, 1, 2 * inner, inner)


STYLES: Sequence[tuple[Callable[[Shards, str], bool], str]] = (
    (lambda shards, path: path in shards.joins, "colwise_gather_output"),
    (lambda shards, path: path in shards.look_ups, "embedding_rowwise"),
    (lambda shards, path: path in shards.sums, "rowwise"),
    (lambda shards, path: True, "colwise"),
)
"""Names that transformers has for the ways to divide a module; the first that holds counts."""


def tp_plan(shards: Shards) -> dict[str, str]:
    """The plan of transformers (`tp_plan`): a style by path, with "*" for the number of a layer;
    empty where it has no style for a module, or layers of one path are divided in several ways."""
    plan: dict[str, str] = {}
    for parameter, part in shards.parameters.items():
        path, _, name = parameter.rpartition(".")
        if name not in ("weight", "bias") or any(len(spans) > 1 for spans in part.spans):
            return {}
        key = ".".join("*" if piece.isdecimal() else piece for piece in path.split("."))
        style = next(style for holds, style in STYLES if holds(shards, path))
        if plan.setdefault(key, style) != style:
            return {}
    return plan


def divided_evenly(shards: Shards) -> bool:
    """True if all ranks have equal, disjoint shards, as DTensor divides."""
    for part in shards.parameters.values():
        sizes = [sum(last - first for first, last in spans) for spans in part.spans]
        if len(set(sizes)) != 1 or sum(sizes) != part.size:
            return False
    return True
