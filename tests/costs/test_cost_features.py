"""What cost models see: fusions learned from profiles, and shapes worked out by hand."""

import numpy as np
import pytest
from made_up import chain_graph, profile

from gdp.costs.calibrate import components, learn_fusions
from gdp.costs.features import SIZES, kernel_features, op_features, shares
from gdp.costs.features import _transpose_access as transpose_access
from gdp.costs.fit import kernel_ids
from gdp.costs.learned import kernel_groups
from gdp.graph.op_graph import OpDetail, make_graph


def test_fusions_seen_in_profiles_are_found_in_other_graphs() -> None:
    table = learn_fusions(profile(2, 2).models)
    other = chain_graph("other", [(5, 6, 7), (7, 8, 9), (9, 10, 11)])
    assert kernel_groups(other, table).tolist() == [0, 0, 1, 1, 2, 2]


def test_the_most_specific_context_decides() -> None:
    """A Relu that nothing else is known of stays a kernel of its own."""
    table = learn_fusions(profile(2, 2).models)
    lone = make_graph("lone", ["a", "b"], ["Tanh", "Relu"], [(0, 4), (1, 4)], [(0, 1)])
    assert kernel_groups(lone, table).tolist() == [0, 1]


def test_ops_of_one_measured_kernel_share_its_id() -> None:
    model = profile(1, 1).models[0]
    assert (kernel_ids(model) == np.repeat(np.arange(8), 2)).all()


def test_components_join_what_shares_ops() -> None:
    """Measured {0, 1} and {2}, predicted {0} and {1, 2}: all one component."""
    members, of_group = components([[0, 1], [2]], np.array([0, 1, 1]))
    assert sorted(map(sorted, members)) == [[0, 1]]
    assert of_group[0] == of_group[1]


def test_sizes_of_a_kernel_by_hand() -> None:
    """2 x 3 times 3 x 4, then Relu: 48 + 8 FLOP, in 0 (first op), out 32, weights 48 bytes."""
    graph = chain_graph("g", [(2, 3, 4)])
    features = kernel_features(graph, np.array([0, 0]))
    size = dict(zip(SIZES, np.exp(features.size[0]), strict=True))
    assert features.lead_type == ("MatMul",)
    assert features.member_types == (("Relu",),)
    assert size["log_flop"] == pytest.approx(56 + 1e3)
    assert size["log_out_bytes"] == pytest.approx(32 + 100)
    assert size["log_weight_bytes"] == pytest.approx(48 + 100)
    assert size["log_rows"] == pytest.approx(2 + 1)


def test_a_tensor_inside_a_kernel_costs_no_traffic() -> None:
    graph = chain_graph("g", [(64, 64, 64), (64, 64, 64)])
    apart = kernel_features(graph, np.arange(4)).size
    joined = kernel_features(graph, np.array([0, 0, 1, 1])).size
    assert joined[0, 0] < np.logaddexp(apart[0, 0], apart[1, 0])


@pytest.mark.parametrize(
    ("shape", "perm", "together"),
    [
        ((2, 3, 4), (0, 2, 1), 1),  # the last axis moves: single elements
        ((2, 3, 4), (1, 0, 2), 4),  # it stays: rows of four
        ((2, 3, 4), (0, 1, 2), 24),  # nothing moves
        ((5, 1, 4), (1, 0, 2), 20),  # an axis of length one is no axis
    ],
)
def test_contiguous_elements_of_a_transposition(shape, perm, together) -> None:
    assert transpose_access(shape, perm)[0] == together


def test_unknown_ops_have_features_too() -> None:
    graph = make_graph("g", ["a"], ["Mystery"], [(0, 4)], [], detail=[OpDetail()])
    assert np.isfinite(op_features(graph, 0)).all()


def test_shares_of_what_bounds_a_kernel_sum_to_one() -> None:
    graph = chain_graph("g", [(512, 512, 512), (1, 1024, 1024), (2, 2, 2)])
    found = shares(kernel_features(graph, np.repeat(np.arange(3), 2)))
    np.testing.assert_allclose(found.sum(axis=1), 1.0)
    assert found.argmax(axis=1).tolist() == [0, 1, 2]  # arithmetic, traffic, launch


def image_graph(types: list[str], uses: list[tuple[int, int]]):
    """Ops over one image of 1 x 8 x 4 x 4, each of which makes one tensor."""
    shape = (1, 8, 4, 4)
    return make_graph(
        "g", [f"{t}{i}" for i, t in enumerate(types)], types,
        [(i, 512) for i in range(len(types))], uses,
        detail=[OpDetail("float32", (shape,), (shape,)) for _ in types],
    )  # fmt: skip


def plain_shares(graph) -> list[tuple[float, float]]:
    """Of every op as a kernel: how much of what it reads, and of what it makes, is plain."""
    features = kernel_features(graph, np.arange(graph.num_ops))
    at = len(op_features(graph, 0))
    return [tuple(row) for row in features.other[:, at : at + 2].tolist()]


def test_joins_and_activations_keep_the_layout_of_their_inputs() -> None:
    """Two convolutions, joined, cut off at zero, convolved: blocked throughout. A sine is not."""
    blocked = image_graph(
        ["Conv", "Conv", "Concat", "Relu", "Conv"], [(0, 2), (1, 2), (2, 3), (3, 4)]
    )
    assert plain_shares(blocked)[2:4] == [(0.0, 0.0), (0.0, 0.0)]
    mixed = image_graph(["Conv", "Sin", "Concat", "Conv"], [(0, 2), (1, 2), (2, 3)])
    assert plain_shares(mixed)[2] == (0.5, 0.0)
    assert plain_shares(mixed)[3][0] == 1.0
