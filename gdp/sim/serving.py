"""Serving: requests at an engine that batches continuously, iteration by iteration.

The engine's scheduler chooses the work of each pass of the model (`gdp.sim.scheduling`). A request
starts where its caches have room, as it will be at its end; or, with preemption, where its prompt
has, and when the caches of all have grown out of theirs the request that started last gives its own
back and reads all of its tokens again later. A pass of d decoding requests and t prompt tokens
takes

    max(step_s, token_s * (t + d)) + context_s * (tokens in the caches of those d)

seconds: weights are read once, or arithmetic takes longer; caches are read by each of its own. The
stages of a pipeline hold as many batches at once, each of which takes a pass from end to end. With
a draft model of k tokens a pass, those and one more are checked at once: t + d (k + 1) tokens.
Copies of the model take requests round-robin, each with caches and limits of its own.
Between two events (a request that arrives, ends, or still reads its prompt) passes are alike but
for the growing caches, so that their sum is a closed form: O(requests log requests).

Disaggregated, one group of devices prefills and another decodes (DistServe, Zhong et al., OSDI
2024; Splitwise, Patel et al., ISCA 2024). A copy of the first reads the prompt of a request; its
caches are sent, one request of a copy after the other; a copy of the second takes it where its
caches have room, and its passes write a token each, the first one included (its last token of the
prompt is computed there, as vLLM does). The host takes its seconds for a request at either group. A
request that is preempted reads its tokens again where it decodes. Left out: what the first group
keeps of a prompt until it is sent.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from gdp.base.errors import ArgumentError
from gdp.sim.scheduling import Scheduler
from gdp.sim.traffic import (
    Arrival,
    ServedRequest,
    ServedTraffic,
    Spread,
    Traffic,
    Work,
    require_rounds,
    summary_of,
)

MOST_PASSES = 2_000_000
"""Passes with prompts that are simulated, each by itself, in some twenty seconds."""


def written_in_a_pass(drafts: int, acceptance: float) -> float:
    """Mean tokens of a pass that verifies `drafts` draft tokens: (1 - a^(k+1)) / (1 - a) (Leviathan
    et al., ICML 2023, equation 1).

    >>> round(written_in_a_pass(4, 0.7), 3)
    2.773
    """
    return (1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance)


class Drafting(NamedTuple):
    """Speculative decoding: a draft model, whose tokens the large one checks in one pass."""

    tokens: int  # proposed in each pass
    written: float  # tokens that a request gets of a pass, mean: those accepted, and one more
    # Of the draft model, as those of `ServingEngine`:
    step_s: float
    token_s: float
    context_s: float

    @classmethod
    def of(cls, tokens: int, acceptance: float, draft: "ServingEngine") -> "Drafting":
        """Each token accepted by itself with a probability below one, up to the first that is
        not."""
        written = written_in_a_pass(tokens, acceptance)
        return cls(tokens, written, draft.step_s, draft.token_s, draft.context_s)


class PassWatts(NamedTuple):
    """Watts of the devices of one copy of an engine, together."""

    idle: float
    limit: float
    step: float  # while a pass of decoding computes, without the reading of caches
    token: float  # while prompts are read
    context: float  # while caches are read


class ServingEngine(NamedTuple):
    """Seconds and room of an engine with a model."""

    step_s: float  # a pass of decoding, without the reading of caches
    token_s: float  # of each token of a prompt
    context_s: float  # of each token in a cache that a pass reads
    tokens_at_once: int  # of one pass
    requests_at_once: int
    cache_tokens: float  # that memory has room for, inf where it has no limit
    stages: int = 1  # batches at once
    copies: int = 1  # of the engine, all else being of one of them; requests go round-robin
    launch_s: float = 0.0  # least of a pass with prompts: the host launches its kernels one by one
    scheduler: Scheduler = Scheduler()
    drafting: Drafting | None = None
    watts: PassWatts | None = None  # None where they are unknown

    @property
    def written(self) -> float:
        """Tokens that a request gets of a pass."""
        return 1.0 if self.drafting is None else self.drafting.written

    def passes_of(self, new: int) -> int:
        """Passes that write so many tokens."""
        return math.ceil(new / self.written - 1e-9)

    def pass_s(self, prompt_tokens: int, decoding: int, context: float) -> float:
        """Seconds of one pass over prompt tokens and so many requests that decode, with so many
        tokens in their caches; without what its launches take at least."""
        drafting = self.drafting
        if drafting is None:
            work = max(self.step_s, self.token_s * (prompt_tokens + decoding))
            return work + self.context_s * context
        checked = prompt_tokens + decoding * (1 + drafting.tokens)
        seconds = max(self.step_s, self.token_s * checked) + self.context_s * context
        # The draft model reads prompts, too, and as many passes as it proposes tokens follow.
        seconds += drafting.token_s * prompt_tokens
        if decoding:
            step_s = max(drafting.step_s, drafting.token_s * decoding)
            seconds += drafting.tokens * (step_s + drafting.context_s * context)
        return seconds

    def pass_j(self, prompt_tokens: int, decoding: int, context: float, pass_s: float) -> float:
        """Joules above idle of one pass, as of `pass_s`, which takes so many seconds: the work of
        decoding and of prompts add up, at most to the limit. A draft model draws as a step does."""
        watts = self.watts
        if watts is None:
            return 0.0
        step_s = self.step_s if decoding else 0.0
        if self.drafting is not None:
            plain_s = self._replace(drafting=None).pass_s(prompt_tokens, decoding, context)
            step_s += self.pass_s(prompt_tokens, decoding, context) - plain_s
        joules = (
            (watts.step - watts.idle) * step_s
            + (watts.token - watts.idle) * self.token_s * prompt_tokens
            + (watts.context - watts.idle) * self.context_s * context
        )
        return min(joules, (watts.limit - watts.idle) * pass_s / self.stages)

    @property
    def growth_s(self) -> float:
        """Seconds by which a pass is longer than the one before, for each request that decodes."""
        context_s = self.context_s
        if self.drafting is not None:
            context_s += self.drafting.tokens * self.drafting.context_s
        return context_s * self.written


class TwoGroups(NamedTuple):
    """Prefill and decode engines, and the link between them that takes KV caches."""

    prefill: ServingEngine
    decode: ServingEngine
    send_s: float  # of the caches of a request, whatever their size
    token_send_s: float  # of each token of its prompt besides
    one_link: bool = False  # all copies send over one link, a request at a time

    def transfer_s(self, prompt: int) -> float:
        """Seconds to send the caches of a prompt over an idle link."""
        return self.send_s + prompt * self.token_send_s


class DisaggregatedTraffic(NamedTuple):
    """Traffic at two groups."""

    served: ServedTraffic
    sent: Spread  # from the end of a prompt's last pass until its caches are sent


def serve(traffic: Traffic, engine: ServingEngine) -> ServedTraffic:
    """Simulate traffic at one group of devices. Its batches share no requests.

    Raises:
        ArgumentError: One request alone needs more cache than there is, or the prompts take more
            than `MOST_PASSES` passes.
    """
    rows, work = served_requests(traffic, engine)
    return summary_of(rows, traffic.begin_s, work, idle_watts(engine))


def served_requests(
    traffic: Traffic, engine: ServingEngine
) -> tuple[list[ServedRequest], list[Work]]:
    """The requests of `serve`, each with the times when it was served, and the work of all
    passes."""
    _require_countable(traffic, engine)
    clients = traffic.concurrency
    lanes = _lanes(engine, clients, max(r.prompt + r.new for r in traffic.requests))
    rows, work, count = list[ServedRequest](), list[Work](), len(lanes)
    for k, lane in enumerate(lanes):
        own = max(1, clients // count + (k < clients % count)) if clients else 0
        run = _Run(traffic.requests[k::count], own, [lane])
        rows += run.served(run.clients.end)
        work += lane.work
    return rows, work


def serve_disaggregated(traffic: Traffic, groups: TwoGroups) -> DisaggregatedTraffic:
    """Simulate traffic at two groups of devices.

    Raises:
        ArgumentError: One request alone needs more cache than a group has.
    """
    requests, clients = traffic.requests, traffic.concurrency
    readers = _lanes(groups.prefill, clients, max(r.prompt for r in requests), "prefill")
    writers = _lanes(groups.decode, clients, max(r.prompt + r.new for r in requests), "decode")
    run = _Run(requests, clients, readers, writers)
    free_s, sent = [0.0] * (1 if groups.one_link else len(readers)), [0.0] * len(requests)

    def send(request: _Request, now: float) -> None:
        """Caches of a prompt on their way to the lane that decodes."""
        number = request.number
        link = number % len(readers) % len(free_s)
        sent_s = max(now, free_s[link]) + groups.transfer_s(request.prompt)
        free_s[link], sent[number] = sent_s, sent_s - now
        request.left, request.cached = request.new, request.prompt
        writer = writers[number % len(writers)]
        writer.take(sent_s + groups.decode.scheduler.request_s, request)

    rows = run.served(send)
    idle_w = [idle_watts(engine) for engine in (groups.prefill, groups.decode)]
    known = None if None in idle_w else sum(filter(None, idle_w))
    work = [part for lane in (*readers, *writers) for part in lane.work]
    return DisaggregatedTraffic(summary_of(rows, traffic.begin_s, work, known), Spread.of(sent))


def idle_watts(engine: ServingEngine) -> float | None:
    """Watts of all copies while nothing is computed; None where they are unknown."""
    return None if engine.watts is None else engine.copies * engine.watts.idle


class Batches(NamedTuple):
    """Batches that an engine serves side by side: one for each stage of each copy."""

    lanes: int
    most: int  # requests in each
    room: float  # tokens in the caches of each


def batches_of(engine: ServingEngine, concurrency: int, longest: int) -> Batches:
    """The batches of an engine for so many clients (0: no limit), of whose requests the longest
    keeps so many tokens.

    Raises:
        ArgumentError: One request alone needs more cache than there is.
    """
    if longest > engine.cache_tokens:
        raise ArgumentError(
            f"a request of {longest} tokens has no room: caches hold {int(engine.cache_tokens)}"
        )
    clients = concurrency or engine.copies * engine.stages
    copies = max(1, min(engine.copies, clients))
    stages = max(1, min(engine.stages, clients // copies))
    if longest > engine.cache_tokens / stages:  # too few tokens for a batch in each stage
        stages = 1
    most = math.ceil(engine.requests_at_once / stages)
    return Batches(copies * stages, most, engine.cache_tokens / stages)


def in_steady_state(traffic: Traffic, engine: ServingEngine, seed: int = 0) -> Traffic:
    """Traffic with staggered client start times, within the life of a request: equal requests that
    begin together stay together, and wait for each other's prompts ever after. Traffic without a
    concurrency, or whose clients are to begin together, is unchanged.

    Raises:
        ArgumentError: Clients ask fewer than two times each.
    """
    clients = traffic.concurrency
    if clients < 2 or traffic.together:
        return traffic
    require_rounds(traffic)
    prompt, new, side = traffic.prompt, traffic.new, math.ceil(clients / engine.copies)
    step_s = engine.pass_s(0, side, side * (prompt + new / 2)) / engine.written
    life_s = engine.token_s * prompt * side + step_s * new
    begin = np.sort(np.random.default_rng(seed).uniform(0.0, life_s, clients)).tolist()
    first = [r._replace(at_s=r.at_s + t) for r, t in zip(traffic.requests, begin, strict=False)]
    requests = (*first, *traffic.requests[clients:])
    return Traffic(requests, traffic.concurrency, begin_s=begin[-1])


def _require_countable(traffic: Traffic, engine: ServingEngine) -> None:
    """Raise `ArgumentError` where prompts take more passes than can be simulated."""
    sizes = np.array([r.prompt for r in traffic.requests])
    passes = int(np.ceil(sizes / engine.tokens_at_once).sum())
    if passes > MOST_PASSES:
        raise ArgumentError(
            f"the prompts of the traffic take {passes} passes of {engine.tokens_at_once} tokens; "
            f"up to {MOST_PASSES} are simulated: give fewer requests"
        )


@dataclass(eq=False, slots=True)
class _Request(ServedRequest):
    """Progress of a request."""

    number: int = 0
    unread: int = 0  # tokens read before its next one: more than its prompt after a preemption
    left: int = 0  # tokens to be written from then on
    cached: int = 0  # tokens in its caches when it began to decode; 0: to be read first
    since: int = 0  # the step of decoding at which that was


@dataclass(eq=False)
class _Clients:
    """Requests on their way to the engine."""

    requests: Sequence[Arrival]
    free: list[float]  # heap of the times since when clients wait for nothing
    request_s: float
    asked: list[_Request] = field(default_factory=list)

    def due(self) -> float:
        """When the next request is in the queue of the engine."""
        if len(self.asked) == len(self.requests) or not self.free:
            return math.inf
        return max(self.requests[len(self.asked)].at_s, self.free[0]) + self.request_s

    def until(self, seconds: float) -> Iterator[_Request]:
        """Requests that are in the queue by then."""
        while self.due() <= seconds:
            number = len(self.asked)
            at_s, prompt, new, _ = self.requests[number]
            asked_s = max(at_s, heapq.heappop(self.free))
            self.asked.append(
                _Request(prompt, new, asked_s, number=number, unread=prompt, left=new)
            )
            yield self.asked[-1]

    def end(self, request: _Request, now: float) -> None:
        """Finish a request; its client may send the next one."""
        request.ended_s = now
        heapq.heappush(self.free, now)


class _Run:
    """One simulation: clients, and the lanes that their requests pass."""

    def __init__(
        self, requests: Sequence[Arrival], concurrency: int, entry: "list[ServingLane]",
        decode: "Sequence[ServingLane]" = (),
    ) -> None:  # fmt: skip
        free = [0.0] * (concurrency or len(requests))
        self.clients = _Clients(requests, free, entry[0].engine.scheduler.request_s)
        self.entry, self.decode = entry, decode

    def served(self, leave: "Callable[[_Request, float], None]") -> list[_Request]:
        """All requests, once the last of them has ended; `leave` takes those that leave an entry
        lane.

        The lane whose pass starts first goes on, so that all that reaches it by then is known."""
        lanes, clients = [*self.entry, *self.decode], self.clients
        while True:
            lane = min(lanes, key=ServingLane.starts_s) if len(lanes) > 1 else lanes[0]
            due_s = clients.due()
            if due_s <= lane.starts_s():
                if math.isinf(due_s):
                    return clients.asked
                for request in clients.until(due_s):
                    self.entry[request.number % len(self.entry)].take(due_s, request)
                continue
            lane.admit()
            sink = clients.end if lane.role == "decode" else leave
            for request in lane.iterate(self._until_s(lane)):
                sink(request, lane.now)

    def _until_s(self, lane: "ServingLane") -> float:
        """A time before which no request reaches a lane: it comes no earlier than the next pass of
        a lane before it starts, nor than a request ends elsewhere whose client asks again."""
        until_s = min(self.clients.due(), lane.coming[0][0] if lane.coming else math.inf)
        if not self.decode:
            return until_s
        others = (other.ends_s() for other in self.decode if other is not lane)
        return min([until_s, *map(ServingLane.starts_s, self.entry), *others])


class ServingLane:
    """One batch: its requests, and the iterations that serve them."""

    def __init__(
        self, engine: ServingEngine, most: int, room: float,
        role: Literal["", "prefill", "decode"] = "",
    ) -> None:  # fmt: skip
        self.engine, self.most, self.room, self.role = engine, most, room, role
        self.coming = list[tuple[float, int, _Request]]()  # heap by time
        self.waiting = deque[_Request]()
        self.running = list[_Request]()  # in the order in which they started
        self.prompts = deque[tuple[_Request, int]]()  # with the tokens that are left of each
        self.ends = list[tuple[int, int, _Request]]()  # heap by step, of those that decode
        self.new = list[_Request]()  # those that begin to decode with the next pass
        self.context = 0.0  # tokens in the caches of those that decode
        self.held = 0.0  # tokens that caches are kept for; with preemption, of prompts alone
        self.count = 0  # steps of decoding so far
        self.iterations_since_admission = 0
        self.deferred_iterations = 0
        self.work = list[Work]()  # of its passes so far
        self.chosen_s = self.now = 0.0  # when the next batch is chosen, and when its pass starts

    def take(self, at_s: float, request: _Request) -> None:
        """Let a request come at a time."""
        heapq.heappush(self.coming, (at_s, request.number, request))

    def starts_s(self) -> float:
        """When its next pass starts, as far as its requests are known."""
        if self.running or self.waiting:
            return self.now
        return max(self.now, self.coming[0][0]) if self.coming else math.inf

    def ends_s(self) -> float:
        """A time before which none of its requests ends."""
        if self.waiting or self.prompts:
            return self.now
        least_s = max(self.now, self.coming[0][0]) if self.coming else math.inf
        if self.ends:
            steps = self.ends[0][0] - self.count
            least_s = min(least_s, self.now + steps * self.engine.step_s)
        return least_s

    def admit(self) -> None:
        """Start requests first come, first served, while they have room."""
        if not self.running:
            self.now = self.starts_s()
            self.chosen_s, self.iterations_since_admission = self.now, 0
        if not self.iterations_since_admission:
            while self.coming and self.coming[0][0] <= self.chosen_s:
                self.waiting.append(heapq.heappop(self.coming)[-1])
        if self._preempt():
            return
        while self.waiting and len(self.running) < self.most:
            request = self.waiting[0]
            needs = self._needs(request)
            if self.running and self._cached + needs + self._grows > self.room:
                break
            self.running.append(self.waiting.popleft())
            if math.isnan(request.started_s):
                request.started_s = self.now
            self.held += needs
            if request.cached:
                self.new.append(request)
                self._decode(request, request.left)
            else:
                self.prompts.append((request, request.unread))

    def iterate(self, until_s: float) -> list[_Request]:
        """Run one iteration, or all identical ones that begin before `until_s`; returns the
        requests that leave."""
        engine, scheduler = self.engine, self.engine.scheduler
        tokens, read, decodes = self._batch()
        decoding, context = (len(self.ends), self.context) if decodes else (0, 0.0)
        first_s = engine.pass_s(tokens, decoding, context)
        if tokens:
            first_s = max(first_s, engine.launch_s)
        first_j = engine.pass_j(tokens, decoding, context, first_s)
        grows_s = engine.growth_s * decoding  # each pass longer than the one before
        passes, start_s = 1, self.now
        if not (self.prompts or read or self.new):
            passes = int(min(self.ends[0][0] - self.count, self._passes_with_room()))
            interval = scheduler.admission_interval
            if until_s <= start_s and interval > 1:
                passes = min(passes, interval - self.iterations_since_admission)
            elif until_s < math.inf:
                passes = min(passes, _passes_in(until_s - start_s, first_s, grows_s))
        last_s = first_s + grows_s * (passes - 1)
        self.now += passes * (first_s + last_s) / 2
        if engine.watts is not None:
            more = decoding * engine.written * (passes - 1)
            last_j = engine.pass_j(tokens, decoding, context + more, last_s)
            self.work.append(Work(start_s, self.now, passes * (first_j + last_j) / 2))
        if decodes:
            self.count += passes
            self.context += decoding * passes * engine.written
        since = self.iterations_since_admission + passes
        self.iterations_since_admission = 0 if tokens else since % scheduler.admission_interval
        self.chosen_s = self.now
        if scheduler.async_scheduling:
            self.chosen_s = start_s if passes == 1 else self.now - last_s
        for request in self.new:
            request.first_s = self.now
        self.new.clear()
        if self.role == "prefill":
            for request in read:
                self.held -= self._needs(request)
                self.running.remove(request)
            return read
        for request in read:
            if math.isnan(request.first_s):
                request.first_s = self.now
            request.cached = request.unread + 1
            self._decode(request, request.left - 1)
        ended = list[_Request]()
        while self.ends and self.ends[0][0] <= self.count:
            ended.append(heapq.heappop(self.ends)[-1])
            self._end(ended[-1])
        return ended

    def _batch(self) -> tuple[int, list[_Request], bool]:
        """(prompt tokens of the next pass, requests that are read to their end by it, True where it
        decodes)."""
        engine = self.engine
        checked = 1 if engine.drafting is None else 1 + engine.drafting.tokens
        chunks, decodes, self.deferred_iterations = engine.scheduler.next_batch(
            (left for _, left in self.prompts), len(self.ends) * checked, engine.tokens_at_once,
            self.deferred_iterations,
        )  # fmt: skip
        read = list[_Request]()
        for chunk in chunks:
            request, unread = self.prompts.popleft()
            if chunk < unread:
                self.prompts.appendleft((request, unread - chunk))
            else:
                read.append(request)
        return sum(chunks), read, decodes

    @property
    def _grows(self) -> float:
        """Tokens by which caches grow in a pass, where that may be more than there is room for."""
        return self.engine.written * len(self.ends) if self.engine.scheduler.preempts else 0.0

    @property
    def _cached(self) -> float:
        """Tokens that caches hold, or are kept for."""
        return self.held + (self.context if self.engine.scheduler.preempts else 0.0)

    def _passes_with_room(self) -> float:
        """Passes before caches have grown out of their room."""
        grows = self._grows
        return max(1.0, (self.room - self._cached) // grows) if grows else math.inf

    def _needs(self, request: _Request) -> int:
        """Tokens that are kept for a request that starts."""
        if self.role == "prefill":
            return request.unread
        return request.unread + (1 if self.engine.scheduler.preempts else request.left)

    def _preempt(self) -> bool:
        """Preempt the most recently started requests until the KV caches of the next pass fit;
        return whether any was preempted."""
        before = len(self.running)
        while len(self.running) > 1 and self._grows and self._cached + self._grows > self.room:
            request = self.running.pop()
            if self.prompts and self.prompts[-1][0] is request:
                self.prompts.pop()
                self.held -= self._needs(request)
            else:
                self.ends = [entry for entry in self.ends if entry[-1] is not request]
                heapq.heapify(self.ends)
                self.context -= self._context(request)
                passes = self.count - request.since
                first = request.cached - request.unread  # token, written by the end of its prompt
                written = int(first + self.engine.written * passes + 1e-9)
                request.unread += written
                request.left -= written
                request.cached = 0
            self.waiting.appendleft(request)
        return len(self.running) < before

    def _decode(self, request: _Request, new: int) -> None:
        """Let the next passes write so many tokens of a request."""
        request.since = self.count
        ends = self.count + self.engine.passes_of(new)
        heapq.heappush(self.ends, (ends, request.number, request))
        self.context += request.cached
        if self.engine.scheduler.preempts:
            self.held -= self._needs(request)

    def _end(self, request: _Request) -> None:
        """Free the room of a request that has all of its tokens."""
        self.context -= self._context(request)
        if not self.engine.scheduler.preempts:
            self.held -= self._needs(request)
        self.running.remove(request)

    def _context(self, request: _Request) -> float:
        """Tokens in the cache of a request that decodes."""
        return request.cached + self.engine.written * (self.count - request.since)


def _lanes(
    engine: ServingEngine, concurrency: int, longest: int,
    role: Literal["", "prefill", "decode"] = "",
) -> list[ServingLane]:  # fmt: skip
    """The batches of a group."""
    count, most, room = batches_of(engine, concurrency, longest)
    return [ServingLane(engine, most, room, role) for _ in range(count)]


def _passes_in(seconds: float, first_s: float, grows_s: float) -> int:
    """Number of iterations that fit in `seconds`, at least one."""
    if first_s <= 0 or seconds <= first_s:
        return 1
    if grows_s <= 0:
        return math.ceil(seconds / first_s)
    half = first_s - grows_s / 2
    return max(1, math.ceil((math.sqrt(half**2 + 2 * grows_s * seconds) - half) / grows_s))
