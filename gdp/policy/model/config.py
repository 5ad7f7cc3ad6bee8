"""Configuration, weights and result of the network. JAX is not imported here.

Axes of the result: K placements, N ops, D devices, F pair features, W head width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from gdp.policy.view.decode_problem import NUM_PAIR_FEATURES
from gdp.policy.view.features import (
    NUM_DEVICE_FEATURES,
    NUM_GLOBAL_FEATURES,
    NUM_OP_FEATURES,
    NUM_OP_TYPES,
    FeatureSet,
)

TYPE_WIDTH = 16
"""Width of the embedding of an op's type."""
MAX_SUMMARIES = 64
"""Beyond 64 segments their summaries are pooled, so that memory grows linearly with the graph."""

Pooling = Literal["published", "directed"]
"""published: equations 2 and 3, predecessors and successors alike. directed: readers and producers
separately, rectified messages, residual connection and layer norm.
"""

Params = dict[str, Any]
"""The weights as a plain pytree of nested dicts; the keys of layers in a list are integers."""


@dataclass(frozen=True)
class NetworkConfig:
    """The shape of the network; `pretrain/recipes/gdp_one.toml` has that of GDP's paper."""

    features: FeatureSet = "full"
    pooling: Pooling = "directed"
    width: int = 64
    sage_layers: int = 3
    attention_layers: int = 1
    heads: int = 4
    segment: int = 128  # ops per segment
    memory: int = 1  # earlier segments that an op attends to
    summaries: bool = True  # attend to the mean of every segment too
    residual_gate: bool = True  # attention starts switched off and is learned in
    superposition: bool = True
    head_width: int = 32
    advice: bool = True  # read what heuristics propose
    mask_memory: bool = True  # decode under the memory limits
    mask_alike: bool = True  # of empty devices that are alike, only the first

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must lie in [{least}, {most}], got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")


_RANGES = {
    "width": (1, 1 << 14), "sage_layers": (0, 256), "attention_layers": (0, 256),
    "heads": (1, 1 << 10), "segment": (1, 1 << 20), "memory": (0, 1 << 10),
    "head_width": (1, 1 << 14),
}  # fmt: skip
"""Allowed ranges; a checkpoint or a recipe may come from anywhere."""


def shapes(config: NetworkConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by its path."""
    width, inner = config.width, config.head_width
    full = config.features == "full"
    shape: dict[str, tuple[int, ...]] = {"type_embedding/embedding": (NUM_OP_TYPES, TYPE_WIDTH)}

    def dense(name: str, inputs: int, outputs: int) -> None:
        shape[f"{name}/kernel"], shape[f"{name}/bias"] = (inputs, outputs), (outputs,)

    def gated(name: str, inputs: int, outputs: int) -> None:
        dense(f"{name}/dense", inputs, outputs)
        if config.superposition:
            dense(f"{name}/gate/conditioning", width + NUM_GLOBAL_FEATURES, inputs)

    def norm(name: str) -> None:
        shape[f"{name}/scale"], shape[f"{name}/bias"] = (width,), (width,)

    dense("enter", NUM_OP_FEATURES + TYPE_WIDTH + full * NUM_GLOBAL_FEATURES, width)
    directed = config.pooling == "directed"
    for i in range(config.sage_layers):
        if directed:
            norm(f"sage/{i}/norm")
        dense(f"sage/{i}/message", width, 2 * width if directed else width)
        dense(f"sage/{i}/combine", 3 * width if directed else 2 * width, width)
    for i in range(config.attention_layers):
        norm(f"attention/{i}/norm")
        norm(f"attention/{i}/norm_after")
        for name in ("query", "key", "value", "out"):
            gated(f"attention/{i}/{name}", width, width)
        gated(f"attention/{i}/widen", width, 2 * width)
        gated(f"attention/{i}/narrow", 2 * width, width)
        if config.residual_gate:
            shape[f"attention/{i}/strength"] = (2,)
    norm("leave")
    dense("device_in", NUM_DEVICE_FEATURES, inner)
    dense("device_out", inner, inner)
    gated("node_head", width, inner)
    gated("feature_head", NUM_PAIR_FEATURES, inner)
    gated("mixing", inner, inner)
    gated("out_head", inner, 1)
    return shape


def nested(arrays: Mapping[str, np.ndarray]) -> Params:
    """Weights by path as nested dicts.

    >>> nested({"sage/0/norm": 1, "sage/1/norm": 2})
    {'sage': {0: {'norm': 1}, 1: {'norm': 2}}}
    """
    tree: Params = {}
    for path, array in arrays.items():
        *outer, last = [int(step) if step.isdigit() else step for step in path.split("/")]
        inner: dict[Any, Any] = tree
        for step in outer:
            inner = inner.setdefault(step, {})
        inner[last] = array
    return tree


class Head(NamedTuple):
    """Result of the network for one problem: scores before the pair features are known.

    Arrays of JAX, padded, from the network; of NumPy, float32, for the decoder.
    """

    node: Any  # [N, W]
    device: Any  # [D, W]
    feature: Any  # [F, W]
    mixing: Any  # [W, W]
    bias: Any  # [W]
    out: Any  # [W]

    def cut(self, num_ops: int, num_devices: int) -> "Head":
        """The head in NumPy, without the padding."""
        ops, devices = slice(num_ops), slice(num_devices)

        def flat(values: Any, *cut: slice) -> np.ndarray:
            # Cut in NumPy: JAX would compile a slice for every new size. A copy, always: what JAX
            # hands out may not be written, for which numba would compile the decoder anew.
            return np.array(np.asarray(values)[cut], dtype=np.float32, order="C")

        return Head(
            node=flat(self.node, ops),
            device=flat(self.device, devices),
            feature=flat(self.feature),
            mixing=flat(self.mixing),
            bias=flat(self.bias),
            out=flat(self.out),
        )


def score(head: Head, feats: Any, relu: Callable[[Any], Any] = lambda x: np.maximum(x, 0.0)) -> Any:
    """Logits [..., N, D] of pair features [..., N, D, F].

    logit = out . relu(mixing' relu(node + device + feature' f) + bias)

    In NumPy; in JAX with its `relu`. `decode_kernels.score_pairs` is the same for one op.
    """
    first = head.node[:, None, :] + head.device[None] + feats @ head.feature
    return relu(relu(first) @ head.mixing + head.bias) @ head.out
