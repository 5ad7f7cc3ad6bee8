"""Measured runs: the loads that a benchmark put on an engine, and the times that it wrote down."""

import math
from dataclasses import dataclass

from gdp.base.errors import GdpError


class MeasurementFileError(GdpError):
    """A result file of a benchmark that is not one, or says what cannot be."""


@dataclass(frozen=True)
class Load:
    """Requests that a benchmark sent, and what it measured of them.

    Attributes:
        prompt: Tokens of a prompt, mean.
        new: Tokens of an answer, mean; 0 where prompts alone were read.
        concurrency: Requests in flight all the time; 0 where they arrived at `rate`.
        rate: Requests that arrived per second; inf where all arrived at once.
        requests: Number of them that were measured.
        together: Their prompts are read at once, and then all of them decode, as
            llama-batched-bench has it.
        context: Tokens that the cache held before the prompt (llama-bench's depth).
        ttft_s: Seconds to the first token, mean over the requests; None where no file says it.
        ttft_median_s: The same, median.
        tpot_s: Seconds of an output token after the first, mean over the requests.
        tpot_median_s: The same, median.
        ttft_p95_s: Seconds to the first token that 95% of the requests keep.
        tpot_p95_s: The same, of an output token after the first.
        tokens_per_s: Output tokens of all requests per second of the whole run.
        seconds: Of the whole run.
    """

    prompt: float
    new: float
    concurrency: int = 1
    rate: float = 0.0
    requests: int = 1
    together: bool = False
    context: int = 0
    ttft_s: float | None = None
    ttft_median_s: float | None = None
    tpot_s: float | None = None
    tpot_median_s: float | None = None
    ttft_p95_s: float | None = None
    tpot_p95_s: float | None = None
    tokens_per_s: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class MeasuredRun:
    """One run of an engine's benchmark, of one or several loads; "" where its file leaves it out.

    Attributes:
        tool: Program that measured, such as "vllm bench serve".
        engine: Row of the table of targets, such as "vllm"; "" where the tool asks any server.
        version: Of the engine, or its build.
        model: As the file names it: a path, a name on the hub, or the title of a GGUF file.
        format: Of the weights, such as "Q4_K - Medium" or "fp8".
        backend: Such as "CUDA" or "Vulkan".
        device: Names of the GPUs, as the file has them.
        processor: Name of the processor.
        settings: Options of the engine that the file tells, as the engine spells them.
        model_bytes: Of the weights; 0 where unknown.
        loads: What was measured.
        notes: What a user should know of the file, in sentences.
    """

    tool: str
    engine: str
    loads: tuple[Load, ...]
    version: str = ""
    model: str = ""
    format: str = ""
    backend: str = ""
    device: str = ""
    processor: str = ""
    settings: tuple[tuple[str, str], ...] = ()
    model_bytes: int = 0
    notes: tuple[str, ...] = ()


def checked(load: Load, where: str) -> Load:
    """A load whose numbers can be; `where` names the file and the part of it.

    Raises:
        MeasurementFileError: Tokens or times are no positive numbers, a token takes longer than an
            hour or less than a microsecond (so that milliseconds were taken for seconds, or the
            other way round), a time is longer than the whole run, or the rate of tokens contradicts
            the times.
    """
    for name, value, least, most in (
        ("tokens of a prompt", load.prompt, 0.0, 1e8), ("tokens of an answer", load.new, 0.0, 1e8),
        ("seconds to the first token", load.ttft_s, 1e-5, 36e3),
        ("median seconds to the first token", load.ttft_median_s, 1e-5, 36e3),
        ("seconds of a token", load.tpot_s, 1e-6, 3600.0),
        ("median seconds of a token", load.tpot_median_s, 1e-6, 3600.0),
        ("95th percentile of seconds to the first token", load.ttft_p95_s, 1e-5, 36e3),
        ("95th percentile of seconds of a token", load.tpot_p95_s, 1e-6, 3600.0),
        ("tokens per second", load.tokens_per_s, 1e-4, 1e8),
        ("seconds of the run", load.seconds, 1e-6, 1e8), ("requests", load.requests, 1, 1e9),
        ("tokens before the prompt", load.context, 0, 1e8),
        ("requests in flight", load.concurrency, 0, 1e6),
    ):  # fmt: skip
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise MeasurementFileError(
                f"{where}: {name} cannot be {value:g}; expected {least:g} to {most:g}"
            )
    if load.prompt + load.new < 1:
        raise MeasurementFileError(
            f"{where}: no tokens were read or written; measure some requests"
        )
    if not load.concurrency and not (0.0 < load.rate <= 1e6 or load.rate == math.inf):
        raise MeasurementFileError(f"{where}: requests cannot arrive at {load.rate:g} per second")
    times = (load.ttft_s, load.ttft_median_s, load.tpot_s, load.tpot_median_s)
    if all(value is None for value in (*times, load.tokens_per_s)):
        raise MeasurementFileError(f"{where}: it tells no time of a token and no rate of tokens")
    longest = max((value for value in times if value is not None), default=0.0)
    if load.seconds is not None and longest > 1.01 * load.seconds:
        raise MeasurementFileError(
            f"{where}: {longest:g} s cannot be a part of a run of {load.seconds:g} s"
        )
    tpot_s = load.tpot_s if load.tpot_s is not None else load.tpot_median_s
    if tpot_s is not None and load.tokens_per_s is not None and load.concurrency:
        most = 2.0 * load.concurrency / tpot_s
        if load.new > 1 and load.tokens_per_s > most:
            raise MeasurementFileError(
                f"{where}: {load.tokens_per_s:g} output tokens per second of {load.concurrency} "
                f"requests that take {tpot_s:g} s for each token cannot be: at most {most / 2:g}"
            )
    return load
