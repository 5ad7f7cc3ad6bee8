"""A problem as the decoder reads it, and the columns of its features of (op, device) pairs.

No numba here: the network and the decoder's kernels import it. Axes: N ops, T tensors, E uses,
C channels, D devices, A advisers, G groups, W weights.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int


class PairFeatures(NamedTuple):
    """The column of each feature. Times are squashed ratios to the mean op unless said otherwise.

    "Least" and "quickest" are over the devices that may take the op.
    """

    end: int  # when the op would end, after the least end
    begin: int  # when it would begin, after the least
    ready: int  # when its inputs would be there, after the least
    free: int  # when the device is free, after the least
    device_waits: int  # the device for the inputs
    inputs_wait: int  # the inputs for the device
    transfer: int  # seconds of sending inputs there
    resident: int  # share of the bytes of the inputs that are there
    load_share: int  # of all work placed so far
    fair_load: int  # load over the fair share of all work
    headroom: int  # share of memory that stays free, in [-1, 1]
    slower: int  # seconds over the quickest device
    slower_log: int  # logarithm of that ratio
    ends_first: int  # 1 on the device of the least end
    heaviest: int  # 1 where the largest input was made
    pull: int  # share of the bytes that the op's readers also read
    kin: int  # share of the readers whose group is decided
    sibling: int  # share of the placed readers of the op's own inputs
    recent: int  # decaying share of the latest ops
    host: int  # 1 on the host
    used: int  # 1 on devices that hold an op
    past_end: int  # longest path through the op after the longest so far
    past_load: int  # load with the op over the largest load of devices and channels
    transfer_share: int  # transfer over the op's own seconds
    sent: int  # quarters of the number of inputs to be sent
    detour: int  # transfer and slowness together
    incumbent: int  # 1 where the best adviser puts the op; so each adviser's, in their order
    single: int
    blocks: int
    heft: int
    etf: int
    metis: int
    votes: int  # of the advisers, by quality
    readers: int  # share of the op's readers that the incumbent has on the device
    followed: int  # how far the decode has followed the incumbent so far, on its device


PAIR = PairFeatures(*range(len(PairFeatures._fields)))
"""`feats[..., PAIR.end]` is a feature."""
NUM_PAIR_FEATURES = len(PAIR)


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
    weight: Int[np.ndarray, "K N"]  # id of the weight of each kind that an op holds
    weight_bytes: Int[np.ndarray, "W"]
    held_on: Int[np.ndarray, "K D"]
    is_io: Bool[np.ndarray, "N"]
    is_backward: Bool[np.ndarray, "N"]
    in_start: Int[np.ndarray, "N+1"]
    in_tensor: Int[np.ndarray, "E"]
    out_start: Int[np.ndarray, "N+1"]
    out_tensor: Int[np.ndarray, "T"]
    producer: Int[np.ndarray, "T"]
    held_bytes: Int[np.ndarray, "T"]
    sent_bytes: Int[np.ndarray, "T"]  # over a link in one sample
    num_uses: Int[np.ndarray, "T"]
    use_start: Int[np.ndarray, "T+1"]
    use_op: Int[np.ndarray, "E"]
    latency_s: Float[np.ndarray, "D D"]
    s_per_byte: Float[np.ndarray, "D D"]
    channel: Int[np.ndarray, "D D"]
    segment_s: Float[np.ndarray, "D"]  # dispatch of devices that pay it per segment
    memory_bytes: Float[np.ndarray, "D"]
    pool: Int[np.ndarray, "D"]
    pool_bytes: Int[np.ndarray, "P"]
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
    "group", "group_allowed", "group_start", "group_op", "weight_bytes", "held_on",
    "is_io", "is_backward", "in_start", "in_tensor", "out_start", "out_tensor",
    "producer", "held_bytes", "sent_bytes", "use_start", "use_op", "segment_s", "pool",
    "pool_bytes",
)  # fmt: skip
"""Fields of `DecodeProblem` that are those of `Arrays`."""
