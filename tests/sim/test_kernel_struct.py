"""Named tuples that kernels receive as one pointer."""

import pickle
import sys
from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba.core import errors

from gdp.base.kernels.options import BARE
from gdp.base.kernels.struct import as_struct


class Pair(NamedTuple):
    """Arrays and scalars of several types."""

    left: np.ndarray
    table: np.ndarray
    factor: float
    size: int
    flag: bool


as_struct(Pair)


def pair(**changes: object) -> Pair:
    base = Pair(np.arange(4.0), np.ones((2, 3), np.float32), 2.5, 3, True)
    return base._replace(**changes)


@numba.njit
def inner(pair, i):
    return pair.left[i] * pair.factor


@numba.njit
def total(pair):
    found = 0.0
    for i in range(len(pair.left)):
        found += inner(pair, i)
    return found, pair.table.shape[1], pair.size, pair.flag


@numba.njit(**BARE)
def fill(pair, count):
    for i in range(1, count):
        pair.left[i] = pair.left[i - 1] + i


@numba.njit
def missing(pair):
    return pair.absent


def test_every_field_is_read_as_it_is() -> None:
    assert total(pair()) == (15.0, 3, 3, True)
    assert total(pair(left=np.zeros(0), flag=False, size=-7)) == (0.0, 3, -7, False)


def test_other_values_need_no_other_kernel_and_other_types_one() -> None:
    total(pair())
    before = len(total.signatures)
    total(pair(left=np.ones(9), size=1))
    assert len(total.signatures) == before
    assert total(pair(left=np.arange(4, dtype=np.int32)))[0] == 15.0
    assert len(total.signatures) == before + 1


def test_what_a_kernel_writes_is_seen_by_its_next_read_and_by_the_caller() -> None:
    """Fields are constant, the arrays behind them are not: 0, 1, 3, 6."""
    given = pair(left=np.zeros(4))
    fill(given, 4)
    np.testing.assert_array_equal(given.left, [0.0, 1.0, 3.0, 6.0])


def test_no_reference_to_an_array_is_left_behind() -> None:
    array = np.arange(4.0)
    before = sys.getrefcount(array)
    for _ in range(100):
        total(pair(left=array))
        fill(pair(left=array), 2)
    assert sys.getrefcount(array) == before


def test_the_type_survives_pickling_and_its_name_is_short() -> None:
    kind = numba.typeof(pair())
    assert pickle.loads(pickle.dumps(kind)) == kind
    assert kind != numba.typeof(pair(factor=1))
    assert len(kind.name) < 100


def test_a_field_that_is_not_there_is_named() -> None:
    with pytest.raises(errors.TypingError, match="absent"):
        missing(pair())


def test_a_field_that_kernels_cannot_read_is_named() -> None:
    with pytest.raises(TypeError, match=r"Pair.size.*object"):
        numba.typeof(pair(size=object()))
