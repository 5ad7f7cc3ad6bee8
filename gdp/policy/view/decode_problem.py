"""A problem as the decoder reads it. No numba here; the decoder's kernels import it.

Axes: N ops, T tensors, E uses, C channels, D devices, A advisers, G groups, W weights.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class DecodeProblem(NamedTuple):
    """A problem as the decoder reads it: `Arrays`, and what is estimated or masked.

    What stands in `Arrays` too is the same array under the same name.
    """

    cost_s: Float[np.ndarray, "N D"]
    order: Int[np.ndarray, "N"]
    tail_s: Float[np.ndarray, "N"]  # longest path after the op, transfers included
    group: Int[np.ndarray, "N"]
    group_allowed: Bool[np.ndarray, "G D"]
    group_start: Int[np.ndarray, "G+1"]
    group_op: Int[np.ndarray, "N"]
    weight: Int[np.ndarray, "N"]  # id of the weight an op holds
    weight_bytes: Int[np.ndarray, "W"]
    is_io: Bool[np.ndarray, "N"]
    is_backward: Bool[np.ndarray, "N"]
    in_start: Int[np.ndarray, "N+1"]
    in_tensor: Int[np.ndarray, "E"]
    out_start: Int[np.ndarray, "N+1"]
    out_tensor: Int[np.ndarray, "T"]
    producer: Int[np.ndarray, "T"]
    tensor_bytes: Int[np.ndarray, "T"]
    num_uses: Int[np.ndarray, "T"]
    use_start: Int[np.ndarray, "T+1"]
    use_op: Int[np.ndarray, "E"]
    latency_s: Float[np.ndarray, "D D"]
    s_per_byte: Float[np.ndarray, "D D"]
    channel: Int[np.ndarray, "D D"]
    segment_s: Float[np.ndarray, "D"]  # dispatch of devices that pay it per segment
    memory_bytes: Float[np.ndarray, "D"]
    twin: Int[np.ndarray, "D"]  # the next lower device that is exactly alike, or -1
    advice: Int[np.ndarray, "A N"]  # devices that advisers propose, the incumbent's first
    advice_weight: Float[np.ndarray, "A"]  # shares of the votes
    scale_s: float
    fair_s: float  # total work shared out by speed
    copies: float  # of a received tensor on its device: two in a full pipeline
    kept: Bool[np.ndarray, "T"]  # once more for each later stage: forward tensors backward ops read
    host: int
    num_channels: int
    num_groups: int
    num_weights: int
    mask_memory: bool
    mask_alike: bool


SHARED = (
    "group", "group_allowed", "group_start", "group_op", "weight_bytes", "is_io", "is_backward",
    "in_start", "in_tensor", "out_start", "out_tensor", "producer", "tensor_bytes", "use_start",
    "use_op", "segment_s",
)  # fmt: skip
"""Of `DecodeProblem`, what are the arrays of `Arrays`."""
