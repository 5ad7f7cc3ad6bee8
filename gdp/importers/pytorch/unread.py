"""Weights that a loaded module holds and its forward pass leaves alone, such as a vision tower
where the inputs are text.

They take memory on the device where their module lies. So each module with such weights has an op
in the graph that holds them, reads nothing, makes nothing and takes no time (`OpGraph.rests`).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from gdp.base.units import format_bytes
from gdp.graph.op_graph import UNREAD, OpDetail, OpGraph, make_graph
from gdp.graph.request import PREFILL, SINGLE
from gdp.importers.program import Op, Traced, Value
from gdp.importers.pytorch.quantised import StoredWeight

_BLOCK = re.compile(r"^(?:.*?\.)?\d+(?=\.|$)")


def storage_of(tensor: Any) -> int:
    """Identity of a tensor's memory, which tied weights share."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def storages_read(model: Any, ops: Iterable[Op], paths: Mapping[str, Value]) -> set[int]:
    """The storages of a model's weights that some ops read; `paths` has weights of the ops' program
    by the paths of parameters and buffers."""
    read = {value.weight[0] for op in ops for value in op.ins if value.weight is not None}
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return {
        storage_of(tensors[path])
        for path, value in paths.items()
        if path in tensors and value.weight is not None and value.weight[0] in read
    }


def unread_weights(
    model: Any, read: Collection[int], stored: Mapping[str, StoredWeight]
) -> dict[str, int]:
    """Bytes by module path of parameters whose storages are not in `read`, tied ones once, with the
    buffers of the same module; quantised ones as they are `stored`."""
    sizes: dict[str, int] = {}
    seen = set(read)
    named = dict(model.named_parameters(remove_duplicate=False))
    for path, weight in named.items():
        if storage_of(weight) not in seen:
            seen.add(storage_of(weight))
            size = stored[path].nbytes if path in stored else weight.untyped_storage().nbytes()
            holder = path.rpartition(".")[0]
            sizes[holder] = sizes.get(holder, 0) + int(size)
    for path, buffer in model.named_buffers():
        holder = path.rpartition(".")[0]
        if holder in sizes and storage_of(buffer) not in seen:
            seen.add(storage_of(buffer))
            sizes[holder] += int(buffer.untyped_storage().nbytes())
    return {path: size for path, size in sizes.items() if size}


class Unread(NamedTuple):
    """Weights that no op reads: bytes by the path of their module, and the type of the weights."""

    held: dict[str, int]
    dtype: str


def unread_of(model: Any, read: Collection[int], stored: Mapping[str, StoredWeight]) -> Unread:
    """The weights of a model whose storages are not in `read`."""
    held = unread_weights(model, read, stored)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.") if held else ""
    return Unread(held, dtype)


def with_unread(traced: Traced, unread: Unread) -> Traced:
    """A trace with the weights that none of its ops reads, which a note names."""
    held = unread.held
    if not held:
        return traced
    roots = sorted({".".join(path.split(".")[:2]) for path in held})
    note = (
        f"{format_bytes(sum(held.values()))} of its weights are read by no op of these inputs, and "
        f"held ({', '.join(roots)})"
    )
    return replace(
        traced, graph=graph_holding(traced.graph, held, unread.dtype),
        assumptions=(*traced.assumptions, note),
    )  # fmt: skip


def graph_holding(graph: OpGraph, held: Mapping[str, int], dtype: str) -> OpGraph:
    """The graph with an op for each module of `held`, a mapping of its path to bytes. Those of one
    block, an element of a list of layers, share a device."""
    if not held:
        return graph
    paths = list(held)
    first = int(graph.colocate.max(initial=0)) + 1
    blocks: dict[str, int] = {}
    together = []
    for path in paths:
        block = _BLOCK.match(path)
        together.append(blocks.setdefault(block[0] if block else path, first + len(blocks)))
    ids = int(graph.weight_id.max(initial=0)) + 1
    nothing = [0] * len(paths)
    return make_graph(
        graph.name,
        [*graph.op_names, *(f"{path}/unread" for path in paths)],
        [*graph.op_types, *[UNREAD] * len(paths)],
        list(zip(graph.producer.tolist(), graph.tensor_bytes.tolist(), strict=True)),
        list(zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True)),
        flop=[*graph.flop.tolist(), *nothing],
        memory_traffic_bytes=[*graph.memory_traffic_bytes.tolist(), *nothing],
        weight_bytes=[*graph.weight_bytes.tolist(), *held.values()],
        weight_id=[*graph.weight_id.tolist(), *range(ids, ids + len(paths))],
        colocate=[*graph.colocate.tolist(), *together],
        is_backward=[*graph.is_backward.tolist(), *[False] * len(paths)],
        scope=[*graph.scope, *paths],
        detail=[*graph.detail, *[OpDetail(dtype=dtype)] * len(paths)],
        tensor_names=graph.tensor_names,
        cache_bytes=[*graph.cache_bytes.tolist(), *nothing],
        repeats=[*graph.repeats.tolist(), *[1] * len(paths)],
        chunks=[*graph.chunks.tolist(), *[1] * len(paths)],
        phase=[*graph.phase.tolist(), *[SINGLE if graph.request is None else PREFILL] * len(paths)],
        source=graph.source,
        request=graph.request,
        growth=graph.growth,
    )
