"""Ops that touch a part of an operand are costed by that part, in every table."""

from collections.abc import Callable

import pytest

from gdp.ops.rule import OpCost, Shape
from gdp.ops.table import aten_cost, jax_cost

TABLE, ROW, CACHE, TOKEN = Shape((1000, 16), 4), 64, Shape((8, 512, 16), 4), Shape((8, 1, 16), 4)
IDS, PLACE, SCALAR = Shape((3,), 8), Shape((1,), 8), Shape((), 4)
ROWS, BAGS = Shape((3, 16), 4), Shape((2, 16), 4)
EXPERTS, GROUPS = Shape((8, 4, 4), 4), Shape((8,), 4)
ONE, OUT = Shape((1, 4), 4), Shape((1, 4), 4)
VECTOR = Shape((1000,), 4)
PRODUCT = {"dimension_numbers": None}

Cost = Callable[..., OpCost]


@pytest.mark.parametrize(
    ("cost", "name", "ins", "outs", "moved"),
    [
        (aten_cost, "embedding", [TABLE, IDS], [ROWS], 2 * 3 * ROW + 24),
        (aten_cost, "index", [TABLE, IDS], [ROWS], 2 * 3 * ROW + 24),
        (aten_cost, "index_select", [TABLE, IDS], [ROWS], 2 * 3 * ROW + 24),
        (aten_cost, "gather", [TABLE, Shape((3, 16), 8)], [ROWS], 2 * 3 * ROW + 384),
        (aten_cost, "take", [TABLE, IDS], [Shape((3,), 4)], 2 * 12 + 24),
        (aten_cost, "select_copy", [TABLE], [Shape((16,), 4)], 2 * ROW),
        (aten_cost, "slice_copy", [TABLE], [ROWS], 2 * 3 * ROW),
        # Three rows are read, two bags and what says where they begin are written or read.
        (aten_cost, "embedding_bag", [TABLE, IDS, Shape((2,), 8)], [BAGS],
         3 * ROW + 24 + 16 + 2 * ROW),
        (aten_cost, "_embedding_bag", [TABLE, IDS, Shape((2,), 8), Shape((3,), 4)], [BAGS],
         3 * ROW + 24 + 16 + 12 + 2 * ROW),
        # One token of a cache: read, and written over its place.
        (aten_cost, "index_put", [CACHE, PLACE, TOKEN], [CACHE], 2 * 512 + 8),
        (aten_cost, "index_copy", [CACHE, PLACE, TOKEN], [CACHE], 2 * 512 + 8),
        (aten_cost, "slice_scatter", [CACHE, TOKEN], [CACHE], 2 * 512),
        (aten_cost, "select_scatter", [CACHE, Shape((8, 16), 4)], [CACHE], 2 * 512),
        # A number at three places.
        (aten_cost, "index_put", [VECTOR, IDS, SCALAR], [VECTOR], 4 + 12 + 24),
        (aten_cost, "_grouped_mm", [ONE, EXPERTS, GROUPS], [OUT], 64 + 16 + 32 + 16),
        # A gradient of a table is written whole.
        (aten_cost, "embedding_dense_backward", [ROWS, IDS], [TABLE], 3 * ROW + 24 + 64000),
        (jax_cost, "gather", [TABLE, IDS], [ROWS], 2 * 3 * ROW + 24),
        (jax_cost, "dynamic_slice", [TABLE, SCALAR], [ROWS], 2 * 3 * ROW),
        (jax_cost, "slice", [TABLE], [ROWS], 2 * 3 * ROW),
        (jax_cost, "dynamic_update_slice", [CACHE, TOKEN, SCALAR], [CACHE], 2 * 512),
        (jax_cost, "scatter", [TABLE, IDS, ROWS], [TABLE], 3 * 3 * ROW + 24),
        (jax_cost, "scatter-add", [TABLE, IDS, ROWS], [TABLE], 3 * 3 * ROW + 24),
        (jax_cost, "ragged_dot_general", [ONE, EXPERTS, GROUPS], [OUT], 64 + 16 + 32 + 16),
        (jax_cost, "reshape", [TABLE], [TABLE], 0),
    ],
)  # fmt: skip
def test_traffic_by_hand(cost: Cost, name: str, ins: list, outs: list, moved: float) -> None:
    assert cost(name, PRODUCT, ins, outs).traffic_bytes == moved


def test_a_bag_adds_up_its_rows() -> None:
    """Three rows of 16; with weights a product each as well."""
    offsets = Shape((2,), 8)
    assert aten_cost("embedding_bag", {}, [TABLE, IDS, offsets], [BAGS]).flop == 48
    weighed = [TABLE, IDS, offsets, Shape((3,), 4)]
    assert aten_cost("embedding_bag", {}, weighed, [BAGS]).flop == 96


def test_a_bag_never_reads_more_than_its_table() -> None:
    small, many = Shape((4, 16), 4), Shape((100,), 8)
    cost = aten_cost("embedding_bag", {}, [small, many], [Shape((1, 16), 4)])
    assert cost.traffic_bytes == 4 * ROW + 800 + ROW
