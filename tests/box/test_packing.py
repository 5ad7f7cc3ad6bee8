"""Packings of random priced boxes against all assignments, which share no code with the solver."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from gdp.box.solve import solve
from gdp.box.table import Box, Tenant, value_of


class Drawn(NamedTuple):
    """A model as plain numbers: the reference reads these, not the tables."""

    options: list[dict]
    demand: float
    weight: float
    swaps: bool
    ttft: float
    tpot: float


def draw(seed: int) -> tuple[list[Drawn], list[int], list[int]]:
    """Models, bytes of each memory, and the memory of each device."""
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(1, 5))
    models = int(rng.integers(1, 5 if devices < 4 else 4))
    pooled = devices > 1 and rng.random() < 0.2
    memory_of = [max(0, d - 1) for d in range(devices)] if pooled else list(range(devices))
    alike = rng.random() < 0.5
    sizes = rng.integers(8, 25, memory_of[-1] + 1).tolist()
    sizes = [sizes[0]] * len(sizes) if alike else sizes
    drawn = []
    for _ in range(models):
        options = []
        need = int(rng.integers(2, 16))
        for used in itertools.chain.from_iterable(
            itertools.combinations(range(devices), k) for k in (1, 2)
        ):
            for share in (1, 2)[: 1 + int(rng.random() < 0.3)]:
                speed = (1.0 if alike else float(rng.uniform(0.5, 2.0))) * len(used) ** 0.7 / share
                held = [0] * len(sizes)
                for d in used:
                    held[memory_of[d]] += -(-need // (len(used) * share))
                split = alike or rng.random() < 0.5
                busy = {d: 1.0 if split else 1.0 / len(used) for d in used}
                options.append({
                    "held": held, "busy": busy, "capacity": 3.0 * speed,
                    "ttft": np.inf if rng.random() < 0.1 else 0.5 / speed,  # too many requests
                    "tpot": 0.02 / speed, "load": need / 4.0, "bytes": float(need),
                })  # fmt: skip
        if rng.random() < 0.1:
            options = []
        drawn.append(Drawn(
            options, float(rng.choice([0.0, 0.3, 1.0, 2.0])), float(rng.choice([1.0, 1.0, 3.0])),
            bool(rng.random() < 0.5), float(rng.choice([0.6, 1.2, 5.0, np.inf])),
            float(rng.choice([0.015, 0.04, np.inf])),
        ))  # fmt: skip
    return drawn, sizes, memory_of


def as_box(drawn: list[Drawn], sizes: list[int], memory_of: list[int]) -> Box:
    """The tables of the solver."""
    d = len(memory_of)

    def column(model: Drawn, key: str) -> np.ndarray:
        return np.array([o[key] for o in model.options], dtype=float)

    tenants = [
        Tenant(
            f"m{i}",
            np.array([o["held"] for o in m.options], dtype=np.int64).reshape(-1, len(sizes)),
            np.array([[o["busy"].get(k, 0.0) for k in range(d)] for o in m.options]).reshape(-1, d),
            column(m, "capacity"), column(m, "ttft"), column(m, "tpot"), column(m, "load"),
            column(m, "bytes"), m.demand, m.weight, m.swaps, m.ttft, m.tpot,
        )
        for i, m in enumerate(drawn)
    ]  # fmt: skip
    return Box(tuple(tenants), np.array(sizes, dtype=np.int64), np.array(memory_of))


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """All ways to put items in groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for k in range(len(rest)):
            yield [*rest[:k], [items[0], *rest[k]], *rest[k + 1 :]]


