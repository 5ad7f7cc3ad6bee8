"""Tensor splits of llama.cpp: GPUs compute each op together, in shares of heads and columns.

`--split-mode tensor` (pull request 19378 of ggml-org/llama.cpp) divides every block among the GPUs
that are named, in the proportions of `--tensor-split`, each tensor in whole pieces: heads with
their cache, columns of feed-forwards and of experts, the vocabulary of the output. The embedding
stays on the CPU. Shares are tried in proportion to bandwidth, which limits a token, to FLOP/s,
which limit a prompt, and to memory; then around the best of these, a step from one GPU to another.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int

from gdp.base.errors import ModelError
from gdp.cluster.machines import machine_of
from gdp.cluster.types import Cluster
from gdp.costs.offload import LENT
from gdp.graph.op_graph import OpGraph
from gdp.placement.constraints import allowed_mask
from gdp.placement.placement import Placement, Split, make_placement
from gdp.question.question import Question
from gdp.splits.division import alone
from gdp.splits.members import known_division
from gdp.splits.sharding import in_whole_units
from gdp.targets.llamacpp.flags import Slots
from gdp.targets.llamacpp.parts import held_bytes
from gdp.targets.llamacpp.rules import leaves_one_without, no_tensor_split
from gdp.targets.simulated import Simulated, simulated

CACHES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Types of cached keys and values that tensor splits can have."""
STEPS = 32
"""Of which a share is a whole number, where heads of keys are not the unit."""
_MOST_GPUS = 4
"""Up to so many all sets of GPUs are tried; of more, the fastest ones of each number."""


def shares_text(split: Split) -> str:
    """Shares of a split that add up to one, such as "0.62/0.38"."""
    total = sum(split.parts)
    return "/".join(f"{part / total:.2f}" for part in split.parts)


def split_name(placement: Placement) -> str:
    """The shares of a tensor split, in hundredths."""
    return f"tensor split {shares_text(placement.splits[0])}"


def why_no_tensor_split(graph: OpGraph) -> str:
    """Reason that llama.cpp does not divide a graph so; "" where it does."""
    kinds = {
        str(d.attributes.get("stored", "f16")).lower()
        for d, kind, other in zip(graph.detail, graph.op_types, alone(graph), strict=True)
        if kind == "Attention" and not other
    }
    if kinds - set(CACHES):
        return f"tensor splits have no cache of {', '.join(sorted(kinds - set(CACHES)))}"
    if refusal := no_tensor_split(graph):
        return refusal
    try:
        known_division(graph)
    except ModelError as error:
        return str(error)
    return ""


def tensor_plans(question: Question, slots: Slots, rest: Int[np.ndarray, "N"]) -> list[Simulated]:
    """The best tensor split of each set of GPUs, the fastest that fits first; none where there is
    one GPU, or llama.cpp cannot divide the model."""
    gpus = _free_gpus(question, slots)
    if len(gpus) < 2 or why_no_tensor_split(question.graph):
        return []
    units = known_division(question.graph).units
    keys = min((unit.keys for unit in units if unit.keys), default=1)
    found = []
    homes = [int(rest[part[0]]) for part in slots.parts]
    room_bytes = question.cluster.memory_bytes.copy()
    for home, part in zip(homes, slots.parts, strict=True):
        room_bytes[home] -= held_bytes(question, part)
    for chosen in _sets(question.cluster, gpus):
        if set(homes) & set(chosen[1:]):
            continue  # ops of one member alone are told of the first one only
        tried: dict[tuple[int, ...], Simulated] = {}
        for parts in _proportions(question.cluster, chosen, keys, room_bytes):
            _try(question, slots, rest, chosen, parts, tried)
        best = min(tried.values(), key=lambda plan: plan.rank, default=None)
        if best is not None and len(chosen) <= _MOST_GPUS:
            for parts in _around(best.placement.splits[0].parts, keys):
                _try(question, slots, rest, chosen, parts, tried)
        found += sorted(tried.values(), key=lambda plan: plan.rank)[:1]
    return sorted(found, key=lambda plan: plan.rank)


