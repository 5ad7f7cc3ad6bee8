"""Traffic at two groups of devices: by hand, pass by pass, and beside the engine of both."""

import math
import random
from itertools import pairwise

import pytest

from gdp.base.errors import ArgumentError
from gdp.sim import serving
from gdp.sim.scheduling import Scheduler
from gdp.sim.serving import ServingEngine, TwoGroups, serve, serve_disaggregated
from gdp.sim.traffic import Arrival, Traffic

ENGINE = ServingEngine(
    step_s=0.01, token_s=1e-4, context_s=1e-7, tokens_at_once=512, requests_at_once=64,
    cache_tokens=math.inf,
)  # fmt: skip
GROUPS = TwoGroups(ENGINE, ENGINE._replace(step_s=0.008), send_s=1e-3, token_send_s=1e-5)


def test_one_request_is_read_sent_and_written() -> None:
    served, sent = serve_disaggregated(Traffic((Arrival(1.0, 200, 3),)), GROUPS)
    read_s, sent_s = 200e-4, 1e-3 + 200e-5
    assert sent.mean_s == pytest.approx(sent_s)
    assert served.first_token.mean_s == pytest.approx(read_s + sent_s + 0.008 + 1e-7 * 200)
    assert served.token.mean_s == pytest.approx(0.008 + 1e-7 * 201.5)
    assert served.request.mean_s == served.seconds
    assert served.running == pytest.approx(1.0)


def test_the_host_takes_a_request_at_either_group() -> None:
    slow = ENGINE._replace(scheduler=Scheduler(request_s=0.02))
    traffic = Traffic((Arrival(0.0, 200, 1),))
    both = serve_disaggregated(traffic, GROUPS._replace(prefill=slow, decode=slow)).served
    none = serve_disaggregated(traffic, GROUPS._replace(decode=ENGINE)).served
    assert both.first_token.mean_s == pytest.approx(none.first_token.mean_s + 0.04)


@pytest.mark.parametrize(("one_link", "waits"), [(False, 0.0), (True, 1.0)])
def test_caches_queue_on_a_link_that_all_copies_share(one_link: bool, waits: float) -> None:
    """Two prompts end at once on two copies; on one link one is sent behind the other."""
    groups = GROUPS._replace(prefill=ENGINE._replace(copies=2), one_link=one_link)
    _, sent = serve_disaggregated(Traffic((Arrival(0.0, 200, 2),) * 2), groups)
    sent_s = 1e-3 + 200e-5
    assert sent.mean_s == pytest.approx(sent_s * (1 + waits / 2))
    # Two prompts of one pass leave their copy one after the other in any case.
    _, sent = serve_disaggregated(Traffic((Arrival(0.0, 200, 2),) * 2), GROUPS)
    assert sent.mean_s == pytest.approx(1.5 * sent_s)


def test_a_request_waits_for_room_where_tokens_are_written() -> None:
    pair = Traffic((Arrival(0.0, 100, 11),) * 2)
    tight = GROUPS._replace(decode=GROUPS.decode._replace(cache_tokens=200), token_send_s=0.0)
    alone = serve_disaggregated(Traffic(pair.requests[:1]), tight).served
    served = serve_disaggregated(pair, tight).served
    written_s = alone.seconds - 200e-4 / 2 - 1e-3
    assert served.seconds == pytest.approx(200e-4 + 1e-3 + 2 * written_s)
    with pytest.raises(ArgumentError, match="111 tokens has no room: caches hold 110"):
        serve_disaggregated(pair, tight._replace(decode=ENGINE._replace(cache_tokens=110)))
    with pytest.raises(ArgumentError, match="100 tokens has no room: caches hold 99"):
        serve_disaggregated(pair, tight._replace(prefill=ENGINE._replace(cache_tokens=99)))


def test_what_is_preempted_reads_its_tokens_again_where_it_decodes() -> None:
    """10 + 40 tokens each in room for 60: after 20 passes both hold 30, and the second gives its
    own back. It reads those once the first has ended, by which it has one more, and writes 19."""
    pair = Traffic((Arrival(0.0, 10, 40), Arrival(0.0, 10, 40)))
    engine = ENGINE._replace(cache_tokens=60, context_s=0.0)
    preempting = engine._replace(scheduler=Scheduler(preempts=True))
    served = serve_disaggregated(pair, TwoGroups(ENGINE, preempting, 0.0, 0.0)).served
    assert served.seconds == pytest.approx((1 + 40 + 1 + 19) * 0.01)
    assert served.first_token.p95_s == pytest.approx(0.02)
    keeps = serve_disaggregated(pair, TwoGroups(ENGINE, engine, 0.0, 0.0)).served
    assert keeps.seconds == pytest.approx((1 + 2 * 40) * 0.01)


