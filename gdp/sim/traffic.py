"""Traffic: many requests at an engine that batches continuously, iteration by iteration.

An engine schedules anew before every pass of the model (Orca, Yu et al., OSDI 2022): each request
that decodes gets one token, what is left of the tokens of a pass goes to prompts in the order of
their arrival, cut into chunks where they are longer (Sarathi-Serve, Agrawal et al., OSDI 2024). A
request starts where its caches have room, as it will be at its end; or, as vLLM has it, where its
prompt has, and when the caches of all have grown out of theirs the request that started last gives
its own back and reads all of its tokens again later (`Scheduling.preempts`). A pass of d decoding
requests and t tokens of prompts takes

    max(step_s, token_s * (t + d)) + context_s * (tokens in the caches of those d)

seconds: weights are read once, or arithmetic takes longer; caches are read by each of its own. The
stages of a pipeline hold as many batches at once, each of which takes a pass from end to end. Where
a small model drafts k tokens a pass, those and one more are checked at once: t + d (k + 1) tokens.
Copies of the model take requests in turn, each with caches and limits of its own.
Between two events (a request that arrives, ends, or still reads its prompt) passes are alike but
for the growing caches, so that their sum is a closed form: O(requests log requests).

Engines differ in the work that they choose for a pass, and in when they choose it (`Scheduling`).
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gdp.errors import ArgumentError

ROUNDS = 10
"""Requests of each client where nobody said how many, as tools that measure engines take."""


MOST_PASSES = 2_000_000
"""Passes with prompts that are simulated, each by itself, in some twenty seconds."""


class Arrival(NamedTuple):
    """A request of the traffic."""

    at_s: float  # when it arrives; with a fixed concurrency, no earlier than another ends
    prompt: int  # tokens that are read
    new: int  # tokens that are written
    line: int = 0  # of the table that it stands in; 0 where none does


@dataclass(frozen=True)
class Traffic:
    """Requests in the order of their arrival; `concurrency` of them at once, 0 for no limit."""

    requests: tuple[Arrival, ...]
    concurrency: int = 0
    begin_s: float = 0.0  # earlier arrivals fill the engine and are not counted
    together: bool = False  # all clients begin at once, as those of a tool that measures do

    def __post_init__(self) -> None:
        if not self.requests:
            raise ArgumentError("traffic has no request")
        for request in self.requests:
            if request.prompt < 1 or request.new < 1 or not 0 <= request.at_s < math.inf:
                raise ArgumentError(f"a request needs a prompt, new tokens and a time: {request}")

    @property
    def prompt(self) -> int:
        """Mean tokens of a prompt."""
        return max(1, round(float(np.mean([r.prompt for r in self.requests]))))

    @property
    def new(self) -> int:
        """Mean tokens that are written."""
        return max(1, round(float(np.mean([r.new for r in self.requests]))))


class Scheduling(NamedTuple):
    """Rules by which an engine fills passes; the defaults are those of chunked prefill alone."""

    mixed: bool = True  # prompts are read beside decoding; else in passes without it
    cuts: bool = True  # prompts are cut where a pass is full; else they wait for a pass with room
    ahead: bool = False  # a pass is chosen when the one before it starts, not when that has ended
    look_passes: int = 1  # passes of decoding between two looks at new requests
    wait_passes: int = 0  # passes that prompts let go by, until
    wait_tokens: int = 0  # so many tokens would be in one
    request_s: float = 0.0  # of the host, before a request is in the queue of the engine
    between_s: float = 0.0  # of the host, between two passes, for which devices wait
    preempts: bool = (
        False  # requests start where prompts have room; else each keeps room to its end
    )


def written_in_a_pass(drafts: int, acceptance: float) -> float:
    """Tokens of a pass that checks so many drafts, mean: (1 - a^(k+1)) / (1 - a) (Leviathan et al.,
    ICML 2023, equation 1).

    >>> round(written_in_a_pass(4, 0.7), 3)
    2.773
    """
    return (1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance)


class Drafting(NamedTuple):
    """A small model that proposes tokens, all of which the large one checks in one pass."""

    tokens: int  # proposed in each pass
    written: float  # tokens that a request gets of a pass, mean: those accepted, and one more
    # Of the small model, as those of `ServingEngine`:
    step_s: float
    token_s: float
    context_s: float

    @classmethod
    def of(cls, tokens: int, acceptance: float, draft: "ServingEngine") -> "Drafting":
        """Each token accepted by itself with a probability below one, up to the first that is
        not."""
        written = written_in_a_pass(tokens, acceptance)
        return cls(tokens, written, draft.step_s, draft.token_s, draft.context_s)


class ServingEngine(NamedTuple):
    """Seconds and room of an engine with a model."""

    step_s: float  # a pass of decoding, without the reading of caches
    token_s: float  # of each token of a prompt
    context_s: float  # of each token in a cache that a pass reads
    tokens_at_once: int  # of one pass
    requests_at_once: int
    cache_tokens: float  # that memory has room for, inf where it has no limit
    stages: int = 1  # batches at once
    copies: int = 1  # of the engine, all else being of one of them; they take requests in turn
    launch_s: float = 0.0  # least of a pass with prompts: the host launches its kernels one by one
    scheduling: Scheduling = Scheduling()
    drafting: Drafting | None = None

    @property
    def written(self) -> float:
        """Tokens that a request gets of a pass."""
        return 1.0 if self.drafting is None else self.drafting.written

    def passes_of(self, new: int) -> int:
        """Passes that write so many tokens."""
        return math.ceil(new / self.written - 1e-9)

    def pass_s(self, prompt_tokens: int, decoding: int, context: float) -> float:
        """Seconds of one pass over tokens of prompts and so many requests that decode, with so many
        tokens in their caches; without what its launches take at least."""
        drafting = self.drafting
        if drafting is None:
            work = max(self.step_s, self.token_s * (prompt_tokens + decoding))
            return work + self.context_s * context
        checked = prompt_tokens + decoding * (1 + drafting.tokens)
        seconds = max(self.step_s, self.token_s * checked) + self.context_s * context
        # The small model reads prompts, too, and as many passes as it proposes tokens follow.
        seconds += drafting.token_s * prompt_tokens
        if decoding:
            step_s = max(drafting.step_s, drafting.token_s * decoding)
            seconds += drafting.tokens * (step_s + drafting.context_s * context)
        return seconds

    @property
    def growth_s(self) -> float:
        """Seconds by which a pass is longer than the one before, for each request that decodes."""
        context_s = self.context_s
        if self.drafting is not None:
            context_s += self.drafting.tokens * self.drafting.context_s
        return context_s * self.written


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of seconds over requests."""

    mean_s: float
    median_s: float
    p95_s: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread":
        """Of the seconds of each request; zeros where there are none."""
        values = np.array(list(seconds))
        if not values.size:
            return cls(0.0, 0.0, 0.0)
        return cls(float(values.mean()), *(float(np.percentile(values, p)) for p in (50, 95)))


