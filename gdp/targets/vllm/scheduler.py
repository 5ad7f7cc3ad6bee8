"""vLLM's scheduler: chunked prefill, asynchronous, with preemption."""

from dataclasses import dataclass

from gdp.sim.scheduling import Scheduler


@dataclass(frozen=True)
class VllmScheduler(Scheduler):
    """`--async-scheduling` is the default since 0.14. Requests start where their prompts have room,
    and the last started is recomputed where caches run out (vLLM's "Optimization and Tuning",
    Preemption; vllm-project/vllm#54644 says which). The host takes 20 ms for a request beside the
    engine (HTTP, tokenisation, the way between processes, and back): of 1, 10, 20 and 30 ms that by
    which TTFTs of Llama 3.1 70B on four kinds of GPU are off least in the median (16.8%, 12.5%,
    10.9%, 11.3%; `benchmarks.measured_world serving`, 2026-11-27)."""

    async_scheduling: bool = True
    request_s: float = 0.02
    preempts: bool = True
