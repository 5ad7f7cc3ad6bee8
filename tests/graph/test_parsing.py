"""Graph parsing, against hand-made trees and an obvious reference."""

import networkx as nx
import numpy as np
import pytest

from gdp.graph.groups import best_edges, components, parse


def reference_groups(score: np.ndarray, src: np.ndarray, dst: np.ndarray, n: int) -> set[frozenset]:
    """Node by node: the best incident edge, the first of equals; groups by networkx."""
    graph = nx.Graph()
    graph.add_nodes_from(range(n))
    for node in range(n):
        mine = [e for e in range(len(score)) if node in (src[e], dst[e]) and src[e] != dst[e]]
        if mine:
            best = max(mine, key=lambda e: (score[e], -e))
            graph.add_edge(int(src[best]), int(dst[best]))
    return {frozenset(group) for group in nx.connected_components(graph)}


def test_a_path_falls_apart_at_its_weakest_edges() -> None:
    """Scores 9 1 8 2 7 on a path of six: every second edge is nobody's best."""
    src, dst = np.arange(5), np.arange(1, 6)
    score = np.array([9.0, 1.0, 8.0, 2.0, 7.0])
    assert best_edges(score, src, dst).tolist() == [True, False, True, False, True]
    assert parse(score, src, dst, 6).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_chain_of_best_edges_is_one_tree() -> None:
    """Ascending scores: each node's best edge is the next one, so all hang together."""
    src, dst = np.arange(4), np.arange(1, 5)
    assert parse(np.array([1.0, 2.0, 3.0, 4.0]), src, dst, 5).tolist() == [0, 0, 0, 0, 0]


def test_a_star_is_one_group_and_a_lone_node_its_own() -> None:
    src, dst = np.array([0, 0, 0]), np.array([1, 2, 4])
    assert parse(np.array([1.0, 5.0, 2.0]), src, dst, 5).tolist() == [0, 0, 0, 1, 0]


def test_edges_below_the_least_score_are_not_kept() -> None:
    src, dst = np.arange(3), np.arange(1, 4)
    score = np.array([0.9, 0.2, 0.4])
    assert parse(score, src, dst, 4, least=0.3).tolist() == [0, 0, 1, 1]
    assert parse(score, src, dst, 4, least=0.5).tolist() == [0, 0, 1, 2]


def test_edges_to_itself_count_for_nothing() -> None:
    assert parse(np.array([9.0, 1.0]), np.array([0, 0]), np.array([0, 1]), 2).tolist() == [0, 0]


@pytest.mark.parametrize("levels", [2, 1000])
def test_groups_are_those_of_the_reference_and_kept_edges_a_forest(levels: int) -> None:
    """With many equal scores and with few."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(2, 30))
        src, dst = rng.integers(n, size=(2, 3 * n))
        score = rng.integers(levels, size=3 * n) / levels
        label = parse(score, src, dst, n)
        groups = {frozenset(np.flatnonzero(label == g).tolist()) for g in set(label.tolist())}
        assert groups == reference_groups(score, src, dst, n)
        kept = best_edges(score, src, dst)
        tree = nx.Graph(list(zip(src[kept].tolist(), dst[kept].tolist(), strict=True)))
        assert len(tree) == 0 or nx.is_forest(tree)
        assert tree.number_of_edges() == kept.sum()


@pytest.mark.parametrize("seed", range(20))
def test_components_are_those_of_networkx_by_first_appearance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, links = int(rng.integers(1, 40)), int(rng.integers(0, 40))
    src, dst = rng.integers(nodes, size=links), rng.integers(nodes, size=links)
    check_components(src, dst, nodes)


def test_components_of_long_chains_and_stars_with_names_in_any_order() -> None:
    names = np.random.default_rng(0).permutation(3000)
    check_components(names[:-1], names[1:], 3000)
    check_components(np.full(2999, names[0]), names[1:], 3000)
    check_components(names[:1500], names[1500:], 3000)


def check_components(src: np.ndarray, dst: np.ndarray, nodes: int) -> None:
    graph = nx.Graph()
    graph.add_nodes_from(range(nodes))
    graph.add_edges_from(zip(src.tolist(), dst.tolist(), strict=True))
    expected = np.empty(nodes, dtype=np.int64)
    for k, group in enumerate(sorted(nx.connected_components(graph), key=min)):
        expected[list(group)] = k
    np.testing.assert_array_equal(components(src, dst, nodes), expected)
