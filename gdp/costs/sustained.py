"""Seconds of eager PyTorch while an accelerator works for seconds without a pause, as it denoises.

A host launches kernel after kernel ahead of the device, so that a call takes what all its kernels
take, or all its launches, whichever is more. Kernels were measured in bursts, at clocks that a
device under its power limit does not keep, and on contiguous tensors: over a whole image or video
they take `PACE` times as long. Attention multiplies by the synchronous instructions of Ampere
(FlashAttention-2, which `scaled_dot_product_attention` takes), while the kernels that the network
learned use Hopper's and Blackwell's own; 3-D convolutions come nowhere near 2-D ones.

All constants are fitted to single-GPU seconds of ML.ENERGY's develop models on H100 and B200;
docs/benchmarks/predictions.md has the errors of whole models left out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from gdp.cluster.presets import presets
from gdp.cluster.types import Cluster, Device
from gdp.costs.base import CostModel, roofline
from gdp.costs.default import CrossingCosts
from gdp.costs.measured.costs import MeasuredCosts, launches_s
from gdp.costs.measured.graph import GraphKernels, graph_kernels
from gdp.costs.measured.kernels import KINDS, descriptor_of
from gdp.costs.power import Power, joules_above_idle
from gdp.graph.op_graph import OpGraph
from gdp.ops.rule import CONVOLUTION
from gdp.ops.table import kernel_of

PACE = {"product": 1.4, "batched product": 1.4, "prompt attention": 1.0, "convolution": 1.0}
"""Factor of kernels' seconds by class; `MOVES` of others, which read and write tensors."""
MOVES, VOLUMES = 1.6, 9.5
"""Factors of ops that are no products, and of 3-D convolutions."""
NEW_FAMILY, NEW_PRODUCTS, NEW_MOVES = "Blackwell", 1.3, 1.25
"""Family whose libraries reach less of what single kernels do, and factors beside those above."""
ATTENTION_FLOP = 1600.0
"""FLOP a clock of a multiprocessor that attention reaches with heads of 128. 225 TFLOP/s on an A100
of 108 multiprocessors at 1.41 GHz are 1,480 (Dao 2023, arXiv 2307.08691)."""
NARROW_HEAD, NARROW = 64, 0.85
"""Size of a head up to which attention reaches that share of it."""
PRODUCTS = [KINDS.index("product"), KINDS.index("batched product")]
HEAD_STEP = 32
"""Heads are padded to a multiple of this."""

EFFORT = 1.25
"""Joules of such kernels, to those of their FLOP and bytes in servers of language models, of which
the power model (`gdp.costs.power`) is: they read and write more often, and multiply with older
instructions."""


@dataclass(frozen=True, eq=False)
class CallSeconds:
    """Seconds of the ops of one call, on each device. N ops, D devices."""

    kernel_s: Float[np.ndarray, "N D"]  # inf where a device cannot run an op
    launch_s: Float[np.ndarray, "N D"]  # of the host; zero on processors, whose seconds hold it


def call_seconds(graph: OpGraph, cluster: Cluster, costs: CostModel) -> CallSeconds:
    """Seconds of an unfused graph of PyTorch by a cost model, at the pace that devices keep."""
    seconds = costs(graph, cluster)
    works = (graph.flop > 0) | (graph.memory_traffic_bytes > 0)
    works &= ~graph.is_io
    found = graph_kernels(graph, served=False)
    launch_s = np.zeros_like(seconds)
    own: Any = costs.base if isinstance(costs, CrossingCosts) else costs
    plain = roofline(graph, cluster)
    alike: dict[Any, Float[np.ndarray, "N"]] = {}
    for d, device in enumerate(cluster.devices):
        if device.is_cpu:
            seconds[:, d] += np.where(works, cluster.op_dispatch_s[d], 0.0)
            continue
        key = device.kind, descriptor_of(device)
        if key not in alike:
            kernel_s = plain[:, d]
            if isinstance(own, MeasuredCosts) and own.predicts(device):
                kernel_s = np.where(found.known, own.kernel_seconds(found, device), kernel_s)
            alike[key] = _at_pace(graph, found, kernel_s, device)
        seconds[:, d] = np.where(np.isfinite(seconds[:, d]), alike[key], np.inf)
        launch_s[:, d] = launches_s(found)
    works = works[:, None]
    return CallSeconds(np.where(works, seconds, 0.0), np.where(works, launch_s, 0.0))


def _at_pace(
    graph: OpGraph, found: GraphKernels, kernel_s: Float[np.ndarray, "N"], device: Device
) -> Float[np.ndarray, "N"]:
    """Seconds of kernels over a whole image or video."""
    kernels = found.kernels
    by_kind = np.array([PACE.get(kind, MOVES) for kind in KINDS])
    paces = np.where(found.known, by_kind[kernels.kind], MOVES)
    kinds, which = graph.kinds
    preset = presets().get(device.kind)
    if preset is not None and preset.family == NEW_FAMILY:
        products = found.known & np.isin(kernels.kind, PRODUCTS)
        paces *= np.where(products, NEW_PRODUCTS, np.where(paces == MOVES, NEW_MOVES, 1.0))
    volumes = np.array([_is_volume(op_type, detail.input_shapes) for op_type, detail in kinds])
    paces[volumes[which]] = VOLUMES
    seconds = kernel_s * paces
    attends = found.known & (kernels.kind == KINDS.index("prompt attention"))
    padded = np.ceil(kernels.k / HEAD_STEP) * HEAD_STEP / np.maximum(kernels.k, 1.0)
    share = np.where(kernels.k <= NARROW_HEAD, NARROW, 1.0)
    silicon = descriptor_of(device)
    rate = ATTENTION_FLOP * silicon.units * silicon.clock_hz * share
    return np.where(attends, np.maximum(seconds, kernels.flop * padded / rate), seconds)


def _is_volume(op_type: str, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """True for 3-D convolutions; a kernel of one tap is a product."""
    return (
        kernel_of(op_type) == CONVOLUTION
        and [len(shape) for shape in shapes[:2]] == [5, 5]
        and max(shapes[1][2:]) > 1
    )


def call_joules(
    graph: OpGraph, cluster: Cluster, kernel_s: Float[np.ndarray, "N D"]
) -> Float[np.ndarray, "N D"]:
    """Joules of the ops of one call above those of an idle device; 0 where they cannot run."""
    joules = EFFORT * joules_above_idle(graph, cluster, kernel_s)
    power = Power.of(cluster)
    runs = np.isfinite(joules) & np.isfinite(kernel_s)
    most = (power.limit - power.idle) * np.where(runs, kernel_s, 0.0)
    return np.where(runs, np.minimum(joules, most), 0.0)