@dataclass(frozen=True)
class ServedTraffic:
    """Traffic as an engine serves it."""

    requests: int
    seconds: float  # from the first arrival to the last token
    first_token: Spread  # from the arrival of a request
    token: Spread  # between two tokens of a request, mean of each request
    request: Spread  # from the arrival of a request to its last token
    tokens_per_s: float  # written by all
    running: float  # requests at once, mean over time
    waiting_s: float  # from arrival to start, mean


@dataclass(eq=False)
class RunningBatch:
    """State of one batch: requests that read their prompt and requests that decode."""

    prompts: deque[tuple[int, int]] = field(default_factory=deque)  # (request, tokens left)
    ends: list[tuple[int, int]] = field(default_factory=list)  # heap of (step, request) that decode
    context: float = 0.0  # tokens in the caches of those that decode
    held: float = 0.0  # tokens that caches are kept for; of engines that preempt, of prompts alone
    count: int = 0  # steps of decoding so far
    unlooked: int = 0  # steps since the last look at new requests
    waited: int = 0  # passes that prompts have let go by
    chosen_s: float = 0.0  # when the next pass is chosen

    @property
    def size(self) -> int:
        return len(self.prompts) + len(self.ends)


def serve(traffic: Traffic, engine: ServingEngine) -> ServedTraffic:
    """Simulate traffic.

    Raises:
        ArgumentError: One request alone needs more cache than there is, or the prompts take more
            than `MOST_PASSES` passes.
    """
    _require_countable(traffic, engine)
    longest = max(r.prompt + r.new for r in traffic.requests)
    count, most, room = batches_of(engine, traffic.concurrency, longest)
    lanes = [
        _lane(
            traffic.requests[lane::count], _part(traffic.concurrency, lane, count), engine, most,
            room,
        )
        for lane in range(count)
    ]  # fmt: skip
    return summary_of([row for rows in lanes for row in rows], traffic.begin_s)


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
    """The traffic of a server that has been asked for a while: clients began at random times
    within the life of a request. Equal requests that begin together stay together, and wait for
    each other's prompts ever after. Traffic without a concurrency, or whose clients are to begin
    together, is as it was.

    Raises:
        ArgumentError: Clients ask fewer than two times each.
    """
    clients = traffic.concurrency
    if clients < 2 or traffic.together:
        return traffic
    require_rounds(traffic)
    prompt, new, side = traffic.prompt, traffic.new, math.ceil(clients / engine.copies)
    step_s = engine.pass_s(0, side, side * (prompt + new / 2)) + engine.scheduling.between_s
    step_s /= engine.written
    life_s = engine.token_s * prompt * side + step_s * new
    begin = np.sort(np.random.default_rng(seed).uniform(0.0, life_s, clients)).tolist()
    first = [r._replace(at_s=r.at_s + t) for r, t in zip(traffic.requests, begin, strict=False)]
    requests = (*first, *traffic.requests[clients:])
    return Traffic(requests, traffic.concurrency, begin_s=begin[-1])


