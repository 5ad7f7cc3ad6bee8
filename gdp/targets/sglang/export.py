"""A layout of vLLM as options of SGLang: tensor, pipeline, data and expert parallel sizes.

SGLang takes GPUs in the order of `CUDA_VISIBLE_DEVICES` as vLLM does: those that divide a stage
follow each other, then the stages of a copy, then the copies (`launch_tensor_parallel_group` of its
`managers/data_parallel_controller.py`). `SGLANG_PP_LAYER_PARTITION` says how many layers each stage
has (`get_pp_indices` of `distributed/utils.py`). Its `--mem-fraction-static` is of weights and
caches alone, unlike vLLM's share, and is left to its own estimate.
"""

import shlex
from pathlib import Path
from typing import Any

from gdp.base.errors import ArgumentError, PlacementError
from gdp.placement.placement import DraftModel
from gdp.sim.traffic import Traffic
from gdp.splits.division import Pieces
from gdp.splits.members import known_division
from gdp.targets.engine import (
    architectures_of,
    quantisation_of,
    runs_stages,
    unknown_method,
    why_not_on,
)
from gdp.targets.options import ADDRESSES, Option, Row, given, reasons, variables, write_commands
from gdp.targets.options import arguments as words
from gdp.targets.sglang.rules import SGLANG
from gdp.targets.target import ExportJob, StartCommand
from gdp.targets.vllm.export import VllmOptions, draft_name, scheme_of
from gdp.targets.vllm.plan import checkpoint_of, options_of, started

UNTRIED = "SGLang was not run with this; the parser of SGLang 0.5.23 reads it"
MEETING_PORT = 20000
"""On the first machine of a server: there its processes find each other; as many behind it as
there are servers are taken, too."""
BOOTSTRAP_PORT = 1000
"""Beyond the port of a server that reads prompts: there the others ask it for caches."""
PORT_OF_EACH = "each server has its own; the router knows them all"
QUANTIZED_WHEN_LOADED = {"fp8": "fp8"}
"""Value of `--quantization` for schemes of `--quantize` that weights of 16 bits are loaded to."""
_CACHE_TYPES = {"fp8": "fp8_e4m3"}
"""Value of `--kv-cache-dtype` where SGLang has another name for a type than vLLM."""


def export(job: ExportJob) -> list[Path]:
    """Write `sglang.json`, with the reason of each option, and environment and arguments of `python
    -m sglang.launch_server --model-path MODEL` as one line each for a shell.

    Raises:
        PlacementError: The placement is no layout of vLLM.
    """
    require_legal(job)
    options = options_of(job)
    if options.other_words:
        raise PlacementError(
            f"{SGLANG} drafts with models of one vocabulary alone "
            "(sglang/srt/speculative/standalone_worker_v2.py), and the plan has two: export "
            "to vllm, or name another small model"
        )
    # Copies in one server (`--dp-size`) have experts of their own here.
    apart = options.role or len(options.nodes) > 1
    each = options.commands if apart else (options,)
    commands = [command(own) for own in each]
    return write_commands("sglang", {}, commands, why(options), job.output, job.overwrite)


def commands(job: ExportJob) -> list[StartCommand]:
    """`python -m sglang.launch_server` with the options of a placement, for each server and
    machine."""
    require_legal(job)
    program = ["python", "-m", "sglang.launch_server", "--model-path", checkpoint_of(job)]
    options, role = options_of(job), job.question.role
    apart = options.role or len(options.nodes) > 1
    each = options.commands if apart else (options,)
    return [started(program, command(own), role) for own in each]


def benchmark(job: ExportJob, traffic: Traffic | None, file: Path) -> str:
    """`sglang.benchmark.serving` with random prompts under a traffic; see `Target.benchmark`."""
    if traffic is None:
        raise ArgumentError("sglang.benchmark.serving sends the requests of --traffic: give it")
    sent = (
        ["--max-concurrency", str(traffic.concurrency)]
        if traffic.concurrency
        else ["--request-rate", f"{traffic.rate:g}"]
    )
    # Prompts of token ids have their exact length and need no data set; a ratio of 1 draws no
    # shorter ones; what an earlier run left in the prefix cache is no work.
    return shlex.join([
        "python", "-m", "sglang.benchmark.serving", "--backend", "sglang",
        "--model", checkpoint_of(job), "--dataset-name", "random-ids", "--tokenize-prompt",
        "--random-input-len", str(traffic.prompt), "--random-output-len", str(traffic.new),
        "--random-range-ratio", "1", "--num-prompts", str(len(traffic.requests)), *sent,
        "--flush-cache", "--output-file", str(file),
    ])  # fmt: skip


def require_legal(job: ExportJob) -> None:
    """Raise `PlacementError` if SGLang refuses a plan made for vLLM."""
    cluster, placement = job.question.cluster, job.placement
    kind = quantisation_of(job.spec)
    leads = {*placement.device[job.question.graph.weight_bytes > 0].tolist()}
    reasons = [unknown_method(SGLANG, kind)]
    reasons += [
        why_not_on(SGLANG, kind, cluster.devices[d]) for d in sorted({*leads, *placement.homes})
    ]
    if len(leads) > 1 and not runs_stages(SGLANG, job.spec):
        names = ", ".join(architectures_of(job.spec))
        reasons.append(f"{SGLANG} runs {names} in one stage alone ({SGLANG.one_stage_file})")
    units = known_division(job.question.graph).units if placement.splits else ()
    experts = [u.total for u in units if u.kind == Pieces.EXPERTS]
    for split in placement.splits:
        if split.experts and experts and experts[0] % len(split.devices):
            reasons.append(
                f"{SGLANG} divides {experts[0]} experts evenly among GPUs, not among "
                f"{len(split.devices)}"
            )
    if reason := next(filter(None, reasons), ""):
        raise PlacementError(
            f"{reason}: export to vllm, or place the model again without what it refuses (--forbid)"
        )


