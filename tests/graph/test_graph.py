"""Graphs are sorted, checked and identified."""

import numpy as np
import pytest

from gdp.base.errors import ModelError
from gdp.graph.op_graph import OpDetail, OpGraph, make_graph, topological_order


def test_ops_come_out_in_topological_order_with_their_tensors() -> None:
    """c reads a, a reads b: given as a, b, c they come out as b, a, c."""
    graph = make_graph(
        "g", ["a", "b", "c"], ["X", "Y", "Z"], [(0, 10), (1, 20)], [(1, 0), (0, 2)],
        flop=[1.0, 2.0, 3.0],
    )  # fmt: skip
    assert graph.op_names == ("b", "a", "c")
    assert graph.flop.tolist() == [2.0, 1.0, 3.0]
    assert graph.tensor_bytes.tolist() == [20, 10]
    assert graph.edges[0].tolist() == [0, 1]
    assert graph.edges[1].tolist() == [1, 2]


def test_tensors_and_uses_may_be_arrays_and_uses_given_twice() -> None:
    tensors, uses = [(0, 10), (1, 20), (2, 5)], [(1, 0), (0, 2), (1, 2), (0, 2)]
    names, types = ["a", "b", "c"], ["X", "Y", "Z"]
    listed = make_graph("g", names, types, tensors, uses)
    packed = make_graph("g", names, types, np.array(tensors), np.array(uses))
    assert listed.digest == packed.digest
    assert listed.num_uses == 3
    assert listed.tensor_bytes.tolist() == [20, 10, 5]


def test_a_cycle_is_named() -> None:
    with pytest.raises(ModelError, match=r"cycle through or before op 'a'"):
        make_graph("g", ["a", "b"], ["X", "X"], [(0, 1), (1, 1)], [(0, 1), (1, 0)])


def test_no_ops_is_an_error() -> None:
    with pytest.raises(ModelError, match="no ops"):
        make_graph("g", [], [], [], [])


def test_equal_names_are_an_error() -> None:
    with pytest.raises(ModelError, match="'a' appears twice"):
        make_graph("g", ["a", "a"], ["X", "X"], [], [])


@pytest.mark.parametrize("size", [1 << 62, 1 << 51])
def test_bytes_that_sum_beyond_what_is_exact_are_an_error(size: int) -> None:
    """Four times 2**62 is 0 in 64 bits: it would fit anywhere."""
    names, types = list("abcde"), ["X"] * 5
    make_graph("g", names, types, [], [], weight_bytes=[(1 << 53) // 5] * 5)
    with pytest.raises(ModelError, match=r"weight_bytes are .* bytes in all"):
        make_graph("g", names, types, [], [], weight_bytes=[size] * 5)
    with pytest.raises(ModelError, match=r"tensor_bytes are .* bytes in all"):
        make_graph("g", names, types, [(i, size) for i in range(5)], [])


def test_work_without_a_finite_sum_is_an_error() -> None:
    with pytest.raises(ModelError, match="no finite sum"):
        make_graph("g", ["a", "b"], ["X", "X"], [], [], flop=[1e308, 1e308])


def test_a_weight_has_one_holder_for_each_owner() -> None:
    """Ops 0, 1 and 3 share a weight, of which op 1 holds most; ops 2 and 4 one of equal bytes."""
    graph = make_graph(
        "g", [*"abcde"], ["X"] * 5, [], [], weight_bytes=[5, 7, 4, 7, 4], weight_id=[3, 3, 1, 3, 1]
    )
    assert graph.weight_holders().tolist() == [2, 1]
    assert graph.weight_holders(np.array([4, 0, 2])).tolist() == [4, 0]
    owner = np.array([0, 0, 0, 1, 1])
    assert graph.weight_holders(owner=owner).tolist() == [2, 1, 4, 3]
    assert graph.weight_holders(np.array([0, 1, 3]), owner).tolist() == [1, 3]
    assert graph.weight_holders(np.array([], dtype=int)).tolist() == []


def test_digest_depends_on_bytes_but_not_on_the_name() -> None:
    one, two, three = (
        make_graph(name, ["a", "b"], ["X", "X"], [(0, size)], [(0, 1)])
        for name, size in (("g", 1), ("h", 1), ("g", 2))
    )
    assert one.digest == two.digest
    assert one.digest != three.digest


def test_topological_order_of_a_sorted_graph_is_the_identity() -> None:
    src, dst = np.array([0, 0, 1]), np.array([1, 2, 2])
    assert topological_order(3, src, dst).tolist() == [0, 1, 2]


def test_arrays_are_read_only() -> None:
    graph = make_graph("g", ["a"], ["X"], [], [])
    with pytest.raises(ValueError, match="read-only"):
        graph.flop[0] = 1.0


def test_digest_depends_on_all_that_changes_an_answer() -> None:
    """Ids of other numbers that tie the same ops are the same graph."""

    def made(**fields) -> OpGraph:
        return make_graph("g", ["a", "b"], ["X", "X"], [(0, 4)], [(0, 1)], **fields)

    plain = made(weight_bytes=[8, 8], weight_id=[0, 1])
    assert plain.digest == made(weight_bytes=[8, 8], weight_id=[7, 3]).digest
    others = [
        made(weight_bytes=[8, 8], weight_id=[0, 0]),
        made(weight_bytes=[8, 8], colocate=[0, 0]),
        made(weight_bytes=[8, 8], is_backward=[False, True]),
        made(weight_bytes=[8, 8], cache_bytes=[0, 4]),
        made(weight_bytes=[8, 8], repeats=[2, 2]),
        made(weight_bytes=[8, 8], scope=["", "m"]),
        made(weight_bytes=[8, 8], detail=[OpDetail(), OpDetail("float16")]),
        made(weight_bytes=[8, 8], detail=[OpDetail(), OpDetail(attributes={"axis": 1})]),
    ]
    assert len({graph.digest for graph in (plain, *others)}) == 1 + len(others)
