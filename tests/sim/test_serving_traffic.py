"""Traffic at an engine: against passes one by one, by hand, and by properties."""

import math
import random
from dataclasses import replace

import pytest

from benchmarks.measured_world.servers import TensorRtScheduler
from gdp.base.errors import ArgumentError
from gdp.sim.scheduling import Scheduler
from gdp.sim.serving import Drafting, ServingEngine, in_steady_state, serve
from gdp.sim.traffic import Arrival, Traffic
from gdp.sim.traffic_text import parse_traffic
from gdp.targets.sglang.scheduler import SglangScheduler

ENGINE = ServingEngine(
    step_s=0.01, token_s=1e-4, context_s=1e-7, tokens_at_once=512, requests_at_once=64,
    cache_tokens=math.inf,
)  # fmt: skip


def slow(traffic: Traffic, engine: ServingEngine) -> list[tuple[float, float, float]]:
    """(asked, first token, last token) of each request: one pass at a time, a list of dicts."""
    todo = [dict(r._asdict(), read=0, written=0, need=r.prompt) for r in traffic.requests]
    free = [0.0] * (traffic.concurrency or len(todo))
    queue, active, now, up = [], [], 0.0, 0
    plan, chosen, since, waited = engine.scheduler, 0.0, 0, 0
    mixed, whole = not isinstance(plan, SglangScheduler), isinstance(plan, TensorRtScheduler)
    drafts, per_pass, small = 0, 1.0, (0.0, 0.0, 0.0)
    if engine.drafting is not None:
        drafts, per_pass, *small = engine.drafting

    def ready() -> float:
        """When the next request is in the queue."""
        return max(todo[up]["at_s"], free[0]) + plan.request_s

    def grown(rows: list[dict[str, float]]) -> float:
        """Tokens that caches hold after one more pass, of prompts all that will be read."""
        reading = [r for r in rows if r["read"] < r["need"]]
        written = [r for r in rows if r["read"] == r["need"]]
        return sum(r["need"] + 1 for r in reading) + sum(
            r["prompt"] + r["written"] + per_pass for r in written
        )

    while up < len(todo) or queue or active:
        if not active:
            now = now if queue else max(now, ready())
            chosen, since = now, 0
        while since == 0 and up < len(todo) and free and ready() <= chosen:
            todo[up]["asked"] = max(todo[up]["at_s"], free.pop(0))
            queue.append(todo[up])
            up += 1
        taken = False
        while plan.preempts and len(active) > 1 and grown(active) > engine.cache_tokens:
            last, taken = active.pop(), True
            last["written"] = int(last["written"] + 1e-9)
            last["read"], last["need"] = 0, last["prompt"] + last["written"]
            queue.insert(0, last)
        while queue and len(active) < engine.requests_at_once and not taken:
            held = sum(r["prompt"] + r["new"] for r in [*active, queue[0]])
            if plan.preempts:
                held = grown(active) + queue[0]["need"] + 1
            if active and held > engine.cache_tokens:
                break
            active.append(queue.pop(0))
        decoding = [r for r in active if r["read"] == r["need"]]
        context = sum(r["prompt"] + r["written"] for r in decoding)
        beside = len(decoding) * (1 + drafts) if mixed else 0
        left, chunks = max(0, engine.tokens_at_once - beside), []
        for r in active:
            if r not in decoding:
                unread = r["need"] - r["read"]
                if whole and left < unread <= engine.tokens_at_once:
                    break
                chunks.append((r, min(left, unread)))
                left -= min(left, unread)
        tokens = sum(chunk for _, chunk in chunks)
        few = isinstance(plan, TensorRtScheduler) and tokens + beside < plan.wait_tokens
        if tokens and decoding and few and waited < plan.wait_iterations:
            waited, tokens, chunks = waited + 1, 0, []
        elif tokens:
            waited = 0
        begin = now
        if tokens and not mixed:
            decoding = []
            work = max(engine.step_s, engine.token_s * tokens) + small[1] * tokens
            now += max(work, engine.launch_s)
        else:
            work = max(engine.step_s, engine.token_s * (tokens + len(decoding) * (1 + drafts)))
            work += engine.context_s * context + small[1] * tokens
            for _ in range(drafts if decoding else 0):
                work += max(small[0], small[1] * len(decoding)) + small[2] * context
            now += max(work, engine.launch_s) if tokens else work
        since = 0 if tokens else (since + 1) % plan.admission_interval
        chosen = begin if plan.async_scheduling else now
        for r, chunk in chunks:
            r["read"] += chunk
            if chunk and r["read"] == r["need"]:
                r["written"] += 1
                r.setdefault("first", now)
        for r in decoding:
            r["written"] += per_pass
        for r in [r for r in active if r["written"] >= r["new"] - 1e-9]:
            r["last"] = now
            active.remove(r)
            free.append(now)
    return [(r["asked"], r["first"], r["last"]) for r in todo]


