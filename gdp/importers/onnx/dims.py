"""Open dimensions of a model, and the sizes that the user binds to them.

A dimension may be named by arithmetic, such as "2*seq + past" or "floor((n - 1)/2) + 1". The
grammar is that of `onnx_ir`, which hands it to sympy; sympy expands powers of sums before any size
is known, and a name of fifty characters takes it hours. Here a text becomes a tree, and is computed
once its symbols have sizes, in whole numbers and fractions of a bounded length.

    sum     = product (("+" | "-") product)*
    product = power (("*" | "/" | "//" | "%") power)*
    power   = unary ("**" power)?
    unary   = "-" unary | number | symbol | function "(" sum ("," sum)* ")" | "(" sum ")"
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import onnx_ir as ir

from gdp.base.errors import ModelError

LONGEST = 500
"""Characters; a longer name is a symbol."""
MOST_BITS = 1024
"""Of a number on the way to a size, which has 31."""

Tree = int | str | tuple[Any, ...]  # a number, a symbol, or (function, *arguments)
_TOKEN = re.compile(r"\s*([0-9]+|[^\W\d][\w.]*|//|\*\*|[-+*/%(),])")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * bits > MOST_BITS:
        raise ValueError("too large a power")
    return base**exponent.numerator


def _root(x: Fraction) -> Fraction:
    if x.denominator == 1 and x >= 0:
        whole = math.isqrt(x.numerator)
        if whole * whole == x:
            return Fraction(whole)
    return Fraction(math.sqrt(x))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv,
    "//": operator.floordiv, "%": operator.mod, "**": _power, "0-": operator.neg,
    "max": max, "Max": max, "min": min, "Min": min, "mod": operator.mod, "Mod": operator.mod,
    "floor": math.floor, "sqrt": _root,
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Tree | None:
    """The tree of an expression; None for any other text.

    >>> parse("2*seq + 1")
    ('+', ('*', 2, 'seq'), 1)
    """
    if len(text) > LONGEST:
        return None
    try:
        tokens = _tokens(text)
        tree = _expression(tokens)
    except (ValueError, RecursionError):
        return None
    return None if tokens else tree


def symbols(text: str) -> tuple[str, ...]:
    """The symbols of an expression; the text itself where it is none.

    >>> symbols("2*seq + past")
    ('past', 'seq')
    """
    tree = parse(text)
    return (text,) if tree is None else tuple(sorted(_symbols(tree)))


def compute(text: str, sizes: Mapping[str, int]) -> int | None:
    """The size that an expression is; None where a symbol has none, or it is no whole number.

    >>> compute("floor((n - 1)/2) + 1", {"n": 7}), compute("n/2", {"n": 7}), compute("n", {})
    (4, None, None)
    """
    tree = parse(text)
    if tree is None:
        return None
    try:
        value = _value(tree, sizes)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return None
    return value.numerator if value.denominator == 1 else None


def _symbols(tree: Tree) -> set[str]:
    if isinstance(tree, tuple):
        return set().union(*map(_symbols, tree[1:]))
    return {tree} if isinstance(tree, str) else set()


def _value(tree: Tree, sizes: Mapping[str, int]) -> Fraction:
    if isinstance(tree, tuple):
        value = Fraction(_FUNCTIONS[tree[0]](*(_value(part, sizes) for part in tree[1:])))
    else:
        value = Fraction(sizes[tree] if isinstance(tree, str) else tree)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ValueError("too large a number")
    return value


_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 3}


def _tokens(text: str) -> list[str]:
    """The tokens of a text, the last one first; raises `ValueError` where there is no token."""
    tokens, position = [], 0
    while match := _TOKEN.match(text, position):
        tokens.append(match[1])
        position = match.end()
    if text[position:].strip():
        raise ValueError("no token")
    return tokens[::-1]


def _expression(tokens: list[str], level: int = 1) -> Tree:
    """Operands joined by signs of this level or a higher one, by precedence climbing."""
    tree = _operand(tokens)
    while tokens and _LEVEL.get(tokens[-1], 0) >= level:
        sign = tokens.pop()
        # A power takes the powers behind it; other signs are taken from left to right.
        tree = (sign, tree, _expression(tokens, _LEVEL[sign] + (sign != "**")))
    return tree


def _operand(tokens: list[str]) -> Tree:
    """A number, a symbol, a call, or an expression in parentheses; perhaps negated."""
    token = tokens.pop() if tokens else ""
    if token == "-":
        return ("0-", _operand(tokens))
    if token == "(":
        return _until_closed(tokens)[0]
    if token.isdecimal():
        return int(token)
    if not token or token in _LEVEL or token in "),":
        raise ValueError("no number and no name")
    if not tokens or tokens[-1] != "(":
        return token
    tokens.pop()
    if token not in _FUNCTIONS:
        raise ValueError(f"no function {token}")
    return (token, *_until_closed(tokens, ","))


def _until_closed(tokens: list[str], separator: str = "") -> list[Tree]:
    """Expressions between separators, up to the parenthesis that closes them."""
    parts = [_expression(tokens)]
    while separator and tokens and tokens[-1] == separator:
        tokens.pop()
        parts.append(_expression(tokens))
    if not tokens or tokens.pop() != ")":
        raise ValueError("no )")
    return parts


class Dimensions:
    """Sizes by symbol ("batch", or a whole expression such as "past + 1"), or by "TENSOR:AXIS".

    A dimension written as an expression of bound symbols is computed from them.
    """

    def __init__(self, sizes: Mapping[str, int], model: ir.Model) -> None:
        self.sizes = dict(sizes)
        values = [
            value
            for graph in model.graphs()
            for value in (*graph.inputs, *(out for node in graph for out in node.outputs))
        ]
        if sizes:
            self._check(values)

    def shape(self, value: ir.Value) -> tuple[int | None, ...] | None:
        """The declared shape of a value with bound dimensions filled in; None: unknown rank."""
        if value.shape is None:
            ranks = range(sum(key.startswith(f"{value.name}:") for key in self.sizes))
            named = tuple(self.sizes.get(f"{value.name}:{axis}") for axis in ranks)
            return named if named and None not in named else None
        return tuple(self._size(value.name, axis, dim) for axis, dim in enumerate(value.shape))

    def named(self, value: ir.Value, axis: int) -> int | None:
        """The size that the user bound to one axis of one tensor."""
        return self.sizes.get(f"{value.name}:{axis}") if self.sizes else None

    def _size(self, name: str | None, axis: int, dim: int | ir.SymbolicDim) -> int | None:
        if isinstance(dim, int):
            # Some writers spell an open dimension -1.
            return dim if dim >= 0 else self.sizes.get(f"{name}:{axis}")
        if dim.value is None:
            return self.sizes.get(f"{name}:{axis}")
        if dim.value in self.sizes:
            return self.sizes[dim.value]
        if self.sizes and symbols(dim.value):
            size = compute(dim.value, self.sizes)
            if size is not None and size >= 0:
                return size
        return self.sizes.get(f"{name}:{axis}")

    def _check(self, values: Iterable[ir.Value]) -> None:
        free: dict[str, None] = {}
        known: set[str] = set()
        for value in values:
            dims = () if value.shape is None else value.shape
            for axis, dim in enumerate(dims):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    free.update(dict.fromkeys(symbols(dim.value)))
                    known.add(dim.value)
                if isinstance(dim, ir.SymbolicDim) or dim < 0:
                    known.add(f"{value.name}:{axis}")
            if value.shape is None:
                known.update(key for key in self.sizes if key.startswith(f"{value.name}:"))
        for name in self.sizes:
            if name not in free and name not in known:
                there = ", ".join(free) if free else "none by name"
                raise ModelError(
                    f"the model has no open dimension {name!r}; its open dimensions are: {there} "
                    "(a single axis is named TENSOR:AXIS)"
                )


def how_to_bind(value: ir.Value, shape: tuple[int | None, ...] | None) -> str:
    """The shape of a value with its open dimensions, and the flags that would bind them."""
    if shape is None:
        return "has an unknown rank; declare its shape in the model (value_info)"
    declared = list(value.shape) if value.shape is not None else []
    texts: list[str] = []
    flags: dict[str, None] = {}
    for axis, size in enumerate(shape):
        if size is not None:
            texts.append(str(size))
            continue
        dim = declared[axis] if axis < len(declared) else None
        symbol = dim.value if isinstance(dim, ir.SymbolicDim) else None
        texts.append(symbol or "?")
        for name in (symbols(symbol) or [symbol]) if symbol else [f"{value.name}:{axis}"]:
            flags[f"--dim {name}=VALUE" if " " not in name else f"--dim '{name}=VALUE'"] = None
    return f"has the open shape [{', '.join(texts)}]; bind it with {' '.join(flags)}"
