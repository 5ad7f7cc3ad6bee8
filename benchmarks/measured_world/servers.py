"""How the servers of the silicon sample were set up and asked.

Most rows come from InferenceX (github.com/SemiAnalysisAI/InferenceX, formerly InferenceMAX), those
of Qwen3 from sweeps of AIConfigurator's authors (github.com/ai-dynamo/aiconfigurator). Both publish
the scripts that start the servers and the program that asks them:

- InferenceX's `utils/bench_serving/benchmark_serving.py` lets C clients begin at once, with ten
  requests each, whose prompts and answers have 0.8 to 1 times the nominal tokens, drawn evenly
  (`--random-range-ratio 0.8`); the first token is the mean over all of them, the burst at the
  beginning included. AIConfigurator's `genai_perf_runner.py` asks as many of equal length.
- vLLM and SGLang cut prompts to fill a pass (`--max-num-batched-tokens`,
  `--chunked-prefill-size`), TensorRT-LLM does not unless told to (`max_num_tokens`). SGLang
  stops decoding while it reads prompts, unless `--enable-mixed-chunk` is given. AIConfigurator's
  rule gives it, but first tokens of its sweep say else: of 64 clients with 4,096 + 256 tokens on
  two H100 they come after 8.8 s (prompts alone 6.9, mixed passes 2.0), and so in all rows.
- All of them choose a pass while the one before it runs (vLLM's `--async-scheduling`, the default
  since 0.14; the overlap schedulers of the others), so that a prompt waits for one more pass.
- Passes of up to 2,048 tokens of MiniMax on B300 are replayed as graphs, those that read prompts
  too (`--max-cudagraph-capture-size`), and so are all passes of TensorRT-LLM with DeepSeek in 8
  bits on B200 where many ask (`enable_piecewise_cuda_graph`).
- vLLM fuses all-reduces with norms on B200 (`enable_fi_allreduce_fusion`), by FlashInfer's kernels,
  which are TensorRT-LLM's, up to 8 MB on eight GPUs and 32 MB on fewer
  (`VLLM_FLASHINFER_ALLREDUCE_FUSION_THRESHOLDS_MB`): in all steps, not where a prompt fills a pass.
- Caches have 8 bits (`--kv-cache-dtype fp8`, `kv_cache_config`) for Llama, MiniMax on H200 and
  B300, and DeepSeek under TensorRT-LLM and on B200. Room says else for two, and is believed. Llama
  on two H100 ran 29 requests of 7,373 + 922 tokens at once, of 32 and of 64 clients alike, as first
  tokens that waited 6.5 s and 59 s tell: 16 bits have room for 29, 8 bits for 58. MiniMax ran 32
  such requests on one B200 in 4 bits, and 256 on four in 8 bits, without a queue, for which 16 bits
  have no room.
- TensorRT-LLM lets prompts wait for others (`batch_wait_timeout_iters`,
  `batch_wait_max_tokens_ratio`), and SGLang looks at new requests each so many steps
  (`--scheduler-recv-interval`), in scripts that say so.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from gdp.costs.measured.kernels import ENGINES
from gdp.sim.scheduling import IterationBatch, Scheduler, chunks_of
from gdp.sim.serving import ServingEngine
from gdp.sim.traffic import ROUNDS, Arrival, Traffic
from gdp.targets.sglang.scheduler import SglangScheduler
from gdp.targets.vllm.scheduler import VllmScheduler

SHORTEST = 0.8
"""InferenceX's `RANDOM_RANGE_RATIO`: shortest over longest prompt, and answer."""


