"""Features of passes: finite; and keys of stacks."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdp.corrections.features import BITS, CAUSES, Pass, format_class
from gdp.question.result import CAUSES as ANSWERED
from tests.corrections.made_up import H100, a_pass

SIZES = st.floats(0, 1e16)
COUNTS = st.integers(1, 10**9)


@given(st.dictionaries(st.sampled_from(CAUSES), st.floats(0, 1e6)), SIZES, COUNTS, SIZES, COUNTS,
       SIZES, SIZES, st.floats(1e-3, 64), COUNTS, st.booleans(), st.booleans())  # fmt: skip
def test_features_of_any_pass_are_finite(
    parts: dict[str, float], tokens: float, sequences: int, context: float, ops: int,
    weights: float, active: float, bits: float, tensor: int, experts: bool, prefill: bool,
) -> None:  # fmt: skip
    one = Pass(prefill, parts, tokens, sequences, context, ops, weights, active, bits, tensor,
               experts)  # fmt: skip
    assert np.isfinite(one.features()).all()
    assert one.features().shape == a_pass().features().shape
    assert one.seconds == pytest.approx(sum(parts.values()))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("0.19.0", "0.19.1", True), ("0.19.0", "v0.19.0rc1", True), ("0.19.0", "0.20.0", False),
     ("0.19", "0.19.2", True), ("", "0.19.0", False), ("b4000", "b4001", False)],
)  # fmt: skip
def test_versions_that_differ_in_their_last_number_share_a_key(
    one: str, other: str, same: bool
) -> None:
    first, second = (msgspec.structs.replace(H100, version=v) for v in (one, other))
    assert (first.key == second.key) is same


def test_stacks_differ_by_all_that_runs_below_a_model() -> None:
    others = {"engine": "sglang", "card": "h200", "backend": "rocm", "host": "cpu"}
    changed = [msgspec.structs.replace(H100, **{name: value}) for name, value in others.items()]
    assert len({stack.key for stack in (H100, *changed)}) == 5


def test_formats_are_classed_by_their_bits() -> None:
    assert [format_class(b) for b in (32, 16, 8.5, 6.6, 4.8, 4.25, 2.6)] == [0, 0, 1, 2, 3, 4, 5]
    assert list(BITS) == sorted(BITS, reverse=True)
    rows = [a_pass(bits=b).format_features() for b in (16.0, 4.5)]
    assert [row.sum() for row in rows] == [1.0, 1.0]
    assert [row.argmax() for row in rows] == [0, 3]


def test_each_cause_of_an_answer_is_a_feature() -> None:
    """None is left out in silence."""
    assert set(ANSWERED) <= set(CAUSES)
    plain = a_pass(parts_s={}).features()
    for cause in CAUSES:
        assert not np.array_equal(a_pass(parts_s={cause: 1e-3}).features(), plain)
