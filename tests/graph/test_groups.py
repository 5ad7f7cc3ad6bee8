"""Groups of ops: ids that are merged, and what is gathered per group."""

import networkx as nx
import numpy as np
import pytest
from tiny import random_problem

from gdp.graph.fuse import coarsen
from gdp.graph.groups import alike, all_per_group, distinct, joined, merge_ids, sum_per_group
from gdp.problem.problem import contracted


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_are_alike_have_one_number(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 3, (int(rng.integers(0, 30)), int(rng.integers(1, 4))))
    seen: dict[tuple, int] = {}
    numbers = [seen.setdefault(tuple(row), len(seen)) for row in rows.tolist()]
    first, number = alike(*rows.T)
    assert number.tolist() == numbers
    assert first.tolist() == [numbers.index(i) for i in range(len(seen))]


@pytest.mark.parametrize("seed", range(20))
def test_ids_are_merged_as_a_graph_library_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, 12, 15), rng.integers(0, 12, 15)
    merged = merge_ids(first, second)
    graph = nx.Graph()
    graph.add_edges_from((("a", int(i)), ("b", int(j))) for i, j in zip(first, second, strict=True))
    wanted = {frozenset(part) for part in nx.connected_components(graph)}
    found = [
        frozenset(
            {("a", int(i)) for i in first[merged == k]}
            | {("b", int(j)) for j in second[merged == k]}
        )
        for k in range(merged.max() + 1)
    ]
    assert set(found) == wanted
    assert len(found) == len(wanted)
    # In order of first appearance.
    assert (np.diff(np.unique(merged, return_index=True)[1]) > 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_distinct_values_are_those_of_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for values in (
        rng.integers(0, 9, 20),
        rng.normal(size=9),
        np.zeros(0),
        rng.integers(9, size=1),
    ):
        assert distinct(values).tolist() == np.unique(values).tolist()
        assert distinct(values).dtype == values.dtype


def test_parts_are_joined_over_chains_of_ids() -> None:
    part = np.array([0, 1, 1, 2, 3, 4])
    ids = np.array([5, 5, 6, 6, 7, 8])
    assert joined(part, ids).tolist() == [0, 0, 0, 1, 2]


def test_values_are_gathered_per_group() -> None:
    group = np.array([1, 0, 1])
    seconds = np.array([[1.0, np.inf], [2.0, 3.0], [4.0, 5.0]])
    assert sum_per_group(seconds, group).tolist() == [[2.0, 3.0], [5.0, np.inf]]
    allowed = np.array([[True, False], [True, True], [True, True]])
    assert all_per_group(allowed, group).tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("seed", range(5))
def test_a_contracted_problem_takes_the_time_and_the_rules_of_its_ops(seed: int) -> None:
    problem = random_problem(seed, num_ops=30, num_devices=3)
    labels = np.unique(problem.allowed, axis=0, return_inverse=True)[1].reshape(-1)
    fused = coarsen(problem.graph, 8, apart=labels.astype(np.int64))
    small = contracted(problem, fused.graph, fused.group_of)
    for m in range(fused.graph.num_ops):
        inside = fused.group_of == m
        assert small.compute_s[m] == pytest.approx(problem.compute_s[inside].sum(axis=0))
        assert (small.allowed[m] == problem.allowed[inside].all(axis=0)).all()
    for a in range(problem.num_ops):
        for b in np.flatnonzero(problem.group == problem.group[a]):
            assert small.group[fused.group_of[a]] == small.group[fused.group_of[b]]
