"""Traffic at two groups of devices: one reads prompts, the other writes tokens.

Passes that read prompts do not delay those that write, and each group has a layout of its own
(DistServe, Zhong et al., OSDI 2024; Splitwise, Patel et al., ISCA 2024). A copy of the first group
reads the prompt of a request; its caches are sent, one request of a copy after the other; a copy of
the second group takes it where its caches have room, and its passes write a token each, the first
one included (its last token of the prompt is computed there, as vLLM does). The host takes its
seconds for a request at either group. A group's passes are those of `gdp.sim.traffic`.

A request keeps room to its end at either group, also of engines that would preempt it. Left out:
what the first group keeps of a prompt until it is sent.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gdp.sim.traffic import (
    Clients,
    RunningBatch,
    ServedRequest,
    ServedTraffic,
    ServingEngine,
    Spread,
    Traffic,
    batches_of,
    run_passes,
    summary_of,
)


class TwoGroups(NamedTuple):
    """Engines of the two groups, and the way of caches between them."""

    prompts: ServingEngine
    tokens: ServingEngine
    send_s: float  # of the caches of a request, whatever their size
    token_send_s: float  # of each token of its prompt besides
    one_way: bool = False  # all copies send over one link, a request at a time

    def transfer_s(self, prompt: int) -> float:
        """Seconds to send the caches of a prompt over an idle link."""
        return self.send_s + prompt * self.token_send_s


class ServedApart(NamedTuple):
    """Traffic at two groups."""

    served: ServedTraffic
    sent: Spread  # from the end of a prompt's last pass until its caches are sent


@dataclass(eq=False)
class _Lane:
    """One batch of a group, and the requests on their way to it."""

    engine: ServingEngine
    most: int  # requests at once
    room: float  # tokens in its caches
    coming: list[tuple[float, int]] = field(default_factory=list)  # heap of (time, request)
    waiting: deque[int] = field(default_factory=deque)
    state: RunningBatch = field(default_factory=RunningBatch)
    now: float = 0.0

    def starts_s(self) -> float:
        """When its next pass starts, as far as its requests are known."""
        if self.state.size or self.waiting:
            return self.now
        return max(self.now, self.coming[0][0]) if self.coming else math.inf

    def ends_s(self) -> float:
        """A time before which none of its requests ends."""
        state, least_s = self.state, math.inf
        if state.ends:
            least_s = self.now + (state.ends[0][0] - state.count) * self.engine.step_s
        if self.coming:
            least_s = min(least_s, max(self.now, self.coming[0][0]))
        return self.now if self.waiting else least_s

    def admitted(self, held: list[int]) -> Iterator[int]:
        """Requests that start with the next pass; `held` are tokens of each request's caches."""
        state = self.state
        if not state.size:
            self.now = self.starts_s()
            state.chosen_s, state.unlooked = self.now, 0
        if not state.unlooked:
            while self.coming and self.coming[0][0] <= state.chosen_s:
                self.waiting.append(heapq.heappop(self.coming)[1])
        while self.waiting and state.size < self.most:
            if state.held + held[self.waiting[0]] > self.room:
                break
            state.held += held[self.waiting[0]]
            yield self.waiting.popleft()


def serve_apart(traffic: Traffic, groups: TwoGroups) -> ServedApart:
    """Simulate traffic.

    The batch whose pass starts first goes on, so that all that reaches it by then is known. A batch
    that writes goes on until a request may reach it: no earlier than the next pass of the other
    group starts, nor than a request ends elsewhere whose client asks again.

    Raises:
        ArgumentError: One request alone needs more cache than a group has.
    """
    run = _Run(traffic, groups)
    while True:
        lanes = [*run.readers, *run.writers]
        lane = min(lanes, key=_Lane.starts_s)
        due_s = run.clients.due()
        if due_s <= lane.starts_s():
            if math.isinf(due_s):
                break
            for request in run.clients.until(due_s):
                reader = run.readers[request % len(run.readers)]
                heapq.heappush(reader.coming, (due_s, request))
        elif lane in run.readers:
            run.read(lane)
        else:
            run.write(lane)
    rows = zip(run.clients.asked, run.started, run.first, run.ended, strict=True)
    served = [ServedRequest(*row, r.new) for row, r in zip(rows, traffic.requests, strict=True)]
    return ServedApart(summary_of(served, traffic.begin_s), Spread.of(run.sent))


class _Run:
    """State of a simulation."""

    def __init__(self, traffic: Traffic, groups: TwoGroups) -> None:
        requests, clients = traffic.requests, traffic.concurrency
        self.requests, self.groups = requests, groups
        self.prompts = [r.prompt for r in requests]
        self.whole = [r.prompt + r.new for r in requests]
        self.readers = _lanes(groups.prompts, clients, max(self.prompts))
        # A pass at which a request starts is the one of its first token: none is skipped.
        look = groups.tokens.scheduling._replace(look_passes=1)
        self.writers = _lanes(groups.tokens._replace(scheduling=look), clients, max(self.whole))
        free = [0.0] * (clients or len(requests))
        self.clients = Clients(requests, free, groups.prompts.scheduling)
        self.started, self.first, self.ended, self.sent = ([0.0] * len(requests) for _ in range(4))
        self.link_free_s = [0.0] * (1 if groups.one_way else len(self.readers))

    def read(self, lane: _Lane) -> None:
        """One pass over prompts; those that end with it are sent."""
        for r in lane.admitted(self.prompts):
            self.started[r] = lane.now
            lane.state.prompts.append((r, self.prompts[r]))
        lane.now, read = run_passes(lane.state, lane.engine, lane.now, math.inf)
        link = self.readers.index(lane) % len(self.link_free_s)
        for r in read:
            lane.state.held -= self.prompts[r]
            sent_s = max(lane.now, self.link_free_s[link]) + self.groups.transfer_s(self.prompts[r])
            self.link_free_s[link], self.sent[r] = sent_s, sent_s - lane.now
            writer = self.writers[r % len(self.writers)]
            heapq.heappush(writer.coming, (sent_s + writer.engine.scheduling.request_s, r))

    def write(self, lane: _Lane) -> None:
        """One pass, or all until a request may come or ends."""
        state, new = lane.state, list[int]()
        for r in lane.admitted(self.whole):
            heapq.heappush(state.ends, (state.count + self.requests[r].new, r))
            state.context += self.prompts[r]
            new.append(r)
        until_s = min(self.clients.due(), *map(_Lane.starts_s, self.readers))
        until_s = min(until_s, lane.coming[0][0]) if lane.coming else until_s
        until_s = min([until_s, *(other.ends_s() for other in self.writers if other is not lane)])
        lane.now, _ = run_passes(state, lane.engine, lane.now, lane.now if new else until_s)
        for r in new:
            self.first[r] = lane.now
        while state.ends and state.ends[0][0] <= state.count:
            r = heapq.heappop(state.ends)[1]
            self.ended[r] = lane.now
            state.context -= self.whole[r]
            state.held -= self.whole[r]
            heapq.heappush(self.clients.free, lane.now)


def _lanes(engine: ServingEngine, concurrency: int, longest: int) -> list[_Lane]:
    """The batches of a group."""
    count, most, room = batches_of(engine, concurrency, longest)
    return [_Lane(engine, most, room) for _ in range(count)]
