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
QUANTIZED_WHEN_LOADED = {"fp8": "fp8"}
"""Value of `--quantization` for schemes of `--quantize` that weights of 16 bits are loaded to."""


def export(job: ExportJob) -> list[Path]:
    """Write `sglang.json`, which says why each option is there, and environment and arguments of
    `python -m sglang.launch_server --model-path MODEL` as one line each for a shell.

    Raises:
        PlacementError: The placement is no layout of vLLM.
    """
    options = options_of(job)
    order, reasons = environment(options), why(options)
    lines = {
        "environment.txt": " ".join(f"{name}={value}" for name, value in order.items()),
        "arguments.txt": shlex.join(arguments(options)),
    }
    document = {"environment": order, "arguments": arguments(options), "why": reasons}
    with new_contents(job.output, "export to sglang", job.overwrite) as folder:
        (folder / "sglang.json").write_bytes(indented_json(document) + b"\n")
        for name, line in lines.items():
            (folder / name).write_text(line + "\n")
    return [job.output / name for name in ("sglang.json", *lines)]


def environment(options: VllmOptions) -> dict[str, str]:
    """Variables by name."""
    names = {"VLLM_PP_LAYER_PARTITION": "SGLANG_PP_LAYER_PARTITION"}
    return {names.get(name, name): value for name, value in options.environment().items()}


def arguments(options: VllmOptions) -> list[str]:
    """Arguments behind `python -m sglang.launch_server --model-path MODEL`."""
    method = QUANTIZED_WHEN_LOADED.get(options.quantize)
    return [
        "--tp-size", str(options.tensor),
        "--pp-size", str(len(options.partition)),
        "--dp-size", str(options.data),
        *(["--ep-size", str(options.tensor)] if options.experts else []),
        "--context-length", str(options.max_model_len),
        *(["--chunked-prefill-size", str(options.at_once)] if options.at_once else []),
        *(["--quantization", method] if method else []),
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
