"""Configurations of a pipeline: a folder of diffusers, the hub's cache, or public facts.

`hf:DIR` holds `model_index.json`, as `DiffusionPipeline.save_pretrained` writes it; `hf:ORG/NAME`
is a pipeline in the cache of the Hugging Face hub; `diffusers:NAME` is one of `data/pipelines`.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gdp.base.errors import ModelError
from gdp.base.files.reading import Kind, data_path, is_file, is_folder, read_bytes, read_toml
from gdp.importers.diffusers.classes import PIPELINES
from gdp.importers.huggingface.check import LARGEST, MOST_BYTES, check_config, without_code
from gdp.importers.huggingface.spec import PIPELINE
from gdp.importers.spec import HF_PREFIX

PREFIX, INDEX = "diffusers:", PIPELINE
MOST_VALUES = 4096
"""Of one list in a configuration; the longest known has 77 numbers."""
_INDEX_KIND = Kind("model index of diffusers", ModelError)
_FACTS_KIND = Kind("file of public pipelines", ModelError)
_UNPLACED = ("scheduler", "tokenizer", "feature_extractor", "image_encoder", "safety_checker",
             "image_processor", "processor", "guider")  # fmt: skip
"""Beginnings of the names of components that compute nothing, or nothing of a text to an image."""


class ComponentConfig(NamedTuple):
    """A component by its class and configuration."""

    class_name: str
    document: Mapping[str, Any]


class PipelineConfig(NamedTuple):
    """A pipeline by its class and the configurations of its components."""

    name: str
    class_name: str
    components: dict[str, ComponentConfig]
    fields: Mapping[str, Any]  # of the pipeline itself
    steps: int = 0  # of denoising, where its makers name them; 0: the default of the class


class _Component(msgspec.Struct, forbid_unknown_fields=True):
    """A component of `data/pipelines/components.toml`; its configuration has what differs from the
    defaults of its class."""

    class_name: str
    source: str
    config: dict[str, Any] = {}


class _Pipeline(msgspec.Struct, forbid_unknown_fields=True):
    """A pipeline of `data/pipelines/pipelines.toml`."""

    class_name: str
    source: str
    components: dict[str, str]  # name in the pipeline: name in components.toml
    fields: dict[str, Any] = {}
    steps: int = 0


def is_pipeline(spec: str) -> bool:
    """True for `diffusers:NAME`, and for `hf:` of something that holds a `model_index.json`."""
    if spec.startswith(PREFIX):
        return True
    return spec.startswith(HF_PREFIX) and _index_file(spec.removeprefix(HF_PREFIX)) is not None


def pipeline_names() -> list[str]:
    """The names of public pipelines."""
    return sorted(_facts()[0])


def pipeline_config(spec: str) -> PipelineConfig:
    """The configurations of a pipeline; raises `ModelError`."""
    name = spec.removeprefix(PREFIX).removeprefix(HF_PREFIX)
    if spec.startswith(PREFIX):
        return _of_facts(name)
    path = _index_file(name)
    if path is None:
        raise ModelError(
            f"no pipeline {name!r}: give a folder that holds {INDEX}, ORG/NAME of a pipeline that "
            f"the Hugging Face cache of this machine holds, or {PREFIX}NAME, one of "
            f"{', '.join(pipeline_names())}; gdp downloads nothing"
        )
    return _of_folder(path, name)


def pipeline_files(spec: str) -> list[Path]:
    """Files that a pipeline is read from."""
    if spec.startswith(PREFIX):
        return [_facts_path("pipelines"), _facts_path("components")]
    path = _index_file(spec.removeprefix(HF_PREFIX))
    return [] if path is None else [path, *sorted(path.parent.glob("*/config.json"))]


def _index_file(name: str) -> Path | None:
    if is_folder(name):
        path = Path(name) / INDEX
        return path if is_file(path) else None
    if is_file(name):
        return Path(name) if Path(name).name == INDEX else None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, INDEX)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _of_folder(path: Path, name: str) -> PipelineConfig:
    index = _read_index(path)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) or class_name not in PIPELINES:
        raise ModelError(
            f"{path}: gdp does not know the pipeline {str(class_name)[:60]!r}; it knows "
            f"{', '.join(PIPELINES)}"
        )
    components, fields = {}, {}
    for key, value in index.items():
        if key.startswith("_"):
            continue
        if not isinstance(value, list):
            fields[key] = value
        elif not key.startswith(_UNPLACED) and value[:1] != [None]:
            components[key] = _component(path, key, value)
    label = Path(name).name if is_folder(name) else name
    return PipelineConfig(label, class_name, components, fields)


def _component(path: Path, key: str, value: list[Any]) -> ComponentConfig:
    if len(value) != 2 or not all(isinstance(part, str) for part in value):
        raise ModelError(f"{path}: {key} must be a library and a class, got {str(value)[:60]}")
    # The name is that of a folder beside the index, and of no other place.
    if not key.isidentifier():
        raise ModelError(f"{path}: {key[:60]!r} is no name of a component")
    file = path.parent / key / "config.json"
    if not is_file(file):
        raise ModelError(
            f"{path} names the component {key} ({value[1][:60]}), and there is no "
            f"{key}/config.json beside it; download it, too (weights are not needed)"
        )
    return ComponentConfig(value[1], checked(check_config(file), str(file)))


def checked(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A configuration without code, whose numbers and lists are bounded."""

    def check(value: Any, key: str) -> None:
        if isinstance(value, Mapping):
            for name, part in value.items():
                check(part, str(name))
        elif isinstance(value, list):
            if len(value) > MOST_VALUES:
                raise ModelError(f"{where}: {key} holds {len(value)} values, at most {MOST_VALUES}")
            for part in value:
                check(part, key)
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise ModelError(f"{where}: {key} is too large a number: {str(value)[:40]}")

    plain = without_code(dict(document))
    check(plain, "the configuration")
    return plain


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index = json.loads(read_bytes(path, _INDEX_KIND, MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no {_INDEX_KIND.name}: {str(error)[:200]}") from None
    if not isinstance(index, dict):
        raise ModelError(f"{path} is no {_INDEX_KIND.name}: it holds no object with a _class_name")
    return index


def _facts_path(name: str) -> Path:
    return data_path("pipelines", f"{name}.toml")


@functools.cache
def _facts() -> tuple[dict[str, _Pipeline], dict[str, _Component]]:
    raw = [read_toml(_facts_path(n), _FACTS_KIND, dict) for n in ("pipelines", "components")]
    return (
        msgspec.convert(raw[0], dict[str, _Pipeline]),
        msgspec.convert(raw[1], dict[str, _Component]),
    )


def _of_facts(name: str) -> PipelineConfig:
    pipelines, known = _facts()
    if name not in pipelines:
        raise ModelError(
            f"no pipeline {PREFIX}{name[:60]}; there are {', '.join(sorted(pipelines))}"
        )
    row = pipelines[name]
    components = {
        key: ComponentConfig(known[of].class_name, known[of].config)
        for key, of in row.components.items()
    }
    return PipelineConfig(name, row.class_name, components, row.fields, row.steps)