class Served(Protocol):
    """A run of a server, as the sample lists it."""

    @property
    def model(self) -> str: ...
    @property
    def system(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def prompt(self) -> int: ...
    @property
    def new(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def tensor(self) -> int: ...
    @property
    def sweep(self) -> bool: ...


@dataclass(frozen=True)
class TensorRtScheduler(Scheduler):
    """Whole prompts, which may wait for others before they share an iteration with decoding."""

    async_scheduling: bool = True
    wait_iterations: int = 0  # `batch_wait_timeout_iters`
    wait_tokens: int = 0  # `batch_wait_max_tokens_ratio`, of the tokens of an iteration

    def next_batch(
        self, queue: Iterable[int], running: int, room: int, deferred: int
    ) -> IterationBatch:
        """Prompts that fit whole; longer ones than an iteration are cut."""
        chunks = chunks_of(queue, room - running, whole=room)
        tokens = sum(chunks)
        few = tokens + running < self.wait_tokens
        if tokens and running and few and deferred < self.wait_iterations:
            return IterationBatch([], deferred_iterations=deferred + 1)
        return IterationBatch(chunks, deferred_iterations=0 if tokens else deferred)


class Setup(NamedTuple):
    """Settings of a script."""

    tokens_at_once: int
    scheduler: Scheduler
    graph_tokens: int = 0  # most tokens of passes that are replayed as graphs


def _vllm(run: Served) -> Setup:
    """70b_fp8_h200_slurm.sh and its siblings, minimaxm2.5_*.sh, kimik2.5_*.sh; `vllm.rule` of
    AIConfigurator."""
    scheduler = VllmScheduler(async_scheduling=not run.sweep)
    if run.sweep:
        return Setup(512 + run.prompt + 1500, scheduler)
    if "MiniMax" in run.model and run.system.startswith("h200"):
        return Setup(16384 if run.batch <= 32 else 32768, scheduler)
    if "MiniMax" in run.model and run.system.startswith("b300"):
        return Setup(2 * run.prompt, scheduler, graph_tokens=2048)
    return Setup(8192, scheduler)


def _sglang(run: Served) -> Setup:
    """dsr1_fp8_h200.sh, dsr1_fp8_b200.sh, dsr1_fp4_b200.sh."""
    alone = SglangScheduler()
    if run.sweep:
        return Setup(8192, alone)
    if not run.system.startswith("b"):
        return Setup(32768, alone)
    looks = SglangScheduler(admission_interval=30 if run.batch >= 16 else 10)
    if run.precision == "fp4":
        return Setup(16384, looks)
    if run.tensor == 4:
        return Setup(8192, replace(looks, admission_interval=10))
    return Setup(32768, looks)


def _trtllm(run: Served) -> Setup:
    """70b_*_trt_slurm.sh, dsr1_*_trt.sh; `trtllm.rule` of AIConfigurator."""
    scheduler = TensorRtScheduler()
    if run.sweep:
        return Setup(math.ceil((512 + run.prompt + 1500) / 32) * 32, scheduler)
    short = run.prompt == run.new == 1024
    if "Llama" in run.model:
        tokens = 16384
        if short and run.tensor < 8:
            scheduler = TensorRtScheduler(wait_iterations=20, wait_tokens=round(0.9 * tokens))
        return Setup(tokens, scheduler)
    tokens = max(8192, math.ceil((run.batch + run.prompt + 64) / 64) * 64)
    blackwell = run.system.startswith("b200") and run.precision == "fp8"
    many = run.batch >= (128 if run.new > 1024 else 64)
    recorded = blackwell and many and (run.batch < 256 or run.prompt > 1024)
    if blackwell and short and 64 <= run.batch < 256:
        scheduler = TensorRtScheduler(wait_iterations=40, wait_tokens=round(0.8 * tokens))
    return Setup(tokens, scheduler, tokens if recorded else 0)


SETUPS: Mapping[str, Callable[[Served], Setup]] = {
    "vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm,
}  # fmt: skip
"""Set-up of a run, by its engine."""


def collectives_of(run: Served) -> tuple[str, str]:
    """Engines, as of `ENGINES`, whose collectives prompts and steps of a run take."""
    own = run.engine if run.engine in ENGINES else "vllm"
    fused = own == "vllm" and "Llama" in run.model and run.system.startswith("b200")
    return own, "trtllm" if fused else own


def host_of(run: Served) -> str:
    """Engine, as of `HOSTS`, whose steps those of a run are: sweeps ran vLLM 0.12, which does not
    schedule ahead unless told to, and TensorRT-LLM 1.0."""
    if run.engine == "vllm":
        return "vllm-sync" if run.sweep else "vllm"
    return "trtllm-1.0" if run.engine == "trtllm" and run.sweep else run.engine


def cache_bits(run: Served) -> int | None:
    """Bits of keys and values; None for those that the weights' scheme says."""
    if "MiniMax" in run.model and run.system.startswith(("h200", "b200", "b300")):
        return 8
    if "DeepSeek" in run.model and (run.engine == "trtllm" or run.system.startswith("b200")):
        return 8
    if run.engine == "vllm" and "Llama" in run.model and run.system.startswith("h100"):
        return 16
    return None


def set_up(engine: ServingEngine, run: Served) -> ServingEngine:
    """The engine as the server of a run was started."""
    own = SETUPS[run.engine](run)
    return engine._replace(
        tokens_at_once=own.tokens_at_once,
        scheduler=replace(own.scheduler, request_s=VllmScheduler.request_s),
        launch_s=0.0 if own.tokens_at_once <= own.graph_tokens else engine.launch_s,
        requests_at_once=max(engine.requests_at_once, run.batch),
    )  # fmt: skip


def asked_of(run: Served, seed: int = 0) -> Traffic:
    """The requests that a server was measured with."""
    count, rng = ROUNDS * run.batch, np.random.default_rng(seed)
    least = 1.0 if run.sweep else SHORTEST
    prompt, new = (
        rng.integers(int(least * most), most + 1, count).tolist() for most in (run.prompt, run.new)
    )
    sizes = zip(prompt, new, strict=True)
    return Traffic(tuple(Arrival(0.0, *own) for own in sizes), run.batch, together=True)
