"""Small figures of traffic, each counted by hand: percentiles, limits, drafts, ranges, batches."""

import math

import pytest

from gdp.base.errors import ArgumentError
from gdp.sim.scheduling import Scheduler
from gdp.sim.serving import (
    MOST_PASSES,
    Batches,
    Drafting,
    ServingEngine,
    TwoGroups,
    batches_of,
    in_steady_state,
    serve,
    serve_disaggregated,
)
from gdp.sim.traffic import Arrival, ServedTraffic, Spread, Traffic
from gdp.sim.traffic_text import TrafficLimits, parse_limits, parse_traffic

ENGINE = ServingEngine(
    step_s=0.008, token_s=1e-4, context_s=0.0, tokens_at_once=512, requests_at_once=5,
    cache_tokens=100.0,
)  # fmt: skip
WIDE = ENGINE._replace(cache_tokens=math.inf)


def test_percentiles_are_those_of_the_requests() -> None:
    assert Spread.of(range(101)) == Spread(50.0, 50.0, 95.0)
    few = Spread.of([0.0, 0.0, 0.0, 10.0])
    assert (few.mean_s, few.median_s, few.p95_s) == pytest.approx((2.5, 0.0, 8.5))
    assert Spread.of([]) == Spread(0.0, 0.0, 0.0)


def served(first: Spread, token: Spread) -> ServedTraffic:
    return ServedTraffic(1, 1.0, first, token, first, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "excess"),
    [
        ("first=3s", 1.0), ("first=1.5s", 2.0), ("token=30ms", 4.0), ("token=120ms", 1.0),
        ("first=1.5s,token=30ms", 4.0), ("first=500ms,token=40000us", 6.0),
    ],
)  # fmt: skip
def test_limits_are_on_the_95th_percentile(text: str, excess: float) -> None:
    seen = served(Spread(1.0, 0.5, 3.0), Spread(0.02, 0.01, 0.12))
    assert parse_limits(text).excess(seen) == pytest.approx(excess)
    assert TrafficLimits().excess(seen) == 1.0


def test_limits_are_on_what_95_percent_of_requests_get() -> None:
    """Of 100 requests 10 read 400 tokens alone, the others 10."""
    rows = [Arrival(float(i), 400 if i % 10 == 9 else 10, 1) for i in range(100)]
    first = serve(Traffic(tuple(rows)), WIDE).first_token
    assert (first.median_s, first.p95_s) == pytest.approx((0.008, 0.04))
    assert first.mean_s == pytest.approx(0.9 * 0.008 + 0.1 * 0.04)


@pytest.mark.parametrize(
    ("acceptance", "written"), [(0.0, 1.0), (0.5, 1.875), (0.9, 1 + 0.9 + 0.81 + 0.729)]
)
def test_a_pass_writes_what_is_accepted_and_one_more(acceptance: float, written: float) -> None:
    own = WIDE._replace(step_s=0.001, token_s=0.0)
    engine = WIDE._replace(drafting=Drafting.of(3, acceptance, own))
    assert engine.written == pytest.approx(written)
    passes = math.ceil(15 / written)
    assert engine.passes_of(15) == passes
    alone = serve(Traffic((Arrival(0.0, 100, 16),)), engine)
    # The prompt takes 100 tokens, and writes one; every pass drafts three times before it checks.
    assert alone.seconds == pytest.approx(0.01 + passes * (0.008 + 3 * 0.001), rel=0.1)
    assert alone.first_token.mean_s == pytest.approx(0.01)


def test_both_ends_of_a_range_are_drawn() -> None:
    traffic = parse_traffic("rate=2,prompt=3..5,new=7..8,requests=200")
    assert {r.prompt for r in traffic.requests} == {3, 4, 5}
    assert {r.new for r in traffic.requests} == {7, 8}
    (one,) = {(r.prompt, r.new) for r in parse_traffic("rate=2,prompt=6..6,new=9").requests}
    assert one == (6, 9)
    with pytest.raises(ArgumentError, match="from the smaller number to the larger"):
        parse_traffic("rate=2,prompt=5..4,new=1")


