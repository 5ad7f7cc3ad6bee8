"""Results of llama-bench, llama-batched-bench and llama-server.

Columns are those of tools/llama-bench/llama-bench.cpp (and of examples/llama-bench before b5200),
tools/batched-bench/batched-bench.cpp and tools/server/server.cpp. llama-bench times prompts and
answers apart, so a row of its is a load that reads, one that writes, or, with -pg, both in turn.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from gdp.base.errors import ArgumentError, PlacementError
from gdp.corrections.run import Load, MeasuredRun, checked
from gdp.importers.spec import ModelSpec
from gdp.ops.llamacpp import BATCH
from gdp.sim.traffic import Traffic
from gdp.targets.llamacpp.flags import flags_of
from gdp.targets.measured import (
    Count,
    Reader,
    Record,
    agreed,
    flags,
    grouped,
    has,
    mean,
    median,
    scaled,
    typed,
)
from gdp.targets.options import arguments, given
from gdp.targets.target import ExportJob

ENGINE = "llamacpp"
FLASH = {-1: "auto", 0: "off", 1: "on"}
BACKENDS = ("CUDA", "Vulkan", "Kompute", "Metal", "SYCL", "BLAS")
"""Columns of builds before b4000, in lower case; later ones have `backends`."""


class BenchRow(msgspec.Struct):
    """A row of llama-bench; numbers of a CSV file are text."""

    build_commit: str
    model_filename: str
    n_prompt: Count
    n_gen: Count
    avg_ns: float
    build_number: Count = 0
    samples_ns: list[float] = []
    n_depth: Count = 0  # since b5200
    cpu_info: str = ""
    gpu_info: str = ""
    backends: str = ""
    cuda: bool = False
    vulkan: bool = False
    kompute: bool = False
    metal: bool = False
    sycl: bool = False
    blas: bool = False
    model_type: str = ""
    model_size: Count = 0
    n_batch: Count | None = None
    n_ubatch: Count | None = None
    n_threads: Count | None = None
    type_k: str = ""
    type_v: str = ""
    n_gpu_layers: int | None = None
    n_cpu_moe: Count = 0
    split_mode: str = ""
    main_gpu: int = 0
    no_kv_offload: bool = False
    flash_attn: int | bool = 0  # -1, 0 or 1 since b6400
    devices: str = "auto"
    tensor_split: str = ""
    tensor_buft_overrides: str = "none"
    no_op_offload: int | bool = 0
    embeddings: bool = False

    def run(self) -> MeasuredRun:
        """The build, the model and the options of the row."""
        old = ",".join(name for name in BACKENDS if getattr(self, name.lower()))
        *_, weights = self.model_type.split(" ", 2) if self.model_type.count(" ") > 1 else ("",)
        shares = self.tensor_split.split("/")
        settings = flags([
            ("--n-gpu-layers", self.n_gpu_layers), ("--n-cpu-moe", self.n_cpu_moe or None),
            ("--split-mode", self.split_mode), ("--main-gpu", self.main_gpu or None),
            ("--tensor-split", ",".join(shares) if set(shares) - {"", "0.00"} else ""),
            ("--device", self.devices if self.devices != "auto" else ""),
            ("--override-tensor",
             self.tensor_buft_overrides if self.tensor_buft_overrides != "none" else ""),
            ("--no-kv-offload", self.no_kv_offload or None),
            ("--no-op-offload", bool(self.no_op_offload) or None),
            ("--flash-attn", FLASH.get(int(self.flash_attn), self.flash_attn)),
            ("--cache-type-k", self.type_k), ("--cache-type-v", self.type_v),
            ("--batch-size", self.n_batch), ("--ubatch-size", self.n_ubatch),
            ("--threads", self.n_threads),
        ])  # fmt: skip
        return MeasuredRun(
            "llama-bench", ENGINE, (),
            version=f"b{self.build_number}" if self.build_number else self.build_commit,
            model=self.model_filename, format=weights.removeprefix("mostly "),
            backend=self.backends or old or "CPU",
            device=self.gpu_info, processor=self.cpu_info, settings=settings,
            model_bytes=self.model_size,
        )  # fmt: skip

    def load(self, where: str) -> Load:
        """The tokens of the row and their seconds."""
        agreed(self.avg_ns, mean(self.samples_ns) or self.avg_ns, "nanoseconds of a run", where)
        seconds, middle = self.avg_ns * 1e-9, scaled(median(self.samples_ns), 1e-9)
        checked(Load(self.n_prompt, self.n_gen, context=self.n_depth, ttft_s=seconds), where)
        load = Load(
            self.n_prompt, self.n_gen, context=self.n_depth, seconds=seconds,
            requests=max(len(self.samples_ns), 1),
        )  # fmt: skip
        if not self.n_gen:
            return checked(replace(load, ttft_s=seconds, ttft_median_s=middle, seconds=None), where)
        load = replace(load, tokens_per_s=self.n_gen / seconds)
        if self.n_prompt:
            return checked(load, where)
        return checked(
            replace(
                load, tpot_s=seconds / self.n_gen, tpot_median_s=scaled(middle, 1 / self.n_gen)
            ),
            where,
        )


def bench(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The runs of a file of llama-bench: one for each model and set of options, a load a row."""
    rows = []
    for i, record in enumerate(records, 1):
        at = f"{where}, row {i}"
        lax = isinstance(record.get("avg_ns"), str)  # of a CSV file
        row = typed(record, BenchRow, at, strict=not lax)
        rows.append((row.run(), row.load(at)))
    return grouped(rows)


