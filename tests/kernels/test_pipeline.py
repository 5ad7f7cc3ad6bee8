"""Kernels compiled in one piece do what numba's own pipeline makes of them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.compiler import Flags

from gdp.base.kernels import options as pipeline
from gdp.base.kernels.options import BARE, INNER


def twice(x):
    if x > 1e6:
        raise ValueError("too large")
    return x + x


def kernels(compiler: Any = pipeline.Compiler) -> tuple[Any, Any]:
    """A kernel, and one that calls it for every value of an array."""
    options = {"cache": False, "pipeline_class": compiler}
    inner = numba.njit(**INNER | options)(twice)

    def total(values):
        found = 0.0
        for value in values:
            found += inner(value)
        return found

    return inner, numba.njit(**BARE | options)(total)


@pytest.mark.parametrize("compiler", [pipeline.Compiler, pipeline.NumbasCompiler])
def test_a_kernel_calls_another_and_passes_its_errors_on(compiler: Any) -> None:
    _, outer = kernels(compiler)
    assert outer(np.array([1.0, 2.5])) == 7.0
    with pytest.raises(ValueError, match="too large"):
        outer(np.array([1.0, 1e7]))


def test_only_what_python_calls_becomes_machine_code() -> None:
    inner, outer = kernels()
    outer(np.array([1.0]))
    (within,) = inner.overloads.values()
    (called,) = outer.overloads.values()
    assert not list(within.library.get_defined_functions())
    assert len(list(called.library.get_defined_functions())) >= 2, "the kernel and its wrapper"


def test_a_kept_kernel_is_called_by_one_compiled_later(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "import numba\n"
        "from gdp.base.kernels.options import BARE, INNER\n"
        "@numba.njit(**INNER)\n"
        "def inner(x):\n"
        "    if x < 0:\n"
        "        raise ValueError('negative')\n"
        "    return 3 * x\n"
        "@numba.njit(**BARE)\n"
        "def first(x):\n"
        "    return inner(x) + 1\n"
        "@numba.njit(**BARE)\n"
        "def second(x):\n"
        "    return inner(x) + 2\n"
    )
    code = """
import made
print(made.{name}(5), sum(made.inner.stats.cache_hits.values()))
try:
    made.{name}(-1)
except ValueError as error:
    print(error)
"""
    for name, said in (("first", "16 0"), ("second", "17 1"), ("second", "17 0")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(name=name)],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.split("\n")[:2] == [said, "negative"]


def test_flags_are_equal_as_numbas_are() -> None:
    plain, other = Flags(), Flags()
    other.nrt = True
    ours = pipeline._Flags(plain)
    assert ours == plain
    assert plain == ours
    assert hash(ours) == hash(plain)
    assert ours != other
    assert ours.copy() == ours


def test_a_numba_without_these_parts_compiles_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pipeline._is_known()
    monkeypatch.setattr(pipeline, "_PARTS", ("_no_such_part",))
    assert not pipeline._is_known()