def require_rounds(traffic: Traffic) -> None:
    """Raise `ArgumentError` where clients that begin at random times ask fewer than two times each:
    the first request of each fills the engine, and only what follows is counted."""
    count, clients = len(traffic.requests), traffic.concurrency
    if clients > 1 and count < 2 * clients and not traffic.together:
        raise ArgumentError(
            f"{count} requests are too few for {clients} clients: give requests={2 * clients} or "
            "more, or start=together"
        )


def _require_countable(traffic: Traffic, engine: ServingEngine) -> None:
    """Raise `ArgumentError` where prompts take more passes than can be simulated."""
    sizes = np.array([r.prompt for r in traffic.requests])
    passes = int(np.ceil(sizes / engine.tokens_at_once).sum())
    if passes > MOST_PASSES:
        raise ArgumentError(
            f"the prompts of the traffic take {passes} passes of {engine.tokens_at_once} tokens; "
            f"up to {MOST_PASSES} are simulated: give fewer requests"
        )


def _part(concurrency: int, lane: int, stages: int) -> int:
    """Clients of one of the batches; 0 for no limit."""
    return max(1, concurrency // stages + (lane < concurrency % stages)) if concurrency else 0


class ServedRequest(NamedTuple):
    """One request that was served."""

    asked_s: float
    started_s: float
    first_s: float
    ended_s: float
    new: int


@dataclass(eq=False)
class Clients:
    """Requests on their way to the engine."""

    requests: Sequence[Arrival]
    free: list[float]  # heap of the times since when clients wait for nothing
    scheduling: Scheduling
    asked: list[float] = field(default_factory=list)

    def due(self) -> float:
        """When the next request is in the queue of the engine."""
        if len(self.asked) == len(self.requests) or not self.free:
            return math.inf
        asked_s = max(self.requests[len(self.asked)].at_s, self.free[0])
        return asked_s + self.scheduling.request_s

    def until(self, seconds: float) -> Iterator[int]:
        """Requests that are in the queue by then."""
        while self.due() <= seconds:
            request = len(self.asked)
            self.asked.append(max(self.requests[request].at_s, heapq.heappop(self.free)))
            yield request


def _lane(
    requests: Sequence[Arrival], concurrency: int, engine: ServingEngine, most: int, room: float
) -> list[ServedRequest]:
    """Requests served by one batch."""
    clients = Clients(requests, [0.0] * (concurrency or len(requests)), engine.scheduling)
    return _Lane(requests, clients, engine, most, room).served()


class _Lane:
    """One batch, its clients, and how far each of their requests is."""

    def __init__(
        self, requests: Sequence[Arrival], clients: Clients, engine: ServingEngine, most: int,
        room: float,
    ) -> None:  # fmt: skip
        count = len(requests)
        self.requests, self.clients, self.engine = requests, clients, engine
        self.most, self.room = most, room
        self.waiting, self.state, self.now = deque[int](), RunningBatch(), 0.0
        self.started, self.first, self.ended = ([math.nan] * count for _ in range(3))
        # Tokens that it reads before its next one: more than its prompt after a preemption.
        self.unread = [r.prompt for r in requests]
        self.left = [r.new for r in requests]  # tokens to be written from then on
        self.since = [0] * count  # the step of decoding at which that was read
        self.running = list[int]()  # in the order in which they started

    def served(self) -> list[ServedRequest]:
        """All requests, once the last of them has ended."""
        state, clients = self.state, self.clients
        while self.waiting or state.size or clients.due() < math.inf:
            if not state.size:
                self.now = self.now if self.waiting else max(self.now, clients.due())
                state.chosen_s, state.unlooked = self.now, 0
            if not state.unlooked:
                self.waiting.extend(clients.until(state.chosen_s))
            if not self._preempt():
                self._admit()
            self.now, read = run_passes(
                state, self.engine, self.now, clients.due(), self._passes_with_room()
            )
            for request in read:
                self._begin(request)
            while state.ends and state.ends[0][0] <= state.count:
                self._end(heapq.heappop(state.ends)[1])
        times = zip(clients.asked, self.started, self.first, self.ended, strict=True)
        return [ServedRequest(*own, r.new) for own, r in zip(times, self.requests, strict=True)]

    @property
    def _grows(self) -> float:
        """Tokens by which caches grow in a pass, where that may be more than there is room for."""
        state, preempts = self.state, self.engine.scheduling.preempts
        return self.engine.written * len(state.ends) if preempts else 0.0

    @property
    def _cached(self) -> float:
        """Tokens that caches hold, or are kept for."""
        state = self.state
        return state.held + (state.context if self.engine.scheduling.preempts else 0.0)

    def _passes_with_room(self) -> float:
        """Passes before caches have grown out of their room."""
        grows = self._grows
        return max(1.0, (self.room - self._cached) // grows) if grows else math.inf

    def _needs(self, request: int) -> int:
        """Tokens that are kept for a request that starts."""
        written = 1 if self.engine.scheduling.preempts else self.left[request]
        return self.unread[request] + written

    def _admit(self) -> None:
        """Start requests in turn, while they have room."""
        state = self.state
        while self.waiting and state.size < self.most:
            needs = self._needs(self.waiting[0])
            if self.running and self._cached + needs + self._grows > self.room:
                break
            request = self.waiting.popleft()
            if math.isnan(self.started[request]):
                self.started[request] = self.now
            state.held += needs
            state.prompts.append((request, self.unread[request]))
            self.running.append(request)

    def _preempt(self) -> bool:
        """Take back what started last while the next pass has no room; whether anything was."""
        before = len(self.running)
        while len(self.running) > 1 and self._grows and self._cached + self._grows > self.room:
            request, state = self.running.pop(), self.state
            if state.prompts and state.prompts[-1][0] == request:
                state.prompts.pop()
                state.held -= self._needs(request)
            else:
                state.ends = [entry for entry in state.ends if entry[1] != request]
                heapq.heapify(state.ends)
                state.context -= self._context(request)
                passes = state.count - self.since[request]
                written = int(1 + self.engine.written * passes + 1e-9)
                self.unread[request] += written
                self.left[request] -= written
            self.waiting.appendleft(request)
        return len(self.running) < before

    def _begin(self, request: int) -> None:
        """Decode a request whose tokens are read, by which it has one more."""
        state = self.state
        if math.isnan(self.first[request]):
            self.first[request] = self.now
        self.since[request] = state.count
        passes = self.engine.passes_of(self.left[request] - 1)
        heapq.heappush(state.ends, (state.count + passes, request))
        state.context += self.unread[request] + 1
        if self.engine.scheduling.preempts:
            state.held -= self._needs(request)

    def _end(self, request: int) -> None:
        """A request that has all of its tokens; its client may ask again."""
        state = self.state
        self.ended[request] = self.now
        state.context -= self._context(request)
        if not self.engine.scheduling.preempts:
            state.held -= self._needs(request)
        self.running.remove(request)
        heapq.heappush(self.clients.free, self.now)

    def _context(self, request: int) -> float:
        """Tokens in the cache of a request that decodes."""
        passes = self.state.count - self.since[request]
        return self.unread[request] + 1 + self.engine.written * passes


def run_passes(
    state: RunningBatch, engine: ServingEngine, now: float, until: float, most: float = math.inf
) -> tuple[float, list[int]]:
    """(time after one pass, or after all that are alike, at most so many; requests whose prompt was
    read)."""
    decoding, scheduling = len(state.ends), engine.scheduling
    tokens, read = _prompts(state, engine)
    if tokens and not scheduling.mixed:
        end_s = now + max(engine.launch_s, engine.pass_s(tokens, 0, 0.0)) + scheduling.between_s
        state.unlooked, state.chosen_s = 0, now if scheduling.ahead else end_s
        return end_s, read
    first_s = engine.pass_s(tokens, decoding, state.context)
    if tokens:
        first_s = max(first_s, engine.launch_s)
    first_s += scheduling.between_s
    grows_s = engine.growth_s * decoding  # each pass longer than the one before
    passes = 1
    if not state.prompts and not read:
        passes = int(min(state.ends[0][0] - state.count, most))
        if until <= now and scheduling.look_passes > 1:
            passes = min(passes, scheduling.look_passes - state.unlooked)
        elif until < math.inf:
            passes = min(passes, _passes_in(until - now, first_s, grows_s))
    last_s = first_s + grows_s * (passes - 1)
    now += passes * (first_s + last_s) / 2
    state.count += passes
    state.context += decoding * passes * engine.written
    state.unlooked = 0 if tokens else (state.unlooked + passes) % scheduling.look_passes
    state.chosen_s = now - last_s if scheduling.ahead else now
    return now, read


def _prompts(state: RunningBatch, engine: ServingEngine) -> tuple[int, list[int]]:
    """(tokens of prompts in the next pass, requests that are read to their end by it)."""
    scheduling, decoding = engine.scheduling, len(state.ends)
    checked = 1 if engine.drafting is None else 1 + engine.drafting.tokens
    beside = decoding * checked if scheduling.mixed else 0
    left, chunks = max(0, engine.tokens_at_once - beside), list[int]()
    for _, unread in state.prompts:
        whole = not scheduling.cuts and unread <= engine.tokens_at_once
        if not left or (whole and unread > left):
            break
        chunks.append(min(unread, left))
        left -= chunks[-1]
    tokens = sum(chunks)
    few = tokens + beside < scheduling.wait_tokens
    if tokens and decoding and few and state.waited < scheduling.wait_passes:
        state.waited += 1
        return 0, []
    if tokens:
        state.waited = 0
    read = list[int]()
    for chunk in chunks:
        request, unread = state.prompts.popleft()
        if chunk < unread:
            state.prompts.appendleft((request, unread - chunk))
        else:
            read.append(request)
    return tokens, read


def _passes_in(seconds: float, first_s: float, grows_s: float) -> int:
    """Least number of passes that take so many seconds, at least one."""
    if first_s <= 0 or seconds <= first_s:
        return 1
    if grows_s <= 0:
        return math.ceil(seconds / first_s)
    half = first_s - grows_s / 2
    return max(1, math.ceil((math.sqrt(half**2 + 2 * grows_s * seconds) - half) / grows_s))


def summary_of(rows: Sequence[ServedRequest], begin_s: float) -> ServedTraffic:
    """Figures of requests that are asked from a time on, and of all while these are asked."""
    begin_s = max(begin_s, min(row.asked_s for row in rows))
    counted = [row for row in rows if row.asked_s >= begin_s]
    end_s = max(row.ended_s for row in counted)
    # While the last requests end, fewer and fewer share the engine.
    until_s = end_s if len(counted) == len(rows) else max(row.asked_s for row in counted)
    until_s = until_s if until_s > begin_s else end_s
    seconds = until_s - begin_s

    def share(start_s: float, end_s: float) -> float:
        """Part of a time that lies within those seconds."""
        inside = min(end_s, until_s) - max(start_s, begin_s)
        return max(0.0, inside / (end_s - start_s)) if end_s > start_s else 0.0

    tokens = sum(row.new * share(row.first_s, row.ended_s) for row in rows if row.new > 1)
    tokens += sum(begin_s <= row.ended_s <= until_s for row in rows if row.new == 1)
    busy_s = sum((row.ended_s - row.started_s) * share(row.started_s, row.ended_s) for row in rows)
    return ServedTraffic(
        requests=len(counted),
        seconds=end_s - begin_s,
        first_token=Spread.of(row.first_s - row.asked_s for row in counted),
        token=Spread.of(
            (row.ended_s - row.first_s) / (row.new - 1) for row in counted if row.new > 1
        ),
        request=Spread.of(row.ended_s - row.asked_s for row in counted),
        tokens_per_s=tokens / seconds if seconds else math.inf,
        running=busy_s / seconds if seconds else 0.0,
        waiting_s=float(np.mean([row.started_s - row.asked_s for row in counted])),
    )
