"""A network with weights, ready to place, and the placement that it was fine-tuned to.

A placement that a fine-tuning found is kept with the weights, as it would not be found again
without searching.
"""

import base64
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from jaxtyping import Int

from gdp.base import checkpoint
from gdp.base.files.reading import Kind, convert, data_path, is_there
from gdp.methods.base import Assignment
from gdp.policy.advice import advice
from gdp.policy.decode import DecodeProblem, prepare
from gdp.policy.model.config import Head, NetworkConfig, Params, nested, shapes
from gdp.policy.model.inference import encode
from gdp.policy.view.features import Features, FeatureSet, features
from gdp.problem.problem import Problem, cached_on_problem

WIDE = "<i4"
"""Packed integer type, which holds device numbers and priorities of any graph."""
MAX_PACKED_BYTES = 1 << 26
"""Largest size of an unpacked row: 16 million ops."""


class KeptPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One placement of one graph; it may serve on another cluster with as many devices."""

    digest: str  # of the graph
    device: str  # base64 of zlib of 32-bit integers, one per op
    rank: str | None = None  # priorities, alike

    def __post_init__(self) -> None:
        """Raises `ValueError` on bytes that `pack` cannot have written."""
        for text in (self.device, self.rank or ""):
            unpack(text, WIDE)


def keep_placement(problem: Problem, assignment: Assignment) -> KeptPlacement:
    """Packed form of an assignment."""
    rank = None if assignment.rank is None else pack(assignment.rank, WIDE)
    return KeptPlacement(problem.graph.digest, pack(assignment.device, WIDE), rank)


def recall_placement(placed: KeptPlacement | None, problem: Problem) -> Assignment | None:
    """The assignment, if it is of this graph and the problem allows it."""
    if placed is None or placed.digest not in problem.graph.digests:
        return None
    device = unpack(placed.device, WIDE)
    rank = None if placed.rank is None else unpack(placed.rank, WIDE)
    if len(device) != problem.num_ops or (rank is not None and len(rank) != problem.num_ops):
        return None
    if not len(device) or device.min() < 0 or device.max() >= problem.num_devices:
        return None
    lead = np.zeros(problem.num_groups, dtype=np.int64)
    lead[problem.group] = device
    together = (lead[problem.group] == device).all()
    if not together or not problem.allowed[np.arange(len(device)), device].all():
        return None
    return Assignment(device, rank)


def pack(row: Int[np.ndarray, "N"], kind: str) -> str:
    """Base64 of zlib of integers of a NumPy type."""
    return base64.b64encode(zlib.compress(row.astype(kind).tobytes(), 9)).decode()


def unpack(text: str, kind: str) -> Int[np.ndarray, "N"]:
    """The integers of `pack`, none of an empty text; raises `ValueError` on anything else."""
    if not text:
        return np.zeros(0, np.int64)
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text, validate=True), MAX_PACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"{text[:16]!r}... is no packed placement: {error}") from None
    if not stream.eof or len(data) % np.dtype(kind).itemsize:
        raise ValueError(f"{text[:16]!r}... is no packed placement: it is cut off, or too long")
    return np.frombuffer(data, dtype=kind).astype(np.int64)


if TYPE_CHECKING:
    from gdp.policy.model.network import Batch


@cached_on_problem
def _features(problem: Problem, kind: FeatureSet, advised: bool) -> Features:
    """Input features of the network, with or without advice."""
    return features(problem, kind, advice(problem) if advised else None)


@cached_on_problem
def _batch(problem: Problem, kind: FeatureSet, advised: bool) -> "Batch":
    """Padded JAX arrays of the input features."""
    from gdp.policy.model.network import on_device, pad

    return on_device(pad(_features(problem, kind, advised)))


@dataclass(frozen=True, eq=False)
class Policy:
    """Weights and the network they belong to."""

    config: NetworkConfig
    params: Params
    name: str = "policy"
    placed: KeptPlacement | None = None  # what it was fine-tuned to

    def features(self, problem: Problem) -> Features:
        """Input features of the network."""
        return _features(problem, self.config.features, self.config.advice)

    def batch(self, problem: Problem) -> "Batch":
        """Padded JAX arrays of the input features, for learning."""
        return _batch(problem, self.config.features, self.config.advice)

    def view(self, problem: Problem) -> DecodeProblem:
        """The problem as the decoder reads it, under this network's masks."""
        view = prepare(
            problem, mask_memory=self.config.mask_memory, mask_alike=self.config.mask_alike
        )
        if not self.config.advice:
            return view
        advised = advice(problem)
        return view._replace(
            advice=np.ascontiguousarray(advised.device),
            advice_weight=advised.weight.astype(np.float64),
        )

    def head(self, problem: Problem) -> Head:
        """The encoded problem: one pass of the network, in NumPy."""
        head = encode(self.config, self.params, self.features(problem))
        return head.cut(problem.num_ops, problem.num_devices)

    def head_of(self, problem: Problem, batch: "Batch") -> Head:
        """JAX version of `head`, from precomputed features; differentiable."""
        from gdp.policy.model import network

        head = network.encode(self.config, self.params, batch)
        return head.cut(problem.num_ops, problem.num_devices)