@pytest.mark.parametrize(
    ("copies", "stages", "clients", "longest", "wanted"),
    [
        (1, 1, 0, 100, Batches(1, 5, 100.0)),
        (1, 2, 0, 50, Batches(2, 3, 50.0)),
        (1, 3, 0, 33, Batches(3, 2, 100 / 3)),
        (1, 3, 0, 34, Batches(1, 5, 100.0)),  # a third of the caches holds no such request
        (2, 2, 8, 10, Batches(4, 3, 50.0)),
        (2, 2, 3, 10, Batches(2, 5, 100.0)),  # a client and a half for each copy fill one stage
        (4, 1, 3, 10, Batches(3, 5, 100.0)),
        (1, 4, 2, 10, Batches(2, 3, 50.0)),
    ],
)
def test_stages_divide_room_and_requests_and_copies_have_their_own(
    copies: int, stages: int, clients: int, longest: int, wanted: Batches
) -> None:
    engine = ENGINE._replace(copies=copies, stages=stages)
    assert batches_of(engine, clients, longest) == wanted


def test_a_stage_serves_no_more_requests_than_its_part() -> None:
    """Two stages of one copy hold three requests each, and 50 tokens: of eight that come at once
    the caches let two of 22 tokens in at a time, on each stage."""
    burst = Traffic((Arrival(0.0, 2, 20),) * 8)
    two = ENGINE._replace(stages=2)
    assert serve(burst, two).running == pytest.approx(4.0)
    assert serve(burst, two._replace(cache_tokens=math.inf)).running == pytest.approx(4.0)
    assert serve(burst, two).seconds == pytest.approx(2 * 20 * 0.008)
    six = Traffic(burst.requests[:6])
    assert serve(six, two._replace(cache_tokens=132.0)).seconds == pytest.approx(20 * 0.008)
    assert serve(six, two._replace(cache_tokens=131.0)).seconds == pytest.approx(40 * 0.008)


def test_requests_are_written_in_turn_by_the_copies_that_write() -> None:
    """Two copies of one request at a time: the first writes 11 + 11 tokens, the second 1 + 1."""
    rows = tuple(Arrival(0.0, 100, new) for new in (11, 1, 11, 1))
    tokens = WIDE._replace(copies=2, requests_at_once=1)
    groups = TwoGroups(WIDE, tokens, send_s=0.0, token_send_s=0.0)
    both = serve_disaggregated(Traffic(rows), groups).served
    assert both.seconds == pytest.approx(0.04 + 22 * 0.008)
    ends = (11, 1, 22, 2)
    assert both.request.mean_s == pytest.approx(0.04 + sum(ends) / 4 * 0.008)


@pytest.mark.parametrize("requests", [4, 5, 6, 7])
def test_clients_that_ask_fewer_than_two_times_are_refused(requests: int) -> None:
    text = f"concurrency=4,prompt=8,new=4,requests={requests}"
    with pytest.raises(ArgumentError, match=f"{requests} requests are too few for 4 clients: give"):
        parse_traffic(text)
    together = parse_traffic(f"{text},start=together")
    assert 0 < serve(in_steady_state(together, WIDE), WIDE).tokens_per_s < math.inf
    with pytest.raises(ArgumentError, match="too few for 4 clients"):
        in_steady_state(Traffic(together.requests, 4), WIDE)


@pytest.mark.parametrize("clients", [2, 3, 8, 32])
@pytest.mark.parametrize("new", [1, 2, 50])
@pytest.mark.parametrize("copies", [1, 2])
def test_rates_of_clients_that_ask_twice_are_finite(clients: int, new: int, copies: int) -> None:
    engine = WIDE._replace(copies=copies, scheduler=Scheduler(admission_interval=3))
    traffic = parse_traffic(f"concurrency={clients},prompt=8,new={new},requests={2 * clients}")
    found = serve(in_steady_state(traffic, engine), engine)
    assert 0 < found.tokens_per_s <= 1.5 * clients / 0.008
    assert 0 < found.running <= clients


def test_prompts_of_endless_passes_are_refused() -> None:
    row = Arrival(0.0, 1_000_000, 1)
    traffic = Traffic((row,) * (MOST_PASSES // 1954 + 1))
    with pytest.raises(ArgumentError, match=f"up to {MOST_PASSES} are simulated"):
        serve(traffic, WIDE)
