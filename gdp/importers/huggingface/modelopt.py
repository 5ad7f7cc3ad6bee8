"""Checkpoints of NVIDIA's ModelOpt: what their configurations say of stored weights, in groups of
modules as compressed-tensors has them.

Newer ones hold a `quantization_config` with groups and names left out, older ones say the same in a
file `hf_quant_config.json` beside `config.json`. Names are wildcards, and stand for all that is
inside of a module, too; parts of models with images are found with and without `language_model.`
(`ModelOptQuantConfigBase.is_layer_excluded` and `from_config` of
`vllm/model_executor/layers/quantization/modelopt.py`).
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gdp.base.errors import ModelError
from gdp.base.files.reading import Kind, is_file, read_bytes

BESIDE = "hf_quant_config.json"
METHOD = "modelopt"
MOST_BYTES = 16 << 20
MOST_LETTERS = 8000
"""Of the names that are compared at once."""
_KIND = Kind("configuration of ModelOpt", ModelError)

Config = Mapping[str, Any]

_FOURS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
ALGORITHMS: Mapping[str, tuple[Config, Config | None]] = {
    "FP8": ({"num_bits": 8, "type": "float", "strategy": "tensor"},
            {"num_bits": 8, "type": "float"}),
    "FP8_PER_CHANNEL_PER_TOKEN": ({"num_bits": 8, "type": "float", "strategy": "channel"},
                                  {"num_bits": 8, "type": "float"}),
    "FP8_PB_WO": ({"num_bits": 8, "type": "float", "strategy": "block"},
                  {"num_bits": 8, "type": "float"}),
    "NVFP4": (_FOURS, {"num_bits": 4, "type": "float"}),
    "W4A16_NVFP4": (_FOURS, None),
}  # fmt: skip
"""(weights, what activations are cast to) of each `quant_algo`; None: they are not cast."""


def with_modelopt(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """A configuration whose `quantization_config` has groups and patterns, where ModelOpt made it.

    Args:
        document: Of `path`, which is left as it is.
        path: Of the configuration; of the file beside it nothing is read where it has a scheme.

    Raises:
        ModelError: an algorithm that is not known, or a field of another type.
    """
    config = document.get("quantization_config")
    if config is None:
        beside = path.with_name(BESIDE)
        config, path = (_read(beside), beside) if is_file(beside) else (None, path)
    if not isinstance(config, Mapping) or not _is_modelopt(config):
        return document
    return document | {"quantization_config": grouped(config, str(path))}


def grouped(config: Config, where: str) -> dict[str, Any]:
    """The groups of a configuration of ModelOpt, as compressed-tensors writes them."""
    ignore = _names(config, "ignore", where) or _names(config, "exclude_modules", where)
    result: dict[str, Any] = {
        "quant_method": METHOD, "ignore": patterns(ignore),
        "config_groups": _groups(config, where),
    }  # fmt: skip
    if _algorithm(config.get("kv_cache_scheme"), config.get("kv_cache_quant_algo")) == "FP8":
        result["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    return result


def _is_modelopt(config: Config) -> bool:
    producer = config.get("producer")
    made_by = producer.get("name") if isinstance(producer, Mapping) else None
    method = config.get("quant_method")
    return method == METHOD or (method is None and (made_by == METHOD or "quant_algo" in config))


def _read(path: Path) -> Config | None:
    try:
        document = json.loads(read_bytes(path, _KIND, MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no {_KIND.name}: {error}") from None
    config = document.get("quantization") if isinstance(document, Mapping) else None
    return config if isinstance(config, Mapping) and config.get("quant_algo") else None


def _groups(config: Config, where: str) -> dict[str, Any]:
    given = config.get("config_groups")
    if isinstance(given, Mapping) and given:
        return {str(name): _group(group, f"{where}: {name}") for name, group in given.items()}
    layers = config.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        return {"all": _of_algorithm(config.get("quant_algo"), ["Linear"], where)}
    members: dict[str, list[str]] = {}
    for name, layer in layers.items():
        algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        members.setdefault(str(algorithm), []).append(str(name))
    return {
        algorithm: _of_algorithm(algorithm, patterns(names), where)
        for algorithm, names in members.items()
    }


def _group(group: object, where: str) -> dict[str, Any]:
    """A group whose weights have a strategy: ModelOpt leaves it to the number of bits."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise ModelError(f"{where} of quantization_config must be an object with weights")
    strategy = "tensor_group" if weights.get("num_bits") == 4 else "tensor"
    return {
        "weights": {"strategy": strategy, "symmetric": True, **weights},
        "input_activations": group.get("input_activations"),
        "targets": patterns(_names(group, "targets", where) or ["Linear"]),
    }


def _of_algorithm(algorithm: object, targets: list[str], where: str) -> dict[str, Any]:
    known = ALGORITHMS.get(str(algorithm).upper())
    if known is None:
        raise ModelError(
            f"{where}: quant_algo {algorithm!r} of ModelOpt is not known, only "
            f"{', '.join(ALGORITHMS)}; --quantize places it as if it were another"
        )
    weights, cast = known
    return {
        "weights": {**weights, "symmetric": True}, "input_activations": cast, "targets": targets,
    }  # fmt: skip


def _algorithm(scheme: object, named: object) -> str:
    """The algorithm of keys and values, in either form."""
    if isinstance(scheme, Mapping):
        return "FP8" if scheme.get("num_bits") == 8 else ""
    return str(scheme or named or "").upper()


def _names(config: Config, key: str, where: str) -> list[str]:
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{where}: {key} of quantization_config must be a list of names")
    return names


def patterns(names: Iterable[str]) -> list[str]:
    r"""Wildcards as patterns of compressed-tensors, of modules and all inside of them.

    >>> patterns(["Linear", "lm_head", "*.mlp.gate"])
    ['Linear', 're:(?:.*\\.)?(?:lm_head|.*\\.mlp\\.gate)(?:\\..*)?$']
    """
    names = list(names)
    classes = [name for name in names if name == "Linear"]
    return classes + [
        rf"re:(?:.*\.)?(?:{'|'.join(part)})(?:\..*)?$"
        for part in _parts(_alternatives(names))
    ]  # fmt: skip


def _alternatives(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name == "Linear":
            continue
        inside = name.removesuffix("*").removesuffix(".")
        short = inside.replace("language_model.", "", 1)
        for each in dict.fromkeys((inside, short)):
            if each:
                yield re.escape(each).replace(r"\*", ".*").replace(r"\?", ".")


def _parts(expressions: Iterable[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for expression in expressions:
        if part and sum(map(len, part)) + len(part) + len(expression) > MOST_LETTERS:
            yield part
            part = []
        part.append(expression)
    if part:
        yield part