def random_case(seed: int) -> tuple[Traffic, ServingEngine]:
    rng = random.Random(seed)
    count = rng.randint(1, 25)
    gaps = [rng.choice([0.0, rng.expovariate(rng.choice([1.0, 30.0]))]) for _ in range(count)]
    requests = tuple(
        Arrival(sum(gaps[: i + 1]), rng.randint(1, 900), rng.choice([1, 2, rng.randint(1, 60)]))
        for i in range(count)
    )
    engine = ServingEngine(
        step_s=rng.choice([0.0, 0.01]), token_s=rng.choice([1e-4, 3e-5]),
        context_s=rng.choice([0.0, 1e-6]), tokens_at_once=rng.choice([8, 100, 512, 8192]),
        requests_at_once=rng.choice([1, 3, 64]),
        cache_tokens=rng.choice([math.inf, 970, 2500]),
    )  # fmt: skip
    if seed % 3:
        scheduler = rng.choice([Scheduler, SglangScheduler, TensorRtScheduler])(
            async_scheduling=rng.random() < 0.5, request_s=rng.choice([0.0, 0.0307]),
            preempts=rng.random() < 0.5, admission_interval=rng.choice([1, 1, 4, 9]),
        )  # fmt: skip
        if isinstance(scheduler, TensorRtScheduler):
            wait = {
                "wait_iterations": rng.choice([0, 0, 3, 20]),
                "wait_tokens": rng.choice([100, 460]),
            }
            scheduler = replace(scheduler, **wait)
        engine = engine._replace(scheduler=scheduler, launch_s=rng.choice([0.0, 0.02]))
    if seed % 4 == 1:
        small = engine._replace(step_s=rng.choice([0.0, 0.002]), token_s=1e-5)
        drafting = Drafting.of(rng.choice([1, 3, 8]), rng.choice([0.0, 0.6, 0.95]), small)
        engine = engine._replace(drafting=drafting)
    return Traffic(requests, rng.choice([0, 0, 1, 2, 7])), engine


@pytest.mark.parametrize("seed", range(240))
def test_jumps_over_equal_passes_are_those_passes(seed: int) -> None:
    assert_same_passes(*random_case(seed))


@pytest.mark.parametrize("seed", range(120))
def test_requests_that_are_preempted_begin_anew_in_the_same_passes(seed: int) -> None:
    """Short prompts and long answers, in room for a few of them; half of the cases preempt. Passes
    grow with their caches, so that no request comes at the very end of one."""
    traffic, engine = random_case(seed)
    rng = random.Random(seed)
    requests = tuple(
        Arrival(r.at_s / 10, rng.randint(1, 60), rng.choice([1, rng.randint(1, 200)]))
        for r in traffic.requests * 2
    )
    engine = engine._replace(
        cache_tokens=rng.choice([262, 700]), requests_at_once=64, context_s=1.3e-7,
        scheduler=replace(engine.scheduler, preempts=True),
    )  # fmt: skip
    assert_same_passes(Traffic(requests, traffic.concurrency), engine)


def assert_same_passes(traffic: Traffic, engine: ServingEngine) -> None:
    rows, served = slow(traffic, engine), serve(traffic, engine)
    near = pytest.approx
    assert served.first_token.mean_s == near(sum(f - a for a, f, _ in rows) / len(rows), rel=1e-9)
    assert served.seconds == near(max(e for *_, e in rows) - min(a for a, *_ in rows), rel=1e-9)
    token = [
        (e - f) / (r.new - 1)
        for (_, f, e), r in zip(rows, traffic.requests, strict=True) if r.new > 1
    ]  # fmt: skip
    mean = sum(token) / len(token) if token else 0.0
    assert served.token.mean_s == near(mean, rel=1e-9, abs=1e-15)


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    served = serve(Traffic((Arrival(1.0, 200, 3),)), ENGINE)
    assert served.first_token.mean_s == pytest.approx(200e-4)
    assert served.token.mean_s == pytest.approx(0.01 + 1e-7 * 201.5)
    assert served.seconds == pytest.approx(200e-4 + 2 * 0.01 + 1e-7 * (201 + 202))
    assert served.tokens_per_s == pytest.approx(3 / served.seconds)


