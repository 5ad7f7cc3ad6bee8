"""Joules of traffic: by hand for one lane, and additive over requests and groups."""

import pytest

from gdp.sim.serving import (
    PassWatts,
    ServingEngine,
    TwoGroups,
    serve,
    serve_disaggregated,
)
from gdp.sim.traffic import Arrival, Traffic

WATTS = PassWatts(idle=10.0, limit=100.0, step=50.0, token=90.0, context=30.0)
ENGINE = ServingEngine(
    step_s=1.0, token_s=0.1, context_s=0.01, tokens_at_once=100, requests_at_once=8,
    cache_tokens=1e6, watts=WATTS,
)  # fmt: skip


def one(prompt: int = 10, new: int = 3, count: int = 1) -> Traffic:
    return Traffic((Arrival(0.0, prompt, new),) * count, 1)


def test_joules_of_one_request_by_hand() -> None:
    """The prompt takes max(1, 10 * 0.1) = 1 s at 90 W; two steps of 1 s at 50 W, with 11 and 12
    tokens of caches, 0.23 s at 30 W; 10 W all the while."""
    served = serve(one(), ENGINE)
    seconds = 1.0 + 2.0 + 0.01 * (11 + 12)
    joules = 10.0 * seconds + 80.0 * 1.0 + 40.0 * 2.0 + 20.0 * 0.23
    assert served.seconds == pytest.approx(seconds)
    assert served.watts == pytest.approx(joules / seconds)
    assert served.joules_per_token == pytest.approx(served.watts / served.tokens_per_s)


def test_copies_idle_together() -> None:
    one_copy, two = (serve(one(), ENGINE._replace(copies=n)) for n in (1, 2))
    assert two.watts == pytest.approx(one_copy.watts + 10.0)


def test_no_pass_draws_more_than_the_limit() -> None:
    hungry = ENGINE._replace(watts=WATTS._replace(step=900.0, token=900.0, context=900.0))
    assert serve(one(), hungry).watts == pytest.approx(100.0)


def test_unknown_watts_are_none() -> None:
    served = serve(one(), ENGINE._replace(watts=None))
    assert served.watts is None
    assert served.joules_per_token is None


def test_disaggregated_groups_add_up() -> None:
    """Both idle for the whole time; the prompt is read by one, and written from by the other."""
    groups = TwoGroups(ENGINE, ENGINE, send_s=0.5, token_send_s=0.0)
    served = serve_disaggregated(one(), groups).served
    work_j = 80.0 * 1.0 + 40.0 * 3.0 + 20.0 * 0.01 * (10 + 11 + 12)
    assert served.watts * served.seconds == pytest.approx(20.0 * served.seconds + work_j)
    part = groups._replace(prefill=ENGINE._replace(watts=None))
    assert serve_disaggregated(one(), part).served.watts is None
