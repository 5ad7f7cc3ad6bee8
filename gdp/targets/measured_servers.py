"""Readers of tools that ask any server, and of gdp's own runs.

GuideLLM's keys are those of guidellm/benchmark/benchmark.py (0.2, 0.3), schemas.py (0.4) and
benchmark/schemas/ (0.5 to 0.8); AIPerf's those of its docs/reference/json-export-schema.md (1.0 to
1.5) and config/phases.py; GenAI-Perf's, of which AIPerf took the form, those of
genai_perf/export_data/json_exporter.py.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from gdp.corrections.run import Load, MeasuredRun, MeasurementFileError, checked
from gdp.targets.measured import (
    Count,
    Reader,
    Record,
    failures,
    grouped,
    has,
    milliseconds,
    of_load,
    rate_of,
    scaled,
    typed,
    within,
)


class Summary(msgspec.Struct):
    """Statistics of one metric over the requests of one fate."""

    mean: float
    median: float | None = None
    count: Count = 0


class Fates(msgspec.Struct):
    """A metric by the fate of its requests."""

    successful: Summary
    incomplete: Summary | None = None


class Totals(msgspec.Struct):
    """Numbers of requests by their fate."""

    successful: Count
    errored: Count = 0
    incomplete: Count = 0


class GuideMetrics(msgspec.Struct):
    """The metrics of a benchmark of GuideLLM that are read."""

    prompt_token_count: Fates
    output_token_count: Fates
    time_to_first_token_ms: Fates
    inter_token_latency_ms: Fates
    request_totals: Totals | None = None  # since 0.5; before, beside the metrics


class Strategy(msgspec.Struct):
    """When GuideLLM sends a request."""

    type_: str = ""
    kind: str = ""  # since 0.7
    streams: Count | None = None
    rate: float | None = None
    max_concurrency: Count | None = None


class Sent(msgspec.Struct, frozen=True):
    """Place of the strategy: `args` to 0.3, `scheduler` in 0.4, then `config`."""

    strategy: Strategy | None = None
    backend: Any = None


class GuideBenchmark(msgspec.Struct):
    """One benchmark of a report of GuideLLM."""

    metrics: GuideMetrics
    duration: float
    args: Sent = Sent()
    scheduler: Sent = Sent()
    benchmarker: Sent = Sent()
    config: Sent = Sent()
    worker: Any = None
    request_totals: Totals | None = None
    total_count: Totals | None = None  # 0.2.0

    def strategy(self, where: str) -> Strategy:
        """When requests were sent; raises `MeasurementFileError` where it is not told."""
        for sent in (self.args, self.scheduler, self.config):
            if sent.strategy is not None:
                return sent.strategy
        raise MeasurementFileError(f"{where}: it does not tell when requests were sent")

    def model(self) -> str:
        """The model as the server names it, "" where the report leaves it out."""
        places = (self.config.backend, self.benchmarker.backend, self.worker)
        names = (within(place, key) for place in places for key in ("model", "backend_model"))
        return next((name for name in names if isinstance(name, str)), "")


def guide(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The run of a report of GuideLLM, a load for each of its benchmarks; those with failures are
    left out where others have none."""
    runs, refusals = [], []
    for record in records:
        for i, one in enumerate(record["benchmarks"], 1):
            at = f"{where}, benchmark {i}"
            found = typed(one, GuideBenchmark, at)
            try:
                version = within(record, "metadata", "guidellm_version")
                runs.append(_guided(found, version if isinstance(version, str) else "", at))
            except _LeftOut as error:
                refusals.append(str(error))
    if not runs:
        raise MeasurementFileError(refusals[0] if refusals else f"{where} holds no benchmark")
    notes = tuple(f"left out: {text}" for text in refusals)
    told = tuple(dict.fromkeys(note for run in runs for note in run.notes))
    same = [(replace(run, loads=(), notes=told + notes), run.loads[0]) for run in runs]
    return grouped(same)


class _LeftOut(MeasurementFileError):
    """A benchmark of several that teaches nothing."""