def test_prompts_that_come_at_once_share_a_pass_and_long_ones_take_several() -> None:
    both = serve(Traffic((Arrival(0, 256, 1), Arrival(0, 256, 1))), ENGINE)
    assert both.first_token.p95_s == both.first_token.median_s == pytest.approx(512e-4)
    long = serve(Traffic((Arrival(0, 1025, 1),)), ENGINE)
    assert long.first_token.mean_s == pytest.approx(2 * 512e-4 + 0.01)


def test_copies_take_requests_in_turn_each_with_its_own_caches() -> None:
    """Four clients on two copies: each copy serves two, as an engine that has no others."""
    requests = tuple(Arrival(0, 100 + 50 * (i % 2), 5) for i in range(12))
    tight = ENGINE._replace(cache_tokens=160)
    both = serve(Traffic(requests, 4), tight._replace(copies=2))
    halves = [serve(Traffic(requests[k::2], 2), tight) for k in range(2)]
    assert both.seconds == pytest.approx(max(half.seconds for half in halves))
    mean_s = sum(half.first_token.mean_s for half in halves) / 2
    assert both.first_token.mean_s == pytest.approx(mean_s)
    assert both.running == pytest.approx(2, rel=0.2)  # one on each: caches have no room for two
    alone = Traffic(requests[:1], 1)
    assert serve(alone, ENGINE._replace(copies=4)) == serve(alone, ENGINE)
    with pytest.raises(ArgumentError, match="155 tokens has no room: caches hold 150"):
        serve(Traffic(requests, 4), tight._replace(cache_tokens=150, copies=2))


def test_a_request_lasts_from_its_arrival_to_its_last_token() -> None:
    served = serve(Traffic((Arrival(1.0, 200, 3),)), ENGINE)
    assert served.request.mean_s == pytest.approx(200e-4 + 2 * 0.01 + 1e-7 * (201 + 202))


def test_a_request_without_room_waits_for_another_to_end() -> None:
    pair = Traffic((Arrival(0, 100, 11), Arrival(0, 100, 11)))
    tight = serve(pair, ENGINE._replace(cache_tokens=200))
    alone = serve(Traffic(pair.requests[:1]), ENGINE)
    assert tight.seconds == pytest.approx(2 * alone.seconds)
    assert tight.waiting_s == pytest.approx(alone.seconds / 2)
    with pytest.raises(ArgumentError, match="111 tokens has no room: caches hold 110"):
        serve(pair, ENGINE._replace(cache_tokens=110))


def test_what_started_last_gives_its_caches_back_and_reads_its_tokens_again() -> None:
    """10 + 40 tokens each in room for 60: after 19 passes both hold 30. The second reads its 30
    again once the first has ended, and writes the 20 that it lacks. All passes are as long."""
    pair = Traffic((Arrival(0.0, 10, 40), Arrival(0.0, 10, 40)))
    engine = ENGINE._replace(cache_tokens=60, context_s=0.0)
    served = serve(pair, engine._replace(scheduler=Scheduler(preempts=True)))
    assert served.seconds == pytest.approx((1 + 39 + 1 + 19) * 0.01)
    assert served.first_token.p95_s == pytest.approx(0.01)
    keeps = serve(pair, engine)
    assert keeps.seconds == pytest.approx(2 * (1 + 39) * 0.01)
    assert keeps.waiting_s == pytest.approx(40 * 0.01 / 2)


def test_stages_serve_as_many_batches_side_by_side() -> None:
    four = parse_traffic("concurrency=4,prompt=100,new=20,requests=8")
    two = parse_traffic("concurrency=2,prompt=100,new=20,requests=4")
    staged, single = serve(four, ENGINE._replace(stages=2)), serve(two, ENGINE)
    assert staged.seconds == pytest.approx(single.seconds)
    assert staged.tokens_per_s == pytest.approx(2 * single.tokens_per_s)


def test_one_client_is_one_client_whatever_the_stages() -> None:
    one = parse_traffic("concurrency=1,prompt=100,new=20,requests=3")
    assert serve(one, ENGINE._replace(stages=4)) == serve(one, ENGINE)


