"""A layout of vLLM as options of SGLang: tensor, pipeline, data and expert parallel sizes.

SGLang takes GPUs in the order of `CUDA_VISIBLE_DEVICES` as vLLM does: those that divide a stage
follow each other, then the stages of a copy, then the copies (`launch_tensor_parallel_group` of its
`managers/data_parallel_controller.py`). `SGLANG_PP_LAYER_PARTITION` says how many layers each stage
has (`get_pp_indices` of `distributed/utils.py`). Its `--mem-fraction-static` is of weights and
caches alone, unlike vLLM's share, and is left to its own estimate.
"""

import shlex
from pathlib import Path

from gdp.files.writing import indented_json, new_contents
from gdp.targets.target import ExportJob
from gdp.targets.vllm.export import VllmOptions
from gdp.targets.vllm.plan import options_of

UNTRIED = "SGLang was not run with this: the form is that of its source and documentation"
BOOTSTRAP_PORT = 1000
"""Beyond the port of a server that reads prompts: there the others ask it for caches."""
QUANTIZED_WHEN_LOADED = {"fp8": "fp8"}
"""Value of `--quantization` for schemes of `--quantize` that weights of 16 bits are loaded to."""
_CACHE_TYPES = {"fp8": "fp8_e4m3"}
"""Value of `--kv-cache-dtype` where SGLang has another name for a type than vLLM."""


def export(job: ExportJob) -> list[Path]:
    """Write `sglang.json`, which says why each option is there, and environment and arguments of
    `python -m sglang.launch_server --model-path MODEL` as one line each for a shell.

    Raises:
        PlacementError: The placement is no layout of vLLM.
    """
    options = options_of(job)
    # Copies in one server (`--dp-size`) have experts of their own here.
    each = options.servers if options.serves else (options,)
    servers = [{"environment": environment(own), "arguments": arguments(own)} for own in each]
    document = {**servers[0], "why": why(options)}
    document |= {"servers": servers} if len(servers) > 1 else {}
    lines = {
        "environment.txt": "\n".join(
            " ".join(f"{name}={value}" for name, value in environment(own).items()) for own in each
        ),
        "arguments.txt": "\n".join(shlex.join(arguments(own)) for own in each),
    }
    with new_contents(job.output, "export to sglang", job.overwrite) as folder:
        (folder / "sglang.json").write_bytes(indented_json(document) + b"\n")
        for name, line in lines.items():
            (folder / name).write_text(line + "\n")
    return [job.output / name for name in ("sglang.json", *lines)]


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
        *(_apart(options) if options.serves else []),
    ]  # fmt: skip


def _apart(options: VllmOptions) -> list[str]:
    """Arguments of a server that reads prompts, or writes tokens, alone."""
    mode = "prefill" if options.serves == "prompts" else "decode"
    port = options.port or options.servers[0].port
    first = ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT + port)]
    return [
        "--port", str(port), "--disaggregation-mode", mode,
        "--disaggregation-transfer-backend", "nixl", *(first if mode == "prefill" else []),
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
    given = {*environment(options), *arguments(options)}
    told = {name: reason for name, reason in reasons.items() if name in given}
    if options.quantize and options.quantize not in QUANTIZED_WHEN_LOADED:
        told["model"] = (
            f"the plan stands on weights stored as {options.quantize} (--quantize): serve a "
            "checkpoint that is stored so"
        )
    return told | {"status": UNTRIED}
