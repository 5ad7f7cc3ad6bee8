"""Result files of `vllm bench serve`, `latency` and `throughput`.

Keys are those of vllm/benchmarks/serve.py, latency.py, throughput.py and lib/utils.py, and of
benchmarks/benchmark_serving.py before 0.10. Files of `serve` hold the load; those that the other
two write with --output-json do not, while their copies for PyTorch's benchmark database do.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gdp.corrections.run import Load, MeasuredRun, MeasurementFileError, checked
from gdp.targets.measured import (
    Count,
    Reader,
    Record,
    agreed,
    failures,
    flags,
    grouped,
    has,
    mean,
    median,
    milliseconds,
    of_load,
    rate_of,
    typed,
    within,
)

SERVE = "vllm bench serve"
RATE_OF_TOKENS = "output tokens per second"


class ServeResult(msgspec.Struct):
    """A file of `vllm bench serve`; lists are there with --save-detailed."""

    completed: Count
    total_input_tokens: Count
    duration: float
    model_id: str
    total_output_tokens: Count | None = None  # None where vectors were asked for
    backend: str = ""
    endpoint_type: str = ""  # before `backend` came back, in vllm/benchmarks/serve.py of 0.10
    num_prompts: Count | None = None
    failed: Count = 0  # since 0.11
    request_rate: float | str | None = None
    max_concurrency: Count | None = None  # since 0.6.4
    burstiness: float = 1.0
    ramp_up_strategy: str | None = None
    output_throughput: float | None = None
    mean_ttft_ms: float | None = None  # each where --percentile-metrics names it
    median_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    median_tpot_ms: float | None = None
    p95_ttft_ms: float | None = None  # both with --metric-percentiles 95
    p95_tpot_ms: float | None = None
    spec_decode_acceptance_length: float | None = None
    tensor_parallel_size: Count | str | None = None  # both of --metadata
    version: str = ""
    output_lens: list[Count] = []
    ttfts: list[float] = []
    itls: list[list[float]] = []
    errors: list[str] = []

    @property
    def lost(self) -> int:
        """Requests that failed, by whichever field tells most of them."""
        asked = self.completed if self.num_prompts is None else self.num_prompts
        return max(self.failed, asked - self.completed, sum(map(bool, self.errors)))

    def timed(self, load: Load) -> Load:
        """The load with seconds of the first token and of those after it: means and medians of the
        file, or of its lists where it has none."""
        if self.mean_ttft_ms is not None:
            load = replace(
                load, ttft_s=milliseconds(self.mean_ttft_ms),
                ttft_median_s=milliseconds(self.median_ttft_ms),
                ttft_p95_s=milliseconds(self.p95_ttft_ms),
            )  # fmt: skip
        else:
            first = [t for t, n in zip(self.ttfts, self.output_lens, strict=False) if n > 0]
            load = replace(load, ttft_s=mean(first), ttft_median_s=median(first))
        if load.new <= 1.0:
            return load  # numpy's mean of no times is 0
        if self.mean_tpot_ms is not None:
            return replace(
                load, tpot_s=milliseconds(self.mean_tpot_ms),
                tpot_median_s=milliseconds(self.median_tpot_ms),
                tpot_p95_s=milliseconds(self.p95_tpot_ms),
            )  # fmt: skip
        gaps = zip(self.itls, self.output_lens, strict=False)
        later = [sum(own) / (n - 1) for own, n in gaps if n > 1]
        return replace(load, tpot_s=mean(later), tpot_median_s=median(later))


def serve(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The runs of a file of `vllm bench serve`, one for each record."""
    return [
        _served(typed(record, ServeResult, where), where if i == 0 else f"{where}, record {i + 1}")
        for i, record in enumerate(records)
    ]


def _served(found: ServeResult, where: str) -> MeasuredRun:
    if found.total_output_tokens is None:
        raise MeasurementFileError(
            f"{where} is a benchmark of vectors, not of answers; measure a model that generates"
        )
    if found.ramp_up_strategy is not None:
        raise MeasurementFileError(
            f"{where}: its requests arrive at a rate that rises; measure at one --request-rate"
        )
    notes = failures(found.completed, found.lost, where)
    if found.burstiness != 1.0:
        notes += (f"requests arrived with a burstiness of {found.burstiness:g}, not as by chance",)
    if found.spec_decode_acceptance_length is not None:
        accepted = found.spec_decode_acceptance_length
        notes += (f"a step of its speculative decoding made {accepted:g} tokens",)
    load = found.timed(Load(
        prompt=found.total_input_tokens / found.completed,
        new=found.total_output_tokens / found.completed,
        requests=found.completed, concurrency=0, seconds=found.duration,
    ))  # fmt: skip
    load = _with_rate(load, found.total_output_tokens, found.output_throughput, where)
    backend = found.backend or found.endpoint_type
    run = MeasuredRun(
        SERVE, _engine(backend), (), model=found.model_id, notes=notes,
        version=found.version,
        settings=flags([("--tensor-parallel-size", found.tensor_parallel_size)]),
    )  # fmt: skip
    return of_load(run, load, where, rate_of(found.request_rate, where), found.max_concurrency)


