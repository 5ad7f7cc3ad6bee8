"""Rows of the operator tables, and the FLOP formulas that they share.

One multiply-accumulate is two FLOPs. Everything else counts the elementary operations of the
textbook formula, where exp, log, erf, tanh, sqrt, pow and a comparison are one operation each.
Moving data is no operation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Number = int | float

VIEW, ELEMENTWISE, REDUCTION = "view", "elementwise", "reduction"

PRODUCT, LINEAR, CONVOLUTION, EXPERTS = "product", "linear", "convolution", "experts"
ATTENTION, SOFTMAX, GATHER = "attention", "softmax", "gather"

SOFTMAX_FLOP = 5  # per element: maximum, subtract, exp, sum, divide
NORMALISE_FLOP = 7  # per element: mean, subtract, square, sum, multiply by 1/std, scale, shift
RMS_NORMALISE_FLOP = 4  # per element: square, sum, multiply by 1/rms, scale
SIGMOID_FLOP = 4  # per element: negate, exp, add one, reciprocal
GELU_ERF_FLOP = 5  # per element: x / sqrt(2), erf, add one, times x, times a half
GELU_TANH_FLOP = 9  # per element: x**2, times c, add one, times x, times c, tanh, add, x, a half
LSTM_FLOP = (
    3 * SIGMOID_FLOP + 2 + 4
)  # per unit: a function per gate, the blend of old and new state
GRU_FLOP = 2 * SIGMOID_FLOP + 1 + 4


@dataclass(frozen=True)
class Shape:
    """Dimensions and storage of an array, as far as costs depend on them."""

    dims: tuple[int, ...]
    itemsize: int
    stored_bytes: int | None = None  # behind a broadcast view; None: all elements are stored

    @property
    def size(self) -> int:
        """Elements, counting those that a broadcast repeats."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of one read: of a broadcast view, at most its stored bytes."""
        dense = self.size * self.itemsize
        return dense if self.stored_bytes is None else min(dense, self.stored_bytes)


Shapes = Sequence[Shape]


@dataclass(frozen=True)
class OpCost:
    """FLOPs and memory traffic of one execution of an op."""

    flop: float
    traffic_bytes: float
    known: bool = True  # False: no formula, one operation per output element is assumed


@dataclass(frozen=True, slots=True)
class OpRule:
    """One operator: how it fuses, computes, moves data, and shapes its outputs.

    JAX and ATen rows take `flop(params, ins, outs)` and `traffic(ins, outs)`; ONNX rows take a
    `NodeView` for both and for `shape`. A number for `flop` is per output element.
    """

    op_class: str = ""
    """VIEW moves or relabels data without arithmetic; outputs of ELEMENTWISE ops need the same
    element of their inputs only; REDUCTION ops read a whole axis. Empty: a kernel of its own."""
    flop: Callable[..., Number] | Number | None = None
    """None: one operation per element made, or per element read for reductions; 0 for views."""
    traffic: Callable[..., Number] | None = None
    """Bytes; None: all inputs are read and all outputs are written, once."""
    shape: Callable[..., list[Any]] | None = None
    """ONNX only: the outputs, where no schema of the onnx package infers them."""
    domains: tuple[str, ...] = ()
    """ONNX only: the operator domains in which `shape` holds."""
    extends: "Extension | None" = None
    """ONNX only: the standard operator whose schema infers the outputs instead."""
    integer: bool = False
    """ONNX only: it multiplies integers, whatever the type of its scales."""
    kernel: str = ""
    """Class of its kernel, which cost models, engines' fusions and splits read; empty: none of
    these. PRODUCT of matrices; LINEAR, one with a weight [N, K] of N columns; CONVOLUTION;
    ATTENTION of queries, keys and values; SOFTMAX; GATHER of some rows of a table; EXPERTS, rows
    [M, K] by matrices [G, K, N] of their groups."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A standard ONNX operator that a contrib operator adds something to."""

    op_type: str
    version: int  # of the operator set
    num_inputs: int  # passed on
    attributes: frozenset[str]  # passed on


def names(text: str) -> frozenset[str]:
    """Operator names written as words.

    >>> sorted(names("Relu Add"))
    ['Add', 'Relu']
    """
    return frozenset(text.split())


def rows(
    words: str,
    op_class: str = "",
    flop: Callable[..., Number] | Number | None = None,
    traffic: Callable[..., Number] | None = None,
    **fields: Any,
) -> dict[str, OpRule]:
    """One rule for several operators, whose names are written as words.

    >>> sorted(rows("Relu Abs", ELEMENTWISE, 1))
    ['Abs', 'Relu']
    """
    return dict.fromkeys(words.split(), OpRule(op_class, flop, traffic, **fields))


def no_traffic(*args: Any) -> float:
    """Views and results known before the run touch no memory."""
    del args
    return 0.0


def gathered_bytes(ins: Shapes, outs: Shapes) -> float:
    """Ops that read as much of their first operand as they write, and all of the others."""
    return 2 * sum(s.nbytes for s in outs) + sum(s.nbytes for s in ins[1:])


