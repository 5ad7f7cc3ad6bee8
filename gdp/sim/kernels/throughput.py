"""The period of a pipeline: busy seconds per sample of every device and channel."""

import typing

import numba
import numpy as np

from gdp.kernels.options import INNER
from gdp.sim.engine import OPENS
from gdp.sim.kernels.engine import transfer_time
from gdp.sim.kernels.memory import overflow, pipeline_peaks


@numba.njit(**INNER)
@typing.no_type_check
def period(a, w, device):
    """The period in seconds; leaves `busy_s` and, per channel, `channel_s` as busy seconds."""
    w.busy_s[:] = 0.0
    w.channel_s[:] = 0.0
    for op in range(len(device)):
        i = device[op]
        seconds = a.op_s[op, i]
        if a.has_segments and a.segment_s[i] > 0.0 and _opens(a, device, op):
            seconds += a.segment_s[i]
        w.busy_s[i] += seconds
    w.sent_to[:] = -1
    for tensor in range(len(a.producer)):
        home = device[a.producer[tensor]]
        for u in range(a.first_use[tensor], a.first_use[tensor + 1]):
            to = device[a.use_op[u]]
            if to != home and w.sent_to[to] != tensor:
                w.sent_to[to] = tensor
                w.channel_s[a.channel[home, to]] += transfer_time(
                    a.latency_s[home, to], a.tensor_bytes[tensor], a.bytes_per_s[home, to],
                    a.round_to,
                )  # fmt: skip
    longest_s = 0.0
    for i in range(len(w.busy_s)):
        longest_s = max(longest_s, w.busy_s[i])
    for i in range(len(w.channel_s) - 1):  # the last is of links on which nothing queues
        longest_s = max(longest_s, w.channel_s[i])
    return longest_s


@numba.njit(**INNER)
@typing.no_type_check
def _opens(a, device, op):
    """Whether an op opens a segment."""
    if a.is_io[op]:
        return False
    opens = (a.state[op] & OPENS) != 0
    for k in range(a.first_input[op], a.first_input[op + 1]):
        opens |= device[a.input_op[k]] != device[op]
    return opens


@numba.njit(**INNER)
@typing.no_type_check
def evaluate_period(a, w, device):
    """Period in seconds and bytes over memory of one placement."""
    period_s = period(a, w, device)
    if not a.pipeline_memory_binds:
        return period_s, np.int64(0)
    pipeline_peaks(a, w, device)
    return period_s, overflow(a, w)
