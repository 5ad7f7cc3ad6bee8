"""Transformers models from a configuration alone: no weights, no hub.

A spec is `hf:PATH`, or `hf:PATH?task=causal-lm&batch=1&sequence=512&decode`, where PATH is a
`config.json` or a folder that holds one, and what is left out is the default.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from gdp.errors import MissingExtraError, ModelError
from gdp.importers.pytorch.export import import_torch

if TYPE_CHECKING:
    from gdp.importers.pytorch.model import TorchModel

PREFIX = "hf:"
TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "feature-extraction": "AutoModel",
}
"""The class that makes the model of each task."""


@dataclass(frozen=True)
class Spec:
    """What is asked of a configuration."""

    path: str
    task: str = ""  # "": by the architecture that the configuration names
    batch: int = 1
    sequence: int = 512  # tokens of the prompt; with `decode`, of the cache
    decode: bool = False  # one step of a causal model that has read `sequence` tokens


def parse(text: str) -> Spec:
    """A spec from its text; raises `ModelError` for an unknown or malformed part.

    >>> parse("hf:llama/config.json?batch=2&decode")
    Spec(path='llama/config.json', task='', batch=2, sequence=512, decode=True)
    """
    path, _, query = text.removeprefix(PREFIX).partition("?")
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(given.keys() - {"task", "batch", "sequence", "decode"})
    if unknown or not path:
        raise ModelError(
            f"{text!r} must look like hf:PATH?task=TASK&batch=1&sequence=512&decode, got "
            f"{unknown[0] if unknown else 'no path'!r}"
        )
    task = given.get("task", "")
    if task and task not in TASKS:
        raise ModelError(f"no task {task!r}; there are {', '.join(TASKS)}")
    return Spec(
        path, task, _count(given, "batch", 1), _count(given, "sequence", 512),
        given.get("decode", "0") in ("", "1", "true"),
    )  # fmt: skip


def _count(given: dict[str, str], key: str, default: int) -> int:
    text = given.get(key, str(default))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) < 1 << 31):
        raise ModelError(f"{key} must be a positive whole number below 2**31, got {text!r}")
    return int(text)


def config_file(spec: str) -> Path:
    """The configuration file of a spec; raises `ModelError` where there is none."""
    path = Path(parse(spec).path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelError(
            f"no configuration {str(path)!r}: give a config.json of transformers, or a folder that "
            "holds one; gdp downloads nothing"
        )
    return path


def huggingface_model(text: str, device: str = "meta") -> "TorchModel":
    """The model of a spec with its inputs: on the meta device, elsewhere with random weights."""
    from gdp.importers.pytorch.model import TorchModel

    spec, torch, transformers = parse(text), import_torch(), _transformers()
    config = _config(transformers, config_file(text))
    task = spec.task or _task_of(config)
    with torch.device(device):
        try:
            model = getattr(transformers, TASKS[task]).from_config(config).eval()
        except Exception as error:
            raise ModelError(
                f"{text!r}: transformers makes no {task} model of it: {_said(error)}"
            ) from error
        inputs = _inputs(torch, config, task, spec)
    name = f"{type(model).__name__} {spec.batch}x{spec.sequence}{' decode' if spec.decode else ''}"
    if not spec.decode:
        return TorchModel(text, model, (), inputs, {"name": name})
    if task != "causal-lm":
        raise ModelError(f"{text!r}: only causal-lm models decode with a cache, this is {task}")
    wrapped, kwargs, held = _decoding(torch, transformers, model, spec)
    return TorchModel(text, wrapped, (), kwargs, {"name": name, "held": held}, prefix="model")


def _transformers() -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingExtraError(
            "hf: models need transformers: pip install 'gdp-placement[torch]'"
        ) from None
    return transformers


def _config(transformers: Any, path: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path} is no configuration of transformers: {_said(error)}") from error


def _task_of(config: Any) -> str:
    """By the ending of the class that the configuration was saved from."""
    names = list(getattr(config, "architectures", None) or [""])
    endings = {
        "ForCausalLM": "causal-lm",
        "LMHeadModel": "causal-lm",
        "ForMaskedLM": "masked-lm",
        "ForConditionalGeneration": "seq2seq-lm",
        "ForSequenceClassification": "sequence-classification",
        "ForImageClassification": "image-classification",
    }
    for ending, task in endings.items():
        if names[0].endswith(ending):
            return task
    return "feature-extraction"


def _inputs(torch: Any, config: Any, task: str, spec: Spec) -> dict[str, Any]:
    if task == "image-classification" or hasattr(config, "image_size"):
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        return {"pixel_values": torch.empty(spec.batch, channels, height, width)}
    ids = torch.zeros(spec.batch, spec.sequence, dtype=torch.long)
    if task == "seq2seq-lm":
        return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
    return {"input_ids": ids} | ({"use_cache": False} if task == "causal-lm" else {})


def _decoding(torch: Any, transformers: Any, model: Any, spec: Spec) -> tuple[Any, Any, Any]:
    """One step: a token in, logits out, the cache of keys and values held where it is read."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, cache: Any) -> Any:
            past = transformers.DynamicCache(config=config)
            for layer, (keys, values) in zip(past.layers, cache, strict=True):
                # What `update` would do, without its copy.
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
            position = torch.full((1, 1), spec.sequence, device=input_ids.device)
            return self.model(
                input_ids=input_ids, past_key_values=past, position_ids=position, use_cache=True
            ).logits

    shape = (spec.batch, heads, spec.sequence, size)
    with torch.device("meta"):
        token = torch.zeros(spec.batch, 1, dtype=torch.long)
        dtype = next(model.parameters()).dtype
        cache = [
            (torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))
            for _ in range(layers)
        ]
    return Step().eval(), {"input_ids": token, "cache": cache}, ("cache",)


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
