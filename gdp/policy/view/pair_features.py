"""What the decoder sees of an (op, device) pair while it decides: one column per field.

Kernels fill the columns, every scorer reads all of them by position; a checkpoint's weights are
bound to the order. No numba here, so that the network may import it.
"""

from typing import NamedTuple


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