def _guided(found: GuideBenchmark, version: str, where: str) -> MeasuredRun:
    totals = found.metrics.request_totals or found.request_totals or found.total_count
    if totals is None:
        raise MeasurementFileError(f"{where}: it does not tell how many requests were served")
    try:
        notes = failures(totals.successful, totals.errored, where)
    except MeasurementFileError as error:
        raise _LeftOut(str(error)) from None
    metrics = found.metrics
    output, first, later = (
        metrics.output_token_count, metrics.time_to_first_token_ms, metrics.inter_token_latency_ms,
    )  # fmt: skip
    written = output.successful.mean * totals.successful
    if output.incomplete is not None:  # cut off at the end, but the server wrote them
        written += output.incomplete.mean * totals.incomplete
    load = Load(
        metrics.prompt_token_count.successful.mean, output.successful.mean, concurrency=0, rate=1.0,
        requests=totals.successful, seconds=found.duration, tokens_per_s=1.0,
        ttft_s=milliseconds(first.successful.mean),
        ttft_median_s=milliseconds(first.successful.median),
    )  # fmt: skip
    if output.successful.mean > 1.0:
        load = replace(
            load, tpot_s=milliseconds(later.successful.mean),
            tpot_median_s=milliseconds(later.successful.median),
        )  # fmt: skip
    load = replace(load, tokens_per_s=written / (checked(load, where).seconds or 1.0))
    rate, most = _strategy(found.strategy(where), where)
    tool = f"GuideLLM {version}".strip()
    return of_load(MeasuredRun(tool, "", (), model=found.model(), notes=notes), load, where, rate,
                   most)  # fmt: skip


def _strategy(sent: Strategy, where: str) -> tuple[float, int | None]:
    kind = sent.kind or sent.type_
    if kind == "synchronous":
        return math.inf, 1
    if kind == "concurrent" and sent.streams:
        return math.inf, sent.streams
    if kind == "throughput":
        return math.inf, sent.max_concurrency
    if kind in ("constant", "poisson", "async") and sent.rate:
        return rate_of(sent.rate, where), sent.max_concurrency
    raise _LeftOut(
        f"{where}: requests that are sent as in {kind!r} teach nothing; measure with --rate-type "
        "concurrent or constant"
    )


SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class Metric(msgspec.Struct):
    """A metric of AIPerf or GenAI-Perf, in its own unit."""

    unit: str
    avg: float
    p50: float | None = None

    def of_unit(self, units: dict[str, float], where: str) -> "Metric":
        """The metric in seconds; raises `MeasurementFileError` for a unit that is none of time."""
        if self.unit not in units:
            raise MeasurementFileError(
                f"{where}: a time in {self.unit!r} is none; expected one of {', '.join(units)}"
            )
        unit = units[self.unit]
        return Metric("s", self.avg * unit, scaled(self.p50, unit))


class PerfResult(msgspec.Struct):
    """A summary of AIPerf or of GenAI-Perf."""

    input_config: dict[str, Any]
    input_sequence_length: Metric
    output_sequence_length: Metric
    request_throughput: Metric
    output_token_throughput: Metric | None = None
    time_to_first_token: Metric | None = None  # with --streaming
    inter_token_latency: Metric | None = None
    request_count: Metric | None = None
    error_request_count: Metric | None = None
    benchmark_duration: Metric | None = None
    was_cancelled: bool | None = False
    aiperf_version: str | None = None
    schema_version: str | None = None
    telemetry_data: Any = None


