"""Record of an execution, with its verdict, warnings and advice."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from gdp.measure.measuring import Measured, Measuring
from gdp.measure.statistics import TOO_WIDE, Estimate
from gdp.sim.objectives import find_objective

PLACED, SINGLE, DEFAULT, REPLICAS = "placed", "single_device", "runtime_default", "replicas"
SIMPLEST = (SINGLE, DEFAULT, REPLICAS, PLACED)
"""Order of preference for contenders that measurements cannot tell apart."""
ADVICE = {
    PLACED: "run the placement (gdp export)",
    SINGLE: "run the model on one device and leave the others free",
    DEFAULT: "leave the whole model to the runtime",
    REPLICAS: "run a copy of the whole model on every device",
}
QUIETER = "close other programs or add --measure-seconds"
"""Advice against wide intervals."""
SHORTFALL = 0.95
"""A placement below this share of its prediction or of an uncut model is remarked on."""


@dataclass(frozen=True)
class Row:
    """One contender: medians of the blocks, with 95% intervals."""

    latency_s: float
    latency_interval_s: tuple[float, float]
    throughput_per_s: float
    throughput_interval_per_s: tuple[float, float]
    completions: int  # counted for the throughput
    is_capped: bool  # the cap of seconds was over before the rate was known to the precision
    rounds: int
    predicted_latency_s: float | None = None  # None: nothing predicts it
    predicted_throughput_per_s: float | None = None


@dataclass(frozen=True)
class SegmentTime:
    """One piece of the cut model."""

    device: str  # several, with commas between, that take the samples in turn
    ops: int
    input_bytes: int  # from other pieces and from outside
    output_bytes: int
    predicted_s: float
    measured_s: float  # median over single samples
    segment: int = -1  # of the plan that was executed; -1: no op of it
    pipelined_s: float | None = None  # median with the pipeline full, where it is known
    member_s: tuple[float, ...] = ()  # the same of each device that takes samples in turn


@dataclass(frozen=True)
class FastestContender:
    """The fastest contender for one objective."""

    fastest: str
    runner_up: str  # empty where there is one contender
    advantage: float  # of the fastest over the runner-up, a share of its speed
    beyond_interval: float  # the same between the near ends of both intervals; negative: they meet
    # The simplest of those whose intervals meet the fastest's; empty: these are too wide to tell.
    prefer: str

    @property
    def significant(self) -> bool:
        """True if the intervals of the fastest and the runner-up do not meet."""
        return self.beyond_interval > 0


@dataclass(frozen=True)
class GenerationTimes:
    """Tokens of a sample of a language model, and the median seconds of its two phases."""

    prompt: int
    new: int  # written one after another
    cached: int  # before the first step, where no prompt is read
    prompt_s: float
    steps_s: float


@dataclass(frozen=True)
class RunReport:
    """Record of an execution. Latency is of single samples, throughput of the full pipeline; both
    are medians over blocks of samples, with 95% intervals of their order statistics."""

    model: str
    objective: str
    predicted_latency_s: float
    measured_latency_s: float
    latency_interval_s: tuple[float, float]
    predicted_throughput_per_s: float
    measured_throughput_per_s: float
    throughput_interval_per_s: tuple[float, float]
    completions: int
    is_capped: bool
    # "single_device": one core. "runtime_default": the runtime's own threads over all cores of the
    # cluster. "replicas": one copy of the model per core.
    baselines: Mapping[str, Row]
    rivals: Mapping[str, Row]  # other placements, measured in turn with this one
    fastest: str  # of "placed" and the baselines, for the objective
    runner_up: str
    advantage: float
    advantage_beyond_interval: float
    significant: bool
    prefer: str  # empty: too noisy to tell
    outputs_equal: bool | None  # None: random ops reach every output, which so cannot be compared
    max_abs_diff: float
    max_relative_diff: float  # of the largest magnitude of the tensor
    compared_tensors: int  # model outputs and tensors that cross a cut, over all samples
    random_weights: bool  # the model carried none
    segments: tuple[SegmentTime, ...]
    samples_in_flight: int  # of the pipeline
    cores: tuple[int, ...]  # of each device of the cluster
    pinned: bool
    note: str
    warnings: tuple[str, ...]  # what the measurement does not show, or what went less well
    rounds: int  # measured, of each contender
    measure_seconds: float  # the cap of all rounds together
    seed: int
    versions: Mapping[str, str]
    inner_equal: bool = True  # the tensors that cross a cut, within a rounding step of their type
    worst_tensor: str = ""  # of the largest relative difference
    random_ops: tuple[str, ...] = ()  # whose results are other ones at each run, uncut too
    fits_alone: bool = True  # False: no device alone has memory for the model
    generation: GenerationTimes | None = None  # where the runtime times both phases itself

    @property
    def placed(self) -> Row:
        """The placement's own row."""
        return Row(
            self.measured_latency_s, self.latency_interval_s, self.measured_throughput_per_s,
            self.throughput_interval_per_s, self.completions, self.is_capped, self.rounds,
            self.predicted_latency_s, self.predicted_throughput_per_s,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def row(latency: Measured, throughput: Measured | None = None) -> Row:
    """A contender's figures; its throughput may be that of another way to run the same."""
    full = throughput or latency
    return Row(
        latency_s=latency.latency_s,
        latency_interval_s=(latency.latency.low, latency.latency.high),
        throughput_per_s=full.throughput_per_s,
        throughput_interval_per_s=(full.throughput.low, full.throughput.high),
        completions=full.completions,
        is_capped=full.is_capped,
        rounds=full.rounds,
    )


def measured_fields(
    objective: str,
    predicted: tuple[float, float],
    placed: Row,
    baselines: Mapping[str, Row],
    measuring: Measuring,
    expected: Mapping[str, tuple[float, float] | None] | None = None,
    rivals: Mapping[str, Row] = MappingProxyType({}),
) -> dict[str, Any]:
    """Fields of a report from measured rows.

    `predicted` and `expected` are seconds of a sample alone and per sample of many, of the
    placement and of baselines.
    """
    expected = expected or {}
    baselines = {name: with_prediction(row, expected.get(name)) for name, row in baselines.items()}
    fastest = verdict(objective, {PLACED: placed} | dict(baselines))
    return {
        "objective": objective,
        "predicted_latency_s": predicted[0],
        "measured_latency_s": placed.latency_s,
        "latency_interval_s": placed.latency_interval_s,
        "predicted_throughput_per_s": 1.0 / predicted[1],
        "measured_throughput_per_s": placed.throughput_per_s,
        "throughput_interval_per_s": placed.throughput_interval_per_s,
        "completions": placed.completions,
        "is_capped": placed.is_capped,
        "baselines": dict(baselines),
        "rivals": dict(rivals),
        "fastest": fastest.fastest,
        "runner_up": fastest.runner_up,
        "advantage": fastest.advantage,
        "advantage_beyond_interval": fastest.beyond_interval,
        "significant": fastest.significant,
        "prefer": fastest.prefer,
        "warnings": tuple(warnings(objective, predicted, placed, baselines)),
        "measure_seconds": measuring.seconds,
        "rounds": placed.rounds,
        "seed": measuring.seed,
    }


def verdict(objective: str, rows: Mapping[str, Row]) -> FastestContender:
    """The fastest contender, and the distance of its interval from the next one's.

    For a latency replicas do not compete: one of them is a single device. Where intervals meet and
    all of these are narrow, the contenders are level and the simplest is preferred; where one of
    them is wider than `TOO_WIDE`, noise may hide a difference and none is.
    """
    speeds = {
        name: speed(objective, row)
        for name, row in rows.items()
        if find_objective(objective).pipelined or name != REPLICAS
    }
    order = sorted(speeds, key=lambda name: -speeds[name].value)
    first = speeds[order[0]]
    level = [name for name in order if speeds[name].high >= first.low]
    hidden = len(level) > 1 and any(speeds[name].is_noisy for name in level)
    prefer = "" if hidden else min(level, key=SIMPLEST.index)
    if len(order) == 1:
        return FastestContender(order[0], "", 0.0, 0.0, prefer)
    second = speeds[order[1]]
    # The runner-up is the next in the order, but another interval may reach further.
    highest = max(speeds[name].high for name in order[1:])
    return FastestContender(
        fastest=order[0],
        runner_up=order[1],
        advantage=first.value / second.value - 1.0,
        beyond_interval=first.low / highest - 1.0,
        prefer=prefer,
    )


def speed(objective: str, row: Row) -> Estimate:
    """Samples per second of a row: its throughput, or one over its latency."""
    if find_objective(objective).pipelined:
        return Estimate(row.throughput_per_s, *row.throughput_interval_per_s)
    low, high = row.latency_interval_s
    return Estimate(1.0 / row.latency_s, 1.0 / high, 1.0 / low)


def warnings(
    objective: str, predicted: tuple[float, float], placed: Row, baselines: Mapping[str, Row],
    scaled: bool = False,
) -> list[str]:  # fmt: skip
    """Warnings for readers of the table: noise, and a placement that falls short by more than noise
    explains; `scaled` where predictions were multiplied by the error of the uncut model's."""
    rows = {PLACED: placed} | dict(baselines)
    messages = []
    noisy = {n: width for n, r in rows.items() if (width := _width(objective, r)) > TOO_WIDE}
    if noisy:
        name = max(noisy, key=lambda n: noisy[n])
        messages.append(f"the 95% interval of {words(name)} is {noisy[name]:.0%} wide; {QUIETER}")
    own = speed(objective, placed)
    foretold = 1.0 / predicted[find_objective(objective).pipelined]
    if own.value < SHORTFALL * foretold and own.high < foretold:
        messages.append(f"the placement runs at {own.value / foretold:.2f} of its predicted speed")
    messages += _slower(objective, rows, scaled)
    uncut = [name for name in (SINGLE, DEFAULT) if name in rows]
    best = max(uncut, key=lambda name: speed(objective, rows[name]).value, default="")
    if best and own.high < (other := speed(objective, rows[best])).low:
        ratio = own.value / other.value
        if ratio < SHORTFALL:
            messages.append(f"the placement runs at {ratio:.2f} of the speed of {words(best)}")
    return messages


def _slower(objective: str, rows: Mapping[str, Row], scaled: bool) -> list[str]:
    """Warning that one device alone is faster, if the intervals leave no doubt, and the remedy."""
    if SINGLE not in rows:
        return []
    own, one = speed(objective, rows[PLACED]), speed(objective, rows[SINGLE])
    if own.high >= one.low:
        return []
    text = (
        f"the placement is slower than one device alone, which is {one.value / own.value:.2f} "
        "times as fast. Run the whole model on one device (gdp place --method single)"
    )
    single = rows[SINGLE]
    throughput = find_objective(objective).pipelined
    expected = single.predicted_throughput_per_s if throughput else single.predicted_latency_s
    if expected is not None:
        alone = expected if throughput else 1.0 / expected
        off = max(one.value / alone, alone / one.value) - 1.0
        if off > 1.0 - SHORTFALL:
            text += (
                f"; the costs are off by {off:.0%} even there: measure this machine (gdp profile, "
                "gdp calibrate) and place again with --costs"
            )
        elif scaled:
            text += "; even with scaled predictions, so the cut itself costs more than predicted"
        else:
            text += "; its prediction is right, so the cut itself costs more than predicted"
    return [text]


def rescaled(report: RunReport) -> RunReport:
    """The report with predictions scaled to the uncut model's seconds on one device, which a note
    says; as it was where nothing predicts that or it was right."""
    single = report.baselines.get(SINGLE)
    if single is None or single.predicted_latency_s is None:
        return report
    slower = single.latency_s / single.predicted_latency_s
    per_s = single.throughput_per_s / (single.predicted_throughput_per_s or single.throughput_per_s)
    full = find_objective(report.objective).pipelined
    factor = 1.0 / per_s if full else slower
    if abs(factor - 1.0) <= 1.0 - SHORTFALL:
        return report
    baselines = {
        name: with_prediction(
            row,
            None
            if row.predicted_latency_s is None or row.predicted_throughput_per_s is None
            else (row.predicted_latency_s * slower, 1.0 / (row.predicted_throughput_per_s * per_s)),
        )
        for name, row in report.baselines.items()
    }
    predicted = (
        report.predicted_latency_s * slower, 1.0 / (report.predicted_throughput_per_s * per_s)
    )  # fmt: skip
    warning = (
        f"the costs are off by {abs(factor - 1.0):.0%} on this machine: predictions are scaled by "
        f"{factor:.2f}, to what the uncut model took; gdp tune learns the rest in about a minute"
    )
    return replace(
        report, predicted_latency_s=predicted[0], predicted_throughput_per_s=1.0 / predicted[1],
        baselines=baselines,
        segments=tuple(replace(s, predicted_s=s.predicted_s * slower) for s in report.segments),
        warnings=(
            *warnings(report.objective, predicted, report.placed, baselines, scaled=True), warning,
        ),
    )  # fmt: skip


def without_rivals(report: RunReport, note: str) -> RunReport:
    """The report of a model that no device holds alone, as a note says: runs of the uncut model are
    yardsticks that its memory would not allow, and the placement has no rival."""
    return replace(
        report, fits_alone=False, fastest=PLACED, runner_up="", advantage=0.0,
        advantage_beyond_interval=0.0, significant=False, prefer=PLACED,
        warnings=(*report.warnings, note),
    )  # fmt: skip


def advice(report: Mapping[str, Any]) -> str:
    """The last line of `gdp run`: what was fastest, by how much, and what to do."""
    rows = {PLACED: report} | dict(report["baselines"])
    throughput = find_objective(report["objective"]).pipelined

    def value(name: str) -> str:
        if throughput:
            measured = rows[name].get("throughput_per_s", report["measured_throughput_per_s"])
            return f"{measured:.1f} samples/s"
        measured = rows[name].get("latency_s", report["measured_latency_s"])
        return f"{measured * 1e3:.3f} ms"

    fastest, second = report["fastest"], report["runner_up"]
    if not report.get("fits_alone", True):
        return f"fastest: {words(fastest)}, {value(fastest)}; nothing else here fits in memory"
    if not second:
        return f"fastest: {words(fastest)}, {value(fastest)}; nothing else was measured"
    by = f"{report['advantage']:.1%}"
    if report["significant"]:
        return (
            f"fastest: {words(fastest)}, {value(fastest)}, {by} faster than {words(second)} and "
            f"{report['advantage_beyond_interval']:.1%} beyond the 95% intervals: {ADVICE[fastest]}"
        )
    if not report["prefer"]:
        return f"no verdict: too noisy to tell; {QUIETER}"
    return (
        f"fastest: {words(fastest)}, {value(fastest)}, {by} faster than {words(second)}, which is "
        f"within the 95% intervals; the simplest of those level with it: {ADVICE[report['prefer']]}"
    )


def words(name: str) -> str:
    """A contender's name for people."""
    return "the placement" if name == PLACED else name.replace("_", " ")


def _width(objective: str, row: Row) -> float:
    if find_objective(objective).pipelined:
        return Estimate(row.throughput_per_s, *row.throughput_interval_per_s).width
    return Estimate(row.latency_s, *row.latency_interval_s).width


def with_prediction(measured: Row, seconds: tuple[float, float] | None) -> Row:
    """The row with predicted seconds of a sample alone and per sample of many, if there are any."""
    if seconds is None:
        return measured
    return replace(
        measured, predicted_latency_s=seconds[0], predicted_throughput_per_s=1.0 / seconds[1]
    )
