"""Disaggregated serving: prefill on some GPUs and decode on others, where that is faster.

Groups of whole GPUs, of one kind each: some prefill, the others decode, each as copies
of the model with a layout of their own. A copy of either group is planned once for each
number of GPUs; the pairs that are the best by their rates are simulated, and the best of these is
planned on its own GPUs and simulated again.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdp.api.answer import answer
from gdp.api.ask import ask
from gdp.api.traffic.plan import engine_on, model_bytes
from gdp.base.errors import ArgumentError, InfeasibleError
from gdp.cluster.types import NO_CHANNEL, Cluster
from gdp.graph.generation import cached_share
from gdp.placement.constraints import Pin, allowed_mask
from gdp.question.models import Generation
from gdp.question.question import Question
from gdp.question.result import PrefillGroup, Result, ServedPlan
from gdp.sim.serving import ServingEngine, TwoGroups, in_steady_state, serve_disaggregated
from gdp.sim.traffic import Traffic

SIMULATED = 4
"""Pairs of groups that are simulated."""


class Asked(NamedTuple):
    """Question about a model, without the requests that run side by side."""

    model: str | Path
    parts: Mapping[str, Any]  # of its questions, as `gdp.api.ask` takes them
    requests_at_once: int | None  # None: vLLM's own default

    def question(self, prompt: int, new: int, batch: int) -> Question:
        """The question of a batch of requests; the seconds of reading the model are a separate
        phase."""
        self.parts["phases"].ended("planning")  # of the questions before this one
        return ask(Generation(self.model, prompt, new, batch), **self.parts)


class GroupPlan(NamedTuple):
    """A plan of a group, with one copy or several."""

    gpus: tuple[int, ...]  # that it may use
    result: Result
    engine: ServingEngine

    def sent_bytes(self, prompt: int) -> tuple[int, ...]:
        """Bytes of the caches of one prompt on each GPU of a copy."""
        graph, placement = self.result.question.graph, self.result.placement
        generation = self.result.of_request()
        share = cached_share(graph, prompt) / generation.request.batch
        others = {d for team in placement.teams for d in team[1:]}
        homes = {s.devices[0]: s.devices for s in placement.splits}
        others |= {d for lead in others for d in homes.get(lead, ())}
        return tuple(
            round(share * row.cache_bytes)
            for d, row in enumerate(generation.memory)
            if row.cache_bytes and d not in others
        )


class _Pair(NamedTuple):
    """GPUs of the prefill group and of the decode group."""

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    prefill_copy: int  # GPUs of each copy
    decode_copy: int

    @property
    def copies(self) -> tuple[int, int]:
        """Of either group."""
        return len(self.prefill) // self.prefill_copy, len(self.decode) // self.decode_copy


def plan_disaggregated(asked: Asked, traffic: Traffic, joint: ServedPlan) -> ServedPlan | None:
    """The best disaggregated plan; None where there is none.

    Args:
        asked: What is asked of the model.
        traffic: Requests.
        joint: The best plan in which all GPUs do both; its limits hold, and where traffic has a
            rate, requests are planned side by side as many as run there.
    """
    search = _Search(asked, traffic, joint)
    estimates = ((search.estimate(pair), pair) for pair in search.pairs())
    ranked = [(value, pair) for value, pair in estimates if value is not None]
    ranked.sort(key=lambda row: row[0])
    simulated = [search.simulated(pair) for _, pair in ranked[:SIMULATED]]
    best = min(filter(None, simulated), key=lambda row: row[0], default=None)
    return None if best is None else search.planned(best[1])


@dataclass(eq=False)
class _Search:
    """Plans of groups, kept by the kind of their GPUs."""

    asked: Asked
    traffic: Traffic
    joint: ServedPlan
    known: dict[tuple[object, ...], GroupPlan | None] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        """The machine, with the memory that vLLM takes."""
        return self.joint.result.question.cluster

    @property
    def clients(self) -> int:
        """Requests at once."""
        return self.traffic.concurrency or max(1, round(self.joint.served.running))

    def pairs(self) -> Iterator[_Pair]:
        """All pairs of groups: of GPUs of one kind every cut, of several kinds one for each."""
        question = self.joint.result.question
        allowed = allowed_mask(question.constraints, question.graph, self.cluster)
        kinds: dict[int, list[int]] = {}
        for d in self.cluster.gpus:
            if allowed[~question.graph.is_io, d].all():
                kinds.setdefault(int(self.cluster.alike[d]), []).append(d)
        alike = list(kinds.values())
        cuts = [
            (gpus[:k], gpus[k:]) for gpus in alike for k in range(1, len(gpus)) if len(alike) == 1
        ]
        for prefill, decode in cuts or itertools.permutations(alike, 2):
            for sizes in itertools.product(_powers(len(prefill)), _powers(len(decode))):
                own, other = (
                    tuple(gpus[: len(gpus) // size * size])
                    for gpus, size in zip((prefill, decode), sizes, strict=True)
                )
                pair = _Pair(own, other, *sizes)
                if question.constraints.replicas or pair.copies == (1, 1):
                    yield pair

    def prefill_plan(self, pair: _Pair) -> GroupPlan | None:
        """The plan of a copy that prefills: of as many at once as fill a pass."""
        at_once = self.joint.engine.tokens_at_once // self.traffic.prompt
        batch = max(1, min(at_once, self.clients))
        return self._of_copy(pair.prefill[: pair.prefill_copy], batch, "prefill")

    def decode_plan(self, pair: _Pair) -> GroupPlan | None:
        """The plan of a copy that decodes: of its part of the requests, in powers of two of
        all, so that few plans are made."""
        parts = 2 ** round(math.log2(pair.copies[1]))
        batch = math.ceil(self.clients / parts)
        return self._of_copy(pair.decode[: pair.decode_copy], batch, "decode")

    def _of_copy(self, gpus: Sequence[int], batch: int, role: str) -> GroupPlan | None:
        like = self.cluster.alike[list(gpus)].tolist()
        key = (*like, batch, role)
        if key not in self.known:
            self.known[key] = self.plan(gpus, 1, batch, role)
        return self.known[key]

    def plan(self, gpus: Sequence[int], copies: int, batch: int, role: str) -> GroupPlan | None:
        """The plan of a group on some GPUs, of fewer requests where so many do not fit; None where
        not even one does."""
        names = self.cluster.device_names
        barred = tuple(names[d] for d in self.cluster.gpus if d not in gpus)
        new = 1 if role == "prefill" else self.traffic.new
        room = sum(self.cluster.devices[d].memory_bytes for d in gpus)
        if model_bytes(self.joint.result.question.graph) > room:
            return None
        while batch >= 1:
            question = self.asked.question(self.traffic.prompt, new, batch)
            rules = question.constraints
            rules = replace(rules, forbid=(*rules.forbid, Pin("*", barred))) if barred else rules
            question = replace(question, copies=copies, role=role, constraints=rules)
            try:
                result = answer(question)
            except InfeasibleError:
                batch //= 2
                continue
            return GroupPlan(tuple(gpus), *engine_on(result, self.asked.requests_at_once))
        return None

    def groups(self, pair: _Pair, prefill: GroupPlan, decode: GroupPlan) -> TwoGroups:
        """Engines of a pair, and the link between its GPUs."""
        prompt, (readers, writers) = self.traffic.prompt, pair.copies
        send_s, token_send_s, shared = kv_transfer_cost(
            self.cluster, pair, prefill.sent_bytes(prompt), decode.sent_bytes(prompt)
        )
        return TwoGroups(
            prefill.engine._replace(copies=readers), decode.engine._replace(copies=writers),
            send_s, token_send_s / prompt, shared,
        )  # fmt: skip

    def estimate(self, pair: _Pair) -> tuple[float, float] | None:
        """By how much a pair exceeds the limits, and seconds of a request, of steady traffic; None
        where the model does not fit."""
        prefill, decode = self.prefill_plan(pair), self.decode_plan(pair)
        if prefill is None or decode is None:
            return None
        groups, (readers, writers) = self.groups(pair, prefill, decode), pair.copies
        prompt, new, reading, writing = self.traffic.prompt, self.traffic.new, *groups[:2]
        side = self.clients / writers
        pass_s = max(writing.step_s, writing.token_s * side)
        pass_s += writing.context_s * side * (prompt + new / 2)
        read_s, sent_s = reading.token_s * prompt, groups.transfer_s(prompt)
        first_s = max(read_s, reading.step_s, reading.launch_s) + sent_s + pass_s
        # So many requests at once go no faster through a group or a link than it takes them.
        links = 1 if groups.one_link else readers
        least_s = self.clients * max(read_s / readers, sent_s / links)
        request_s = max(first_s + (new - 1) * pass_s, least_s)
        first_s = request_s - (new - 1) * pass_s
        limits = self.joint.within
        return max(1.0, first_s / limits.first_s, pass_s / limits.token_s), request_s

    def simulated(self, pair: _Pair) -> tuple[tuple[float, float], _Pair] | None:
        """A pair with its value by `ServedPlan.value`; None where a request has no room."""
        prefill, decode = self.prefill_plan(pair), self.decode_plan(pair)
        if prefill is None or decode is None:
            return None
        plan = self._served(pair, prefill, decode)
        return None if plan is None else (plan.value, pair)

    def planned(self, pair: _Pair) -> ServedPlan | None:
        """A pair planned on its own GPUs."""
        near = self.prefill_plan(pair), self.decode_plan(pair)
        prefill, decode = (
            plan
            if plan is None or plan.gpus == gpus
            else self.plan(gpus, copies, plan.result.of_request().request.batch, role)
            for plan, gpus, copies, role in zip(
                near, pair[:2], pair.copies, ("prefill", "decode"), strict=True
            )
        )
        return None if prefill is None or decode is None else self._served(pair, prefill, decode)

    def _served(self, pair: _Pair, prefill: GroupPlan, decode: GroupPlan) -> ServedPlan | None:
        groups = self.groups(pair, prefill, decode)
        try:
            served, sent = serve_disaggregated(in_steady_state(self.traffic, groups.decode), groups)
        except ArgumentError:  # a request has no room
            return None
        mean = self.traffic.prompt
        sent_bytes = sum(decode.sent_bytes(mean))
        reading = PrefillGroup(prefill.result, groups, sent_bytes, groups.transfer_s(mean), sent)
        batch = decode.result.of_request().request.batch
        return ServedPlan(decode.result, groups.decode, served, batch, reading, self.joint.within)


def _powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**k for k in range(most.bit_length())]


def kv_transfer_cost(
    cluster: Cluster, pair: _Pair, sent: Sequence[int], taken: Sequence[int]
) -> tuple[float, float, bool]:
    """(seconds of latency, seconds of the bytes of one prompt, True where all share one channel).

    Each GPU of a copy sends what it holds while the others do, so that the fullest one takes the
    longest, on the slowest link between the groups; where all links are one channel, such as a
    network between two machines, the bytes of all go one after the other.
    """
    between = np.ix_(pair.prefill, pair.decode)
    channels = np.unique(cluster.channel[between])
    shared = len(channels) == 1 and channels[0] != NO_CHANNEL and min(map(len, pair[:2])) > 1
    busiest = sum(taken) if shared else max(*sent, *taken)
    rate = float(cluster.link_bytes_per_s[between].min())
    return float(cluster.link_latency_s[between].max()), busiest / rate, shared
