"""Tasks of configurations of transformers: the class that makes the model, and its inputs.

The class that a configuration names is looked up in transformers' own tables; endings of names
decide only where no table has it. Inputs are those that the model's forward pass takes, whatever
the task is called: an encoder is there where it takes `decoder_input_ids`, and what the encoder
reads is the model's `main_input_name`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gdp.base.errors import ModelError

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "speech-to-text": "AutoModelForSpeechSeq2Seq",
    "image-text-to-text": "AutoModelForImageTextToText",
    "any-to-any": "AutoModelForMultimodalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "feature-extraction": "AutoModel",
}
"""The class that makes the model of each task."""
GENERATES = ("causal-lm", "image-text-to-text", "speech-to-text", "seq2seq-lm", "any-to-any")
"""Tasks whose models write token by token, with a cache."""
_TABLES = {
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech-to-text": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "any-to-any": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "feature-extraction": "MODEL_MAPPING_NAMES",
}
"""transformers' table of the classes of each task, by model type; of a class with several tasks
the first counts."""
_ENDINGS = {
    "ForCausalLM": ("causal-lm",),
    "LMHeadModel": ("causal-lm",),
    "ForMaskedLM": ("masked-lm",),
    "ForSequenceClassification": ("sequence-classification",),
    "ForImageClassification": ("image-classification",),
    "ForConditionalGeneration": ("image-text-to-text", "speech-to-text", "seq2seq-lm",
                                 "any-to-any"),
}  # fmt: skip
SECONDS_HEARD, SAMPLES_PER_S = 30, 16_000
"""Of a recording, where a model takes samples and its configuration names no rate."""


def task_of(config: Any) -> str:
    """The task of the class that a configuration was saved from."""
    name = (list(getattr(config, "architectures", None) or []) or [""])[0]
    known = _classes(config.model_type)
    for task, classes in known.items():
        if name in classes:
            return task
    tasks = next((tasks for end, tasks in _ENDINGS.items() if name.endswith(end)), ())
    return next((t for t in tasks if t in known), tasks[0] if tasks else "feature-extraction")


def may_generate(architectures: object) -> bool:
    """True where the first of the class names of a configuration is of a model that writes tokens,
    by its ending alone."""
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    tasks = (t for end, tasks in _ENDINGS.items() if name.endswith(end) for t in tasks)
    return any(task in GENERATES for task in tasks)


def require_task(config: Any, task: str, text: str) -> None:
    """Raise `ModelError` where transformers has no class of this task for the model type; the line
    names the tasks that it has."""
    known = _classes(config.model_type)
    if known and task not in known:
        raise ModelError(
            f"{text!r}: transformers has no {task} model of type {config.model_type!r}; ask for "
            f"?task={' or ?task='.join(sorted(known))}"
        )


def require_generating(config: Any, task: str, text: str) -> None:
    """Raise `ModelError` where models of the task do not write token by token."""
    if task in GENERATES:
        return
    others = [other for other in _classes(config.model_type) if other in GENERATES]
    hint = f"; ask for ?task={' or ?task='.join(others)}" if others else ""
    raise ModelError(
        f"{text!r}: models of {', '.join(GENERATES)} decode with a cache, this is {task}{hint}"
    )


def other_classes(config: Any, name: str) -> str:
    """The tasks of other classes of a model type that write tokens, as a hint behind a refusal of
    class `name`; empty where there are none."""
    known = _classes(config.model_type)
    others = [t for t in GENERATES if t in known and name not in known[t]]
    return f"; ?task={' or ?task='.join(others)} places another class of it" if others else ""


def _classes(kind: str) -> dict[str, tuple[str, ...]]:
    """Names of the classes of a model type, by task."""
    from transformers.models.auto import modeling_auto

    found = {}
    for task, table in _TABLES.items():
        classes = getattr(modeling_auto, table, {}).get(kind)
        if classes is not None:
            found[task] = (classes,) if isinstance(classes, str) else tuple(classes)
    return found


def encodes(model: Any) -> bool:
    """True for models with an encoder, whose decoder has tokens of its own."""
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def prompt_inputs(
    model: Any, config: Any, shape: tuple[int, int], written: int, text: str
) -> dict[str, Any]:
    """Inputs of a whole prompt of (batch, tokens); models with an encoder have also `written`
    tokens in the decoder. What hears takes the 30 seconds that its encoder is made for."""
    import torch

    ids = torch.zeros(shape, dtype=torch.long)
    if not encodes(model):
        given = {"input_ids": ids}
        needed = _required(model, text) - given.keys()
        if "pixel_values" in needed:
            given["pixel_values"] = _pixels(model, config, ids, text)
            needed.remove("pixel_values")
        if needed:
            raise _not_made(model, needed, text)
        return given
    main = str(getattr(model, "main_input_name", "input_ids"))
    also = _required(model, text) - {main, "decoder_input_ids"}
    if also:
        raise _not_made(model, also, text)
    if main not in _ENCODED:
        raise ModelError(
            f"{text!r}: {type(model).__name__} reads {main}, whose shape gdp does not know; known "
            f"are {', '.join(_ENCODED)}"
        )
    most = min(written, _first(config, ("max_target_positions",)) or written)
    read = _ENCODED[main](model, config, ids, text)
    return {main: read, "decoder_input_ids": ids[:, :1].repeat(1, most)}


def fix_ropes(model: Any) -> None:
    """Keep the frequencies of rotary embeddings that grow with the sequence (dynamic, longrope) as
    they are: a step of decoding asks for its position as a number, which no graph has. Their size
    is that of any others, and so is the work."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, Mapping):
            module.rope_type = {layer: _fixed(kind) for layer, kind in kinds.items()}
        elif isinstance(kinds, str):
            module.rope_type = _fixed(kinds)


