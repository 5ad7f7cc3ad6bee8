"""Candidates of a relaxed problem are judged by their times as devices run them, by hand."""

import numpy as np
import pytest

from gdp.methods.base import Answer, Assignment, Candidate
from gdp.question.candidates import best_executed
from gdp.sim.objectives import Score

ANSWERED, OTHER, BEFORE = (Assignment(np.array([d])) for d in (0, 1, 2))


def judged(times_s: dict[int, float], over: int = 0) -> tuple[Answer, list[int]]:
    """The best of an answer of 10 s, of which a quarter is what simplicity cost, of another
    candidate that is said to take 7 s, and of what was found before it was simplified, of 9 s;
    with the devices of those that were simulated. The other one may overflow memory."""
    rows = [Candidate("other", 7.0, 7.0, 7.0, True, 0.0), Candidate("replicas", 1, 1, 1, True, 0.0),
            Candidate("local_search", 9.0, 9.0, 9.0, True, 0.0)]  # fmt: skip
    answer = Answer(ANSWERED, candidates=tuple(rows), evaluated=(OTHER,), simplicity_cost=0.25)
    asked: list[int] = []

    def executed(assignment: Assignment) -> Score:
        d = int(assignment.device[0])
        asked.append(d)
        value_s = times_s[d]
        return Score(value_s, value_s, over if d == 1 else 0, np.zeros(1, np.int64), value_s)

    return best_executed(answer, BEFORE, executed), asked


@pytest.mark.parametrize(
    ("other_s", "over", "best"), [(7.5, 0, OTHER), (8.5, 0, ANSWERED), (7.5, 3, ANSWERED)]
)
def test_the_fastest_that_fits_is_taken(other_s: float, over: int, best: Assignment) -> None:
    """Without what simplicity cost the answer takes 8 s: that of 9 s need not be simulated."""
    found, asked = judged({0: 10.0, 1: other_s, 2: 9.0}, over)
    assert found.assignment is best
    assert asked == [0, 1]
    assert [row.value_s for row in found.candidates] == [other_s, 1, 9.0]
    assert [row.feasible for row in found.candidates] == [over == 0, True, True]
