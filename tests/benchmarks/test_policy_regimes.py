"""The benchmark of regimes: misfits stand apart from medians and means, instances are as drawn."""

import pytest

pytest.importorskip("jax")

from benchmarks.policy.regimes import (
    REGIMES,
    Entry,
    Made,
    load,
    names_of,
    portfolio,
    problem_of,
    source,
    table,
)


def test_misfits_are_counted_and_not_averaged() -> None:
    """Two instances, two seeds: 1.5, 6 (best 1) and 4, inf (best 2) are ratios 1.5, 6, 2."""
    entries = [Entry("ample", "a", 0, best_s=1.0), Entry("ample", "b", 0, best_s=2.0)]
    column = [
        Made(1.5, 0.1, 10), Made(6.0, 0.2, 20), Made(4.0, 0.3, 30), Made(float("inf"), 0.4, 40),
    ]  # fmt: skip
    row = table(entries, {"way": column})["way"]
    assert row == ("median 2.000, mean 2.621, misfits 1 of 4, CPU 0.25 s, evaluations 25")


@pytest.mark.slow
def test_the_list_is_of_test_families_and_of_their_regimes() -> None:
    entries, graphs = load(), source()
    assert {entry.regime for entry in entries} == set(REGIMES)
    assert all(entry.graph in graphs.test for entry in entries)
    for regime in REGIMES:
        of = [entry for entry in entries if entry.regime == regime]
        assert of
        assert {entry.graph for entry in of} <= set(names_of(regime, graphs))
        assert all((entry.memory > 0) == (regime == "tight") for entry in of)
    tiled = [problem_of(entry, graphs) for entry in entries if entry.regime == "tiled"]
    assert {problem.num_devices for problem in tiled} == {4, 8}
    assert {bool(problem.cluster.queues.any()) for problem in tiled} == {False, True}


def test_a_portfolio_is_judged_on_families_that_its_rule_did_not_see() -> None:
    """Each way is twice as slow on one of two families: the virtual best is 1, each way alone the
    root of 2, and the rule, which learns from the other family, always takes the wrong one."""
    graphs = source()
    first = graphs.test[0]
    second = next(n for n in graphs.test if graphs.family(n) != graphs.family(first))
    entries = [Entry("ample", name, 0, best_s=1.0) for name in (first, second)]
    rows = {
        (0, 0, 100): {"auto": (1.0, 0.1), "search alone": (2.0, 0.1)},
        (1, 0, 100): {"auto": (2.0, 0.1), "search alone": (1.0, 0.1)},
        (1, 1, 100): {"auto": (float("inf"), 0.1), "search alone": (1.0, 0.1)},
    }
    assert portfolio(entries, rows, [100, 400]) == {
        "100 evaluations": "auto 1.414, search alone 1.414, virtual best 1.000 (-34.66% of the "
        "single best), by regime on held-out families 2.000"
    }
