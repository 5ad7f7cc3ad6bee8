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

from gdp.errors import ModelError

LONGEST = 500
"""Characters; a longer name is a symbol."""
MOST_BITS = 1024
"""Of a number on the way to a size, which has 31."""

Tree = int | str | tuple[Any, ...]  # a number, a symbol, or (function, *arguments)
_TOKEN = re.compile(r"\s*(?:([0-9]+)|([^\W\d][\w.]*)|(//|\*\*|[-+*/%(),]))")


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
        return _Parser(text).whole()
    except (ValueError, RecursionError):
        return None


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
        found = Fraction(_FUNCTIONS[tree[0]](*(_value(part, sizes) for part in tree[1:])))
    else:
        found = Fraction(sizes[tree] if isinstance(tree, str) else tree)
    if max(found.numerator.bit_length(), found.denominator.bit_length()) > MOST_BITS:
        raise ValueError("too large a number")
    return found


class _Parser:
    """Recursive descent over the tokens of a text; raises `ValueError` where it is malformed."""

    def __init__(self, text: str) -> None:
        self.text, self.position = text, 0
        self.kind, self.token = 0, ""
        self.advance()

    def advance(self) -> None:
        """Read the next token: 1 a number, 2 a name, 3 a sign, 0 the end."""
        found = _TOKEN.match(self.text, self.position)
        if found is None:
            if self.text[self.position :].strip():
                raise ValueError("no token")
            self.kind, self.token = 0, ""
            return
        self.kind, self.position = found.lastindex or 0, found.end()
        self.token = found[self.kind]

    def take(self, *signs: str) -> str:
        """The sign at hand if it is one of these, which is then read; else an empty string."""
        if self.kind != 3 or self.token not in signs:
            return ""
        sign = self.token
        self.advance()
        return sign

    def require(self, sign: str) -> None:
        """Read a sign that must stand here."""
        if not self.take(sign):
            raise ValueError(f"no {sign}")

    def whole(self) -> Tree:
        """The tree of the whole text."""
        tree = self.sum()
        if self.kind:
            raise ValueError("more than an expression")
        return tree

    def sum(self) -> Tree:
        """Products, added or subtracted from left to right."""
        return self.chain(self.product, "+", "-")

    def product(self) -> Tree:
        """Powers, multiplied or divided from left to right."""
        return self.chain(self.power, "*", "/", "//", "%")

    def chain(self, part: Callable[[], Tree], *signs: str) -> Tree:
        """Parts with these signs between them."""
        tree = part()
        while sign := self.take(*signs):
            tree = (sign, tree, part())
        return tree

    def power(self) -> Tree:
        """One part, perhaps to a power, which may be one itself."""
        base = self.unary()
        return ("**", base, self.power()) if self.take("**") else base

    def unary(self) -> Tree:
        """A number, a symbol, a call, or what stands in parentheses; perhaps negated."""
        if self.take("-"):
            return ("0-", self.unary())
        if self.take("("):
            tree = self.sum()
            self.require(")")
            return tree
        kind, token = self.kind, self.token
        if kind not in (1, 2):
            raise ValueError("no number and no name")
        self.advance()
        if kind == 1:
            return int(token)
        return self.call(token) if self.take("(") else token

    def call(self, name: str) -> Tree:
        """The arguments of a function, whose parenthesis is open."""
        if name not in _FUNCTIONS:
            raise ValueError(f"no function {name}")
        arguments = [self.sum()]
        while self.take(","):
            arguments.append(self.sum())
        self.require(")")
        return (name, *arguments)


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
        """The declared shape of a value with what is bound filled in; None: unknown rank."""
        if value.shape is None:
            ranks = range(sum(key.startswith(f"{value.name}:") for key in self.sizes))
            named = tuple(self.sizes.get(f"{value.name}:{axis}") for axis in ranks)
            return named if named and None not in named else None
        return tuple(self._size(value.name, axis, dim) for axis, dim in enumerate(value.shape))

    def named(self, value: ir.Value, axis: int) -> int | None:
        """What the user bound to one axis of one tensor."""
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
