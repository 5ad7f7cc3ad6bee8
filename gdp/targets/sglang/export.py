"""A layout of vLLM as options of SGLang: tensor, pipeline, data and expert parallel sizes.

SGLang takes GPUs in the order of `CUDA_VISIBLE_DEVICES` as vLLM does: those that divide a stage
follow each other, then the stages of a copy, then the copies (`launch_tensor_parallel_group` of its
`managers/data_parallel_controller.py`). `SGLANG_PP_LAYER_PARTITION` says how many layers each stage
has (`get_pp_indices` of `distributed/utils.py`). Its `--mem-fraction-static` is of weights and
caches alone, unlike vLLM's share, and is left to its own estimate.
"""

from pathlib import Path
from typing import Any

from gdp.base.errors import PlacementError
from gdp.placement.placement import DraftModel
from gdp.splits.division import Pieces, Unit
from gdp.splits.members import known_division
from gdp.targets.engine import (
    architectures_of,
    quantisation_of,
    runs_stages,
    unknown_method,
    why_not_on,
)
from gdp.targets.sglang.rules import SGLANG
from gdp.targets.target import ExportJob
from gdp.targets.vllm.export import (
    ADDRESSES,
    VllmOptions,
    draft_name,
    scheme_of,
    write_commands,
)
from gdp.targets.vllm.plan import options_of

UNTRIED = "SGLang was not run with this: the form is that of its source and documentation"
MEETING_PORT = 20000
"""On the first machine of a server: there its processes find each other; as many behind it as
there are servers are taken, too."""
BOOTSTRAP_PORT = 1000
"""Beyond the port of a server that reads prompts: there the others ask it for caches."""
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


def require_legal(job: ExportJob) -> None:
    """Raise `PlacementError` if SGLang refuses a plan made for vLLM."""
    cluster, placement = job.question.cluster, job.placement
    kind = quantisation_of(job.spec)
    used = {int(d) for d in placement.device[job.question.graph.weight_bytes > 0]}
    used |= {d for group in placement.splits for d in group.devices}
    used |= {d for team in placement.teams for d in team}
    reasons = [unknown_method(SGLANG, kind)]
    reasons += [why_not_on(SGLANG, kind, cluster.devices[d]) for d in sorted(used)]
    leads = {*placement.device[job.question.graph.weight_bytes > 0].tolist()}
    if len(leads) > 1 and not runs_stages(SGLANG, job.spec):
        names = ", ".join(architectures_of(job.spec))
        reasons.append(f"{SGLANG} runs {names} in one stage alone ({SGLANG.one_stage_file})")
    experts = [u.total for u in _units(job) if u.kind == Pieces.EXPERTS]
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


def _units(job: ExportJob) -> tuple[Unit, ...]:
    splits = job.placement.splits
    return known_division(job.question.graph).units if splits else ()


def command(options: VllmOptions) -> dict[str, Any]:
    """Environment and arguments, with the machine on which they are for."""
    own = {"environment": environment(options), "arguments": arguments(options)}
    return {**options.command(), **own}


def environment(options: VllmOptions) -> dict[str, str]:
    """Variables by name."""
    names = {"VLLM_PP_LAYER_PARTITION": "SGLANG_PP_LAYER_PARTITION"}
    return {
        names.get(name, name): value
        for name, value in options.environment().items()
        if not name.startswith(("UCX_", "VLLM_NIXL_"))
    }


def arguments(options: VllmOptions) -> list[str]:
    """Arguments behind `python -m sglang.launch_server --model-path MODEL`."""
    method = QUANTIZED_WHEN_LOADED.get(options.quantize)
    cached = _CACHE_TYPES.get(options.kv_cache_dtype, options.kv_cache_dtype)
    return [
        "--tp-size", str(options.tensor),
        "--pp-size", str(len(options.partition)),
        "--dp-size", str(options.data),
        *(["--ep-size", str(options.tensor)] if options.experts else []),
        "--context-length", str(options.max_model_len),
        *(["--chunked-prefill-size", str(options.at_once)] if options.at_once else []),
        *(["--quantization", method] if method else []),
        *(["--kv-cache-dtype", cached] if cached else []),
        *(["--dtype", options.dtype] if options.dtype else []),
        *([] if options.draft is None else _drafting(options.draft)),
        *(_apart(options) if options.role else _of_copy(options)),
        *(_of_machines(options) if options.machines else []),
    ]  # fmt: skip


