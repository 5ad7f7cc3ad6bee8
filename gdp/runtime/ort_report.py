"""What an execution measured, as a record."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gdp.runtime.ort_measure import Measured


@dataclass(frozen=True)
class Baseline:
    """The uncut model, run in the same rounds as the placement."""

    latency_s: float
    throughput_per_s: float
    best_latency_s: float
    best_throughput_per_s: float


@dataclass(frozen=True)
class SegmentTime:
    """One piece of the cut model."""

    device: str
    ops: int
    input_bytes: int  # from other pieces and from outside
    output_bytes: int
    predicted_s: float
    measured_s: float  # median over single samples


@dataclass(frozen=True)
class RunReport:
    """What an execution measured. Latency is of single samples, throughput of the full pipeline;
    both are medians over the rounds, with the best round beside them."""

    model: str
    objective: str
    predicted_latency_s: float
    measured_latency_s: float
    predicted_throughput_per_s: float
    measured_throughput_per_s: float
    best_latency_s: float
    best_throughput_per_s: float
    # "single_device": one core. "runtime_default": the runtime's own threads over all cores of the
    # cluster. "replicas": one copy of the model per core.
    baselines: Mapping[str, Baseline]
    latency_speedup: float  # over one device: median of the ratios within each round
    throughput_speedup: float
    outputs_equal: bool | None  # None: random ops reach every output, which so cannot be compared
    inner_equal: bool  # the tensors that cross a cut, within a rounding step of their type
    worst_tensor: str  # of the largest relative difference
    random_ops: tuple[str, ...]  # whose results are other ones each time, uncut too
    max_abs_diff: float
    max_relative_diff: float  # of the largest magnitude of the tensor
    compared_tensors: int  # model outputs and tensors that cross a cut, over all samples
    random_weights: bool  # the model carried none
    segments: tuple[SegmentTime, ...]
    samples_in_flight: int  # of the pipeline
    cores: tuple[int, ...]  # of each device of the cluster
    pinned: bool
    note: str
    rounds: int
    seed: int
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def baseline(measured: Measured) -> Baseline:
    """A contender's medians and bests."""
    return Baseline(
        latency_s=measured.latency_s,
        throughput_per_s=measured.throughput_per_s,
        best_latency_s=measured.best_latency_s,
        best_throughput_per_s=measured.best_throughput_per_s,
    )
