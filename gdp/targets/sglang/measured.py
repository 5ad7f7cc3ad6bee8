"""Result files of `sglang.bench_serving`, `sglang.bench_one_batch` and `bench_one_batch_server`.

Keys are those of python/sglang/bench_serving.py (0.2 to 0.5; since then
python/sglang/benchmark/serving.py), bench_one_batch.py and bench_one_batch_server.py. All three
append a line to their file for every run.
"""

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
    milliseconds,
    of_load,
    rate_of,
    typed,
)

SERVING = "sglang.bench_serving"
MOST_CACHED = 0.01
"""Share of the prompts that may have been in the prefix cache: they are not read again."""


class ServerInfo(msgspec.Struct):
    """The server's own options, since 0.5."""

    model_path: str | None = None
    version: str | None = None
    quantization: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    tp_size: Count | None = None
    pp_size: Count | None = None
    dp_size: Count | None = None
    ep_size: Count | None = None
    max_running_requests: Count | None = None
    chunked_prefill_size: int | None = None
    context_length: Count | None = None
    mem_fraction_static: float | None = None


class ServingResult(msgspec.Struct):
    """A line of `sglang.bench_serving`; `errors` is there with --output-details."""

    completed: Count
    duration: float
    total_input_tokens: Count
    total_output_tokens: Count
    backend: str
    request_rate: float | str | None = None  # "trace" where a trace tells when requests arrive
    max_concurrency: Count | None = None  # since 0.3.5
    num_prompts: Count | None = None
    output_throughput: float | None = None
    mean_ttft_ms: float | None = None
    median_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    median_tpot_ms: float | None = None
    accept_length: float | None = None
    total_input_vision_tokens: Count = 0
    server_info: Any = None
    errors: list[str] = []


def serving(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The runs of a file of `sglang.bench_serving`, one for each line."""
    return [
        _served(typed(record, ServingResult, where), f"{where}, line {i}" if i > 1 else where)
        for i, record in enumerate(records, 1)
    ]


def _served(found: ServingResult, where: str) -> MeasuredRun:
    asked = found.completed if found.num_prompts is None else found.num_prompts
    lost = max(asked - found.completed, sum(map(bool, found.errors)))
    notes = failures(found.completed, lost, where)
    if found.accept_length:
        notes += (f"a step of its speculative decoding made {found.accept_length:g} tokens",)
    if found.total_input_vision_tokens:
        notes += ("its prompts hold images",)
    single = found.total_output_tokens <= found.completed  # numpy's mean of none is 0
    load = Load(
        prompt=found.total_input_tokens / found.completed,
        new=found.total_output_tokens / found.completed,
        requests=found.completed, seconds=found.duration, concurrency=0, tokens_per_s=1.0, rate=1.0,
        ttft_s=milliseconds(found.mean_ttft_ms), ttft_median_s=milliseconds(found.median_ttft_ms),
        tpot_s=None if single else milliseconds(found.mean_tpot_ms),
        tpot_median_s=None if single else milliseconds(found.median_tpot_ms),
    )  # fmt: skip
    made = found.total_output_tokens / (checked(load, where).seconds or 1.0)
    name = "output tokens per second"
    load = replace(load, tokens_per_s=agreed(found.output_throughput, made, name, where))
    return of_load(
        replace(_run(found, where), notes=notes), load, where, rate_of(found.request_rate, where),
        found.max_concurrency,
    )  # fmt: skip


def _run(found: ServingResult, where: str) -> MeasuredRun:
    engine = next((e for e in ("sglang", "vllm") if found.backend.startswith(e)), "")
    run = MeasuredRun(SERVING, engine, ())
    if engine != "sglang" or not isinstance(found.server_info, dict):
        return run
    server = typed(found.server_info, ServerInfo, f"{where}, server_info")
    told = ("model_path", "version", "quantization")
    return replace(
        run, model=server.model_path or "", version=server.version or "",
        format=server.quantization or "",
        settings=flags(
            (f"--{name.replace('_', '-')}", getattr(server, name))
            for name in server.__struct_fields__ if name not in told
        ),
    )  # fmt: skip


class BatchResult(msgspec.Struct):
    """A line of `sglang.bench_one_batch`: the model without a server."""

    batch_size: Count
    input_len: Count
    output_len: Count
    prefill_latency: float
    total_latency: float
    median_decode_latency: float | None = None


def one_batch(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The run of a file of `sglang.bench_one_batch`, a load for each line."""
    notes = ("its batches run without the server and its scheduler",)
    run = MeasuredRun("sglang.bench_one_batch", "sglang", (), notes=notes)
    rows = []
    for i, record in enumerate(records, 1):
        at = f"{where}, line {i}"
        found = typed(record, BatchResult, at)
        load = Load(
            found.input_len, found.output_len, found.batch_size, together=True,
            requests=found.batch_size, ttft_s=found.prefill_latency,
            tpot_median_s=found.median_decode_latency, seconds=found.total_latency,
        )  # fmt: skip
        rows.append((run, _in_batch(load, at)))
    return grouped(rows)


class ServerBatchResult(msgspec.Struct):
    """A line of `sglang.bench_one_batch_server`: a batch that is sent to a server at once."""

    batch_size: Count
    input_len: Count
    output_len: Count
    latency: float
    last_ttft: float  # until the last prompt is read
    output_throughput: float  # behind that
    cache_hit_rate: float | None = None
    acc_length: float | None = None  # -1 where nothing drafts


def server_batch(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The run of a file of `sglang.bench_one_batch_server`, a load for each line."""
    run = MeasuredRun("sglang.bench_one_batch_server", "sglang", ())
    rows = []
    for i, record in enumerate(records, 1):
        at = f"{where}, line {i}"
        found = typed(record, ServerBatchResult, at)
        if (found.cache_hit_rate or 0.0) > MOST_CACHED:
            raise MeasurementFileError(
                f"{at}: {found.cache_hit_rate:.0%} of the prompts were in the prefix cache; "
                "measure with --cache-hit-rate 0"
            )
        accepted = found.acc_length or 0.0
        drafts = f"a step of its speculative decoding made {accepted:g} tokens"
        own = replace(run, notes=(drafts,)) if accepted > 1.0 else run
        steps = found.output_len - 1
        load = Load(
            found.input_len, found.output_len, found.batch_size, together=True,
            requests=found.batch_size, ttft_s=found.last_ttft, seconds=found.latency,
            tpot_s=(found.latency - found.last_ttft) / steps if steps > 0 else None,
        )  # fmt: skip
        rows.append((own, _in_batch(load, at)))
    return grouped(rows)


def _in_batch(load: Load, where: str) -> Load:
    """The load with the rate of its output tokens, once its numbers can be."""
    seconds = checked(load, where).seconds or 1.0
    return checked(replace(load, tokens_per_s=load.requests * load.new / seconds), where)


MEASURED_SERVING = Reader(
    f"{SERVING} --output-file",
    has("total_output_tokens_retokenized", "completed", "duration"), serving,
)  # fmt: skip
MEASURED_BATCH = Reader(
    "sglang.bench_one_batch --result-filename",
    has("batch_size", "input_len", "prefill_latency", "total_latency"), one_batch,
)  # fmt: skip
MEASURED_SERVER_BATCH = Reader(
    "sglang.bench_one_batch_server --result-filename",
    has("batch_size", "input_len", "last_ttft", "overall_throughput"), server_batch,
)  # fmt: skip
