"""Heads, tails and spans in plain Python and compiled."""

import numpy as np
import pytest
from tiny import fork_join, random_problem

from gdp.bounds import paths
from gdp.bounds.budget import WorkBudget
from gdp.problem.problem import Problem


def computed(problem: Problem) -> list[np.ndarray]:
    """Heads, tails, spans between the blocks, and heads and tails with these."""
    arcs = paths.arcs_of(problem)
    head_s, tail_s = paths.heads_and_tails(arcs, paths.no_spans(problem.num_devices))
    blocks = paths.find_blocks(arcs, head_s)
    spans = paths.find_spans(problem, arcs, blocks, WorkBudget(0.02, cap_s=600.0))
    return [head_s, tail_s, *spans, *paths.heads_and_tails(arcs, spans)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_compiled_twins_compute_the_same_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    problem = random_problem(seed, num_devices=2 + seed % 2) if seed else fork_join()
    monkeypatch.setattr(paths, "is_worth_compiling", lambda *_: True)
    monkeypatch.setattr(paths, "_PLAIN_BRANCHES", 0)
    twins = computed(problem)
    for branches in (3, 10**9):  # plain until there are too many, and to the end
        monkeypatch.setattr(paths, "is_worth_compiling", lambda steps, plain: steps > plain)
        monkeypatch.setattr(paths, "_PLAIN_STEPS", 10**9)
        monkeypatch.setattr(paths, "_PLAIN_BRANCHES", branches)
        for a, b in zip(computed(problem), twins, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("seed", range(12))
def test_a_block_holds_the_ops_on_the_paths_between_its_ends(seed: int) -> None:
    problem = random_problem(seed, num_devices=2)
    arcs = paths.arcs_of(problem)
    head_s, _ = paths.heads_and_tails(arcs, paths.no_spans(2))
    readers: dict[int, set[int]] = {}
    for v in range(len(arcs.op_s)):
        for u in arcs.source[arcs.first_input[v] : arcs.first_input[v + 1]].tolist():
            readers.setdefault(u, set()).add(v)

    def reached(u: int) -> set[int]:
        return readers.get(u, set()).union(*(reached(v) for v in readers.get(u, ())))

    for block in paths.find_blocks(arcs, head_s):
        inside = {
            x
            for x in range(block.target)
            if block.target in reached(x) and (block.source < 0 or x in reached(block.source))
        }
        assert set(block.inner.tolist()) <= inside
        left_out = inside - set(block.inner.tolist())
        assert all(arcs.first_input[x] == arcs.first_input[x + 1] for x in left_out)
