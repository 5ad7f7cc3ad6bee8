"""The head of the policy: what one pass of the network leaves to be done for each pair.

Axes: K placements, N ops, D devices, F pair features, W head width.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Head(NamedTuple):
    """What the network computed for one problem: scores before the pair features are known.

    Arrays of JAX, padded, as the network returns it; of NumPy, float32, as the decoder reads it.
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


def _relu(x: Any) -> Any:
    return np.maximum(x, 0.0)


def score(head: Head, feats: Any, relu: Callable[[Any], Any] = _relu) -> Any:
    """Logits [..., N, D] of pair features [..., N, D, F].

    logit = out . relu(mixing' relu(node + device + feature' f) + bias)

    In NumPy; in JAX with its `relu`. `decode_kernels.score_pairs` is the same for one op.
    """
    first = head.node[:, None, :] + head.device[None] + feats @ head.feature
    return relu(relu(first) @ head.mixing + head.bias) @ head.out
