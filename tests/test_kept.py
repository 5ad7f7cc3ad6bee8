"""What was prepared for a question is made once, and anew for another question."""

from dataclasses import replace

import numpy as np

from gdp.costs.base import roofline
from gdp.placement.constraints import Constraints
from gdp.question.prepare import problem_of
from gdp.question.question import Kept, Question
from tests.tiny import plain_graph, unit_cluster


def test_an_answer_prepares_equal_questions_once_and_others_anew() -> None:
    graph, cluster = plain_graph(4, [(0, 1), (1, 2), (2, 3)]), unit_cluster()
    question = Question(graph, cluster, kept=Kept())
    whole = problem_of(question)
    assert problem_of(replace(question, constraints=Constraints())) is whole
    others = (
        replace(question, objective="throughput"),
        replace(question, cluster=replace(cluster)),
        replace(question, costs=roofline),
        replace(question, constraints=Constraints(together=("*",))),
    )
    assert all(problem_of(other) is not whole for other in others)
    assert problem_of(question, replicas=True) is not whole
    one, two = np.array([0, 0, 1, 1]), np.array([5, 5, 3, 3])
    assert problem_of(question, keep_apart=one) is problem_of(question, keep_apart=two)
    alone = Question(graph, cluster)
    assert problem_of(alone) is not problem_of(alone)


def test_the_oldest_of_what_is_kept_goes_first() -> None:
    kept, made = Kept(2), list[str]()
    for name in ("a", "b", "a", "c", "b", "a"):
        assert kept.once("letters", (name,), lambda name=name: made.append(name) or name) == name
    assert made == ["a", "b", "c", "a"]