class _Meta(msgspec.Struct):
    """Keys of `meta.json` that `load_policy` reads."""

    network: NetworkConfig
    name: str = "policy"
    placed: KeptPlacement | None = None


def save_policy(
    policy: Policy,
    path: str | os.PathLike[str],
    *,
    recipe: str = "",
    beside: Mapping[str, bytes] | None = None,
    force: bool = False,
    **meta: Any,
) -> str:
    """Write a policy checkpoint (`gdp.base.checkpoint.save`); return its weights' SHA-256."""
    document = {"kind": "policy", "network": asdict(policy.config), "name": policy.name, **meta}
    if policy.placed is not None:
        document["placed"] = msgspec.to_builtins(policy.placed)
    return checkpoint.save(
        path, policy.params, recipe=recipe, meta=document, kind="policy", beside=beside, force=force
    )


RUN_POLICIES = ("best", "last")
"""Policies in the folder of a training run, the one to use first."""


def policy_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a policy: the path, or in the folder of a training run its best policy."""
    folder = Path(path)
    if is_there(folder / checkpoint.META):
        return folder
    inside = (folder / name for name in RUN_POLICIES)
    return next((p for p in inside if is_there(p / checkpoint.META)), folder)


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Read a policy checkpoint, or the best one of a training run; raises `CheckpointError` on
    anything else."""
    path = policy_folder(path)
    kind = Kind("policy that this gdp can read", checkpoint.CheckpointError)
    where = f"checkpoint {str(path)!r}"
    meta = convert(_without_former(checkpoint.read_meta(path), where), kind, _Meta, where)
    params = nested(checkpoint.load_arrays(path, shapes(meta.network)))
    return Policy(meta.network, params, meta.name, meta.placed)


FORMER = {"decode": "autoregressive", "device_attention": False, "diffusion": 0}
"""Former settings of the network that checkpoints may hold, with their only remaining value."""
UNREAD = ("max_devices", "zero_kernels")
"""Former settings whose value does not matter."""


def _without_former(meta: dict[str, Any], where: str) -> dict[str, Any]:
    """The document without former settings; raises `CheckpointError` for forms that are gone."""
    network = meta.get("network")
    if not isinstance(network, dict):
        return meta
    for name, value in FORMER.items():
        if network.get(name, value) != value:
            raise checkpoint.CheckpointError(
                f"{where} has {name} = {network[name]!r}, a form of the network that gdp no longer "
                "has; train it again with `gdp pretrain`"
            )
    settings = {name: x for name, x in network.items() if name not in (*FORMER, *UNREAD)}
    return meta | {"network": settings}


def default_checkpoint() -> Path:
    """Folder of the shipped policy: next to the package in a checkout, inside it in a wheel."""
    return data_path("checkpoints", "default")
