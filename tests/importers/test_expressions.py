"""Arithmetic in names of dimensions: as sympy computes it, but bounded."""

import random
from pathlib import Path

import onnx_ir as ir
import pytest
from onnx_tiny import model, node, save

from gdp.base.errors import ModelError
from gdp.importers.onnx.dims import MOST_BITS, compute, parse, symbols
from gdp.importers.onnx.model import load_onnx

SIZES = {"n": 7, "past": 3, "a.1_b": 12}


def drawn(rng: random.Random, depth: int) -> str:
    """An expression of the grammar."""
    if depth == 0:
        return rng.choice((*SIZES, "1", "2", "5"))
    left, right = drawn(rng, depth - 1), drawn(rng, rng.randrange(depth))
    form = rng.choice((
        "({} + {})", "{} - {}", "({}) * {}", "floor(({}) / ({} + 2))", "({}) // ({})",
        "({}) % ({})", "max({}, {}, 4)", "Min({}, {})", "mod({}, 3) + {}",
        "-({}) + {}", "({})**2 - {}",
    ))  # fmt: skip
    return form.format(left, right)


def test_sizes_are_those_that_sympy_computes() -> None:
    rng = random.Random(1)
    texts = [drawn(rng, 1 + i % 3) for i in range(120)]
    found = {text: compute(text, SIZES) for text in texts}
    assert sum(size is not None for size in found.values()) > 90
    for text, size in found.items():
        try:
            wanted = ir.SymbolicDim(text).evaluate(SIZES)
        except ZeroDivisionError:
            wanted = None
        assert size == (wanted if isinstance(wanted, int) else None), text
        if wanted is not None:
            assert set(symbols(text)) >= ir.SymbolicDim(text).free_symbols()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2**3**2", 512), ("-2**2", 4), ("sqrt(n + 2)", 3), ("floor(sqrt(n))", 2), ("7/2*2", 7),
        ("n/2", None), ("n//0", None), ("n % 0", None), ("9**9**9", None), ("2**-1*4", 2),
        (f"2**{MOST_BITS + 1}", None), ("*".join(["n**99"] * 9), None), ("max(n)", None),
    ],
)  # fmt: skip
def test_what_is_no_size_is_none(text: str, size: int | None) -> None:
    assert parse(text) is not None
    assert compute(text, SIZES) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a b",
        "n +",
        "(n",
        "n)",
        "f(n)",
        "n..2 $",
        "max()",
        "1 2",
        "(" * 400 + "n",
        "n" * 501,
    ],
)
def test_what_is_no_expression_is_a_symbol(text: str) -> None:
    assert parse(text) is None
    assert symbols(text) == (text,)
    assert compute(text, SIZES) is None


TERMS = "(a+b+c+d+e+f+g+{})**9"
HUGE = f"mod({TERMS.format('h')}, {TERMS.format('i')})"


def test_a_power_of_a_sum_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sympy would take it apart into 11,440 terms, and divide them by as many others."""

    def refuse(*_: object) -> None:
        raise AssertionError("sympy was asked")

    monkeypatch.setattr(ir.SymbolicDim, "free_symbols", refuse)
    monkeypatch.setattr(ir.SymbolicDim, "evaluate", refuse)
    path = save(tmp_path, model([node("Relu", ["x"], ["y"], name="r")], {"x": [HUGE]}, ["y"]))
    with pytest.raises(ModelError, match="--dim a=VALUE --dim b=VALUE"):
        load_onnx(path)
    sizes = dict.fromkeys("abcdefgh", 2) | {"i": 1}
    assert load_onnx(path, sizes).detail[-2].output_shapes == ((16**9 % 15**9,),)