def _drafting(draft: DraftModel) -> list[str]:
    """Arguments of a small model that drafts a row of tokens, whose last one is the large model's
    own: `STANDALONE`, with one candidate a step."""
    method = QUANTIZED_WHEN_LOADED.get(scheme_of(draft))
    return [
        "--speculative-algorithm", "STANDALONE",
        "--speculative-draft-model-path", draft_name(draft),
        "--speculative-num-steps", str(draft.tokens), "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(draft.tokens + 1),
        *([] if method is None else ["--speculative-draft-model-quantization", method]),
    ]  # fmt: skip


def _of_copy(options: VllmOptions) -> list[str]:
    """Port of one of several servers."""
    return ["--port", str(options.port)] if options.port else []


def _of_machines(options: VllmOptions) -> list[str]:
    """Arguments by which other machines reach a server, and its processes each other."""
    here, nodes = options.nodes[options.node], options.nodes
    meeting = f"{nodes[0]}:{MEETING_PORT + 10 * (options.port % 1000)}"
    return [
        "--host", here,
        *([] if len(nodes) < 2 else [
            "--dist-init-addr", meeting, "--nnodes", str(len(nodes)),
            "--node-rank", str(options.node),
        ]),
    ]  # fmt: skip


def _apart(options: VllmOptions) -> list[str]:
    """Arguments of a server for prefill, or for decode, alone."""
    port = options.port or options.servers[0].port
    first = ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT + port)]
    return [
        "--port", str(port), "--disaggregation-mode", options.role,
        "--disaggregation-transfer-backend", "nixl", *(first if options.role == "prefill" else []),
    ]  # fmt: skip


def why(options: VllmOptions) -> dict[str, str]:
    """A sentence for each of them."""
    reasons = {
        "CUDA_DEVICE_ORDER": "numbers are those of nvidia-smi, not those of the fastest first",
        "CUDA_VISIBLE_DEVICES": "ranks take these GPUs in this order",
        "SGLANG_PP_LAYER_PARTITION": "so many layers in each stage",
        "--tp-size": "so many GPUs divide the heads and columns of each layer",
        "--pp-size": "stages of the plan, one after the other",
        "--dp-size": "copies of the model, which take requests in turn",
        "--ep-size": "each GPU of a group has whole experts",
        "--context-length": "the context that was asked for, or the longest one whose cache has "
        "room on every GPU, within what the model was made for",
        "--chunked-prefill-size": "prompts are computed in chunks of so many tokens, for whose "
        "tensors the plan has room",
        "--port": "each server has its own; the router knows them all",
        "--disaggregation-mode": "prompts are read here (prefill), or tokens written (decode)",
        "--disaggregation-transfer-backend": "caches of prompts are sent by NIXL",
        "--disaggregation-bootstrap-port": "the router is told it beside the server's address",
        "--kv-cache-dtype": "type of the keys and values that the plan has room for",
        "--quantization": f"the plan stands on weights stored as {options.quantize} (--quantize)",
    }  # fmt: skip
    reasons |= {
        "--speculative-algorithm": "a small model drafts so many tokens a pass, on the same GPUs",
        "--host": f"others reach it there from their machines; {ADDRESSES}",
        "--dtype": "the type that was planned: each process would decide by its own GPU",
        "--dist-init-addr": "the processes of a server meet there, on its first machine",
        "--nnodes": "the GPUs are on so many machines: start a line on each, with its own "
        "environment",
    }
    first = options.commands[0] if options.machines else options
    given = {*environment(first), *arguments(first)}
    told = {name: reason for name, reason in reasons.items() if name in given}
    if options.quantize and options.quantize not in QUANTIZED_WHEN_LOADED:
        told["model"] = (
            f"the plan stands on weights stored as {options.quantize} (--quantize): serve a "
            "checkpoint that is stored so"
        )
    return told | {"status": UNTRIED}