def random_case(seed: int) -> tuple[Traffic, TwoGroups]:
    """Seconds of a pass are no round numbers, so that no two events are at one time."""
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    gaps = [rng.choice([0.0, rng.expovariate(rng.choice([3.0, 30.0]))]) for _ in range(count)]
    requests = tuple(
        Arrival(sum(gaps[: i + 1]), rng.randint(1, 900), rng.choice([1, 2, rng.randint(1, 60)]))
        for i in range(count)
    )
    reading, writing = (
        ServingEngine(
            step_s=rng.uniform(0.001, 0.01), token_s=rng.choice([1e-4, 3e-5]),
            context_s=rng.choice([0.0, 1e-6]), tokens_at_once=rng.choice([100, 512, 8192]),
            requests_at_once=rng.choice([1, 3, 64]), cache_tokens=rng.choice([math.inf, 2500]),
            stages=rng.choice([1, 1, 2]), copies=rng.choice([1, 2, 3]),
            scheduler=Scheduler(
                rng.random() < 0.5, rng.choice([0.0, 0.02]), preempts=rng.random() < 0.5
            ),
        )
        for _ in range(2)
    )  # fmt: skip
    groups = TwoGroups(
        reading, writing, rng.uniform(0.0, 1e-3), rng.choice([0.0, 1e-5]), seed % 2 == 0
    )
    return Traffic(requests, rng.choice([0, 1, 2, 7])), groups


@pytest.mark.parametrize("seed", range(60))
def test_jumps_over_equal_passes_are_those_passes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic, groups = random_case(seed)
    jumped = serve_disaggregated(traffic, groups)
    iterate = serving.ServingLane.iterate
    monkeypatch.setattr(serving.ServingLane, "iterate", lambda lane, _: iterate(lane, lane.now))
    one_by_one = serve_disaggregated(traffic, groups)
    for name in ("seconds", "tokens_per_s", "running", "waiting_s"):
        own, other = getattr(jumped.served, name), getattr(one_by_one.served, name)
        assert own == pytest.approx(other, rel=1e-9, abs=1e-12)
    for name in ("first_token", "token", "request"):
        own, other = (getattr(run.served, name).mean_s for run in (jumped, one_by_one))
        assert own == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_two_groups_with_one_batch_each_are_two_engines_in_a_row(seed: int) -> None:
    """Arrivals by the clock: first as an engine that only reads, then pass by pass those that
    write, each with all that have come and have room."""
    rng = random.Random(seed)
    at_s = sorted(rng.uniform(0, 2) for _ in range(12))
    requests = tuple(Arrival(t, rng.randint(50, 400), rng.randint(1, 30)) for t in at_s)
    reading = ENGINE._replace(tokens_at_once=400)
    writing = GROUPS.decode._replace(requests_at_once=3)
    groups = TwoGroups(reading, writing, 1e-3, 1e-5)
    come, link_s = list[float](), 0.0
    ends = _read_one_engine(requests, reading)
    for end_s, request in zip(ends, requests, strict=True):
        link_s = max(end_s, link_s) + 1e-3 + request.prompt * 1e-5
        come.append(link_s)
    assert all(a <= b for a, b in pairwise(come))
    now, queue, active, last = 0.0, list(range(12)), dict[int, int](), [0.0] * 12
    while queue or active:
        now = now if active else max(now, come[queue[0]])
        while queue and come[queue[0]] <= now and len(active) < 3:
            active[queue.pop(0)] = 0
        context = sum(requests[r].prompt + done for r, done in active.items())
        now += max(0.008, 1e-4 * len(active)) + 1e-7 * context
        active = {r: done + 1 for r, done in active.items()}
        for r in [r for r, done in active.items() if done == requests[r].new]:
            last[r] = now
            del active[r]
    served = serve_disaggregated(Traffic(requests), groups).served
    mean_s = sum(end - r.at_s for end, r in zip(last, requests, strict=True)) / 12
    assert served.request.mean_s == pytest.approx(mean_s, rel=1e-9)


def _read_one_engine(requests: tuple[Arrival, ...], engine: ServingEngine) -> list[float]:
    """When each prompt has been read: passes of up to `tokens_at_once`, in the order of arrival."""
    now, left, ends = 0.0, [r.prompt for r in requests], [0.0] * len(requests)
    while any(left):
        first = next(i for i, tokens in enumerate(left) if tokens)
        now = max(now, requests[first].at_s)
        room, ended = engine.tokens_at_once, list[int]()
        for i, request in enumerate(requests):
            if left[i] and request.at_s <= now and room:
                taken = min(room, left[i])
                left[i], room = left[i] - taken, room - taken
                ended += [i] if not left[i] else []
        now += max(engine.step_s, engine.token_s * (engine.tokens_at_once - room))
        for i in ended:
            ends[i] = now
    return ends


def test_prompts_on_their_own_do_not_delay_tokens() -> None:
    """Sixteen clients at two engines: tokens come sooner where one of them never reads a prompt."""
    traffic = Traffic((Arrival(0.0, 400, 20),) * 160, 16)
    both = serve(traffic, ENGINE._replace(copies=2))
    apart = serve_disaggregated(traffic, TwoGroups(ENGINE, ENGINE, 0.0, 0.0)).served
    assert apart.token.p95_s < 0.9 * both.token.mean_s
    assert apart.token.p95_s < 0.012
