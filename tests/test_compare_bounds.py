"""What compare and its table say of the proven bound."""

import gdp
from gdp.cli.text import compare_text
from gdp.costs.roofline import roofline
from gdp.graph.op_graph import INPUT, OUTPUT, make_graph
from gdp.result import Result


def test_all_methods_are_measured_against_the_best_bound_of_any() -> None:
    names = ["in", "a", "b", "c", "d", "out"]
    kinds = [INPUT, "MatMul", "MatMul", "MatMul", "MatMul", OUTPUT]
    graph = make_graph(
        "diamond", names, kinds, [(i, 4_000_000) for i in range(5)],
        [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)], flop=[0, 4e9, 4e9, 4e9, 4e9, 0],
    )  # fmt: skip
    cluster = gdp.Cluster.load("2xt4-pcie3")
    rows = gdp.compare(
        graph, cluster, names=["single", "round_robin"], costs=roofline,
        search=gdp.Search(seconds=1.0),
    )  # fmt: skip
    results = [row for row in rows.values() if isinstance(row, Result)]
    assert len({row.bound_by for row in results}) == 1
    assert all(0 < row.bound_s <= row.value_s for row in results)
    best = min(results, key=lambda row: row.value_s)
    worst = max(results, key=lambda row: row.value_s)
    assert worst.gap > best.gap
    assert not worst.proven_optimal
    text = compare_text(graph, cluster, rows)
    assert "bound    at least" in text
    assert best.bound_by in text
