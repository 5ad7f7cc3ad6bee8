"""Features of stacks, which contenders read: finite, and in the order of versions."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdp.corrections.features import EngineStack
from pretrain.corrections.stacks import age_of, stack_features
from tests.corrections.made_up import H100, a_pass


@given(st.text(max_size=40), st.floats(1e-300, 1e20), st.sampled_from(["vllm", "sglang", "x"]))
def test_features_of_any_stack_are_finite(version: str, rate: float, engine: str) -> None:
    stack = EngineStack(engine, "card", rate, rate, version)
    assert np.isfinite(stack_features(stack, rate, a_pass())).all()
    assert abs(age_of(stack)) <= 2


def test_names_of_a_card_and_a_host_tell_nothing() -> None:
    others = {"engine": "sglang", "card": "h200", "backend": "rocm", "host": "cpu"}
    plain = stack_features(H100, 8e10, a_pass())
    changed = [msgspec.structs.replace(H100, **{name: value}) for name, value in others.items()]
    differ = [not np.array_equal(stack_features(s, 8e10, a_pass()), plain) for s in changed]
    assert differ == [True, False, True, False]


def test_newer_versions_are_older_by_no_feature() -> None:
    def ages(engine: str, *versions: str) -> list[float]:
        return [age_of(EngineStack(engine, "x", 1.0, 1.0, v)) for v in versions]

    assert ages("vllm", "0.9.0", "0.15.0", "0.18.0", "1.0.0") == [-1.0, 0.0, 0.5, 2.0]
    assert ages("sglang", "0.5.5", "0.5.11") == [0.0, 1.0]
    assert ages("trtllm", "1.0", "1.2") == pytest.approx([-0.3, 0.2])
    assert ages("vllm", "", "main", "9" * 5000) == [0.0, 0.0, 2.0]  # no numbers: unknown
