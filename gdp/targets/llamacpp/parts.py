"""Devices for parts of llama.cpp that compute beside the blocks: its image encoder (`--mmproj`) and
a model that drafts (`--model-draft`)."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from gdp.cluster.machines import machine_of
from gdp.costs.offload import LENT
from gdp.ops.llamacpp import DRAFT
from gdp.placement.constraints import allowed_mask
from gdp.question.prepare import requests_in_flight
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.sim.objectives import find_objective
from gdp.targets.llamacpp.flags import Slots


def homes_of_parts(question: Question, slots: Slots) -> Iterator[tuple[int, ...]]:
    """All ways to give each part a device of the host's machine: the processor, or a GPU."""
    cluster, graph = question.cluster, question.graph
    allowed = allowed_mask(question.constraints, graph, cluster)
    here = machine_of(cluster, cluster.host)
    usable = [
        d for d in np.flatnonzero(cluster.computes).tolist()
        if (not cluster.is_cpu[d] or d == cluster.host) and machine_of(cluster, d) == here
        and not cluster.devices[d].kind.startswith(LENT)
    ]  # fmt: skip
    last = sorted(usable, key=lambda d: cluster.is_cpu[d])  # the slowest place
    return itertools.product(*([d for d in last if allowed[part, d].all()] for part in slots.parts))


def held_bytes(question: Question, part: Int[np.ndarray, "M"]) -> int:
    """Weights of a part, with the caches of all requests in flight."""
    graph = question.graph
    ops = graph.weight_holders(part)
    more = requests_in_flight(graph, question.cluster, question.objective) - 1
    return int((graph.weight_bytes[ops] + more * graph.cache_bytes[ops]).sum())


def parts_note(best: Result, found: Sequence[Result], slots: Slots) -> str:
    """The devices of the parts, compared with the alternatives, in a sentence."""
    names = (
        "the model that drafts" if best.question.graph.scope[part[0]] == DRAFT
        else "the image encoder" for part in slots.parts
    )  # fmt: skip
    verb = "is" if len(slots.parts) == 1 else "are"
    text = find_objective(best.question.objective).text
    others = ", ".join(
        f"{text(result.value_s)} on {_where(result, slots)}"
        for result in found if result is not best
    )  # fmt: skip
    beside = others and f" (so the plan takes {text(best.value_s)}, {others})"
    return f"{' and '.join(names)} {verb} on {_where(best, slots)}{beside}"


def _where(result: Result, slots: Slots) -> str:
    placement = result.placement
    return " and ".join(
        placement.device_names[int(placement.device[part[0]])] for part in slots.parts
    )
