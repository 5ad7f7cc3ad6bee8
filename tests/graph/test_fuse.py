"""Contractions keep the graph acyclic, lose nothing, and expand to what they stand for."""

import networkx as nx
import numpy as np
import pytest

from gdp.graph.fuse import Fused, coarsen, fuse, group_seconds
from gdp.graph.op_graph import OpGraph, make_graph

TYPES = ("MatMul", "Relu", "Add", "Reshape", "ReduceSum", "Expand", "Softmax", "Conv")


def random_graph(seed: int, num: int = 60) -> OpGraph:
    """A random DAG with inputs, outputs, several tensors per op, tied weights and colocation."""
    rng = np.random.default_rng(seed)
    types = ["Input"] * 3 + [str(t) for t in rng.choice(TYPES, num)] + ["Output"] * 2
    n = len(types)
    backward = np.zeros(n, bool)
    if seed % 2:
        backward[n // 2 : -2] = True
    makers = [i for i in range(n - 2) for _ in range(int(rng.integers(1, 3)))]
    sizes = rng.choice([0, 4, 100, 10_000, 10**6], len(makers))
    uses = []
    for op in range(3, n):
        near = [t for t, m in enumerate(makers) if m < op and (op - m < 8 or rng.random() < 0.02)]
        uses += [(int(t), op) for t in rng.choice(near, min(len(near), 2), replace=False)]
    colocate = np.arange(n)
    weight_id = np.arange(n)
    weight_bytes = rng.choice([0, 0, 64, 10**6], n)
    weight_bytes[[0, 1, 2, n - 2, n - 1]] = 0
    for k in range(6):
        pair = rng.choice(np.arange(3, n - 2), 2, replace=False)
        weight_bytes[pair] = 500 + k
        weight_id[pair] = 1000 + k
        if k % 2:
            colocate[pair] = colocate[pair[0]]
    return make_graph(
        f"random{seed}", [f"op{i}" for i in range(n)], types,
        list(zip(makers, sizes.tolist(), strict=True)), uses,
        flop=rng.uniform(0, 1e9, n), memory_traffic_bytes=rng.uniform(0, 1e8, n),
        weight_bytes=weight_bytes, weight_id=weight_id, colocate=colocate, is_backward=backward,
    )  # fmt: skip


def total_weight(graph: OpGraph, chosen: np.ndarray | None = None) -> int:
    """Every weight id counted once."""
    most: dict[int, int] = {}
    for op in range(graph.num_ops) if chosen is None else np.flatnonzero(chosen).tolist():
        key = int(graph.weight_id[op])
        most[key] = max(most.get(key, 0), int(graph.weight_bytes[op]))
    return sum(most.values())


def transfers(graph: OpGraph, device: np.ndarray) -> set[tuple[str, int]]:
    """Which tensor goes to which other device."""
    return {
        (graph.tensor_names[t], int(device[op]))
        for t, op in zip(graph.use_tensor, graph.use_op, strict=True)
        if device[graph.producer[t]] != device[op]
    }


def class_placement(graph: OpGraph, seed: int, num_devices: int = 3) -> np.ndarray:
    choice = np.random.default_rng(seed).integers(num_devices, size=graph.num_ops)
    return choice[np.unique(graph.colocate, return_inverse=True)[1]]


def contractions(graph: OpGraph) -> list[Fused]:
    return [fuse(graph), coarsen(graph, 20), coarsen(graph, 8)]


@pytest.mark.parametrize("seed", range(12))
def test_a_contraction_is_acyclic_and_loses_nothing(seed: int) -> None:
    graph = random_graph(seed)
    for fused in contractions(graph):
        small, group_of = fused.graph, fused.group_of
        quotient = nx.DiGraph(
            (int(group_of[u]), int(group_of[v]))
            for u, v in zip(*graph.edges, strict=True)
            if group_of[u] != group_of[v]
        )
        assert nx.is_directed_acyclic_graph(quotient)
        assert set(zip(*(a.tolist() for a in small.edges), strict=True)) == set(quotient.edges)
        assert small.num_ops == len(np.unique(group_of)) < graph.num_ops
        assert small.flop.sum() == pytest.approx(graph.flop.sum())
        assert total_weight(small) == total_weight(graph)
        assert np.array_equal(small.is_backward[group_of], graph.is_backward)
        io = np.flatnonzero(graph.is_io)
        assert [small.op_names[g] for g in group_of[io]] == [graph.op_names[i] for i in io]
        assert small.is_io.sum() == len(io)


@pytest.mark.parametrize("seed", range(12))
def test_an_expanded_placement_costs_what_the_placed_groups_cost(seed: int) -> None:
    """Same transfers and same weights per device, for any placement of the groups."""
    graph = random_graph(seed)
    for fused in contractions(graph):
        device = class_placement(fused.graph, seed)
        whole = device[fused.group_of]
        assert whole.shape == (graph.num_ops,)
        for ids in np.unique(graph.colocate):
            assert len(np.unique(whole[graph.colocate == ids])) == 1
        assert transfers(fused.graph, device) == transfers(graph, whole)
        for d in range(3):
            assert total_weight(fused.graph, device == d) == total_weight(graph, whole == d)


@pytest.mark.parametrize("seed", range(4))
def test_traffic_inside_a_group_is_saved_once(seed: int) -> None:
    graph = random_graph(seed)
    fused = fuse(graph)
    assert (fused.graph.memory_traffic_bytes >= 0).all()
    assert fused.graph.memory_traffic_bytes.sum() < graph.memory_traffic_bytes.sum()


def test_ops_kept_apart_never_meet() -> None:
    graph = random_graph(3)
    apart = np.random.default_rng(0).integers(2, size=graph.num_ops)
    for fused in (fuse(graph, apart=apart), coarsen(graph, 10, apart=apart)):
        for group in range(fused.graph.num_ops):
            assert len(set(apart[fused.group_of == group])) == 1


def chain(
    types: list[str], edges: list[tuple[int, int]], sizes: list[int] | None = None
) -> OpGraph:
    """One tensor per op that is read; bytes 1000 unless given."""
    makers = sorted({u for u, _ in edges})
    tensor = {u: t for t, u in enumerate(makers)}
    size = sizes or [1000] * len(types)
    traffic = [
        float(size[i] * (i in tensor) + sum(size[u] for u, v in edges if v == i))
        for i in range(len(types))
    ]
    return make_graph(
        "chain", [f"{t}{i}" for i, t in enumerate(types)], types,
        [(u, size[u]) for u in makers], [(tensor[u], v) for u, v in edges],
        flop=np.ones(len(types)), memory_traffic_bytes=traffic,
    )  # fmt: skip


def test_matmul_bias_and_activation_become_one_op() -> None:
    """x -> MatMul -> Add -> Relu -> MatMul -> Output: the first three fuse, two matmuls do not."""
    graph = chain(
        ["Input", "MatMul", "Add", "Relu", "MatMul", "Output"], [(i, i + 1) for i in range(5)]
    )
    fused = fuse(graph)
    assert fused.group_of.tolist() == [0, 1, 1, 1, 2, 3]
    assert fused.graph.op_types == ("Input", "MatMul", "MatMul", "Output")
    assert fused.graph.flop.tolist() == [1, 3, 1, 1]
    # Read x, write y; what was between the three ops stays on chip.
    assert fused.graph.memory_traffic_bytes.tolist() == [1000, 2000, 2000, 1000]


def test_softmax_is_one_op_apart_from_the_matmuls() -> None:
    """max and sum reduce rows, exp(x - max) / sum reads them: paths that close on themselves."""
    types = ["MatMul", "ReduceMax", "Sub", "Exp", "ReduceSum", "Div", "MatMul"]
    edges = [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (3, 5), (4, 5), (5, 6)]
    fused = fuse(chain(types, edges, [8000, 80, 8000, 8000, 80, 8000, 8000]))
    assert fused.group_of.tolist() == [0, 1, 1, 1, 1, 1, 2]


def test_a_merge_that_would_close_a_cycle_is_left() -> None:
    """Add reads the MatMul directly and through the Conv: it joins the Conv."""
    fused = fuse(chain(["MatMul", "Conv", "Add"], [(0, 1), (1, 2), (0, 2)]))
    assert fused.group_of.tolist() == [0, 1, 1]


def test_a_sum_joins_the_branch_that_ends_last() -> None:
    """Add reads a short branch (Conv) and a long one (two MatMuls): the Conv must not wait."""
    types = ["Input", "Conv", "MatMul", "MatMul", "Add"]
    fused = fuse(chain(types, [(0, 1), (0, 2), (2, 3), (1, 4), (3, 4)]))
    assert fused.group_of.tolist() == [0, 1, 2, 3, 3]


def test_a_broadcast_goes_to_its_reader_and_a_reduction_to_its_maker() -> None:
    """Between two heavy ops the small tensor is the one that may travel."""
    grow = fuse(chain(["MatMul", "Expand", "MatMul"], [(0, 1), (1, 2)], [10, 10_000, 1]))
    assert grow.group_of.tolist() == [0, 1, 1]
    shrink = fuse(chain(["Conv", "Relu", "ReduceSum", "Conv"], [(0, 1), (1, 2), (2, 3)],
                        [10_000, 10_000, 10, 1]))  # fmt: skip
    assert shrink.group_of[3] not in shrink.group_of[:3]


def test_a_broadcast_with_two_readers_stays_alone() -> None:
    fused = fuse(
        chain(
            ["MatMul", "Expand", "MatMul", "MatMul"], [(0, 1), (1, 2), (1, 3)], [10, 10_000, 1, 1]
        )
    )
    assert fused.graph.num_ops == 4


def test_seconds_of_a_group_are_a_sum_and_inf_stays() -> None:
    fused = fuse(chain(["MatMul", "Relu", "MatMul"], [(0, 1), (1, 2)]))
    seconds = np.array([[1.0, 2.0], [3.0, np.inf], [5.0, 6.0]])
    assert group_seconds(fused, seconds).tolist() == [[4.0, np.inf], [5.0, 6.0]]


def layered(num: int, width: int, seed: int = 0) -> OpGraph:
    """Layers of heavy ops, each reading two of the layer before."""
    rng = np.random.default_rng(seed)
    near = np.maximum(np.arange(num)[:, None] - rng.integers(1, 2 * width, (num, 2)), 0)
    uses = [(int(u), op) for op in range(1, num) for u in near[op] if u < op]
    types = [str(t) for t in rng.choice(["MatMul", "Relu", "Add", "Softmax"], num)]
    return make_graph(
        "layered", [f"n{i}" for i in range(num)], types,
        [(i, int(b)) for i, b in enumerate(rng.integers(1, 10**6, num))], uses,
        flop=rng.uniform(0, 1e9, num), memory_traffic_bytes=rng.uniform(0, 1e6, num),
    )  # fmt: skip


@pytest.mark.parametrize("width", [1, 10, 300])
def test_coarsening_reaches_its_target_and_stays_balanced(width: int) -> None:
    graph = layered(3000, width)
    small = coarsen(graph, 200)
    assert small.graph.num_ops <= 200
    assert small.graph.flop.max() < 0.1 * graph.flop.sum()


def test_independent_ops_can_be_coarsened() -> None:
    """No edges at all: only blocks are left."""
    names = [f"n{i}" for i in range(500)]
    graph = make_graph("dust", names, ["MatMul"] * 500, [], [], flop=np.ones(500))
    assert coarsen(graph, 10).graph.num_ops <= 10


def test_no_groups_are_wanted() -> None:
    with pytest.raises(ValueError, match="max_ops must be at least 1"):
        coarsen(random_graph(0), 0)


def test_the_same_graph_gives_the_same_groups() -> None:
    graph = layered(2000, 7)
    assert np.array_equal(coarsen(graph, 50).group_of, coarsen(graph, 50).group_of)
    assert fuse(graph).graph.digest == fuse(graph).graph.digest
