"""The rule by which llama.cpp places blocks by itself (`--fit on`): pull request 16653 of
ggml-org/llama.cpp. Written again here, as the program itself measures real devices.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

FIT_MARGIN_BYTES = 1 << 30
"""Kept free on each GPU: default of llama.cpp's `--fit-target`, 1024 MiB."""


class FitSizes(NamedTuple):
    """Bytes that llama.cpp's fit counts. Axes: S slots (blocks, then the output), G GPUs."""

    dense: Int[np.ndarray, "S"]  # of each slot without its experts; caches included
    experts: Int[np.ndarray, "S"]
    memory: Int[np.ndarray, "G"]
    buffers: int  # of tensors, on each GPU


class FitPlan(NamedTuple):
    """A plan of llama.cpp's fit; the CPU is -1."""

    layers: Int[np.ndarray, "S"]  # GPU of each slot
    experts: Int[np.ndarray, "S"]  # of its experts


def fit_plan(sizes: FitSizes, margin_bytes: int = FIT_MARGIN_BYTES) -> FitPlan:
    """The plan of llama.cpp's `--fit` at the requested context.

    1. Everything on the GPUs, in proportion to their memory, where that keeps the margin on each.
    2. Else GPUs are filled from the last to the first with slots from the last to the first; in a
       mixture of experts all experts stay on the CPU.
    3. Where all dense weights of a mixture fit so, GPUs take whole slots from the first on, as long
       as later GPUs have room for the dense rest; behind its whole slots the last GPU has the rest.

    Left out: reducing the context, and parts of one block on a GPU.
    """
    count, gpus = len(sizes.dense), len(sizes.memory)
    room = np.maximum(sizes.memory - margin_bytes - sizes.buffers, 0)
    full = sizes.dense + sizes.experts
    ends = np.cumsum(sizes.memory) / max(int(sizes.memory.sum()), 1)
    even = np.searchsorted(ends, np.arange(count) / count, side="right").clip(max=gpus - 1)
    if (np.bincount(even, full, gpus) <= room).all():
        return FitPlan(even, even)
    kept = sizes.dense if sizes.experts.any() else full
    layers = _back_to_front(kept, room)
    nowhere = np.full(count, -1)
    if not sizes.experts.any():
        return FitPlan(layers, layers)
    if (layers < 0).any():
        return FitPlan(layers, nowhere)
    experts, start = nowhere, 0
    for gpu in range(gpus):
        for stop in range(count, start, -1):
            rest = _back_to_front(kept[stop:], room[gpu + 1 :])
            shared = gpu == gpus - 1  # the last one keeps the dense rest as well
            held = full[start:stop].sum() + (kept[stop:].sum() if shared else 0)
            if held <= room[gpu] and (shared or (rest >= 0).all()):
                layers[start:stop] = experts[start:stop] = gpu
                layers[stop:] = gpu if shared else rest + gpu + 1
                start = stop
                break
    return FitPlan(layers, experts)


def _back_to_front(sizes: Int[np.ndarray, "S"], room: Int[np.ndarray, "G"]) -> Int[np.ndarray, "S"]:
    """GPU of each slot, -1 for the CPU, filled from the last slot and the last GPU."""
    layers, slot = np.full(len(sizes), -1), len(sizes)
    for gpu in range(len(room) - 1, -1, -1):
        free = int(room[gpu])
        while slot and sizes[slot - 1] <= free:
            slot -= 1
            free -= int(sizes[slot])
            layers[slot] = gpu
    return layers
