"""The type that the weights of a configuration are loaded in: one rule for all targets.

A checkpoint has the type that its configuration names (`dtype`, `torch_dtype` before transformers
4.56), a part of it (`text_config`) where the whole names none, or that of the safetensors beside
it. Where nothing says it, language models and quantised ones count as bfloat16, in which they are
published; other models as float32, which PyTorch makes.

transformers loads a checkpoint in its own type (`dtype="auto"`, the default of `from_pretrained`
since transformers 5). vLLM computes float32 checkpoints in 16 bits, and what a card has no
arithmetic for in the next type that it has (`_resolve_auto_dtype` of `vllm/config/model.py`,
`supported_dtypes` of `vllm/platforms/cuda.py`, vLLM 0.33).
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gdp.base.errors import ModelError
from gdp.base.files.reading import Kind, open_regular, read_json
from gdp.importers.huggingface.check import check_config, without_code
from gdp.importers.huggingface.modelopt import with_modelopt
from gdp.importers.huggingface.spec import (
    TYPES,
    ConfigSpec,
    config_file,
    parse_config_spec,
)
from gdp.importers.huggingface.tasks import GENERATES, may_generate

NO_FLOAT16 = frozenset(("gemma2", "gemma3", "gemma3_text", "glm4"))
"""Model types that vLLM never computes in float16 (`_FLOAT16_NOT_SUPPORTED_MODELS`)."""
_PARTS = ("text_config", "vision_config", "encoder_config")
"""Parts of a configuration whose type stands for the whole, in vLLM's order (`get_torch_dtype` of
`vllm/transformers_utils/model_arch_config_convertor.py`); a `thinker_config` holds its own."""
_SAVED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
MOST_HEADER = 1 << 26
"""Bytes of the header of a file of safetensors; that of 100,000 tensors takes 12 MB."""


_INDEX = Kind("index of safetensors", ModelError)


class _Total(msgspec.Struct):
    total_size: int = 0


class _Index(msgspec.Struct):
    """The part of an index that says how large its files are."""

    metadata: _Total = msgspec.field(default_factory=_Total)


class ReadConfig(NamedTuple):
    """A configuration that was checked, and the type its model is loaded in."""

    spec: ConfigSpec
    path: Path
    given: Mapping[str, Any]  # as it stands in the file
    document: dict[str, Any]  # without code, with the type that is loaded as its `dtype`
    saved: str  # type of the checkpoint; "" where nothing says it

    @property
    def loaded(self) -> str:
        """The type of the weights in memory, and of caches."""
        return str(self.document.get("dtype"))


def loaded_config(text: str, *, has_bfloat16: bool = True) -> ReadConfig:
    """The configuration of a spec with the type that its model is loaded in, by an engine where the
    spec is of one; raises `ModelError`.

    Args:
        text: A spec, `hf:PATH?...`.
        has_bfloat16: False where a card of an engine computes no bfloat16.
    """
    spec, path = parse_config_spec(text), config_file(text)
    given = check_config(path)
    document = with_modelopt(without_code(given), path)
    # "" if neither the configuration nor the files name a type.
    saved = next(filter(None, map(_named, _parts(document))), "") or _type_of_files(path.parent)
    loaded = spec.dtype or saved or _presumed(document, spec)
    if spec.max_num_batched_tokens and not spec.dtype:
        loaded = served_type(loaded, document.get("model_type"), has_bfloat16=has_bfloat16)
    document.pop("torch_dtype", None)
    return ReadConfig(spec, path, given, document | {"dtype": loaded}, saved)


def served_type(saved: str, model_type: object, *, has_bfloat16: bool) -> str:
    """The type that vLLM computes a checkpoint of some type in.

    >>> served_type("float32", "llama", has_bfloat16=True)
    'bfloat16'
    >>> [served_type("bfloat16", m, has_bfloat16=False) for m in ("llama", "gemma2")]
    ['float16', 'float32']
    """
    supported = [
        t for t in TYPES
        if (has_bfloat16 or t != "bfloat16") and (t != "float16" or model_type not in NO_FLOAT16)
    ]  # fmt: skip
    return saved if saved in supported and saved != "float32" else supported[0]


def type_note(text: str) -> str:
    """The type that the model of a spec is loaded in, in a sentence, where its configuration does
    not name that type; "" where it does."""
    read = loaded_config(text)
    name, by_engine = read.loaded, bool(read.spec.max_num_batched_tokens)
    if read.saved:
        by = " (vLLM's --dtype auto)" if by_engine else ""
        return "" if name == read.saved else f"weights of {read.saved} are loaded as {name}{by}"
    if read.spec.dtype and not by_engine:
        return ""
    if by_engine:
        return f"{read.path.name} names no dtype: {name}, as vLLM loads it (--dtype auto)"
    if name == "float32":
        return ""
    return (
        f"{read.path.name} names no dtype: {name} is assumed, in which such models are published; "
        "?dtype=float32 behind the model plans another"
    )


def _parts(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield document
    thinker = document.get("thinker_config")
    if isinstance(thinker, Mapping):
        yield from _parts(thinker)
    for name in _PARTS:
        if isinstance(part := document.get(name), Mapping):
            yield part


def _named(part: Mapping[str, Any]) -> str:
    """The type that a configuration names; of a table by module the main one."""
    for key in ("dtype", "torch_dtype"):
        value = part.get(key)
        value = value.get("") if isinstance(value, Mapping) else value
        if isinstance(value, str) and value not in ("", "auto"):
            return value.removeprefix("torch.")
    return ""


def _type_of_files(folder: Path) -> str:
    """The type of most numbers in the first file of safetensors of a folder, of those that are not
    quantised; "" where there is none."""
    count: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors"))[:1]:
        for dtype, size in _tensors(path):
            if dtype in _SAVED:
                count[_SAVED[dtype]] += size
    return count.most_common(1)[0][0] if count else ""


def bytes_of_files(folder: Path) -> int:
    """Bytes of all tensors in the files of a checkpoint, by its index or in its one file; 0 where
    there is neither."""
    for path in sorted(folder.glob("*.safetensors.index.json"))[:1]:
        with contextlib.suppress(ModelError):
            return read_json(path, _INDEX, _Index).metadata.total_size
    files = list(folder.glob("*.safetensors"))
    return sum(size for _, size in _tensors(files[0])) if len(files) == 1 else 0


def _tensors(path: Path) -> Iterator[tuple[str, int]]:
    """(type, bytes) of each tensor in a file of safetensors."""
    for tensor in _header(path).values():
        match tensor:
            case {"dtype": str(dtype), "data_offsets": [int(start), int(end)]}:
                yield dtype, end - start


def _header(path: Path) -> Mapping[str, Any]:
    """Tensors of a file of safetensors; none of one that is damaged, as no weight is read."""
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            document = json.loads(file.read(size)) if size <= MOST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, Mapping) else {}


def _presumed(document: Mapping[str, Any], spec: ConfigSpec) -> str:
    """Assumed data type of a checkpoint without any type information."""
    parts = [part for part in _parts(document) if part.get("quantization_config")]
    asked = bool(spec.new or spec.decode or spec.task in GENERATES)
    if parts or asked or (not spec.task and may_generate(document.get("architectures"))):
        return "bfloat16"
    return "float32"
