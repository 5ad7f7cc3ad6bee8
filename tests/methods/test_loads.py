"""Sums that the annealing of a period keeps from move to move, against those of the simulator."""

import numba
import numpy as np
import pytest
from tiny import random_devices, random_problem

from gdp.base.kernels.options import BARE
from gdp.methods.annealing.annealer_kernels import (
    Loads,
    make_loads,
    move_op,
    new_loads,
    restore_loads,
    save_loads,
)
from gdp.problem.arrays import arrays_of
from gdp.sim.latency import periods

SUMS = ("busy_s", "channel_s", "readers", "foreign", "held", "room_bytes")


@numba.njit(**BARE)
def move_all(a, loads, device, ops, to):
    """Moves of ops one by one; kernels inside of others are not called from Python."""
    for k in range(len(ops)):
        move_op(a, loads, device, ops[k], to[k])


@numba.njit(**BARE)
def move_and_back(a, loads, device, op, to):
    save_loads(loads)
    home = np.int64(device[op])
    move_op(a, loads, device, op, to)
    move_op(a, loads, device, op, home)
    restore_loads(loads)


def same(one: Loads, other: Loads) -> None:
    for name in SUMS:
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


@pytest.mark.parametrize("seed", range(40))
def test_moves_leave_the_sums_of_the_placement_that_they_lead_to(seed: int) -> None:
    """All times are ticks, so that sums are equal to the last bit, whatever their order; the
    largest is the period."""
    rng = np.random.default_rng(seed)
    problem = random_problem(
        seed, objective="throughput", num_devices=2 + seed % 3, runs=seed % 2 == 1, varied=True
    )
    a, start = arrays_of(problem), random_devices(problem, seed)[0].astype(np.int32)
    moved, device = new_loads(a), start.copy()
    make_loads(a, moved, device)
    ops = rng.permutation(np.flatnonzero(~problem.graph.is_io))
    move_all(a, moved, device, ops, rng.integers(problem.num_devices, size=len(ops)))
    fresh = new_loads(a)
    make_loads(a, fresh, device)
    same(moved, fresh)
    longest_s = max(moved.busy_s.max(), moved.channel_s.max(initial=0.0))
    assert longest_s == periods(problem, device[None])[0][0]


def test_a_rejected_move_leaves_the_sums() -> None:
    problem = random_problem(3, objective="throughput", varied=True)
    a, device = arrays_of(problem), random_devices(problem, 3)[0].astype(np.int32)
    loads, kept = new_loads(a), new_loads(a)
    for each in (loads, kept):
        make_loads(a, each, device)
    op = int(np.flatnonzero(~problem.graph.is_io)[0])
    move_and_back(a, loads, device, op, (int(device[op]) + 1) % problem.num_devices)
    same(loads, kept)