def perf(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The runs of summaries of AIPerf or GenAI-Perf."""
    return [_perf(typed(record, PerfResult, where), where) for record in records]


def _perf(found: PerfResult, where: str) -> MeasuredRun:
    if found.was_cancelled:
        raise MeasurementFileError(f"{where}: the run was interrupted; measure again")
    sent = _sending(found.input_config, where)
    # Before GenAI-Perf counted requests there were more than in flight at once.
    done = found.request_count.avg if found.request_count else (sent.most or 0) + 1.0
    failed = found.error_request_count.avg if found.error_request_count else 0.0
    if not (math.isfinite(done) and math.isfinite(failed)):
        raise MeasurementFileError(f"{where}: {done:g} and {failed:g} are no numbers of requests")
    notes = failures(int(done), int(failed), where)
    first, later = (
        metric.of_unit(SECONDS, where) if metric else None
        for metric in (found.time_to_first_token, found.inter_token_latency)
    )
    lasted = found.benchmark_duration
    load = Load(
        found.input_sequence_length.avg, found.output_sequence_length.avg, requests=int(done),
        ttft_s=first and first.avg, ttft_median_s=first and first.p50,
        tpot_s=later and later.avg, tpot_median_s=later and later.p50,
        tokens_per_s=found.output_token_throughput and found.output_token_throughput.avg,
        seconds=lasted and lasted.of_unit(SECONDS, where).avg,
    )  # fmt: skip
    is_aiperf = found.aiperf_version is not None or found.schema_version is not None
    tool = f"AIPerf {found.aiperf_version or ''}".strip() if is_aiperf else "GenAI-Perf"
    run = MeasuredRun(tool, "", (), model=sent.model, device=_gpus(found), notes=notes)
    return of_load(run, load, where, sent.rate, sent.most)


class Sending(NamedTuple):
    """When a tool sends requests, and for which model."""

    rate: float
    most: int | None
    model: str


class Stimulus(msgspec.Struct):
    """Numbers that tell when requests are sent, by both names that they have."""

    concurrency: Count | None = None
    request_rate: float | None = None
    rate: float | None = None
    rate_series: Any = None
    type: str = ""


def _sending(config: dict[str, Any], where: str) -> Sending:
    """Concurrency, rate and model of the configuration of AIPerf or GenAI-Perf."""
    names = (
        within(config, "model"), within(config, "model_names"),
        within(config, "endpoint", "model_names"), within(config, "models", "items"),
    )  # fmt: skip
    model = next((name for name in names if name), "")
    model = model[0] if isinstance(model, list) else model
    model = within(model, "name") if isinstance(model, dict) else model
    places = (
        within(config, "loadgen"), within(config, "perf_analyzer", "stimulus"),
        _profiling(within(config, "phases"), where), config,
    )  # fmt: skip
    for place in places:
        if not isinstance(place, dict):
            continue
        keys = ("concurrency", "request_rate", "rate", "rate_series", "type")
        found = typed({k: place[k] for k in keys if k in place}, Stimulus, where)
        if found.rate_series is not None or found.type in ("user_centric", "fixed_schedule"):
            break
        rate = found.rate if found.request_rate is None else found.request_rate
        if rate is not None or found.concurrency:
            told = model if isinstance(model, str) else ""
            return Sending(rate_of(rate, where), found.concurrency, told)
    raise MeasurementFileError(
        f"{where}: it tells neither requests in flight nor one rate of them; measure with "
        "--concurrency or --request-rate"
    )


def _profiling(phases: Any, where: str) -> Any:
    """The one phase whose requests are measured, None where there are no phases."""
    if isinstance(phases, dict):
        phases = [{"name": name} | own for name, own in phases.items() if isinstance(own, dict)]
    if not isinstance(phases, list):
        return None
    own = [p for p in phases if "profiling" in (within(p, "kind"), within(p, "name"))]
    if len(own) > 1:
        raise MeasurementFileError(
            f"{where}: {len(own)} phases of load are summed up in it; give the file of one phase"
        )
    return own[0] if own else None


def _gpus(found: PerfResult) -> str:
    """Names of the GPUs that were watched."""
    names = [
        within(gpu, "gpu_name")
        for endpoint in _values(within(found.telemetry_data, "endpoints"))
        for gpu in _values(within(endpoint, "gpus"))
    ]
    return ", ".join(name for name in names if isinstance(name, str))


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


class OwnTimes(msgspec.Struct):
    """Tokens of a sample of `gdp run`, and the seconds of its phases."""

    prompt: Count
    new: Count
    cached: Count
    prompt_s: float
    steps_s: float


class OwnRun(msgspec.Struct):
    """A report of `gdp run --json`."""

    model: str
    versions: dict[str, str]
    generation: OwnTimes | None = None


def own(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The runs of reports of `gdp run --json` on language models."""
    rows = []
    for record in records:
        found = typed(record, OwnRun, where)
        times = found.generation
        if times is None:
            raise MeasurementFileError(
                f"{where} holds times of whole samples, not of requests; gdp tune learns from runs "
                "of this model"
            )
        load = Load(
            times.prompt, times.new, context=times.cached,
            ttft_s=times.prompt_s if times.prompt else None,
            tpot_s=times.steps_s / times.new if times.new else None,
        )  # fmt: skip
        package = found.versions.get("llama-cpp-python", "")
        version = f"llama-cpp-python {package}" if package else ""
        run = MeasuredRun("gdp run", "llamacpp", (), version=version, model=found.model)
        rows.append((run, checked(load, where)))
    return grouped(rows)


def _is_guide(record: Record) -> bool:
    benchmarks = record.get("benchmarks")
    return isinstance(benchmarks, list) and all(
        within(one, "metrics", "time_to_first_token_ms") is not None for one in benchmarks
    )


GUIDE = Reader("GuideLLM (benchmarks.json)", _is_guide, guide)
PERF = Reader(
    "AIPerf and GenAI-Perf (profile_export_aiperf.json, profile_export_genai_perf.json)",
    has("input_config", "request_throughput"),
    perf,
)  # fmt: skip
OWN = Reader("gdp run --json", has("measured_latency_s", "segments", "versions"), own)