def command(options: VllmOptions) -> dict[str, Any]:
    """Environment and arguments, with the machine on which they are for."""
    own = {"environment": environment(options), "arguments": arguments(options)}
    return {**options.command(), **own}


def environment(options: VllmOptions) -> dict[str, str]:
    """Variables by name."""
    return variables(_variables(options))


def arguments(options: VllmOptions) -> list[str]:
    """Arguments behind `python -m sglang.launch_server --model-path MODEL`."""
    return words(_options(options))


def why(options: VllmOptions) -> dict[str, str]:
    """Reasons by name."""
    first = options.commands[0] if options.machines else options
    text = reasons([*_variables(first), *_options(first)]) | {"status": UNTRIED}
    if options.quantize and options.quantize not in QUANTIZED_WHEN_LOADED:
        text["model"] = (
            f"the plan stands on weights stored as {options.quantize} (--quantize): serve a "
            "checkpoint that is stored so"
        )
    return text


def _variables(options: VllmOptions) -> list[Option]:
    """vLLM's variables under SGLang's names, without those of vLLM's connector."""
    names = {"VLLM_PP_LAYER_PARTITION": "SGLANG_PP_LAYER_PARTITION"}
    return [
        option._replace(name=names.get(option.name, option.name))
        for option in options.variables()
        if not option.name.startswith(("UCX_", "VLLM_NIXL_"))
    ]


def _options(options: VllmOptions) -> list[Option]:
    cached = _CACHE_TYPES.get(options.kv_cache_dtype, options.kv_cache_dtype)
    return given(
        ("--tp-size", options.tensor, "so many GPUs divide the heads and columns of each layer"),
        ("--pp-size", len(options.partition), "stages of the plan, one after the other"),
        ("--dp-size", options.data, "copies of the model, which take requests in turn"),
        ("--ep-size", options.experts and options.tensor, "each GPU of a group has whole experts"),
        ("--context-length", str(options.max_model_len),
         "the context that was asked for, or the longest one whose cache has room on every GPU, "
         "within what the model was made for"),
        ("--chunked-prefill-size", options.at_once,
         "prompts are computed in chunks of so many tokens, for whose tensors the plan has room"),
        ("--quantization", QUANTIZED_WHEN_LOADED.get(options.quantize),
         f"the plan stands on weights stored as {options.quantize} (--quantize)"),
        ("--kv-cache-dtype", cached, "type of the keys and values that the plan has room for"),
        ("--dtype", options.dtype,
         "the type that was planned: each process would decide by its own GPU"),
        *(_drafting(options.draft) if options.draft is not None else ()),
        *(_apart(options) if options.role else (("--port", options.port, PORT_OF_EACH),)),
        *(_of_machines(options) if options.machines else ()),
    )  # fmt: skip


def _drafting(draft: DraftModel) -> tuple[Row, ...]:
    """Options of a small model that drafts a row of tokens, whose last one is the large model's
    own: `STANDALONE`, with one candidate a step."""
    return (
        ("--speculative-algorithm", "STANDALONE",
         "a small model drafts so many tokens a pass, on the same GPUs"),
        ("--speculative-draft-model-path", draft_name(draft), ""),
        ("--speculative-num-steps", str(draft.tokens), ""),
        ("--speculative-eagle-topk", 1, ""),
        ("--speculative-num-draft-tokens", draft.tokens + 1, ""),
        ("--speculative-draft-model-quantization", QUANTIZED_WHEN_LOADED.get(scheme_of(draft)), ""),
    )  # fmt: skip


def _of_machines(options: VllmOptions) -> tuple[Row, ...]:
    """Options by which other machines reach a server, and its processes each other."""
    nodes = options.nodes
    meeting = (
        ("--dist-init-addr", f"{nodes[0]}:{MEETING_PORT + 10 * (options.port % 1000)}",
         "the processes of a server meet there, on its first machine"),
        ("--nnodes", len(nodes),
         "the GPUs are on so many machines: start a line on each, with its own environment"),
        ("--node-rank", str(options.node), ""),
    )  # fmt: skip
    return (
        ("--host", nodes[options.node], f"others reach it there from their machines; {ADDRESSES}"),
        *(meeting if len(nodes) > 1 else ()),
    )


def _apart(options: VllmOptions) -> tuple[Row, ...]:
    """Options of a server for prefill, or for decode, alone."""
    port = options.port or options.servers[0].port
    return (
        ("--port", port, PORT_OF_EACH),
        ("--disaggregation-mode", options.role,
         "prompts are read here (prefill), or tokens written (decode)"),
        ("--disaggregation-transfer-backend", "nixl", "caches of prompts are sent by NIXL"),
        ("--disaggregation-bootstrap-port", options.role == "prefill" and BOOTSTRAP_PORT + port,
         "the router is told it beside the server's address"),
    )  # fmt: skip
