"""Rates of work of functions that XLA compiles, fitted to whole models.

A compiler fuses too freely to time kernels one by one, so whole functions are timed and their
seconds explained as a sum of work at unknown rates. Rates are fitted by least squares of relative
errors, none below zero, with `PRIOR` where the models say nothing (Lawson and Hanson 1974).

Axes: N ops, R kinds of work, P profiled models, D devices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from gdp.cluster.types import is_cpu_kind
from gdp.costs.profile import Profile, ProfiledModel, ProfileError
from gdp.graph.fuse import fuse
from gdp.graph.op_graph import OpGraph
from gdp.ops.rule import CONVOLUTION, EXPERTS, LINEAR, PRODUCT, names
from gdp.ops.table import ELEMENTWISE_OPS, REDUCTIONS, VIEWS

PRIOR: Mapping[str, float] = {
    "kernel": 1.5e-6,  # a loop nest, or a call of a library
    "array": 1.5e-6,  # a weight or a state that is passed in, and out where it is updated
    "product_flop": 4e-12,
    "product_small": 1e-10,  # an element of the smaller operand
    "product_large": 1e-10,
    "product_out": 1e-10,
    "convolution": 1e-5,
    "convolution_flop": 5e-12,
    "convolution_bytes": 1e-10,
    "odd_patch_bytes": 3e-10,  # of windows laid side by side, where channels fill no vector
    "grouped_flop": 1e-9,  # of convolutions of channels in groups, which no library computes
    "function": 5e-10,  # an element of exp, tanh and their kind
    "slow_function": 2.5e-9,  # of those that are not vectorised, such as sin
    "division": 2e-10,
    "cheap": 5e-11,
    "reduction": 1e-10,  # an element, along the last axis
    "reduction_across": 1e-10,  # along others
    "bytes": 2e-11,  # of tensors that are not multiplied, between fused loops
    "cold_bytes": 1e-10,  # of weights that the caches cannot hold from one run to the next
}
"""Seconds per unit of each kind of work, of a server processor with two cores: the start of a fit,
which measured models move where they say something. For an accelerator all are scaled to it."""
PRIOR_WEIGHT = 0.2
"""Weight of the prior relative to a model, in relative errors."""
_VECTOR = 8  # float32 in a register: other numbers of channels are laid out one by one
_HUBER = 0.05  # relative errors beyond this count less and less
_CACHE_BYTES = 8 << 20

_FUNCTIONS = names("tanh exp log erf logistic log1p expm1 exp2")
_SLOW = names("sin cos tan pow atan2 erfc erf_inv sinh cosh cbrt lgamma digamma")
_DIVISIONS = names("div sqrt rsqrt rem integer_pow")


def work(graph: OpGraph) -> Float[np.ndarray, "N R"]:
    """Amount of each kind of work of each op, in the order of `PRIOR`.

    Loops that are fused count their kernel and traffic once, at one of their ops.
    """
    product, convolution = graph.has_kernel(PRODUCT, LINEAR, EXPERTS), graph.has_kernel(CONVOLUTION)
    columns = {name: np.zeros(graph.num_ops) for name in PRIOR}
    columns["product_flop"][product] = graph.flop[product]
    for op in np.flatnonzero(product).tolist():
        detail = graph.detail[op]
        if not detail.input_shapes or not detail.output_shapes:
            continue  # a graph from a file may tell no shapes: its FLOPs alone count
        sizes = sorted(float(np.prod(shape)) for shape in detail.input_shapes[:2])
        columns["product_small"][op], columns["product_large"][op] = sizes[0], sizes[-1]
        columns["product_out"][op] = float(np.prod(detail.output_shapes[0]))
    columns["convolution"][convolution] = 1.0
    columns["convolution_bytes"][convolution] = graph.memory_traffic_bytes[convolution]
    for op in np.flatnonzero(convolution).tolist():
        grouped, patch_bytes = _convolution(graph, op)
        columns["grouped_flop" if grouped else "convolution_flop"][op] = graph.flop[op]
        columns["odd_patch_bytes"][op] = patch_bytes
    special = {"function": _FUNCTIONS, "slow_function": _SLOW, "division": _DIVISIONS}
    special["cheap"] = ELEMENTWISE_OPS - frozenset().union(*special.values())
    for name, members in special.items():
        own = graph.has_type(members)
        columns[name][own] = graph.flop[own]
    for op in np.flatnonzero(graph.has_type(REDUCTIONS)).tolist():
        detail = graph.detail[op]
        rank = len(detail.input_shapes[0]) if detail.input_shapes else 0
        axes = detail.attributes.get("axes", ())
        across = isinstance(axes, tuple) and axes and rank - 1 not in axes
        columns["reduction_across" if across else "reduction"][op] = graph.flop[op]
    held = graph.weight_holders(np.flatnonzero(graph.weight_bytes))
    columns["array"][held] = 1.0
    total = float(graph.weight_bytes[held].sum())
    cold = max(0.0, 1.0 - _CACHE_BYTES / (total + 1.0))
    columns["cold_bytes"][held] = cold * graph.weight_bytes[held]
    alone = product | convolution
    _add_loops(graph, alone, columns)
    return np.column_stack([columns[name] for name in PRIOR])


def _convolution(graph: OpGraph, op: int) -> tuple[bool, float]:
    """(grouped channels?, bytes of all windows laid side by side where channels fill no vector)."""
    detail = graph.detail[op]
    groups = max(
        int(detail.attributes.get(name, 1))  # pyright: ignore[reportArgumentType]
        for name in ("feature_group_count", "batch_group_count")
    )
    # Axes of batch, features and space: of the input, the kernel, the output.
    spec = detail.attributes.get("dimension_numbers", ())
    shapes = [*detail.input_shapes[:1], *detail.output_shapes[:1]]
    if groups > 1 or not isinstance(spec, tuple) or [3 * len(s) for s in shapes] != [len(spec)] * 2:
        return groups > 1, 0.0
    read, written = (shapes[i][int(spec[2 * i * len(shapes[i]) + 1])] for i in (0, 1))
    odd = read % _VECTOR != 0
    return False, 4.0 * odd * float(graph.flop[op]) / (2.0 * max(written, 1))


def _add_loops(graph: OpGraph, alone: np.ndarray, found: Mapping[str, np.ndarray]) -> None:
    """Kernels and traffic of loops.

    XLA's CPU compiler calls libraries for products and fuses no loop into them.
    """
    fused = fuse(graph, apart=alone.astype(np.int64))
    works = ~graph.is_io & ~graph.has_type(VIEWS)
    count = fused.graph.num_ops
    runs = np.bincount(fused.group_of, works, count) > 0
    multiplies = np.bincount(fused.group_of, alone, count) > 0
    _, first = np.unique(fused.group_of, return_index=True)
    found["kernel"][first] = runs
    found["bytes"][first] = np.where(multiplies, 0.0, fused.graph.memory_traffic_bytes)


@dataclass(frozen=True)
class WorkRates:
    """Seconds per unit of each kind of work, by the names of `PRIOR`."""

    rates: Mapping[str, float]

    def __post_init__(self) -> None:
        if set(self.rates) != set(PRIOR) or not all(0 <= r < 1 for r in self.rates.values()):
            raise ProfileError(
                f"rates of {', '.join(PRIOR)} are needed, each of 0 to 1 seconds; calibrate again"
            )

    def covers(self, graph: OpGraph) -> bool:
        """True for a graph of JAX."""
        return graph.source == "jax"

    def op_seconds(self, graph: OpGraph) -> Float[np.ndarray, "N"]:
        """Seconds of every op; those of a fused loop are at one of its ops."""
        return work(graph) @ np.array([self.rates[name] for name in PRIOR])


def fit_rates(
    models: Sequence[ProfiledModel], call_s: float, *, scaled: bool = False
) -> dict[str, float]:
    """Rates by iteratively reweighted least squares: disturbed measurements weigh little.

    With `scaled`, the prior is first multiplied so that it is right for the median model.
    """
    rates = _fitted(_amounts(models), np.array([m.latency_s for m in models]), call_s, scaled)
    return dict(zip(PRIOR, rates.tolist(), strict=True))


def _amounts(models: Sequence[ProfiledModel]) -> Float[np.ndarray, "P R"]:
    return np.array([work(m.graph).sum(axis=0) for m in models])


def _fitted(
    amount: Float[np.ndarray, "P R"],
    measured_s: Float[np.ndarray, "P"],
    call_s: float,
    scaled: bool,
) -> Float[np.ndarray, "R"]:
    from scipy.optimize import nnls

    seconds = np.maximum(measured_s - call_s, 0.2 * measured_s)
    prior = np.array(list(PRIOR.values()))
    if scaled:
        prior = prior * np.median(seconds / (amount @ prior))
    share = amount * prior / seconds[:, None]  # of a model's time, at the prior's rates
    start = PRIOR_WEIGHT * np.eye(len(prior))
    weight = np.ones(len(seconds))
    factor = np.ones(len(prior))
    for _ in range(20):
        rows = np.vstack([share * weight[:, None], start])
        factor, _ = nnls(rows, np.concatenate([weight, np.full(len(prior), PRIOR_WEIGHT)]))
        weight = 1.0 / np.sqrt(np.maximum(np.abs(share @ factor - 1.0), _HUBER) / _HUBER)
    return factor * prior


def left_out_seconds(
    models: Sequence[ProfiledModel], call_s: float, *, scaled: bool = False
) -> Float[np.ndarray, "P"]:
    """Seconds of every model by rates that its family had no part in."""
    amount, measured_s = _amounts(models), np.array([m.latency_s for m in models])
    family = np.array([m.family for m in models])
    predicted_s = np.zeros(len(models))
    for name in np.unique(family):
        own = family == name
        rates = _fitted(amount[~own], measured_s[~own], call_s, scaled)
        predicted_s[own] = amount[own] @ rates + call_s
    return predicted_s


def fit_work_rates(
    profile: Profile,
) -> tuple[WorkRates, Float[np.ndarray, "P"]]:
    """(rates of a profile of JAX, seconds of its models by rates that their family had no part in).

    Raises `ProfileError` where it lacks models of two families, or the cost of a call.
    """
    call_s = profile.overheads.session_s
    if call_s is None or len({m.family for m in profile.models}) < 2:
        raise ProfileError(
            "rates need models of two families and overheads; make the profile with "
            "`gdp profile --quick --device jax:cpu`"
        )
    scaled = not is_cpu_kind(profile.device.kind)
    rates = fit_rates(profile.models, call_s, scaled=scaled)
    return (
        WorkRates({name: float(f"{rate:.4g}") for name, rate in rates.items()}),
        left_out_seconds(profile.models, call_s, scaled=scaled),
    )
