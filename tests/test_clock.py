"""Budgets of seconds: compiling takes nothing of them."""

import time

import pytest
from numba import njit

from gdp.base.clock import COMPILE, Clock, waited_s, waiting_for
from gdp.base.kernels.options import BARE


def test_what_is_compiled_within_takes_nothing_of_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    clock = Clock(10.0)
    now_s[0] += 3.0
    with waiting_for(COMPILE):
        now_s[0] += 60.0
    assert clock.elapsed_s() == pytest.approx(3.0)
    assert clock.remaining_s() == pytest.approx(7.0)


def test_every_compilation_is_counted_once() -> None:
    @njit(**BARE | {"cache": False})
    def inner(x):  # type: ignore[no-untyped-def]
        return x + 1

    @njit(**BARE | {"cache": False})
    def outer(x):  # type: ignore[no-untyped-def]
        return inner(x) + inner(x)

    before_s, began_s = waited_s(COMPILE), time.perf_counter()
    assert outer(1) == 4
    took_s = time.perf_counter() - began_s
    assert 0 < waited_s(COMPILE) - before_s <= took_s
    before_s = waited_s(COMPILE)
    assert outer(2) == 6
    assert waited_s(COMPILE) == before_s
