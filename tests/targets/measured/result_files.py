"""Made-up result files, in the form in which each tool writes them, and the loads that they hold.

Keys are those of the tools' sources; all numbers are made up so that the loads can be checked by
hand.
"""

import csv
import io
import json
from dataclasses import dataclass, replace
from typing import Any

from gdp.corrections.run import Load, MeasuredRun

INF = float("inf")
Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Example:
    """A result file with what should be read of it."""

    name: str
    title: str  # of the reader
    records: list[Any]
    runs: list[MeasuredRun]
    form: str = "json"  # "array", "jsonl" or "csv"
    needed: tuple[Keys, ...] = ()  # keys of the first record that cannot be left out
    times: tuple[Keys, ...] = ()  # and times in it that cannot be 1e9 times as long
    numbers: tuple[Keys, ...] = ()  # and other numbers that are read

    def text(self, records: list[Any] | None = None) -> str:
        """The file, with its own records or with others."""
        own = self.records if records is None else records
        if self.form == "json":
            return json.dumps(own[0], indent=1)
        if self.form == "array":
            return json.dumps(own, indent=2)
        if self.form == "jsonl":
            return "".join(json.dumps(record) + "\n" for record in own)
        file = io.StringIO()
        file.write(",".join(own[0]) + "\n")  # llama-bench quotes values alone
        csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
            record.values() for record in own
        )
        return file.getvalue()


def paths(*dotted: str) -> tuple[Keys, ...]:
    """Paths of keys; numbers are indices."""
    return tuple(tuple(int(k) if k.isdigit() else k for k in d.split(".")) for d in dotted)


def vllm_serve(**changed: Any) -> dict[str, Any]:
    """100 requests of 1000 and 201 tokens at a concurrency of 8, in 600 s: a request takes
    0.5 s and 200 steps of 20 ms, 4.5 s."""
    return {
        "date": "20260101-120000", "endpoint_type": "vllm", "backend": "vllm", "label": None,
        "model_id": "made/up-8b", "tokenizer_id": "made/up-8b", "num_prompts": 100,
        "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 8, "duration": 60.0,
        "completed": 100, "failed": 0, "total_input_tokens": 100_000, "total_output_tokens": 20_100,
        "request_throughput": 100 / 60, "request_goodput": None, "output_throughput": 335.0,
        "total_token_throughput": 2001.67, "max_output_tokens_per_s": 400.0,
        "max_concurrent_requests": 8, "rtfx": 0.0,
        "mean_ttft_ms": 500.0, "median_ttft_ms": 480.0, "std_ttft_ms": 30.0, "p99_ttft_ms": 600.0,
        "mean_tpot_ms": 20.0, "median_tpot_ms": 19.5, "std_tpot_ms": 1.0, "p99_tpot_ms": 24.0,
        "mean_itl_ms": 20.0, "median_itl_ms": 19.0, "std_itl_ms": 3.0, "p99_itl_ms": 60.0,
    } | changed  # fmt: skip