def _fixed(kind: str) -> str:
    return "default" if "dynamic" in kind or kind == "longrope" else kind


def _required(model: Any, text: str) -> set[str]:
    """Arguments without which a forward pass is not called."""
    import torch

    if type(model).forward is torch.nn.Module.forward:
        parts = [n for n in getattr(model.config, "sub_configs", {}) if getattr(model.config, n)]
        raise ModelError(
            f"{text!r}: {type(model).__name__} has no forward pass of its own; place one of its "
            f"parts, with its configuration in a file: {', '.join(parts) or 'its modules'}"
        )
    return {
        name
        for name, argument in inspect.signature(model.forward).parameters.items()
        if argument.default is argument.empty
        and argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
    }


def _not_made(model: Any, needed: set[str], text: str) -> ModelError:
    return ModelError(
        f"{text!r}: {type(model).__name__} needs {' and '.join(sorted(needed))}, which gdp does "
        "not make; place the module with inputs of yours: python:package.module:function"
    )


def _tokens(model: Any, config: Any, ids: Any, text: str) -> Any:
    del model, config, text
    return ids


def _spectrum(model: Any, config: Any, ids: Any, text: str) -> Any:
    """Features of a recording: bins of a spectrum over time, or frames of features."""
    import torch

    bins, frames = _first(config, ("num_mel_bins",)), _first(config, ("max_source_positions",))
    features = _first(config, ("input_feat_per_channel", "feature_projection_input_dim"))
    if features is not None:
        shape = (int(frames or 3000), int(features) * int(_first(config, ("input_channels",)) or 1))
    elif bins is not None:
        shape = (int(bins), 2 * int(frames or 1500))
    else:
        raise ModelError(
            f"{text!r}: {type(model).__name__} reads input_features, and its configuration says no "
            "num_mel_bins of them"
        )
    return torch.empty(ids.shape[0], *shape, dtype=model.dtype)


def _samples(model: Any, config: Any, ids: Any, text: str) -> Any:
    import torch

    del text
    rate = _first(config, ("sampling_rate", "sample_rate")) or SAMPLES_PER_S
    return torch.empty(ids.shape[0], SECONDS_HEARD * int(rate), dtype=model.dtype)


def _pixels(model: Any, config: Any, ids: Any, text: str) -> Any:
    import torch

    del text
    size = _first(config, ("image_size",)) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = _first(config, ("num_channels",)) or 3
    return torch.empty(ids.shape[0], channels, height, width, dtype=model.dtype)


_ENCODED: dict[str, Callable[[Any, Any, Any, str], Any]] = {
    "input_ids": _tokens,
    "input_features": _spectrum,
    "input_values": _samples,
    "pixel_values": _pixels,
}
"""Inputs of encoders, by the name of the argument."""


def _parts(config: Any) -> Iterator[Any]:
    """A configuration, and those of its parts."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)


def _first(config: Any, names: Sequence[str]) -> Any:
    """The first of some fields that a configuration or one of its parts has."""
    for part in _parts(config):
        for name in names:
            if (value := getattr(part, name, None)) is not None:
                return value
    return None