def benchmark(job: ExportJob, traffic: Traffic | None, file: Path) -> str:
    """llama-bench on a request: its prompt, then its answer behind that prompt; see
    `Target.benchmark`."""
    request = job.question.graph.request
    if traffic is not None or request is None or request.batch > 1:
        raise ArgumentError(
            "llama-bench measures one request at a time: give --generate prompt=2048,new=256"
        )
    flags = flags_of(job.question.graph, job.placement, job.question.cluster)
    if flags.draft is not None or flags.rpc:
        kind = "a model that drafts" if flags.draft is not None else "GPUs of other machines"
        raise PlacementError(f"llama-bench measures no plan with {kind}; leave it out")
    options = given(
        ("-ngl", str(flags.n_gpu_layers), ""), ("-sm", flags.divides and "tensor", ""),
        ("-dev", "/".join(flags.device), ""),
        ("-ts", flags.n_gpu_layers and "/".join(map(str, flags.tensor_split)), ""),
        ("-ot", ";".join(flags.override_tensor), ""),
        ("-ctk", flags.cache_type, ""), ("-ctv", flags.cache_type, ""),
        ("-fa", str(int(flags.flash)), ""), ("-ub", min(flags.ubatch_size, flags.ctx_size), ""),
        ("-b", max(BATCH, flags.ubatch_size), ""), ("-nopo", not flags.op_offload and "1", ""),
    )  # fmt: skip
    program = ["llama-bench", "-m", ModelSpec.of(job.spec).path, *arguments(options)]
    tests = (
        ["-p", str(request.prompt), "-n", "0"],
        ["-p", "0", "-n", str(request.new), "-d", str(request.prompt)],
    )
    lines = [shlex.join([*program, *test, "-o", "jsonl"]) for test in tests]
    return f"{{ {lines[0]} && {lines[1]}; }} > {shlex.quote(str(file))}"


class BatchedRow(msgspec.Struct):
    """A line of llama-batched-bench: prompts that are read at once, and then answers that are
    written side by side."""

    n_kv_max: Count
    pp: Count
    tg: Count
    pl: Count
    t_pp: float
    t_tg: float
    t: float
    n_batch: Count | None = None
    n_ubatch: Count | None = None
    flash_attn: int | None = None
    is_pp_shared: int = 0
    n_gpu_layers: int | None = None
    n_threads: Count | None = None
    n_threads_batch: Count | None = None