def expert_bytes(ins: Shapes, outs: Shapes) -> float:
    """Rows [M, K] times the matrices [G, K, N] of their groups: those of at most M are read."""
    share = min(1.0, ins[0].dims[-2] / max(ins[1].dims[0], 1))
    rest = sum(s.nbytes for s in (ins[0], *ins[2:], *outs))
    return share * ins[1].nbytes + rest


def matmul_flop(batch: int, rows: int, columns: int, inner: int) -> float:
    """[batch, rows, inner] times [batch, inner, columns].

    >>> matmul_flop(1, 2, 3, 4)
    48.0
    """
    return 2.0 * batch * rows * columns * inner


def convolution_flop(
    output_elements: int, channels_per_group: int, kernel_elements: int, bias: bool = False
) -> float:
    """A convolution, whatever its strides, pads and dilations; depthwise has one channel per group.

    For a transposed convolution, pass its input's elements and its output's channels per group.

    >>> convolution_flop(output_elements=10, channels_per_group=3, kernel_elements=9)
    540.0
    """
    return output_elements * (2.0 * channels_per_group * kernel_elements + bias)


def attention_flop(
    batch: int, heads: int, queries: int, keys: int, key_size: int, value_size: int
) -> float:
    """softmax(Q K^T / sqrt(d)) V with the full score matrix: a causal mask saves nothing here.

    >>> attention_flop(1, 1, 1, 1, 2, 3)  # 4 + 1 + 5 + 6
    16.0
    """
    scores = batch * heads * queries * keys
    return scores * (2.0 * key_size + 1 + SOFTMAX_FLOP + 2.0 * value_size)


def recurrent_flop(
    steps: int,
    directions: int,
    batch: int,
    input_size: int,
    hidden_size: int,
    gates: int,
    elementwise: int,
) -> float:
    """An RNN (1 gate), GRU (3) or LSTM (4): two products and the bias per gate, then `elementwise`
    operations per hidden unit."""
    per_gate = 2.0 * hidden_size * (input_size + hidden_size) + 2 * hidden_size
    return steps * directions * batch * (gates * per_gate + elementwise * hidden_size)


def einsum_flop(equation: str, shapes: Sequence[Sequence[int]]) -> float:
    """An einsum with its operands contracted from left to right, as runtimes do.

    Two operands cost a multiply-add per index combination when some index is summed, else one
    multiply. An index leaves as soon as no later operand and no output needs it.

    >>> einsum_flop("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)])
    240.0
    >>> einsum_flop("ij->i", [(3, 4)])
    12.0
    """
    terms, output = einsum_terms(equation, [len(shape) for shape in shapes])
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for index, size in zip(term, shape, strict=True):
            sizes[index] = max(size, sizes.get(index, 1))

    def points(indices: set[str]) -> int:
        return math.prod(sizes[index] for index in indices)

    held = set(terms[0])
    if len(terms) == 1:
        return float(points(held)) if held - set(output) else 0.0
    flop = 0.0
    for place, term in enumerate(terms[1:], start=2):
        joined = held | set(term)
        later = set(output).union(*terms[place:])
        held = joined & later
        flop += points(joined) * (2.0 if joined - held else 1.0)
    return flop


def einsum_terms(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The index names of each operand and of the output, with ellipses written out.

    >>> einsum_terms("...i,i->...", [2, 1])
    ([['...0', 'i'], ['i']], ['...0'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(ranks):
        raise ValueError(f"einsum {equation!r} has {len(texts)} operands, {len(ranks)} were given")
    # Ellipses align at their last axis.
    hidden = max(
        (rank - len(text) + 3 for text, rank in zip(texts, ranks, strict=True) if "..." in text),
        default=0,
    )

    def spell(text: str, rank: int) -> list[str]:
        before, dots, after = text.partition("...")
        if not dots:
            return list(text)
        count = rank - len(before) - len(after)
        return [*before, *(f"...{i}" for i in range(hidden - count, hidden)), *after]

    terms = [spell(text, rank) for text, rank in zip(texts, ranks, strict=True)]
    for term, rank in zip(terms, ranks, strict=True):
        if len(term) != rank:
            raise ValueError(f"einsum {equation!r}: an operand has {rank} axes, not {len(term)}")
    if arrow:
        output = spell(right, hidden + len(right.replace("...", "")))
    else:
        # The implicit form: ellipsis first, then the indices seen once, in alphabetical order.
        seen = [index for term in terms for index in term]
        output = [f"...{i}" for i in range(hidden)]
        output += sorted(i for i in set(seen) if seen.count(i) == 1 and not i.startswith("..."))
    return terms, output


def interpolation_flop(axes: int, mode: str) -> float:
    """Per output element: nothing for nearest, 2**axes - 1 blends of three operations for linear,
    4**axes multiply-adds for cubic.

    >>> interpolation_flop(2, "linear"), interpolation_flop(2, "nearest")
    (9.0, 0.0)
    """
    if mode == "nearest" or axes == 0:
        return 0.0
    if mode == "cubic":
        return 2.0 * 4**axes
    return 3.0 * (2**axes - 1)


def fft_flop(transforms: int, length: int) -> float:
    """5 n log2 n per complex transform, the radix-2 count.

    >>> fft_flop(1, 8)
    120.0
    """
    return transforms * 5.0 * length * math.log2(max(length, 2))
