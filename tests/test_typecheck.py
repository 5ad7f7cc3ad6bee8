"""What the tests check of every call: types, and axes that agree within one call."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from jaxtyping import TypeCheckError
from typecheck import ViolationError, checked_package

from gdp.base.kernels import cache

SOURCE = """
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Row = tuple[Float[np.ndarray, "N"], ...]


def twice(seconds: float) -> float:
    return 2 * seconds


def sums(costs: Float[np.ndarray, "N D"], times: Float[np.ndarray, "D"]) -> Float[np.ndarray, "N"]:
    return costs @ times if costs.shape[0] < 5 else times


def along(
    costs: Float[np.ndarray, "N N"] | Float[np.ndarray, "N D"], times: Float[np.ndarray, "D"]
) -> Float[np.ndarray, "3"]:
    return costs @ times


def first(rows: Row) -> "Float[np.ndarray, 'N']":
    return rows[0]


def later(value: "Table | Unknown", one: "Early") -> None:
    del value, one


def drawn(costs: Float[np.ndarray, "N D"], times: Float[np.ndarray, "D"]) -> Iterator[float]:
    yield from costs @ times


def adder(first: int) -> Callable[[int], int]:
    def add(second: int, *, third: int = 0) -> int:
        return first + second + third if second else "none"

    return add


class Early:
    @property
    def name(self) -> str:
        return 3


@dataclass(frozen=True)
class Table:
    costs: Float[np.ndarray, "N D"]
    times: Float[np.ndarray, "D"]

    def total(self, other: Float[np.ndarray, "N"]) -> float:
        return float(self.times.sum())


@dataclass(frozen=True)
class Longer(Table):
    count: int
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "made_up_package.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    checked_package("made_up_package")
    import made_up_package  # pyright: ignore

    yield made_up_package
    del sys.modules["made_up_package"]


def test_types_and_axes_of_calls_and_dataclasses_are_checked(made: ModuleType) -> None:
    assert made.twice(1) == 2
    costs, times = np.ones((3, 2)), np.ones(2)
    assert made.sums(costs, times).tolist() == [2, 2, 2]
    assert made.sums(np.ones((4, 3)), np.ones(3)).shape == (4,)  # axes are of one call alone
    for _ in range(2):  # an array that was not square has left no axis behind
        assert made.along(costs, times).tolist() == [2, 2, 2]
        assert made.along(np.ones((3, 3)), np.ones(5)[:3]).tolist() == [3, 3, 3]
    table = made.Table(costs, times)
    assert table.total(np.ones(7)) == 2
    assert made.first((times, times)) is times
    assert list(made.drawn(costs, times)) == [2, 2, 2]
    adders = [made.adder(first) for first in (10, 20, 30)]
    assert [add(1, third=2) for add in adders] == [13, 23, 33]
    assert adders[0](1) == 11
    assert adders[0].__code__ is adders[2].__code__  # compiled once
    made.later(None, 3)  # the first text has no meaning there, and the second none yet
    for wrong in (
        lambda: made.twice("1"),
        lambda: made.sums(costs, np.ones(3)),
        lambda: made.sums(costs.astype(int), times),
        lambda: made.sums(costs[0], times),
        lambda: made.along(costs, np.ones(3)),
        lambda: made.along(np.ones((4, 2)), times),  # a length that is written as a number
        lambda: made.sums(np.ones((6, 2)), times),  # the result has another length
        lambda: made.first((None, None)),  # of a tuple of any length one entry is looked at
        *(functools.partial(add, "1") for add in adders),
        *(functools.partial(add, 0) for add in adders),
        lambda: made.drawn(costs, np.ones(3)),
        lambda: made.Table(costs, np.ones(3)),
        lambda: made.Longer(costs, np.ones(3), 1),
        lambda: made.Longer(costs, times, "1"),
        lambda: table.total(costs),
        lambda: made.Early().name,
    ):
        with pytest.raises((ViolationError, TypeCheckError)):
            wrong()


def test_checked_kernels_are_those_that_are_kept() -> None:
    kept = cache.kept_in()
    assert kept is not None
    assert Path(kept).name.startswith("gdp.base.kernels.cache-")