def batched(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The runs of a file of llama-batched-bench, a load a line."""
    rows = []
    for i, record in enumerate(records, 1):
        at = f"{where}, line {i}"
        row = typed(record, BatchedRow, at)
        run = MeasuredRun(
            "llama-batched-bench", ENGINE, (),
            settings=flags([
                ("--n-gpu-layers", row.n_gpu_layers), ("--ctx-size", row.n_kv_max),
                ("--batch-size", row.n_batch), ("--ubatch-size", row.n_ubatch),
                ("--flash-attn", FLASH.get(row.flash_attn or 0, row.flash_attn)),
                ("--threads", row.n_threads), ("--threads-batch", row.n_threads_batch),
            ]),
        )  # fmt: skip
        rows.append(_batched(run, row, at))
    return grouped(rows)


def _batched(run: MeasuredRun, row: BatchedRow, where: str) -> tuple[MeasuredRun, Load]:
    load = Load(
        row.pp, row.tg, row.pl, requests=row.pl, together=True,
        ttft_s=row.t_pp if row.pp else None, seconds=row.t,
        tpot_s=row.t_tg / row.tg if row.tg else None,
    )  # fmt: skip
    agreed(row.t, row.t_pp + row.t_tg, "seconds of the run", where)
    checked(load, where)
    if row.is_pp_shared and row.pl > 1:
        # One prompt was read, and the answers share its cache: no engine serves so.
        note = "its requests share one prompt, so that only the time to read it is taken"
        alone = replace(load, new=0, concurrency=1, requests=1, tpot_s=None, seconds=None)
        return replace(run, notes=(note,)), checked(alone, where)
    if row.tg:
        load = replace(load, tokens_per_s=row.pl * row.tg / row.t)
    return run, checked(load, where)


class Timings(msgspec.Struct):
    """The `timings` of an answer of llama-server."""

    prompt_n: Count  # read, without those that were in the cache
    prompt_ms: float
    predicted_n: Count
    predicted_ms: float  # behind the first token
    cache_n: Count | None = None  # since b6100
    draft_n: Count = 0
    draft_n_accepted: Count = 0


class ServerAnswer(msgspec.Struct):
    """An answer of llama-server, of /completion or of its OpenAI endpoints."""

    timings: Timings
    model: str = ""
    tokens_evaluated: Count = 0  # of the whole prompt, of /completion


def answers(records: Sequence[Record], where: str) -> list[MeasuredRun]:
    """The runs of answers of llama-server, a load for each."""
    rows = []
    for i, record in enumerate(records, 1):
        at = f"{where}, answer {i}" if len(records) > 1 else where
        found = typed(record, ServerAnswer, at)
        times = found.timings
        notes = ("its requests are taken as sent one at a time, which the answers do not tell",)
        if times.draft_n:
            share = times.draft_n_accepted / times.draft_n
            notes += (f"{share:.0%} of its drafted tokens were accepted",)
        whole = max(found.tokens_evaluated - times.prompt_n, 0)
        first, rest = times.prompt_ms * 1e-3, times.predicted_ms * 1e-3
        load = Load(
            times.prompt_n, times.predicted_n, ttft_s=first, seconds=first + rest,
            context=whole if times.cache_n is None else times.cache_n,
            # The clock of the answer starts once its first token is there.
            tpot_s=rest / (times.predicted_n - 1) if times.predicted_n > 1 else None,
        )  # fmt: skip
        if times.predicted_n and checked(load, at).seconds:
            load = replace(load, tokens_per_s=times.predicted_n / (first + rest))
        run = MeasuredRun("llama-server", ENGINE, (), model=found.model, notes=notes)
        rows.append((run, checked(load, at)))
    return grouped(rows)


def _is_answer(record: Record) -> bool:
    timings = record.get("timings")
    return isinstance(timings, dict) and has("prompt_ms", "predicted_ms")(timings)


MEASURED_BENCH = Reader(
    "llama-bench -o json, jsonl or csv", has("build_commit", "model_filename", "avg_ns"), bench
)
MEASURED_BATCHED = Reader(
    "llama-batched-bench --output-format jsonl", has("n_kv_max", "t_pp", "t_tg", "pl"), batched
)
MEASURED_ANSWERS = Reader("answers of llama-server with timings", _is_answer, answers)
