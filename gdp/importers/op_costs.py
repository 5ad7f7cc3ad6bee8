"""FLOP formulas shared by the importers: plain integers in, floating-point operations out.

One multiply-accumulate is two FLOPs. Everything else counts the elementary operations of the
textbook formula, where exp, log, erf, tanh, sqrt, pow and a comparison are one operation each.
Moving data is no operation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Number = int | float

SOFTMAX_FLOP = 5  # per element: maximum, subtract, exp, sum, divide
NORMALISE_FLOP = 7  # per element: mean, subtract, square, sum, multiply by 1/std, scale, shift
RMS_NORMALISE_FLOP = 4  # per element: square, sum, multiply by 1/rms, scale
SIGMOID_FLOP = 4  # per element: negate, exp, add one, reciprocal
GELU_ERF_FLOP = 5  # per element: x / sqrt(2), erf, add one, times x, times a half
GELU_TANH_FLOP = 9  # per element: x**2, times c, add one, times x, times c, tanh, add, x, a half


@dataclass(frozen=True)
class Shape:
    """What a cost needs to know of an array."""

    dims: tuple[int, ...]
    itemsize: int
    stored_bytes: int | None = None  # of what a broadcast view shows; None: all of it

    @property
    def size(self) -> int:
        """Elements, counting those that a broadcast repeats."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes to read it once: of a broadcast view, at most what is stored."""
        shown = self.size * self.itemsize
        return shown if self.stored_bytes is None else min(shown, self.stored_bytes)


@dataclass(frozen=True)
class Cost:
    """What one execution of an op computes and moves through memory."""

    flop: float
    traffic_bytes: float
    known: bool = True  # False: the fallback, one operation per output element


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


def packed_bytes(elements: int, bits: int) -> int:
    """Bytes of a tensor, sub-byte types packed.

    >>> packed_bytes(3, 4)
    2
    """
    return (elements * bits + 7) // 8