def _free_gpus(question: Question, slots: Slots) -> list[int]:
    """GPUs of the host's machine that may compute all but the embedding; cores lent by RPC are
    none."""
    cluster, graph = question.cluster, question.graph
    allowed = allowed_mask(question.constraints, graph, cluster)
    blocks = np.concatenate([*slots.layers, *slots.experts])
    home = machine_of(cluster, cluster.host)
    return [
        d for d in cluster.gpus
        if not cluster.devices[d].is_unified and not cluster.devices[d].kind.startswith(LENT)
        and machine_of(cluster, d) == home and allowed[blocks, d].all()
    ]  # fmt: skip


def _sets(cluster: Cluster, gpus: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Sets of at least two GPUs, in their order; one of each class of interchangeable sets."""
    fastest = sorted(gpus, key=lambda d: -cluster.devices[d].bytes_per_s)
    seen = set[tuple[int, ...]]()
    for size in range(2, len(gpus) + 1):
        few = len(gpus) <= _MOST_GPUS
        for chosen in itertools.combinations(gpus, size) if few else [fastest[:size]]:
            like = tuple(cluster.alike[list(chosen)].tolist())
            if like not in seen:
                seen.add(like)
                yield tuple(sorted(chosen))


def _proportions(
    cluster: Cluster, chosen: Sequence[int], keys: int, room_bytes: Int[np.ndarray, "D"]
) -> Iterable[tuple[int, ...]]:
    """Shares to begin with: equal ones, and those of bandwidth, FLOP/s and room beside an image
    encoder or a model that drafts."""
    devices = [cluster.devices[d] for d in chosen]
    rates = (
        [1.0 for _ in devices],
        [device.bytes_per_s for device in devices],
        [device.speed("float16") for device in devices],
        [float(max(room_bytes[d], 1)) for d in chosen],
    )
    found = dict.fromkeys(_rounded(rate, steps) for rate in rates for steps in (keys, STEPS))
    return [parts for parts in found if parts]


def _rounded(rates: Sequence[float], steps: int) -> tuple[int, ...]:
    """Shares of so many steps, equal ones as 1:1; () if there are fewer steps than parts."""
    if steps < len(rates):
        return ()
    return (1,) * len(rates) if len(set(rates)) == 1 else in_whole_units(rates, steps)


def _around(parts: tuple[int, ...], keys: int) -> Iterator[tuple[int, ...]]:
    """Shares with one step more on a GPU and one less on another."""
    total = sum(parts)
    if total < keys:  # equal ones, told as 1:1
        rates = np.array(parts) + np.linspace(0, 1e-9, len(parts))
        parts = in_whole_units(rates.tolist(), max(keys, STEPS))
    for more, less in itertools.permutations(range(len(parts)), 2):
        if parts[less] > 1:
            moved = list(parts)
            moved[more] += 1
            moved[less] -= 1
            yield tuple(moved)


def _try(
    question: Question, slots: Slots, rest: Int[np.ndarray, "N"], chosen: Sequence[int],
    parts: tuple[int, ...], tried: dict[tuple[int, ...], Simulated],
) -> None:  # fmt: skip
    """Simulate one split, unless it was, or leaves a GPU without a piece."""
    graph = question.graph
    even = len(set(parts)) == 1
    parts = (1,) * len(parts) if even else parts
    keys = min((unit.keys for unit in known_division(graph).units if unit.keys), default=0)
    if parts in tried or not parts or (keys and leaves_one_without(parts, keys)):
        return
    device = rest.copy()
    device[np.concatenate([*slots.layers, *slots.experts])] = chosen[0]
    split = Split(tuple(chosen), shares=() if even else parts)
    placement = make_placement(
        graph, question.cluster, device, made_by="gdp llamacpp", splits=(split,)
    )
    with contextlib.suppress(ModelError):
        tried[parts] = simulated(question, placement)
