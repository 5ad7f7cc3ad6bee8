"""A network with weights, ready to place: the bridge from problems to decoded placements."""

import os
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gdp import checkpoint
from gdp.policy.advice import Advice, advice
from gdp.policy.batching import Batch, on_device, pad
from gdp.policy.decode import DecodeProblem, Head, advised, prepare
from gdp.policy.features import features
from gdp.policy.network import Encoded, NetworkConfig, Params, abstract, encode
from gdp.policy.placed import Placed
from gdp.reading import Kind, convert
from gdp.sim.problem import Problem

_BATCHES: weakref.WeakKeyDictionary[Problem, dict[tuple[str, bool], Batch]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, eq=False)
class Policy:
    """Weights and the network they belong to."""

    config: NetworkConfig
    params: Params
    name: str = "policy"
    placed: Placed | None = None  # what it was fine-tuned to

    def batch(self, problem: Problem, found: Advice | None = None) -> Batch:
        """The padded features of a problem, computed once; anew for advice of one's own."""
        kind = self.config.features
        if found is not None and self.config.advice:
            return on_device(pad(features(problem, kind, found)))
        batches = _BATCHES.setdefault(problem, {})
        key = (kind, self.config.advice)
        if key not in batches:
            found = advice(problem) if self.config.advice else None
            batches[key] = on_device(pad(features(problem, kind, found)))
        return batches[key]

    def view(self, problem: Problem, found: Advice | None = None) -> DecodeProblem:
        """The problem as the decoder reads it, under this network's masks."""
        plain = prepare(
            problem, mask_memory=self.config.mask_memory, mask_alike=self.config.mask_alike
        )
        if not self.config.advice:
            return plain
        return advised(plain, found or advice(problem))

    def head(self, problem: Problem, found: Advice | None = None) -> Head:
        """The encoded problem: one pass of the network."""
        return self.head_of(problem, self.batch(problem, found))

    def head_of(self, problem: Problem, batch: Batch) -> Head:
        """The same from features that are at hand."""
        encoded = encode(self.config, self.params, batch)
        return to_head(self.config, encoded, problem.num_ops, problem.num_devices)


def to_head(config: NetworkConfig, encoded: Encoded, num_ops: int, num_devices: int) -> Head:
    """What the decoder needs, without the padding."""

    def flat(values: Any, *cut: slice) -> np.ndarray:
        # Cut in NumPy: JAX would compile a slice for every new size.
        return np.ascontiguousarray(np.asarray(values)[cut], dtype=np.float32)

    ops, devices = slice(num_ops), slice(num_devices)

    return Head(
        prior=flat(encoded.prior, ops, devices),
        node=flat(encoded.node, ops),
        device=flat(encoded.device, devices),
        feature=flat(encoded.feature),
        mixing=flat(encoded.mixing),
        bias=flat(encoded.bias),
        out=flat(encoded.out),
        dynamic=config.decode == "autoregressive",
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
    meta = convert(checkpoint.read_meta(path), kind, _Meta, f"checkpoint {str(path)!r}")
    params = checkpoint.load(path, abstract(meta.network))
    return Policy(meta.network, params, meta.name, meta.placed)


def default_checkpoint() -> Path:
    """Where the shipped policy lies: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_data" / "checkpoints" / "default"
    return inside if inside.exists() else package.parent / "checkpoints" / "default"
