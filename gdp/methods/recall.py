"""What methods answered for a problem, so that whoever needs it again need not run them again."""

import weakref

from gdp.methods.base import Answer
from gdp.problem.problem import Problem

_ANSWERS: weakref.WeakKeyDictionary[Problem, dict[str, Answer]] = weakref.WeakKeyDictionary()


def remember(problem: Problem, method: str, answer: Answer) -> None:
    """Keep an answer for as long as its problem lives."""
    _ANSWERS.setdefault(problem, {})[method] = answer


def recall(problem: Problem, method: str) -> Answer | None:
    """The answer kept, if there is one."""
    return _ANSWERS.get(problem, {}).get(method)
