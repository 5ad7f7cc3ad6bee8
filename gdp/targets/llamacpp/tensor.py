"""Tensor splits of llama.cpp: GPUs compute each op together, in shares of heads and columns.

`--split-mode tensor` (pull request 19378 of ggml-org/llama.cpp) divides every block among the GPUs
that are named, in the proportions of `--tensor-split`, each tensor in whole pieces: heads with
their cache, columns of feed-forwards and of experts, the vocabulary of the output. The embedding
stays on the CPU. Shares are tried in proportion to bandwidth, which limits a token, to FLOP/s,
which limit a prompt, and to memory; then around the best of these, a step from one GPU to another.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from gdp.base.errors import ModelError
from gdp.base.units import format_bytes
from gdp.cluster.machines import machine_of
from gdp.cluster.types import Cluster
from gdp.costs.offload import LENT
from gdp.graph.op_graph import OpGraph
from gdp.methods.base import Candidate
from gdp.placement.constraints import allowed_mask
from gdp.placement.placement import Placement, Split, make_placement
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.sim.objectives import Score
from gdp.splits.division import alone
from gdp.splits.members import known_division
from gdp.targets.llamacpp.flags import Slots
from gdp.targets.llamacpp.parts import held_bytes
from gdp.targets.llamacpp.rules import leaves_one_without, no_tensor_split

CACHES = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Types of cached keys and values that tensor splits can have."""
STEPS = 32
"""Of which a share is a whole number, where heads of keys are not the unit."""
_MOST_GPUS = 4
"""Up to so many all sets of GPUs are tried; of more, the fastest ones of each number."""


@dataclass(frozen=True, eq=False)
class TensorPlan:
    """A tensor split with its score."""

    placement: Placement
    score: Score
    exchanged: float  # share of the seconds that collectives take
    seconds: float  # that the simulation took

    @property
    def split(self) -> Split:
        """Its only split."""
        return self.placement.splits[0]

    @property
    def name(self) -> str:
        """Its shares, in hundredths."""
        return f"tensor split {shares_text(self.split)}"

    def candidate(self) -> Candidate:
        """Its row among the candidates."""
        score = self.score
        reason = "" if score.feasible else f"{format_bytes(score.overflow_bytes)} over memory"
        names = ", ".join(self.placement.device_names[d] for d in self.split.devices)
        return Candidate(
            f"{self.name} of {names}", score.latency_s, score.period_s, score.value_s,
            score.feasible, self.seconds, reason,
        )  # fmt: skip


def shares_text(split: Split) -> str:
    """Shares of a split that add up to one, such as "0.62/0.38"."""
    total = sum(split.parts)
    return "/".join(f"{part / total:.2f}" for part in split.parts)


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


def tensor_plans(question: Question, slots: Slots, rest: Int[np.ndarray, "N"]) -> list[TensorPlan]:
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
        tried: dict[tuple[int, ...], TensorPlan] = {}
        for parts in _proportions(question.cluster, chosen, keys, room_bytes):
            _try(question, slots, rest, chosen, parts, tried)
        best = min(tried.values(), key=_rank, default=None)
        if best is not None and len(chosen) <= _MOST_GPUS:
            for parts in _around(best.split.parts, keys):
                _try(question, slots, rest, chosen, parts, tried)
        found += sorted(tried.values(), key=_rank)[:1]
    return sorted(found, key=_rank)


def _rank(plan: TensorPlan) -> tuple[int, float]:
    return plan.score.overflow_bytes, plan.score.value_s


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
    found = dict.fromkeys(
        _rounded(np.array(rate), steps) for rate in rates for steps in (keys, STEPS)
    )
    return [parts for parts in found if parts]


def _rounded(rates: np.ndarray, steps: int) -> tuple[int, ...]:
    """Integer parts of `steps` steps in all, each at least one, in proportion; () if there are
    fewer steps than parts.

    >>> _rounded(np.array([2.0, 1.0]), 8)
    (5, 3)
    """
    if steps < len(rates):
        return ()
    if len(set(rates.tolist())) == 1:
        return (1,) * len(rates)
    exact = rates / rates.sum() * steps
    parts = np.maximum(np.floor(exact), 1).astype(int)
    while parts.sum() < steps:
        parts[np.argmax(exact - parts)] += 1
    while parts.sum() > steps:
        parts[np.argmax(np.where(parts > 1, parts - exact, -np.inf))] -= 1
    return tuple(parts.tolist())


def _around(parts: tuple[int, ...], keys: int) -> Iterator[tuple[int, ...]]:
    """Shares with one step more on a GPU and one less on another."""
    total = sum(parts)
    if total < keys:  # equal ones, told as 1:1
        parts = _rounded(np.array(parts) + np.linspace(0, 1e-9, len(parts)), max(keys, STEPS))
    for more, less in itertools.permutations(range(len(parts)), 2):
        if parts[less] > 1:
            moved = list(parts)
            moved[more] += 1
            moved[less] -= 1
            yield tuple(moved)


def _try(
    question: Question, slots: Slots, rest: Int[np.ndarray, "N"], chosen: Sequence[int],
    parts: tuple[int, ...], tried: dict[tuple[int, ...], TensorPlan],
) -> None:  # fmt: skip
    """Simulate one split, unless it was, or leaves a GPU without a piece."""
    started_s, graph = time.perf_counter(), question.graph
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
    try:
        predicted = prepare_placement(question, placement)
    except ModelError:
        return
    score, problem = predicted.score(), predicted.problem
    exchange_s = problem.origin.exchange_s
    share = 0.0
    if exchange_s is not None and score.latency_s:
        own_s = exchange_s[np.arange(problem.num_ops), predicted.assignment.device]
        share = float((own_s * problem.graph.repeats).sum()) / score.latency_s
    tried[parts] = TensorPlan(placement, score, share, time.perf_counter() - started_s)
