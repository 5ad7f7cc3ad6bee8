"""Arithmetic in the names of dimensions, such as "2*seq + past" or "floor((n - 1)/2) + 1".

The grammar is that of `onnx_ir`, which hands it to sympy; sympy expands powers of sums before any
size is known, and a name of fifty characters takes it hours. Here a text becomes a tree, and is
computed once its symbols have sizes, in whole numbers and fractions of a bounded length.

    sum     = product (("+" | "-") product)*
    product = power (("*" | "/" | "//" | "%") power)*
    power   = unary ("**" power)?
    unary   = "-" unary | number | symbol | function "(" sum ("," sum)* ")" | "(" sum ")"
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

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