def _with_rate(load: Load, tokens: float, told: float | None, where: str) -> Load:
    """The load with the rate of its output tokens; raises where its seconds cannot be."""
    seconds = checked(replace(load, tokens_per_s=1.0, rate=1.0), where).seconds or 0.0
    if not tokens:
        return load
    return replace(load, tokens_per_s=agreed(told, tokens / seconds, RATE_OF_TOKENS, where))


def _engine(backend: str) -> str:
    """The engine that a backend of the benchmark asks; "" where it asks any server, as "openai"
    does."""
    for prefix, engine in (("vllm", "vllm"), ("sglang", "sglang"), ("llama.cpp", "llamacpp")):
        if backend.startswith(prefix):
            return engine
    return ""


class OfflineArguments(msgspec.Struct):
    """Options of `vllm bench latency` and `throughput`; those of the engine are its own."""

    input_len: Count | None = None
    output_len: Count | None = None
    batch_size: Count | None = None
    n: Count = 1
    quantization: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: Count | None = None
    pipeline_parallel_size: Count | None = None
    data_parallel_size: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_model_len: Count | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None

    def settings(self) -> tuple[tuple[str, str], ...]:
        """The engine's options, in its own words."""
        mine = ("input_len", "output_len", "batch_size", "n", "quantization")
        return flags(
            (f"--{name.replace('_', '-')}", getattr(self, name))
            for name in self.__struct_fields__
            if name not in mine
        )


class OfflineRun(msgspec.Struct):
    """The run as a whole, of `throughput`."""

    elapsed_time: float | None = None
    num_requests: Count | None = None
    total_num_tokens: Count | None = None


class OfflineMetric(msgspec.Struct):
    """The values of a record."""

    name: str
    benchmark_values: list[float]
    extra_info: OfflineRun


class OfflineRecord(msgspec.Struct):
    """One metric in the form of PyTorch's benchmark database."""

    benchmark: dict[str, Any]
    model: dict[str, Any]
    metric: OfflineMetric


def offline(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The runs of a .pytorch.json of `vllm bench latency` or `throughput`."""
    found = [typed(record, OfflineRecord, where) for record in records]
    # The second metric of `throughput` is the first one once more.
    found = [record for record in found if record.metric.name in ("latency", "tokens_per_second")]
    rows = [_offline(record, where) for record in found]
    if not rows:
        raise MeasurementFileError(f"{where} has no times of vllm bench latency or throughput")
    return grouped(rows)


def _offline(record: OfflineRecord, where: str) -> tuple[MeasuredRun, Load]:
    asked = typed(within(record.benchmark, "extra_info", "args"), OfflineArguments, where)
    metric = record.metric
    if not asked.input_len or asked.output_len is None or asked.n != 1:
        raise MeasurementFileError(
            f"{where}: lengths of prompts and answers are not told; measure with --input-len and "
            "--output-len, and one answer a prompt"
        )
    prompt, new, info = asked.input_len, asked.output_len, metric.extra_info
    if metric.name == "latency":
        tool, seconds, requests = "vllm bench latency", mean(metric.benchmark_values), 1
        load = Load(prompt, new, rate=math.inf, concurrency=0, requests=asked.batch_size or 0)
    else:
        tool, seconds, requests = "vllm bench throughput", info.elapsed_time, info.num_requests
        load = Load(prompt, new, rate=math.inf, concurrency=0, requests=requests or 0)
        tokens = load.requests * (prompt + new)
        agreed(info.total_num_tokens, tokens, "tokens of all requests", where)
    if seconds is None or not all(value > 0 for value in metric.benchmark_values):
        raise MeasurementFileError(f"{where}: seconds of its runs are missing, or none at all")
    load = _with_rate(replace(load, seconds=seconds), load.requests * new, None, where)
    run = MeasuredRun(
        tool, "vllm", (), model=str(record.model.get("name", "")), format=asked.quantization or "",
        settings=asked.settings(),
    )  # fmt: skip
    return run, checked(load, where)


def bare(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """Refuse a file of `vllm bench latency` or `throughput` that does not hold the load."""
    raise MeasurementFileError(
        f"{where} tells seconds, but not the lengths of prompts and answers; set "
        "SAVE_TO_PYTORCH_BENCHMARK_FORMAT=1, measure again, and give the .pytorch.json beside it"
    )


def _is_bare(record: Record) -> bool:
    return has("avg_latency", "latencies", "percentiles")(record) or has(
        "elapsed_time", "num_requests", "total_num_tokens", "tokens_per_second"
    )(record)


def _is_offline(record: Record) -> bool:
    benchmark = record.get("benchmark")
    named = isinstance(benchmark, dict) and benchmark.get("name") == "vLLM benchmark"
    return named and has("metric", "model")(record)


MEASURED_SERVING = Reader(f"{SERVE} --save-result", has("model_id", "request_throughput"), serve)
MEASURED_OFFLINE = Reader(
    "vllm bench latency and throughput (.pytorch.json)", _is_offline, offline
)  # fmt: skip
BARE = Reader("vllm bench latency and throughput --output-json", _is_bare, bare)
