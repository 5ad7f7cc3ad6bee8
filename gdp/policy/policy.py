"""A network with weights, ready to place: the bridge from problems to decoded placements."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gdp import checkpoint
from gdp.files.reading import Kind, convert
from gdp.policy.advice import Advice, advice
from gdp.policy.decode import DecodeProblem, prepare
from gdp.policy.model.config import NetworkConfig, Params, nested, shapes
from gdp.policy.model.head import Head
from gdp.policy.model.inference import encode
from gdp.policy.placed import Placed
from gdp.policy.view.features import Features, FeatureSet, features
from gdp.problem.problem import Problem, derived
from gdp.resources import data_path

if TYPE_CHECKING:
    from gdp.policy.view.batching import Batch


@derived
def _features(problem: Problem, kind: FeatureSet, advised: bool) -> Features:
    """What the network reads of a problem, with its own advice or none."""
    return features(problem, kind, advice(problem) if advised else None)


@derived
def _batch(problem: Problem, kind: FeatureSet, advised: bool) -> "Batch":
    """The same padded and as JAX arrays."""
    from gdp.policy.view.batching import on_device, pad

    return on_device(pad(_features(problem, kind, advised)))


@dataclass(frozen=True, eq=False)
class Policy:
    """Weights and the network they belong to."""

    config: NetworkConfig
    params: Params
    name: str = "policy"
    placed: Placed | None = None  # what it was fine-tuned to

    def features(self, problem: Problem, found: Advice | None = None) -> Features:
        """What the network reads, computed once; anew for advice of one's own."""
        kind = self.config.features
        if found is not None and self.config.advice:
            return features(problem, kind, found)
        return _features(problem, kind, self.config.advice)

    def batch(self, problem: Problem, found: Advice | None = None) -> "Batch":
        """The same padded and as JAX arrays, for learning."""
        from gdp.policy.view.batching import on_device, pad

        if found is not None and self.config.advice:
            return on_device(pad(self.features(problem, found)))
        return _batch(problem, self.config.features, self.config.advice)

    def view(self, problem: Problem, found: Advice | None = None) -> DecodeProblem:
        """The problem as the decoder reads it, under this network's masks."""
        plain = prepare(
            problem, mask_memory=self.config.mask_memory, mask_alike=self.config.mask_alike
        )
        if not self.config.advice:
            return plain
        return advised(plain, found or advice(problem))

    def head(self, problem: Problem, found: Advice | None = None) -> Head:
        """The encoded problem: one pass of the network, in NumPy."""
        head = encode(self.config, self.params, self.features(problem, found))
        return head.cut(problem.num_ops, problem.num_devices)

    def head_of(self, problem: Problem, batch: "Batch") -> Head:
        """The same by JAX, from features that are at hand: what learning differentiates."""
        from gdp.policy.model import network

        head = network.encode(self.config, self.params, batch)
        return head.cut(problem.num_ops, problem.num_devices)


def advised(view: DecodeProblem, found: Advice) -> DecodeProblem:
    """The view with the advice that the decoder is to read."""
    return view._replace(
        advice=np.ascontiguousarray(found.device), advice_weight=found.weight.astype(np.float64)
    )


class _Meta(msgspec.Struct):
    """What `save_policy` writes beside the weights, as far as it is read again."""

    network: NetworkConfig
    name: str = "policy"
    placed: Placed | None = None


def save_policy(
    policy: Policy,
    path: str | os.PathLike[str],
    *,
    recipe: str = "",
    beside: Mapping[str, bytes] | None = None,
    force: bool = False,
    **meta: Any,
) -> str:
    """Write a policy checkpoint, see `gdp.checkpoint.save`; returns the SHA-256 of its weights."""
    document = {"kind": "policy", "network": asdict(policy.config), "name": policy.name, **meta}
    if policy.placed is not None:
        document["placed"] = msgspec.to_builtins(policy.placed)
    return checkpoint.save(
        path, policy.params, recipe=recipe, meta=document, kind="policy", beside=beside, force=force
    )


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Read a policy checkpoint; raises `CheckpointError` on anything else."""
    kind = Kind("policy that this gdp can read", checkpoint.CheckpointError)
    where = f"checkpoint {str(path)!r}"
    meta = convert(_without_former(checkpoint.read_meta(path), where), kind, _Meta, where)
    params = nested(checkpoint.load_arrays(path, shapes(meta.network)))
    return Policy(meta.network, params, meta.name, meta.placed)


FORMER = {"decode": "autoregressive", "device_attention": False, "diffusion": 0}
"""Settings of a network that checkpoints may name, with the one value that is left of each."""
UNREAD = ("max_devices", "zero_kernels")
"""Settings that no longer matter, whatever their value."""


def _without_former(meta: dict[str, Any], where: str) -> dict[str, Any]:
    """The document without settings that are gone; raises where they name a form that is gone."""
    network = meta.get("network")
    if not isinstance(network, dict):
        return meta
    for name, value in FORMER.items():
        if network.get(name, value) != value:
            raise checkpoint.CheckpointError(
                f"{where} has {name} = {network[name]!r}, a form of the network that gdp no longer "
                "has; train it again with `gdp pretrain`"
            )
    kept = {name: x for name, x in network.items() if name not in (*FORMER, *UNREAD)}
    return meta | {"network": kept}


def default_checkpoint() -> Path:
    """Where the shipped policy lies: beside the package in a checkout, inside it in a wheel."""
    return data_path("checkpoints", "default")
