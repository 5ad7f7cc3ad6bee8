"""The network in NumPy is the network in JAX, and answering needs no JAX."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import random_problem

from gdp.base import checkpoint
from gdp.learn.recipe import load_recipe
from gdp.policy.advice import advice
from gdp.policy.model.config import NetworkConfig
from gdp.policy.model.network import apply, init, on_device, pad
from gdp.policy.policy import Policy, encode, load_policy, save_policy
from gdp.policy.view.features import features
from gdp.problem.problem import Problem

PUBLISHED = load_recipe("pretrain/recipes/gdp_one.toml")[0].network
CONFIG = NetworkConfig(width=16, heads=2, sage_layers=2, head_width=8, segment=64)
CONFIGS = {
    "improved": CONFIG,
    "published": replace(PUBLISHED, width=16, heads=2, segment=64, sage_layers=2),
    "no layers": replace(CONFIG, sage_layers=0, attention_layers=0),
    "two blocks, longer memory": replace(CONFIG, attention_layers=2, memory=2),
    "many segments, no gates of any kind": replace(
        CONFIG, segment=2, superposition=False, residual_gate=False
    ),
    "one segment, features as published": replace(
        CONFIG, segment=512, features="published", advice=False
    ),
    "published messages, no memory, no summaries": replace(
        CONFIG, pooling="published", memory=0, summaries=False
    ),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


def weights(config: NetworkConfig) -> dict:
    """Away from what is drawn at the start, where gates are one and branches are off."""
    rng = np.random.default_rng(5)
    return jax.tree.map(
        lambda x: (x + 0.1 * rng.standard_normal(x.shape)).astype(np.float32), init(config, 0)
    )


def told(problem: Problem, config: NetworkConfig):
    return features(problem, config.features, advice(problem) if config.advice else None)


@pytest.mark.slow
@each_config
def test_both_forms_of_the_network_agree(config: NetworkConfig) -> None:
    problem = random_problem(3, num_ops=150, num_devices=3)
    found, params = told(problem, config), weights(config)
    wanted = jax.jit(apply, static_argnums=0)(config, params, on_device(pad(found)))
    plain = encode(config, params, found)
    cut = {"node": slice(problem.num_ops), "device": slice(problem.num_devices)}
    for name, value in plain._asdict().items():
        assert value.dtype == np.float32
        expected = np.asarray(getattr(wanted, name))[cut.get(name, slice(None))]
        np.testing.assert_allclose(value, expected, rtol=2e-4, atol=2e-5, err_msg=name)


def test_a_checkpoint_of_a_form_that_is_gone_is_refused(tmp_path: Path) -> None:
    """Of its settings those are read over that say what every network is now."""
    save_policy(Policy(CONFIG, init(CONFIG, 1)), tmp_path / "ck")
    meta = tmp_path / "ck" / "meta.json"
    document = json.loads(meta.read_text())

    def written(**former: object) -> Policy:
        changed = document | {"network": document["network"] | former}
        meta.write_text(json.dumps(changed))
        return load_policy(tmp_path / "ck")

    assert written(decode="autoregressive", max_devices=8, diffusion=0).config == CONFIG
    with pytest.raises(checkpoint.CheckpointError, match=r"ck' has decode = 'independent', a form"):
        written(decode="independent")


def test_saving_again_renews_the_weights(tmp_path: Path) -> None:
    for seed in (1, 2):
        save_policy(Policy(CONFIG, init(CONFIG, seed)), tmp_path / "ck")
        found = load_policy(tmp_path / "ck").params
        jax.tree.map(np.testing.assert_array_equal, found, init(CONFIG, seed))


def test_a_file_of_other_weights_is_refused(tmp_path: Path) -> None:
    for name, seed in (("old", 1), ("new", 2)):
        save_policy(Policy(CONFIG, init(CONFIG, seed)), tmp_path / name)
    (tmp_path / "old" / "weights.npz").replace(tmp_path / "new" / "weights.npz")
    with pytest.raises(checkpoint.CheckpointError, match="is damaged"):
        load_policy(tmp_path / "new")
    (tmp_path / "new" / "weights.npz").write_bytes(b"PK")
    with pytest.raises(checkpoint.CheckpointError, match=r"weights\.npz is not a"):
        load_policy(tmp_path / "new")


ANSWER = """
import sys
from tiny import random_problem
from gdp.methods.base import Search
from gdp.policy.method import place_with_policy
assert place_with_policy(random_problem(1, num_ops=20), Search(evaluations=1)).assignment
print(sorted({"jax", "jraph", "flax", "optax", "jinja2"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_an_answer_imports_no_library_of_learning() -> None:
    tests = str(Path(__file__).resolve().parent.parent)
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n" + ANSWER],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == "[]"
