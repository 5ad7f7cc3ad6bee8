"""The best way for each component, against every combination."""

import itertools

import numpy as np
import pytest

from gdp.api.diffusion.choose import HandOver, Way, choose


def problem(
    seed: int,
) -> tuple[list[list[Way]], list[HandOver], np.ndarray]:
    """Random ways of up to four components on up to three devices, each with a memory."""
    draw = np.random.default_rng(seed)
    count, devices = int(draw.integers(1, 5)), int(draw.integers(1, 4))
    ways = [
        [
            Way(
                float(draw.integers(1, 12)), draw.integers(0, 10, (count, devices)),
                int(draw.integers(devices)), int(draw.integers(devices)), int(draw.integers(0, 3)),
            )
            for _ in range(int(draw.integers(1, 6)))
        ]
        for _ in range(count)
    ]  # fmt: skip
    pairs = [p for p in itertools.combinations(range(count), 2) if draw.random() < 0.6]
    flows = [
        HandOver(i, j, draw.integers(0, 5, (devices, devices)).astype(float)) for i, j in pairs
    ]
    return ways, flows, draw.integers(8, 30, devices)


def every(
    ways: list[list[Way]], flows: list[HandOver], memory: np.ndarray
) -> tuple[float, int, int] | None:
    """The least (seconds, bytes moved, bytes held) of all combinations that fit."""
    values = []
    for chosen in itertools.product(*ways):
        held = np.sum([w.held_bytes for w in chosen], axis=0)
        if all(held[p, m] <= memory[m] for p in range(len(held)) for m in range(len(memory))):
            crossing = sum(
                f.seconds[chosen[f.sender].last][chosen[f.receiver].first] for f in flows
            )
            values.append((
                sum(w.seconds for w in chosen) + crossing, sum(w.moved_bytes for w in chosen),
                int(held.sum()),
            ))  # fmt: skip
    return min(values, default=None)


@pytest.mark.parametrize("seed", range(400))
def test_equals_the_best_of_all_combinations(seed: int) -> None:
    ways, flows, memory = problem(seed)
    expected, found = every(ways, flows, memory), choose(ways, flows, memory)
    if expected is None:
        assert found.ways is None
        return
    assert found.ways is not None
    chosen = [own[w] for own, w in zip(ways, found.ways, strict=True)]
    held = np.sum([w.held_bytes for w in chosen], axis=0)
    assert (held <= memory).all()
    assert (found.seconds, sum(w.moved_bytes for w in chosen), int(held.sum())) == expected


def test_a_component_without_a_way_has_no_choice() -> None:
    way = Way(1.0, np.ones((2, 1), int), 0, 0)
    assert choose([[way], []], [], np.array([10])).ways is None


def test_phases_count_by_themselves() -> None:
    """Two components of 6 bytes on a card of 8, each there while it runs alone."""
    moves = [Way(2.0, np.array([[6], [0]]), 0, 0, 6), Way(3.0, np.array([[0], [6]]), 0, 0, 6)]
    stays = [Way(1.0, np.array([[6], [6]]), 0, 0), Way(1.0, np.array([[6], [6]]), 0, 0)]
    found = choose([[moves[0], stays[0]], [moves[1], stays[1]]], [], np.array([8]))
    assert found.ways == (0, 0)
    assert found.seconds == 5.0
    assert choose([[moves[0], stays[0]], [moves[1], stays[1]]], [], np.array([12])).seconds == 2.0
