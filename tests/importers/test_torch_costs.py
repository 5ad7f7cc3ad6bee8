"""ATen ops cost what can be counted by hand; no torch is needed to say so."""

import pytest

from gdp.ops.rule import Shape
from gdp.ops.table import aten_cost


def f32(*dims: int) -> Shape:
    return Shape(dims, 4)


@pytest.mark.parametrize(
    ("name", "params", "ins", "outs", "flop"),
    [
        ("linear", {}, [f32(2, 8), f32(16, 8), f32(16)], [f32(2, 16)], 2 * 2 * 8 * 16 + 32),
        ("matmul", {}, [f32(3, 2, 8), f32(8, 5)], [f32(3, 2, 5)], 3 * 2 * 8 * 5 * 2),
        ("addmm", {}, [f32(5), f32(2, 8), f32(8, 5)], [f32(2, 5)], 2 * 8 * 5 * 2 + 10),
        ("einsum", {"equation": "bij,bjk->bik"}, [f32(2, 3, 4), f32(2, 4, 5)], [f32(2, 3, 5)], 240),
        ("conv2d", {}, [f32(1, 6, 8, 8), f32(4, 3, 3, 3)], [f32(1, 4, 8, 8)], 256 * 2 * 27),
        # A transposed convolution multiplies every input element with its kernel.
        ("conv_transpose1d", {}, [f32(1, 3, 8), f32(3, 4, 5)], [f32(1, 4, 12)], 24 * 2 * 20),
        ("_grouped_mm", {}, [f32(6, 8), f32(4, 8, 5), f32(4)], [f32(6, 5)], 6 * 8 * 5 * 2),
        # Two gates' matrices over three steps of two samples.
        ("lstm", {}, [f32(3, 2, 4), f32(8, 4), f32(8, 2), f32(8)], [f32(3, 2, 2)], 2 * 6 * 48),
        # Of x [2, 4] and hidden states [2, 3]: per gate two products and two biases, then per unit
        # three sigmoids, two hyperbolic tangents and four operations.
        ("lstm_cell", {}, [f32(2, 4), f32(2, 3), f32(2, 3), f32(12, 4), f32(12, 3), f32(12),
                           f32(12)], [f32(2, 3), f32(2, 3)], 2 * (4 * (2 * 3 * 7 + 6) + 3 * 18)),
        ("gru_cell", {}, [f32(2, 4), f32(2, 3), f32(9, 4), f32(9, 3)], [f32(2, 3)],
         2 * (3 * (2 * 3 * 7 + 6) + 3 * 13)),
        ("rnn_tanh_cell", {}, [f32(2, 4), f32(2, 3), f32(3, 4), f32(3, 3)], [f32(2, 3)],
         2 * (2 * 3 * 7 + 6 + 3)),
        ("_unique2", {}, [f32(4, 4)], [f32(16)], 16 * 4),
        # A number is compared once for each doubling of what is kept of its row.
        ("sort", {}, [f32(4, 15)], [f32(4, 15), f32(4, 15)], 60 * 4),
        ("topk", {"k": 3}, [f32(4, 15)], [f32(4, 3), f32(4, 3)], 60 * 2),
        ("max_pool2d", {"kernel_size": [2, 3]}, [f32(1, 1, 8, 8)], [f32(1, 1, 4, 4)], 16 * 6),
        ("mul", {}, [f32(4, 4), f32(4)], [f32(4, 4)], 16),
        ("sum", {}, [f32(4, 4)], [f32(4)], 16),
        ("cat", {}, [f32(4), f32(4)], [f32(8)], 0),
    ],
)  # fmt: skip
def test_flop_by_hand(name: str, params: dict, ins: list, outs: list, flop: float) -> None:
    cost = aten_cost(name, params, ins, outs)
    assert (cost.flop, cost.known) == (flop, True)


def test_attention_counts_both_products_and_the_softmax() -> None:
    q, k, v = f32(2, 4, 3, 8), f32(2, 2, 5, 8), f32(2, 2, 5, 6)
    cost = aten_cost("scaled_dot_product_attention", {}, [q, k, v], [f32(2, 4, 3, 6)])
    # 4 heads of queries, though keys have 2: 2*8 + 1 + 5 + 2*6 per score.
    assert cost.flop == 2 * 4 * 3 * 5 * (16 + 1 + 5 + 12)


def test_an_embedding_reads_its_rows_and_not_the_table() -> None:
    cost = aten_cost("embedding", {}, [f32(1000, 16), Shape((3,), 8)], [f32(3, 16)])
    assert (cost.flop, cost.traffic_bytes) == (0.0, 2 * 3 * 64 + 24)


def test_one_row_reads_one_expert_and_many_rows_all_of_them() -> None:
    experts, offsets = f32(8, 4, 4), Shape((8,), 4)
    one = aten_cost("_grouped_mm", {}, [f32(1, 4), experts, offsets], [f32(1, 4)])
    many = aten_cost("_grouped_mm", {}, [f32(64, 4), experts, offsets], [f32(64, 4)])
    assert one.traffic_bytes == 64 + 16 + 32 + 16
    assert many.traffic_bytes == 8 * 64 + 1024 + 32 + 1024


def test_a_broadcast_view_is_read_once() -> None:
    wide = Shape((64, 64), 4, stored_bytes=256)
    assert aten_cost("mul", {}, [wide, f32(64, 64)], [f32(64, 64)]).traffic_bytes == 256 + 2 * 16384


def test_an_unknown_op_says_so() -> None:
    assert aten_cost("no_such_op", {}, [f32(4)], [f32(4)]).known is False