SERVED = Load(
    1000.0, 201.0, concurrency=8, requests=100, seconds=60.0, tokens_per_s=335.0, ttft_s=0.5,
    ttft_median_s=0.48, tpot_s=0.02, tpot_median_s=0.0195,
)  # fmt: skip
SERVE_NUMBERS = paths("completed", "total_input_tokens", "total_output_tokens")
SERVE_TIMES = paths("mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "duration")


def vllm_detailed() -> dict[str, Any]:
    """Two requests, as --save-detailed writes them where no metric has a summary: 3 and 5 tokens,
    100 and 300 ms to the first, 20 and 40 ms between."""
    whole = vllm_serve(
        num_prompts=2, completed=2, total_input_tokens=12, total_output_tokens=8, duration=0.5,
        output_throughput=16.0, request_throughput=4.0, max_concurrency=None, request_rate=4.0,
        backend="openai", endpoint_type="openai",
        input_lens=[4, 8], output_lens=[3, 5], ttfts=[0.1, 0.3],
        itls=[[0.02, 0.02], [0.04, 0.03, 0.05, 0.04]], generated_texts=["a", "b"],
        errors=["", ""], start_times=[1.0, 1.2],
    )  # fmt: skip
    return {k: v for k, v in whole.items() if "_ttft_" not in k and "_tpot_" not in k}


DETAILED = Load(
    6.0, 4.0, concurrency=0, rate=4.0, requests=2, seconds=0.5, tokens_per_s=16.0, ttft_s=0.2,
    ttft_median_s=0.2, tpot_s=0.03, tpot_median_s=0.03,
)  # fmt: skip


def vllm_old() -> dict[str, Any]:
    """benchmark_serving.py of 0.6: no failures, no concurrency, and Infinity as a word."""
    new = {"failed", "max_concurrency", "burstiness", "endpoint_type", "label", "rtfx",
           "max_output_tokens_per_s", "max_concurrent_requests", "request_goodput"}  # fmt: skip
    whole = vllm_serve(best_of=1, request_rate="inf", num_prompts=100)
    return {k: v for k, v in whole.items() if k not in new}


def vllm_offline(name: str, values: list[float], info: dict[str, Any]) -> dict[str, Any]:
    """A record for PyTorch's benchmark database: 16 prompts of 512 tokens, 128 new ones."""
    arguments = {
        "input_len": 512, "output_len": 128, "batch_size": 16, "n": 1, "num_prompts": 50,
        "model": "made/up-8b", "tokenizer": "made/up-8b", "dtype": "bfloat16",
        "quantization": "fp8", "tensor_parallel_size": 2, "enforce_eager": False,
        "max_num_seqs": None, "compilation_config": {"level": 3},
    }  # fmt: skip
    return {
        "benchmark": {"name": "vLLM benchmark", "extra_info": {"args": arguments}},
        "model": {"name": "made/up-8b"},
        "metric": {"name": name, "benchmark_values": values, "extra_info": info},
    }


OFFLINE = MeasuredRun(
    "vllm bench latency", "vllm", (), model="made/up-8b", format="fp8",
    settings=(
        ("--dtype", "bfloat16"), ("--tensor-parallel-size", "2"), ("--enforce-eager", "off"),
    ),
)  # fmt: skip


def with_loads(run: MeasuredRun, *loads: Load) -> MeasuredRun:
    """The run, of these loads."""
    return replace(run, loads=loads)


def sglang_serving(**changed: Any) -> dict[str, Any]:
    """64 requests of 500 and 101 tokens at a concurrency of 4, in 40 s."""
    return {
        "tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": INF,
        "max_concurrency": 4, "sharegpt_output_len": None, "random_input_len": 500,
        "random_output_len": 101, "random_range_ratio": 1.0,
        "server_info": {
            "model_path": "made/up-14b", "version": "0.5.3", "quantization": "fp8", "dtype": "auto",
            "tp_size": 2, "pp_size": 1, "chunked_prefill_size": -1, "internal_states": [{}],
        },
        "duration": 40.0, "completed": 64, "total_input_tokens": 32_000,
        "total_input_text_tokens": 32_000, "total_input_vision_tokens": 0,
        "total_output_tokens": 6464, "total_output_tokens_retokenized": 6400,
        "request_throughput": 1.6, "input_throughput": 800.0, "output_throughput": 161.6,
        "total_throughput": 961.6,
        "mean_e2e_latency_ms": 2250.0, "median_e2e_latency_ms": 2240.0, "std_e2e_latency_ms": 1.0,
        "p99_e2e_latency_ms": 2300.0,
        "mean_ttft_ms": 250.0, "median_ttft_ms": 245.0, "std_ttft_ms": 9.0, "p99_ttft_ms": 280.0,
        "mean_tpot_ms": 20.0, "median_tpot_ms": 21.0, "std_tpot_ms": 1.0, "p99_tpot_ms": 25.0,
        "mean_itl_ms": 20.0, "median_itl_ms": 19.0, "std_itl_ms": 5.0, "p95_itl_ms": 40.0,
        "p99_itl_ms": 55.0, "max_itl_ms": 90.0, "concurrency": 3.6, "accept_length": None,
    } | changed  # fmt: skip


SGLANG = Load(
    500.0, 101.0, concurrency=4, requests=64, seconds=40.0, tokens_per_s=161.6, ttft_s=0.25,
    ttft_median_s=0.245, tpot_s=0.02, tpot_median_s=0.021,
)  # fmt: skip
SGLANG_RUN = MeasuredRun(
    "sglang.bench_serving", "sglang", (), version="0.5.3", model="made/up-14b", format="fp8",
    settings=(
        ("--dtype", "auto"), ("--tp-size", "2"), ("--pp-size", "1"),
        ("--chunked-prefill-size", "-1"),
    ),
)  # fmt: skip


def sglang_old() -> dict[str, Any]:
    """bench_serving of 0.2: medians alone, no concurrency, no server."""
    kept = ("backend", "dataset_name", "request_rate", "total_input_tokens", "total_output_tokens",
            "total_output_tokens_retokenized", "mean_e2e_latency_ms", "median_e2e_latency_ms",
            "median_ttft_ms", "median_itl_ms", "output_throughput", "sharegpt_output_len",
            "random_input_len", "random_output_len", "random_range_ratio", "duration",
            "completed")  # fmt: skip
    return {k: v for k, v in sglang_serving().items() if k in kept} | {"request_rate": 2.0}


def one_batch() -> dict[str, Any]:
    """4 prompts of 1024 tokens in 200 ms, and 31 steps of 10 ms behind them."""
    return {
        "run_name": "default", "batch_size": 4, "input_len": 1024, "output_len": 32,
        "prefill_latency": 0.2, "prefill_throughput": 20480.0, "median_decode_latency": 0.01,
        "median_decode_throughput": 400.0, "total_latency": 0.512, "overall_throughput": 8250.0,
    }  # fmt: skip


def one_batch_server() -> dict[str, Any]:
    """The same, sent to a server: 210 ms until the last prompt is read, 31 steps of 12 ms."""
    return {
        "run_name": "default", "batch_size": 4, "input_len": 1024, "output_len": 32,
        "latency": 0.582, "input_throughput": 19504.76, "output_throughput": 344.09,
        "overall_throughput": 7257.73, "last_ttft": 0.21, "last_gen_throughput": 333.0,
        "acc_length": -1, "cache_hit_rate": 0.0,
    }  # fmt: skip


def bench_row(prompt: int, new: int, seconds: float, **changed: Any) -> dict[str, Any]:
    """A row of llama-bench of 2025, whose three repetitions take the same on average."""
    ns = round(seconds * 1e9)
    return {
        "build_commit": "abcdef12", "build_number": 6789, "cpu_info": "Made-up CPU 9000",
        "gpu_info": "Made-up GPU 5000", "backends": "CUDA", "model_filename": "models/up.gguf",
        "model_type": "llama 8B Q4_K - Medium", "model_size": 4_912_898_304,
        "model_n_params": 8_030_261_312, "n_batch": 2048, "n_ubatch": 512, "n_threads": 8,
        "cpu_mask": "0x0", "cpu_strict": False, "poll": 50, "type_k": "f16", "type_v": "q8_0",
        "n_gpu_layers": 99, "n_cpu_moe": 4, "split_mode": "layer", "main_gpu": 0,
        "no_kv_offload": False, "flash_attn": 1, "devices": "auto", "tensor_split": "3.00/1.00",
        "tensor_buft_overrides": "none", "use_mmap": True, "embeddings": False, "no_op_offload": 0,
        "n_prompt": prompt, "n_gen": new, "n_depth": 0, "test_time": "2026-01-01T12:00:00Z",
        "avg_ns": ns, "stddev_ns": 1000, "avg_ts": (prompt + new) / seconds, "stddev_ts": 0.5,
        "samples_ns": [ns - 8000, ns + 4000, ns + 4000], "samples_ts": [1.0, 1.0, 1.0],
    } | changed  # fmt: skip


BENCH = MeasuredRun(
    "llama-bench", "llamacpp", (), version="b6789", model="models/up.gguf",
    format="Q4_K - Medium", backend="CUDA", device="Made-up GPU 5000",
    processor="Made-up CPU 9000", model_bytes=4_912_898_304,
    settings=(
        ("--n-gpu-layers", "99"), ("--n-cpu-moe", "4"), ("--split-mode", "layer"),
        ("--tensor-split", "3.00,1.00"), ("--flash-attn", "on"), ("--cache-type-k", "f16"),
        ("--cache-type-v", "q8_0"), ("--batch-size", "2048"), ("--ubatch-size", "512"),
        ("--threads", "8"),
    ),
)  # fmt: skip


def old_bench_row() -> dict[str, str]:
    """A row of a table of 2024: flags instead of `backends`, all values text, no samples."""
    whole = bench_row(512, 0, 0.128, tensor_split="0.00", flash_attn="0", embeddings="0",
                      no_kv_offload="0", use_mmap="1", build_number="3000")  # fmt: skip
    new = ("backends", "cpu_mask", "cpu_strict", "poll", "n_cpu_moe", "devices", "n_depth",
           "tensor_buft_overrides", "no_op_offload", "samples_ns", "samples_ts")  # fmt: skip
    flags = {"cuda": "0", "vulkan": "1", "kompute": "0", "metal": "0", "sycl": "0", "rpc": "0",
             "gpu_blas": "1", "blas": "1"}  # fmt: skip
    return flags | {k: str(v) for k, v in whole.items() if k not in new}


OLD_BENCH = MeasuredRun(
    "llama-bench", "llamacpp", (), version="b3000", model="models/up.gguf",
    format="Q4_K - Medium", backend="Vulkan,BLAS", device="Made-up GPU 5000",
    processor="Made-up CPU 9000", model_bytes=4_912_898_304,
    settings=(
        ("--n-gpu-layers", "99"), ("--split-mode", "layer"), ("--flash-attn", "off"),
        ("--cache-type-k", "f16"), ("--cache-type-v", "q8_0"), ("--batch-size", "2048"),
        ("--ubatch-size", "512"), ("--threads", "8"),
    ),
)  # fmt: skip


def batched(sequences: int, reads_s: float, writes_s: float, shared: int = 0) -> dict[str, Any]:
    """A line of llama-batched-bench: prompts of 256 tokens, 64 new ones."""
    return {
        "n_kv_max": 4096, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1,
        "is_pp_shared": shared, "n_gpu_layers": -1, "n_threads": 6, "n_threads_batch": 12,
        "pp": 256, "tg": 64, "pl": sequences, "n_kv": sequences * 320, "t_pp": reads_s,
        "speed_pp": 256 * sequences / reads_s, "t_tg": writes_s,
        "speed_tg": 64 * sequences / writes_s, "t": reads_s + writes_s, "speed": 1.0,
    }  # fmt: skip


BATCHED = MeasuredRun(
    "llama-batched-bench", "llamacpp", (),
    settings=(
        ("--n-gpu-layers", "-1"), ("--ctx-size", "4096"), ("--batch-size", "2048"),
        ("--ubatch-size", "512"), ("--flash-attn", "auto"), ("--threads", "6"),
        ("--threads-batch", "12"),
    ),
)  # fmt: skip


def answer(**changed: Any) -> dict[str, Any]:
    """An answer of llama-server: 700 tokens of 1000 are read in 350 ms, 100 more tokens follow the
    first in 2.5 s."""
    timings = {
        "cache_n": 300, "prompt_n": 700, "prompt_ms": 350.0, "prompt_per_token_ms": 0.5,
        "prompt_per_second": 2000.0, "predicted_n": 101, "predicted_ms": 2500.0,
        "predicted_per_token_ms": 24.75, "predicted_per_second": 40.4,
    }  # fmt: skip
    return {
        "index": 0, "content": "...", "tokens": [], "id_slot": 0, "stop": True, "model": "up.gguf",
        "tokens_predicted": 101, "tokens_evaluated": 1000, "generation_settings": {"n_predict": -1},
        "prompt": "...", "stop_type": "limit", "timings": timings | changed,
    }  # fmt: skip


ONE_AT_A_TIME = "its requests are taken as sent one at a time, which the answers do not tell"


def fates(mean: float, median: float, served: int, cut: float = 0.0, count: int = 0) -> Any:
    """A metric of GuideLLM by the fate of its requests."""

    def summary(mean: float, median: float, count: int) -> dict[str, Any]:
        return {"mean": mean, "median": median, "mode": mean, "variance": 1.0, "std_dev": 1.0,
                "min": 1.0, "max": 1.0, "count": count, "total_sum": mean * count,
                "percentiles": {"p50": median}}  # fmt: skip

    return {"successful": summary(mean, median, served), "incomplete": summary(cut, cut, count),
            "errored": summary(0.0, 0.0, 0), "total": summary(mean, median, served)}  # fmt: skip


def guide_metrics() -> dict[str, Any]:
    """60 requests of 800 and 51 tokens; 4 more are cut off after 20 tokens."""
    return {
        "requests_per_second": fates(2.0, 2.0, 60), "request_concurrency": fates(4.0, 4.0, 60),
        "request_latency": fates(1.9, 1.9, 60), "prompt_token_count": fates(800.0, 800.0, 60),
        "output_token_count": fates(51.0, 51.0, 60, 20.0, 4),
        "time_to_first_token_ms": fates(400.0, 390.0, 60),
        "time_per_output_token_ms": fates(37.0, 37.0, 60),
        "inter_token_latency_ms": fates(30.0, 29.0, 60),
        "output_tokens_per_second": fates(104.0, 104.0, 60),
        "tokens_per_second": fates(1700.0, 1700.0, 60),
    }  # fmt: skip


COUNTS = {"successful": 60, "incomplete": 4, "errored": 0, "total": 64}
GUIDED = Load(
    800.0, 51.0, concurrency=4, requests=60, seconds=30.0, tokens_per_s=(60 * 51 + 4 * 20) / 30,
    ttft_s=0.4, ttft_median_s=0.39, tpot_s=0.03, tpot_median_s=0.029,
)  # fmt: skip


def guide_0_2(strategy: dict[str, Any], errored: int = 0) -> dict[str, Any]:
    """A benchmark of GuideLLM 0.2 or 0.3."""
    return {
        "type_": "generative_benchmark", "id_": "1", "run_id": "1",
        "args": {"profile": {"type_": "concurrent"}, "strategy_index": 0, "strategy": strategy,
                 "max_number": None, "max_duration": 30.0},
        "run_stats": {"start_time": 0.0, "end_time": 30.0}, "extras": {},
        "worker": {"type_": "generative_requests_worker", "backend_type": "openai_http",
                   "backend_target": "http://localhost:8000", "backend_model": "made/up-8b"},
        "request_loader": {}, "start_time": 1000.0, "end_time": 1030.0, "duration": 30.0,
        "metrics": guide_metrics(), "request_totals": COUNTS | {"errored": errored},
        "requests": {"successful": [], "incomplete": [], "errored": []},
    }  # fmt: skip


def guide_0_4() -> dict[str, Any]:
    """A benchmark of GuideLLM 0.4."""
    whole = guide_0_2({"type_": "concurrent", "streams": 4})
    strategy = whole.pop("args")["strategy"]
    del whole["worker"], whole["request_loader"]
    return whole | {
        "scheduler": {"strategy": strategy, "constraints": {}, "state": {}},
        "benchmarker": {"args": {}, "profile": {}, "requests": {},
                        "backend": {"target": "http://localhost:8000", "model": "made/up-8b"}},
    }  # fmt: skip


def guide_0_7(strategy: dict[str, Any]) -> dict[str, Any]:
    """A benchmark of GuideLLM 0.5 to 0.7; the last calls the strategy's type its kind."""
    return {
        "type_": "generative_benchmark", "start_time": 1000.0, "end_time": 1030.0, "duration": 30.0,
        "config": {"run_id": "1", "run_index": 0, "strategy": strategy, "constraints": {},
                   "backend": {"target": "http://localhost:8000", "model": "made/up-8b"}},
        "scheduler_state": {}, "scheduler_metrics": {}, "requests": {},
        "metrics": guide_metrics() | {"request_totals": COUNTS},
    }  # fmt: skip


def stats(unit: str, avg: float, p50: float | None = None) -> dict[str, Any]:
    """A metric of AIPerf or GenAI-Perf."""
    return {"unit": unit, "avg": avg} | ({} if p50 is None else {"p50": p50, "p99": 2 * avg})


def perf(input_config: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """40 requests of 256 and 65 tokens in 20 s: 150 ms, and 64 steps of 25 ms."""
    return {
        "request_throughput": stats("requests/sec", 2.0),
        "request_latency": stats("ms", 1750.0, 1740.0),
        "time_to_first_token": stats("ms", 150.0, 140.0),
        "inter_token_latency": stats("ms", 25.0, 24.0),
        "output_token_throughput": stats("tokens/sec", 130.0),
        "output_sequence_length": stats("tokens", 65.0, 65.0),
        "input_sequence_length": stats("tokens", 256.0, 256.0),
        "input_config": input_config,
    } | changed  # fmt: skip


def aiperf(input_config: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The same of AIPerf, which counts requests and watches GPUs."""
    gpus = {"gpu_0": {"gpu_index": 0, "gpu_name": "Made-up GPU 5000", "metrics": {}}}
    return perf(
        input_config, schema_version="1.3", aiperf_version="0.6.0",
        request_count=stats("requests", 40.0), benchmark_duration=stats("sec", 20.0),
        was_cancelled=False, error_summary=[],
        telemetry_data={"summary": {}, "endpoints": {"localhost:9400": {"gpus": gpus}}},
    ) | changed  # fmt: skip


PERF = Load(
    256.0, 65.0, concurrency=4, requests=40, seconds=20.0, tokens_per_s=130.0, ttft_s=0.15,
    ttft_median_s=0.14, tpot_s=0.025, tpot_median_s=0.024,
)  # fmt: skip
AIPERF = MeasuredRun("AIPerf 0.6.0", "", (), model="made/up-8b", device="Made-up GPU 5000")


def own_run(**changed: Any) -> dict[str, Any]:
    """A report of `gdp run --json`: a prompt of 128 tokens in 64 ms, 32 steps in 0.8 s."""
    generation = {"prompt": 128, "new": 32, "cached": 0, "prompt_s": 0.064, "steps_s": 0.8}
    return {
        "model": "up", "objective": "latency", "predicted_latency_s": 0.8,
        "measured_latency_s": 0.864, "latency_interval_s": [0.86, 0.87], "baselines": {},
        "segments": [], "versions": {"llama-cpp-python": "0.3.16", "numpy": "2.0"},
        "fastest": "placed", "cluster": "one", "costs": "shipped", "generation": generation,
    } | changed  # fmt: skip


BENCH_LOADS = (
    Load(512, 0, requests=3, ttft_s=0.128, ttft_median_s=0.128004),
    Load(0, 128, requests=3, context=4096, seconds=3.2, tokens_per_s=40.0, tpot_s=0.025,
         tpot_median_s=3.200004 / 128),
    Load(512, 128, requests=3, seconds=3.4, tokens_per_s=128 / 3.4),
)  # fmt: skip
BENCH_ROWS = [
    bench_row(512, 0, 0.128), bench_row(0, 128, 3.2, n_depth=4096), bench_row(512, 128, 3.4)
]  # fmt: skip
BATCHED_LOADS = (
    Load(256, 64, concurrency=1, requests=1, together=True, ttft_s=0.1, tpot_s=0.02, seconds=1.38,
         tokens_per_s=64 / 1.38),
    Load(256, 64, concurrency=4, requests=4, together=True, ttft_s=0.3, tpot_s=0.025, seconds=1.9,
         tokens_per_s=256 / 1.9),
)  # fmt: skip
ANSWERED = Load(
    700, 101, context=300, ttft_s=0.35, tpot_s=0.025, seconds=2.85, tokens_per_s=101 / 2.85
)
BATCH = Load(1024, 32, concurrency=4, requests=4, together=True, ttft_s=0.2, seconds=0.512,
             tpot_median_s=0.01, tokens_per_s=250.0)  # fmt: skip
SERVER_BATCH = Load(1024, 32, concurrency=4, requests=4, together=True, ttft_s=0.21, seconds=0.582,
                    tpot_s=0.012, tokens_per_s=128 / 0.582)  # fmt: skip
OWN_LOAD = Load(128, 32, ttft_s=0.064, tpot_s=0.025)
SERVE = "vllm bench serve"
VLLM = MeasuredRun(SERVE, "vllm", (), model="made/up-8b")
BATCH_NOTE = "its batches run without the server and its scheduler"
SERVING, BENCHING = "sglang.bench_serving --output-file", "llama-bench -o json, jsonl or csv"
GUIDE = MeasuredRun("GuideLLM", "", (), model="made/up-8b")
CONCURRENT = {"type_": "concurrent", "streams": 4}
PERFING = "AIPerf and GenAI-Perf (profile_export_aiperf.json, profile_export_genai_perf.json)"
OFFLINE_TITLE = "vllm bench latency and throughput (.pytorch.json)"
LOADGEN = {"endpoint": {"model_names": ["made/up-8b"], "streaming": True},
           "loadgen": {"concurrency": 4, "request_count": 40}}  # fmt: skip
GUIDE_TIMES = tuple(
    ("benchmarks", 0, "metrics", metric, "successful", kind)
    for metric in ("time_to_first_token_ms", "inter_token_latency_ms")
    for kind in ("mean", "median")
)
GUIDE_NUMBERS = paths(
    "benchmarks.0.metrics.prompt_token_count.successful.mean",
    "benchmarks.0.metrics.output_token_count.successful.mean", "benchmarks.0.duration",
)  # fmt: skip
PERF_TIMES = tuple(
    (metric, kind)
    for metric in ("time_to_first_token", "inter_token_latency")
    for kind in ("avg", "p50")
)
PERF_NUMBERS = paths(
    "input_sequence_length.avg", "output_sequence_length.avg", "output_token_throughput.avg"
)

EXAMPLES = [
    Example("vllm serve", f"{SERVE} --save-result", [vllm_serve()], [with_loads(VLLM, SERVED)],
            needed=(*SERVE_NUMBERS, ("duration",), ("model_id",)), times=SERVE_TIMES,
            numbers=(*SERVE_NUMBERS, ("failed",), ("output_throughput",), ("max_concurrency",))),
    Example("vllm serve of two runs", f"{SERVE} --save-result",
            [vllm_serve(), vllm_serve(max_concurrency=None, request_rate=2.0)],
            [with_loads(VLLM, SERVED),
             with_loads(VLLM, replace(SERVED, concurrency=0, rate=2.0))],
            form="jsonl", times=SERVE_TIMES),
    Example("vllm serve in detail", f"{SERVE} --save-result", [vllm_detailed()],
            [with_loads(replace(VLLM, engine=""), DETAILED)],
            times=paths("ttfts.0", "itls.0.1", "itls.1.2", "duration"),
            numbers=paths("output_lens.0", "request_rate")),
    Example("vllm benchmark_serving.py", f"{SERVE} --save-result", [vllm_old()],
            [with_loads(VLLM, replace(SERVED, concurrency=0, rate=INF))],
            needed=SERVE_NUMBERS, times=SERVE_TIMES, numbers=SERVE_NUMBERS),
    Example("vllm latency", OFFLINE_TITLE,
            [vllm_offline("latency", [2.0, 2.2, 1.8],
                          {"avg_latency": 2.0, "std_latency": 0.1, "percentiles": {"50": 2.0}})],
            [with_loads(OFFLINE, Load(512, 128, concurrency=0, rate=INF, requests=16, seconds=2.0,
                                      tokens_per_s=1024.0))],
            form="array", times=(),
            needed=paths("benchmark.extra_info.args.input_len", "metric.benchmark_values",
                         "benchmark.extra_info.args.output_len"),
            numbers=paths("metric.benchmark_values.0", "benchmark.extra_info.args.batch_size")),
    Example("vllm throughput", OFFLINE_TITLE,
            [vllm_offline(name, values, {"elapsed_time": 16.0, "num_requests": 50,
                                         "total_num_tokens": 32_000})
             for name, values in (("tokens_per_second", [2000.0]),
                                  ("requests_per_second", [3.125]))],
            [with_loads(replace(OFFLINE, tool="vllm bench throughput"),
                        Load(512, 128, concurrency=0, rate=INF, requests=50, seconds=16.0,
                             tokens_per_s=400.0))],
            form="array", needed=paths("metric.extra_info.elapsed_time"),
            times=paths("metric.extra_info.elapsed_time"),
            numbers=paths("metric.extra_info.num_requests", "metric.extra_info.total_num_tokens")),
    Example("sglang serving", SERVING, [sglang_serving()], [with_loads(SGLANG_RUN, SGLANG)],
            form="jsonl", needed=(*SERVE_NUMBERS, ("duration",)), times=SERVE_TIMES,
            numbers=(*SERVE_NUMBERS, ("output_throughput",), ("max_concurrency",))),
    Example("sglang serving of 0.2", SERVING, [sglang_old()],
            [with_loads(MeasuredRun("sglang.bench_serving", "sglang", ()),
                        replace(SGLANG, concurrency=0, rate=2.0, ttft_s=None, tpot_s=None,
                                tpot_median_s=None))],
            form="jsonl", times=paths("median_ttft_ms", "duration"),
            numbers=(*SERVE_NUMBERS, ("request_rate",))),
    Example("sglang one batch", "sglang.bench_one_batch --result-filename", [one_batch()],
            [with_loads(MeasuredRun("sglang.bench_one_batch", "sglang", (), notes=(BATCH_NOTE,)),
                        BATCH)],
            form="jsonl",
            needed=paths("batch_size", "input_len", "output_len", "prefill_latency"),
            times=paths("prefill_latency", "median_decode_latency", "total_latency"),
            numbers=paths("batch_size", "input_len", "output_len")),
    Example("sglang one batch of a server", "sglang.bench_one_batch_server --result-filename",
            [one_batch_server()],
            [with_loads(MeasuredRun("sglang.bench_one_batch_server", "sglang", ()), SERVER_BATCH)],
            form="jsonl", needed=paths("batch_size", "input_len", "output_len", "latency"),
            times=paths("last_ttft", "latency"),
            numbers=paths("batch_size", "input_len", "output_len")),
    *(Example(f"llama-bench {form}", BENCHING, BENCH_ROWS, [with_loads(BENCH, *BENCH_LOADS)],
              form=form, needed=paths("avg_ns", "n_prompt", "n_gen"), times=paths("avg_ns"),
              numbers=paths("n_prompt", "samples_ns.0"))
      for form in ("array", "jsonl")),
    Example("llama-bench of 2024", BENCHING, [old_bench_row()],
            [with_loads(OLD_BENCH, Load(512, 0, ttft_s=0.128))], form="csv",
            needed=paths("avg_ns", "n_prompt", "n_gen"), times=paths("avg_ns"),
            numbers=paths("n_prompt")),
    Example("llama-batched-bench", "llama-batched-bench --output-format jsonl",
            [batched(1, 0.1, 1.28), batched(4, 0.3, 1.6)], [with_loads(BATCHED, *BATCHED_LOADS)],
            form="jsonl", needed=paths("pp", "tg", "pl", "t_pp", "t_tg", "t"),
            times=paths("t_pp", "t_tg", "t"), numbers=paths("pp", "tg", "pl")),
    Example("llama-batched-bench of one prompt", "llama-batched-bench --output-format jsonl",
            [batched(4, 0.1, 1.6, shared=1)],
            [replace(with_loads(BATCHED, Load(256, 0, together=True, ttft_s=0.1)),
                     notes=("its requests share one prompt, so that only the time to read it is "
                            "taken",))],
            form="jsonl"),
    Example("llama-server", "answers of llama-server with timings", [answer()],
            [with_loads(MeasuredRun("llama-server", "llamacpp", (), model="up.gguf",
                                    notes=(ONE_AT_A_TIME,)), ANSWERED)],
            needed=paths("timings.prompt_n", "timings.prompt_ms", "timings.predicted_n",
                         "timings.predicted_ms"),
            times=paths("timings.prompt_ms", "timings.predicted_ms"),
            numbers=paths("timings.prompt_n", "timings.predicted_n", "timings.cache_n")),
    Example("GuideLLM 0.2", "GuideLLM (benchmarks.json)",
            [{"benchmarks": [guide_0_2(CONCURRENT),
                             guide_0_2({"type_": "poisson", "rate": 2.0})]}],
            [with_loads(GUIDE, GUIDED, replace(GUIDED, concurrency=0, rate=2.0))],
            needed=paths("benchmarks.0.duration", "benchmarks.0.args.strategy",
                         "benchmarks.0.request_totals"),
            times=GUIDE_TIMES, numbers=GUIDE_NUMBERS),
    Example("GuideLLM 0.4", "GuideLLM (benchmarks.json)", [{"benchmarks": [guide_0_4()]}],
            [with_loads(GUIDE, GUIDED)], times=GUIDE_TIMES, numbers=GUIDE_NUMBERS),
    *(Example(f"GuideLLM 0.7 with {key}", "GuideLLM (benchmarks.json)",
              [{"metadata": {"version": 2, "guidellm_version": "0.7.0"},
                "benchmarks": [guide_0_7({key: "concurrent", "streams": 4})]}],
              [with_loads(replace(GUIDE, tool="GuideLLM 0.7.0"), GUIDED)],
              times=GUIDE_TIMES, numbers=GUIDE_NUMBERS)
      for key in ("kind", "type_")),
    Example("AIPerf", PERFING, [aiperf(LOADGEN)], [with_loads(AIPERF, PERF)],
            needed=paths("input_sequence_length", "output_sequence_length", "input_config",
                         "time_to_first_token.unit"),
            times=(*PERF_TIMES, ("benchmark_duration", "avg")),
            numbers=(*PERF_NUMBERS, ("request_count", "avg"))),
    Example("AIPerf with phases", PERFING,
            [aiperf({"models": {"items": [{"name": "made/up-8b"}]},
                     "phases": [{"name": "warmup", "type": "concurrency", "concurrency": 1},
                                {"name": "profiling", "kind": "profiling", "type": "poisson",
                                 "rate": 2.0}]})],
            [with_loads(AIPERF, replace(PERF, concurrency=0, rate=2.0))],
            times=PERF_TIMES, numbers=(*PERF_NUMBERS, ("input_config", "phases", 1, "rate"))),
    Example("GenAI-Perf", PERFING,
            [perf({"model": ["made/up-8b"], "concurrency": 4, "request_rate": None})],
            [with_loads(MeasuredRun("GenAI-Perf", "", (), model="made/up-8b"),
                        replace(PERF, requests=5, seconds=None))],
            times=PERF_TIMES, numbers=PERF_NUMBERS),
    Example("GenAI-Perf with a stimulus", PERFING,
            [perf({"model_names": ["made/up-8b"],
                   "perf_analyzer": {"stimulus": {"request_rate": 2.0}}})],
            [with_loads(MeasuredRun("GenAI-Perf", "", (), model="made/up-8b"),
                        replace(PERF, concurrency=0, rate=2.0, requests=1, seconds=None))],
            times=PERF_TIMES, numbers=PERF_NUMBERS),
    Example("gdp run", "gdp run --json", [own_run()],
            [with_loads(MeasuredRun("gdp run", "llamacpp", (), model="up",
                                    version="llama-cpp-python 0.3.16"), OWN_LOAD)],
            needed=paths("generation", "generation.prompt", "generation.steps_s", "model"),
            times=paths("generation.prompt_s", "generation.steps_s"),
            numbers=paths("generation.prompt", "generation.new", "generation.cached")),
]  # fmt: skip