def rate(drawn: list[Drawn], sizes: list[int], memory_of: list[int], pick: list, groups: list):
    """PackingValue of one assignment by the definitions; None where a memory overflows."""
    for m in range(len(sizes)):
        if sum(max(pick[i]["held"][m] for i in g) for g in groups) > sizes[m]:
            return None
    devices = range(len(memory_of))
    engines = [sum(any(d in pick[i]["busy"] for i in g) for g in groups) for d in devices]
    dropped = sum(m.weight for i, m in enumerate(drawn) if pick[i] is None)
    broken = crowded = moved = waited = 0.0
    loads: list[list[tuple[float, float]]] = [[] for _ in memory_of]
    slot_loads: list[list[tuple[float, float]]] = [[]]
    for g in groups:
        total, load = sum(drawn[i].demand for i in g), []
        for i in g:
            m, o = drawn[i], pick[i]
            swaps = m.demand * (total - m.demand) / total if total and len(g) > 1 else 0.0
            load.append((m.demand / o["capacity"] + swaps * o["load"], m.weight))
            moved += swaps * o["bytes"]
            wait = o["load"] if len(g) > 1 else 0.0
            worst = min(
                1 + sum(s * (engines[d] - 1) for d, s in o["busy"].items()),
                max(engines[d] for d in o["busy"]),
            )
            ttft, tpot = m.ttft * (1 + 1e-7), m.tpot * (1 + 1e-7)
            late = [o["ttft"] * f + wait > ttft or o["tpot"] * f > tpot for f in (1.0, worst)]
            broken += m.weight * late[0]
            crowded += m.weight * late[1]
            for d, s in o["busy"].items():
                loads[d].append((s * m.demand / o["capacity"], m.weight))
            waited += m.weight * m.demand / o["capacity"] * worst
        slot_loads.append(load)
    least = min(m.weight for m in drawn)
    load = max(load_of(rows, least) for rows in (*loads, *slot_loads))
    return dropped, broken, crowded, load, moved, waited


def load_of(rows: list[tuple[float, float]], least: float) -> float:
    """Load of (share of the time, weight) by bisection of the level of served parts."""
    whole = sum(share for share, _ in rows)
    if whole <= 1:
        return whole
    low, high = 0.0, 1.0
    for _ in range(60):
        level = (low + high) / 2
        taken = sum(share * min(1.0, level * weight / least) for share, weight in rows)
        low, high = (level, high) if taken <= 1 else (low, level)
    return 1 / low


def best_of_all(drawn: list[Drawn], sizes: list[int], memory_of: list[int]) -> tuple:
    """The least value over all options, models left out and groups."""
    best = None
    for pick in itertools.product(*([None, *m.options] for m in drawn)):
        here = [i for i, o in enumerate(pick) if o is not None]
        stay = [[i] for i in here if not drawn[i].swaps]
        for groups in partitions([i for i in here if drawn[i].swaps]):
            value = rate(drawn, sizes, memory_of, list(pick), stay + groups)
            if value is not None:
                value = tuple(round(x, 7) for x in value)
                best = value if best is None else min(best, value)
    assert best is not None
    return best


@pytest.mark.parametrize("block", range(16))
def test_packings_are_the_best_of_all_assignments(block: int) -> None:
    """Twenty boxes a block."""
    for seed in range(20 * block, 20 * block + 20):
        drawn, sizes, memory_of = draw(seed)
        box = as_box(drawn, sizes, memory_of)
        solution = solve(box)
        assert solution.proven
        expected = best_of_all(drawn, sizes, memory_of)
        assert tuple(solution.value) == pytest.approx(expected, rel=1e-5, abs=1e-6), seed
        again = value_of(box, solution.packing)
        assert again is not None
        assert tuple(again) == pytest.approx(tuple(solution.value), rel=1e-9, abs=1e-9)
        assert solution.bound <= solution.value.load + 1e-9


def test_a_first_packing_leaves_room_for_all_models() -> None:
    """The larger model is quicker on both cards, which have room for the other one only where it
    is on one; no time is left for more than first packings."""
    held, busy = np.array([[8, 8], [8, 0], [0, 8]]), np.array([[1.0, 1], [1, 0], [0, 1]])
    speed, more = np.array([2.0, 1, 1]), np.zeros(3)
    large = Tenant("large", held, busy, speed, 1 / speed, 1 / speed, more, more, 0.5)
    one, none = np.ones(2), np.zeros(2)
    small = Tenant("small", held[1:] // 2, busy[1:], one, one, one, none, none, 0.5)
    solution = solve(Box((large, small), np.array([8, 8]), np.array([0, 1])), seconds=0.0)
    assert not solution.proven
    assert solution.value.dropped == 0
    assert solution.value.load == 0.5
