"""Checkpoints of NVIDIA's ModelOpt: what their configurations say of stored weights, in groups of
modules as compressed-tensors has them.

Newer ones hold a `quantization_config` with groups and names left out, older ones say the same in a
file `hf_quant_config.json` beside `config.json`. Names are wildcards, and stand for all that is
inside of a module, too; they are found with and without `language_model.` and `backbone.`, and
with `language_model.` where checkpoints write `language_model.model.`, which classes of
transformers call otherwise. Source: `is_layer_excluded` and `from_config` of
`vllm/model_executor/layers/quantization/modelopt.py`, vLLM 0.33.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gdp.base.errors import ModelError
from gdp.base.files.reading import Kind, is_file, read_json
from gdp.importers.pytorch.quantised_check import check_quantization

BESIDE = "hf_quant_config.json"
METHOD = "modelopt"
AT_ONCE = 50
"""Names in one pattern, which may have `gdp.importers.pytorch.patterns.MOST_LETTERS`."""
_KIND = Kind("configuration of ModelOpt", ModelError)
_EXPERT = re.compile(r"(\.experts)\.\d+\..+")
"""A matrix of one expert, which transformers stacks with those of all others."""

Config = Mapping[str, Any]

_FOURS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_EIGHTS = {"num_bits": 8, "type": "float"}
ALGORITHMS: Mapping[str, tuple[Config, Config | None]] = {
    "FP8": ({**_EIGHTS, "strategy": "tensor"}, _EIGHTS),
    "FP8_PER_CHANNEL_PER_TOKEN": ({**_EIGHTS, "strategy": "channel"}, _EIGHTS),
    "FP8_PB_WO": ({**_EIGHTS, "strategy": "block"}, _EIGHTS),
    "NVFP4": (_FOURS, {"num_bits": 4, "type": "float"}),
    "W4A16_NVFP4": (_FOURS, None),
}
"""(weights, what activations are cast to) of each `quant_algo`; None: they are not cast."""


class _Beside(msgspec.Struct):
    """The file beside a configuration."""

    quantization: dict[str, Any] = {}


def with_modelopt(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """A configuration whose `quantization_config` has groups and patterns, where ModelOpt made it.

    Args:
        document: Of `path`, which is left as it is.
        path: Of the configuration; the file beside it is read where it names no scheme itself.

    Raises:
        ModelError: an algorithm that is not known, or a field of another type.
    """
    config, beside = document.get("quantization_config"), path.with_name(BESIDE)
    if config is None and is_file(beside):
        path, config = beside, read_json(beside, _KIND, _Beside).quantization
        if not config.get("quant_algo"):
            return document
    if not isinstance(config, Mapping) or not _is_modelopt(config):
        return document
    return document | {"quantization_config": grouped(config, str(path))}


def grouped(config: Config, where: str) -> dict[str, Any]:
    """The groups of a configuration of ModelOpt, as compressed-tensors writes them."""
    # By layers' names, which may be those of fields.
    layers = config.get("quantized_layers")
    check_quantization({k: v for k, v in config.items() if k != "quantized_layers"}, where)
    if isinstance(layers, Mapping) and layers:
        groups = _by_algorithm(layers, where)
    elif config.get("config_groups"):
        groups = {name: _group(group) for name, group in config["config_groups"].items()}
    else:
        groups = {"all": _of_algorithm(config.get("quant_algo"), ["Linear"], where)}
    ignore = config.get("ignore") or config.get("exclude_modules") or ()
    result: dict[str, Any] = {
        "quant_method": METHOD, "ignore": patterns(ignore), "config_groups": groups,
    }  # fmt: skip
    cache = config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo")
    if str(cache).upper() == "FP8":  # by name, not as an object
        cache = _EIGHTS
    return result | ({"kv_cache_scheme": cache} if isinstance(cache, Mapping) else {})


def _is_modelopt(config: Config) -> bool:
    producer, method = config.get("producer"), config.get("quant_method")
    made_by = producer.get("name") if isinstance(producer, Mapping) else None
    return method == METHOD or (method is None and (made_by == METHOD or "quant_algo" in config))


def _by_algorithm(layers: Config, where: str) -> dict[str, Any]:
    members: dict[str, list[str]] = {}
    for name, layer in layers.items():
        algorithm = layer.get("quant_algo") if isinstance(layer, Mapping) else layer
        members.setdefault(str(algorithm), []).append(name)
    return {
        algorithm: _of_algorithm(algorithm, _targets(names), where)
        for algorithm, names in members.items()
    }


def _group(group: Config) -> dict[str, Any]:
    """A group as compressed-tensors has it: of NVFP4 ModelOpt leaves the strategy to the sizes."""
    weights = group.get("weights") or {}
    is_nvfp4 = all(weights.get(key) == _FOURS[key] for key in ("num_bits", "type", "group_size"))
    strategy = {"strategy": _FOURS["strategy"]} if is_nvfp4 else {}
    return {
        "weights": weights and {"symmetric": True, **strategy, **weights},
        "input_activations": group.get("input_activations"),
        "targets": _targets(group.get("targets") or ["Linear"]),
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


def _targets(names: Iterable[str]) -> list[str]:
    return patterns(dict.fromkeys(_EXPERT.sub(r"\1", name) for name in names))


def patterns(names: Iterable[str]) -> list[str]:
    r"""Wildcards as patterns of compressed-tensors, of modules and all inside of them.

    >>> patterns(["Linear", "lm_head", "*.mlp.gate"])
    ['Linear', 're:(?:.*\\.)?(?:lm_head|.*\\.mlp\\.gate)(?:\\..*)?$']
    """
    names = list(names)
    found = list(_alternatives(name for name in names if name != "Linear"))
    parts = ["|".join(found[i : i + AT_ONCE]) for i in range(0, len(found), AT_ONCE)]
    classes = [name for name in names if name == "Linear"]
    return classes + [rf"re:(?:.*\.)?(?:{part})(?:\..*)?$" for part in parts]


def _alternatives(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        inside = name.removesuffix("*").removesuffix(".")
        short = inside.removeprefix("backbone.").replace("language_model.", "", 1)
        moved = inside.replace("language_model.model.", "language_model.", 1)
        for each in dict.fromkeys((inside, short, moved)):
            if each:
                yield re.escape(each).replace(r"\*", ".*").replace(r"\?", ".")
