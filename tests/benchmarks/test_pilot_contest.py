"""LLM-Pilot's contest on made-up rows and engines."""

import math
from typing import Any

import pytest

from benchmarks.measured_world.pilot_contest import (
    PADDED,
    Choice,
    HostOf2023,
    Row,
    after_run,
    cheapest,
    contest,
    host_of,
    measured_most,
    outcome,
    score,
    step_of,
)
from gdp.sim.serving import ServingEngine

ENGINE = ServingEngine(0.010, 1e-4, 1e-7, 2048, 256, 20_000.0, launch_s=0.012)
LAUNCHES, SEQUENCE_S = 1.6, 5e-4


def row(model: str, gpu: str, gpus: int, users: int, **given: Any) -> Row:
    """A row as `HostOf2023(1.6, 0.5 ms)` would make it, where nothing else is given."""
    told = Row(model, gpu, gpus, users, 112.0, 85.0, 22.0, 0.06, 0.0007, 0.0, float(users))
    token_s = step_of(told, HostOf2023(LAUNCHES, SEQUENCE_S).on(ENGINE, told))
    return told._replace(**{"token_s": token_s, **given})


def test_the_cheapest_profile_counts_replicas() -> None:
    """200 users of 64 need 4 H100 at 12.29, of 16 need 13 A100 at 4.096, together 53.25."""
    best = cheapest({("H100", 1): 64, ("A100", 1): 16, ("T4", 4): 0})
    assert best == Choice(("H100", 1), 64, 4 * 12.29)
    assert best is not None
    assert str(best) == "4 x 1 H100"
    assert cheapest({("T4", 4): 0}) is None


def test_rows_say_how_many_users_keep_both_limits() -> None:
    """A row behind one that breaks a limit counts no more."""
    rows = [row("m", "H100", 1, n) for n in (1, 2, 4)]
    rows[1] = rows[1]._replace(token_s=0.051)
    assert measured_most(rows) == {("H100", 1): 1}
    rows[1] = rows[1]._replace(token_s=0.050, per_prompt_s=0.101)
    assert measured_most(rows) == {("H100", 1): 1}


def test_an_outcome_and_the_score() -> None:
    rows = [row("m", gpu, 1, n) for gpu in ("A100", "H100") for n in (1, 2, 4)]
    assert outcome(rows, cheapest({("A100", 1): 4})) == (True, pytest.approx(0.0))
    good, over = outcome(rows, cheapest({("H100", 1): 4}))
    assert (good, over) == (True, pytest.approx(12.29 / 4.096 - 1))
    assert outcome(rows, cheapest({("A100", 1): 8}))[0] is False
    assert outcome(rows, None)[0] is False
    assert score([(True, 0.2), (False, math.nan)]) == (0.5, 0.2, pytest.approx(0.8 / 1.3))
    assert score([(False, 0.0)])[2] == 0.0


def test_a_host_is_fitted_to_the_rows_of_others() -> None:
    rows = [row(m, g, 1, n) for m in ("a", PADDED[0]) for g in ("A100", "H100") for n in (1, 8, 64)]
    rows = [r._replace(token_s=1.5 * r.token_s) if r.gpu == "A100" else r for r in rows]
    rows.append(row(PADDED[0], "H100", 1, 128, at_once=4.0))
    engines = {(r.model, *r.profile): ENGINE for r in rows}
    host = host_of(rows, engines, padded=True)
    assert host.reserved == pytest.approx(5000.0)
    assert host.slower["A100"] / host.slower["H100"] == pytest.approx(1.5, rel=0.05)
    for r in rows[:-1]:
        assert step_of(r, host.on(ENGINE, r)) == pytest.approx(r.token_s, rel=0.3)
    assert host_of(rows, engines, padded=False).reserved == 0.0
    factor, known = after_run(rows[-1]._replace(token_s=0.1), HostOf2023(), ENGINE)
    assert (factor, known.reserved) == (pytest.approx(math.log(0.1 / 0.010), rel=0.01), 5000.0)


def test_the_contest_leaves_each_model_out() -> None:
    """Rows that all follow one host: the choice after it is the best one, that of plans is not."""
    users = (1, 2, 4, 8, 16, 32, 64, 128)
    rows = [row(m, g, 1, n) for m in ("a", "b") for g in ("A100", "H100") for n in users]
    found = contest(rows, "a", {(r.model, *r.profile): ENGINE for r in rows})
    assert [one.kept for one in found["as planned"]] == [False]
    (hosted,) = found["TGI of 2023"]
    assert hosted.kept
    assert hosted.overspend == pytest.approx(0.0)
    assert hosted.token_off < 0.05
    assert len(found["any one run"]) == 10
