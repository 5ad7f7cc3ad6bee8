"""Seconds of eager PyTorch while an accelerator works for seconds without a pause, as it denoises.

A host launches kernel after kernel ahead of the device, so that a call takes what all its kernels
take, or all its launches, whichever is more. Kernels were measured in bursts, at clocks that a
device under its power limit does not keep, and on contiguous tensors: over a whole image or video
they take longer (`Paces`). Attention multiplies by the synchronous instructions of Ampere
(FlashAttention-2, which `scaled_dot_product_attention` takes), while the kernels that the network
learned use Hopper's and Blackwell's own; 3-D convolutions come nowhere near 2-D ones.

The paces were rounded from a fit to single-GPU seconds of ML.ENERGY's develop models on H100 and
B200. `python -m pretrain.costs.sustained` fits them again, and prints errors of models left out.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.cluster.types import Cluster, Device
from gdp.costs.base import CostModel, roofline
from gdp.costs.default import CrossingCosts
from gdp.costs.measured.costs import MeasuredCosts, launches_s, slower_types
from gdp.costs.measured.graph import GraphKernels, graph_kernels
from gdp.costs.measured.host import is_blackwell
from gdp.costs.measured.kernels import KINDS, descriptor_of
from gdp.costs.power import Power, joules_above_idle
from gdp.graph.op_graph import OpGraph
from gdp.ops.rule import CONVOLUTION
from gdp.ops.table import kernel_of

HEAD_STEP, NARROW_HEAD = 32, 64
"""Heads are padded to a multiple of the first; the second is the largest of narrow ones."""


class Paces(NamedTuple):
    """Factors of the seconds of kernels by class, and the rate of attention."""

    products: float = 1.4
    moves: float = 1.6  # ops that read and write tensors
    volumes: float = 9.5  # 3-D convolutions
    new_products: float = 1.3  # of Blackwell, beside those above
    new_moves: float = 1.25
    # FLOP a clock of a multiprocessor with heads of 128. 225 TFLOP/s on an A100 of 108 at 1.41 GHz
    # are 1,480 (Dao 2023, arXiv 2307.08691).
    attention: float = 1600.0
    narrow: float = 0.85  # share of it with heads up to `NARROW_HEAD`


PACES = Paces()
EFFORT = 1.25
"""Joules of such kernels, to those of their FLOP and bytes in servers of language models, of which
the power model (`gdp.costs.power`) is: they read and write more often, and multiply with older
instructions. Chosen by hand on the same rows."""


@dataclass(frozen=True, eq=False)
class CallSeconds:
    """Seconds of the ops of one call, on each device. N ops, D devices."""

    kernel_s: Float[np.ndarray, "N D"]  # inf where a device cannot run an op
    launch_s: Float[np.ndarray, "N D"]  # of the host; zero on processors, whose seconds hold it


def call_seconds(
    graph: OpGraph, cluster: Cluster, costs: CostModel, paces: Paces = PACES
) -> CallSeconds:
    """Seconds of an unfused graph of PyTorch by a cost model, at the pace that devices keep."""
    seconds = costs(graph, cluster)
    works = (graph.flop > 0) | (graph.memory_traffic_bytes > 0)
    works &= ~graph.is_io
    found = graph_kernels(graph, served=False)
    launch_s = np.zeros_like(seconds)
    own: Any = costs.base if isinstance(costs, CrossingCosts) else costs
    plain = roofline(graph, cluster)
    of_kind: dict[Any, Float[np.ndarray, "N"]] = {}
    for d, device in enumerate(cluster.devices):
        if device.is_cpu:
            seconds[:, d] += np.where(works, cluster.op_dispatch_s[d], 0.0)
            continue
        key = device.kind, descriptor_of(device)
        if key not in of_kind:
            kernel_s = plain[:, d]
            if isinstance(own, MeasuredCosts) and own.predicts(device):
                learned = found.known & ~slower_types(graph, device)
                kernel_s = np.where(learned, own.kernel_seconds(found, device), kernel_s)
            of_kind[key] = _at_pace(graph, found, kernel_s, device, paces)
        seconds[:, d] = np.where(np.isfinite(seconds[:, d]), of_kind[key], np.inf)
        launch_s[:, d] = launches_s(found)
    works = works[:, None]
    return CallSeconds(np.where(works, seconds, 0.0), np.where(works, launch_s, 0.0))


def _at_pace(
    graph: OpGraph, found: GraphKernels, kernel_s: Float[np.ndarray, "N"], device: Device,
    paces: Paces,
) -> Float[np.ndarray, "N"]:  # fmt: skip
    """Seconds of kernels over a whole image or video."""
    kernels, is_new = found.kernels, is_blackwell(device)
    factors = {
        "products": paces.products * (paces.new_products if is_new else 1.0),
        "moves": paces.moves * (paces.new_moves if is_new else 1.0),
        "volumes": paces.volumes, "attention": 1.0, "planes": 1.0,
    }  # fmt: skip
    classes = classes_of(graph, found)
    seconds = kernel_s * np.array([factors[name] for name in CLASSES])[classes]
    padded = np.ceil(kernels.k / HEAD_STEP) * HEAD_STEP / np.maximum(kernels.k, 1.0)
    share = np.where(kernels.k <= NARROW_HEAD, paces.narrow, 1.0)
    silicon = descriptor_of(device)
    rate = paces.attention * silicon.units * silicon.clock_hz * share
    attends = classes == CLASSES.index("attention")
    return np.where(attends, np.maximum(seconds, kernels.flop * padded / rate), seconds)


CLASSES = ("products", "moves", "volumes", "planes", "attention")
"""Classes of kernels with a pace; planes are 2-D convolutions."""
_CLASS_OF = {"product": "products", "batched product": "products", "convolution": "planes",
             "prompt attention": "attention"}  # fmt: skip


def classes_of(graph: OpGraph, found: GraphKernels) -> Int[np.ndarray, "N"]:
    """Index into `CLASSES` of each op."""
    by_kind = np.array([CLASSES.index(_CLASS_OF.get(kind, "moves")) for kind in KINDS])
    classes = np.where(found.known, by_kind[found.kernels.kind], CLASSES.index("moves"))
    kinds, which = graph.kinds
    volumes = np.array([_is_volume(op_type, detail.input_shapes) for op_type, detail in kinds])
    classes[volumes[which]] = CLASSES.index("volumes")
    return classes


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
