"""The ablations: that a form lacks its part and nothing else, and how rows are compared."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import fork_join

pytest.importorskip("jax")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published.ablation import compared, table_text
from benchmarks.published.ablation_cases import FRESH, SHIPPED, by_form, forms
from gdp.policy.policy import default_checkpoint, load_policy

FORMS = forms()


def weights(tree: dict[Any, Any], path: str = "") -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, part in tree.items():
        if isinstance(part, dict):
            found |= weights(part, f"{path}{name}/")
        else:
            found[f"{path}{name}"] = np.asarray(part)
    return found


def test_every_row_says_where_it_starts() -> None:
    assert len(FORMS) == len(SHIPPED) + len(FRESH)
    whole = weights(load_policy(default_checkpoint()).params)
    for name, form in FORMS.items():
        made = weights(form(0).policy.params)
        same = [path for path in made if path in whole and np.array_equal(made[path], whole[path])]
        kernels = [path for path in same if path.endswith("kernel")]
        assert bool(kernels) == name.startswith("shipped"), name


def test_only_what_is_named_is_zeroed() -> None:
    whole = weights(load_policy(default_checkpoint()).params)
    for name, changed in {
        ", devices zeroed": {"device_in/kernel", "device_in/bias"},
        ", pair features zeroed": {"feature_head/dense/kernel"},
        ", cost features zeroed": {"enter/kernel", "device_in/kernel"},
    }.items():
        made = weights(FORMS[f"shipped{name}"](0).policy.params)
        assert made.keys() == whole.keys()
        differ = {path for path in made if not np.array_equal(made[path], whole[path])}
        assert differ == changed
        assert all((made[path] == 0.0).any(axis=-1).any() for path in differ)


def test_without_gates_is_gates_at_one() -> None:
    """2 sigmoid(0) = 1: the shipped weights with the conditioning at zero encode alike."""
    problem = fork_join()
    policy = load_policy(default_checkpoint())

    def silent(tree: dict[Any, Any], under: bool = False) -> dict[Any, Any]:
        return {
            name: silent(part, under or name == "conditioning")
            if isinstance(part, dict) else np.zeros_like(part) if under else part
            for name, part in tree.items()
        }  # fmt: skip

    gated = type(policy)(policy.config, silent(policy.params)).head(problem)
    bare = FORMS["shipped without gates"](0).policy.head(problem)
    whole = policy.head(problem)
    assert np.allclose(bare.node, gated.node, atol=1e-5)
    assert np.allclose(bare.out, gated.out, atol=1e-6)
    assert not np.allclose(bare.node, whole.node, atol=1e-3)


@pytest.mark.parametrize("name", ["shipped without attention", "fresh without advice"])
def test_a_form_is_adapted_within_the_evaluations(name: str) -> None:
    """fork_join takes 6 s at best, 7 s on one device."""
    found = by_form(FORMS[name])(fork_join(), 40, 0)
    assert found.value_s is not None
    assert 6.0 <= found.value_s <= 7.0
    assert found.evaluations_spent <= 40


def test_rows_are_compared_with_their_whole_seed_by_seed() -> None:
    """1 over 2 s is half the time, 6 over 4 s half as much again: no difference in the mean."""

    def row(method: str, values: list[float]) -> dict[str, Any]:
        return {"method": method, "values_s": values, "model": "m", "cluster": "c", "fused": 1,
                "value_s": float(np.mean(values)), "interval_s": 0.0, "evaluations_spent": 9,
                "cpu_s": 0.0}  # fmt: skip

    rows = compared([
        row("HSDAG", [2.0, 4.0]), row("HSDAG without node id", [1.0, 6.0]),
        row("fresh", [1.0, 1.0]), row("fresh without gates", [1.1, 1.1]), row("bound", [1.0]),
    ])  # fmt: skip
    assert rows[1]["paired"] == [-0.5, 0.5]
    assert rows[3]["paired"] == pytest.approx([0.1, 0.1])
    assert "paired" not in rows[4]
    assert "| HSDAG without node id | 3500.0000 |  | +0.00% | 635.31% | 9 | 0.0 |" in table_text(
        rows
    )