def test_in_steady_state_clients_do_not_wait_for_the_prompts_of_all() -> None:
    burst = parse_traffic("concurrency=8,prompt=64,new=200")
    steady = in_steady_state(burst, ENGINE)
    assert steady.requests[8:] == burst.requests[8:]
    assert steady.begin_s == max(r.at_s for r in steady.requests)
    together, apart = serve(burst, ENGINE), serve(steady, ENGINE)
    # All prompts at once fill a pass of 512 tokens; one alone takes no longer than a step.
    assert together.first_token.median_s == pytest.approx(512e-4)
    assert apart.first_token.median_s < 0.03
    assert apart.requests == 80 - 8 + 1  # the last to begin counts
    assert apart.running == pytest.approx(8, rel=0.02)
    assert apart.tokens_per_s == pytest.approx(8 / apart.token.mean_s, rel=0.05)
    assert in_steady_state(burst, ENGINE) == steady
    begun = parse_traffic("concurrency=8,prompt=64,new=200,start=together")
    assert in_steady_state(begun, ENGINE) is begun
    for alike in ("rate=2,prompt=64,new=20,requests=9", "concurrency=1,prompt=64,new=20"):
        assert in_steady_state(parse_traffic(alike), ENGINE) == parse_traffic(alike)


@pytest.mark.parametrize("seed", range(30))
def test_a_faster_engine_or_more_room_serves_no_later(seed: int) -> None:
    traffic, engine = random_case(seed)
    traffic = Traffic(traffic.requests)  # of clients that wait, an order may come out worse
    before = serve(traffic, engine).seconds
    small = engine.drafting
    faster = engine._replace(
        drafting=small and small._replace(
            step_s=small.step_s / 2, token_s=small.token_s / 2, context_s=small.context_s / 2
        ),
        step_s=engine.step_s / 2, token_s=engine.token_s / 2, context_s=engine.context_s / 2,
        launch_s=engine.launch_s / 2,
        scheduler=replace(engine.scheduler, request_s=engine.scheduler.request_s / 2),
    )  # fmt: skip
    at_once = tuple(r._replace(at_s=0.0) for r in traffic.requests)
    assert serve(Traffic(at_once), faster).seconds == pytest.approx(
        serve(Traffic(at_once), engine).seconds / 2
    )
    assert before >= traffic.requests[-1].at_s - traffic.requests[0].at_s


def test_the_text_of_traffic() -> None:
    closed = parse_traffic("concurrency=3, prompt=10..20, new=5")
    assert (closed.concurrency, len(closed.requests)) == (3, 30)
    assert {r.prompt for r in closed.requests} <= set(range(10, 21))
    assert {r.at_s for r in closed.requests} == {0.0}
    opened = parse_traffic("rate=2,prompt=10,new=5,requests=400,seed=1")
    times = [r.at_s for r in opened.requests]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.2)
    assert opened == parse_traffic("rate=2,prompt=10,new=5,requests=400,seed=1")
    assert opened != parse_traffic("rate=2,prompt=10,new=5,requests=400,seed=2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must look like concurrency=32"),
        ("concurrency=32", "prompt misses"),
        ("prompt=1,new=1", "must have concurrency or rate"),
        ("rate=1,concurrency=1,prompt=1,new=1", "must have concurrency or rate"),
        ("rate=-1,prompt=1,new=1", "rate must be a positive number"),
        ("rate=nan,prompt=1,new=1", "rate must be a positive number"),
        ("concurrency=0,prompt=1,new=1", "concurrency must be a whole number"),
        ("concurrency=1,prompt=1,new=1,start=x", "start can be together"),
        ("concurrency=1,prompt=9..3,new=1", "from the smaller number to the larger"),
        ("concurrency=1,prompt=1,new=x", "new must be a whole number"),
        ("concurrency=1,prompt=1,prompt=1,new=1", "must look like"),
        ("concurrency=99999999999,prompt=1,new=1", "concurrency must be a whole number"),
    ],
)
def test_traffic_of_another_form_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_traffic(text)


def test_requests_without_tokens_are_refused() -> None:
    with pytest.raises(ArgumentError, match="no request"):
        Traffic(())
    with pytest.raises(ArgumentError, match="needs a prompt"):
        Traffic((Arrival(0.0, 0, 1),))
