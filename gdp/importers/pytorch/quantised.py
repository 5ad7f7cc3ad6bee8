"""Quantised models of transformers: bytes of every weight as its scheme stores it.

A row of `SCHEMES` reads one `quant_method` of a `quantization_config`: which modules are converted,
how many bytes a weight takes with its scales, zero points and tables, and whether its kernels write
a dense copy before they multiply. Which modules are left out is what transformers' own functions
say. Biases, norms, embeddings and what is left out keep the model's type.

The time of a quantised product: bytes as stored over the bandwidth, plus unpacking, which is two
operations a weight and, where `dense_copy` says so, the way of a dense copy to memory and back. In
transformers the product runs at the speed of its 16-bit inputs, but for LLM.int8; an engine that
serves multiplies what the scheme casts activations to (`WEIGHT_ARITHMETIC`).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

from gdp.base.errors import ModelError
from gdp.base.units import format_bytes
from gdp.graph.op_graph import WEIGHT_ARITHMETIC, WEIGHT_BLOCK
from gdp.importers.program import Op, ProgramOps, Value
from gdp.importers.pytorch.patterns import NamePatterns
from gdp.importers.pytorch.quantised_check import GROUPED, check_quantization

Config = Mapping[str, Any]


class Weight(NamedTuple):
    """A matrix that is quantised: several `matrices` where experts are stored together."""

    matrices: int
    rows: int  # output features
    columns: int  # input features
    itemsize: int  # bytes of a number of the model's type

    @property
    def numel(self) -> int:
        """Numbers of one matrix."""
        return self.rows * self.columns


class StoredWeight(NamedTuple):
    """Bytes that a weight takes, whether a dense copy of it is written before it is used, and what
    is multiplied."""

    nbytes: int
    dense_copy: str  # "never", "always", or "rows": for more than one row of activations
    arithmetic: str = "weights"  # a value of `WEIGHT_ARITHMETIC`
    block: tuple[int, int] = (1, 1)  # columns and rows that stay together, see `WEIGHT_BLOCK`


@dataclass(frozen=True)
class Scheme:
    """One way to store weights. Sources are the libraries' own modules, against which tests hold
    the bytes."""

    method: str  # quant_method
    nbytes: Callable[[Config, Weight], int]  # of one matrix
    dense_copy: str
    kernel: str  # which kernel multiplies, for the assumptions
    skips: tuple[str, ...] = ("modules_to_not_convert",)  # keys that name modules left out
    add_default_skips: bool = False  # the output layer and tied weights, beside those named
    experts: bool = False  # stacked weights of experts are converted, too
    linears: bool = True
    covers: Callable[[Config, str, NamePatterns], bool] = lambda config, path, patterns: True
    arithmetic: Callable[[Config], str] = lambda config: "weights"  # see `WEIGHT_ARITHMETIC`
    # Outputs and inputs of a block that engines do not cut, of a matrix, or of experts.
    block: Callable[[Config, bool], tuple[int, int]] = lambda config, experts: (1, 1)
    offloaded: str = ""  # what transformers does with maps that keep weights off accelerators


def _bitsandbytes(config: Config, w: Weight) -> int:
    if config.get("load_in_8bit"):
        return w.numel + 4 * w.rows  # SCB: float32 of each row
    if not config.get("load_in_4bit"):
        raise ModelError("bitsandbytes needs load_in_4bit or load_in_8bit")
    blocks = ceil(w.numel / 64)
    table = 16 * 4
    if not config.get("bnb_4bit_use_double_quant"):
        return ceil(w.numel / 2) + 4 * blocks + table
    # Scales in 8 bits, in blocks of 256, with the table of those 8 bits and their mean.
    return ceil(w.numel / 2) + blocks + 4 * ceil(blocks / 256) + table + 256 * 4 + 4


def _groups(config: Config, w: Weight) -> int:
    size = int(config.get("group_size") or 128)
    return 1 if size <= 0 else ceil(w.columns / size)


def _gptq(config: Config, w: Weight) -> int:
    bits, groups = int(config.get("bits") or 4), _groups(config, w)
    zeros = 4 * groups * ceil(w.rows * bits / 32)
    return 4 * ceil(w.columns * bits / 32) * w.rows + zeros + 2 * groups * w.rows + 4 * w.columns


def _awq(config: Config, w: Weight) -> int:
    bits, groups = int(config.get("bits") or config.get("w_bit") or 4), _groups(config, w)
    packed = ceil(w.rows * bits / 32)
    return 4 * w.columns * packed + 4 * groups * packed + 2 * groups * w.rows


def _fp8(config: Config, w: Weight) -> int:
    block = config.get("weight_block_size", (128, 128))
    scales = 1 if block is None else ceil(w.rows / block[0]) * ceil(w.columns / block[1])
    scale_bytes = 1 if config.get("scale_fmt") == "ue8m0" else 4
    static = 4 if config.get("activation_scheme") == "static" else 0
    return w.numel + scale_bytes * scales + static


def _packed_block(config: Config, experts: bool) -> tuple[int, int]:
    """Eight numbers of 4 bits a word, and groups with a scale of inputs: engines halve those of
    experts down to 32 (`MoeWNA16Method.create_weights` of `moe_wna16.py` in vLLM 0.33), and end at
    parts of others (`auto_awq.py`, `check_marlin_supports_layer` of `utils/marlin_utils.py`)."""
    size = max(1, int(config.get("group_size") or 128))
    return 8, min(size, 32) if experts else size


def _fp8_block(config: Config, experts: bool) -> tuple[int, int]:
    """Blocks with a scale, where the configuration names them: engines end at parts of them
    (`validate_fp8_block_shape` of `utils/fp8_utils.py` in vLLM 0.33, `layers/quantization/fp8.py`
    in SGLang 0.5.23). Of experts vLLM 0.33 alone refines the blocks, for slower kernels."""
    del experts
    size = config.get("weight_block_size")
    return (int(size[0]), int(size[1])) if size else (1, 1)


def _compressed_block(config: Config, experts: bool) -> tuple[int, int]:
    """By the first group, as `_compressed` (`verify_group_size_divides_partition` of
    `vllm/distributed/utils.py`)."""
    del experts
    args = next(iter((config.get("config_groups") or {}).values()))["weights"]
    if args.get("strategy") == "block":
        high, wide = args.get("block_structure") or (128, 128)
        return int(high), int(wide)
    return 1, max(1, int(args.get("group_size") or 1))


def _torchao_block(config: Config, experts: bool) -> tuple[int, int]:
    del experts
    kind, data = torchao_kind(config)
    return 1, max(1, int(data.get("group_size") or 128)) if kind.startswith("int4") else 1


def _hqq(config: Config, w: Weight) -> int:
    given = config.get("quant_config") or config
    given = given.get("weight_quant_params") or given
    bits, group = int(given.get("nbits") or 4), given.get("group_size", 64)
    size = w.columns if group is None or int(group) < 0 else int(group)
    groups = ceil(w.numel / size)
    packed = {8: w.numel, 4: ceil(w.numel / 2), 2: ceil(w.numel / 4), 1: ceil(w.numel / 8)}
    # Ten numbers of 3 bits in 32, counted along the groups, or along each group.
    along = (groups, size) if given.get("axis", 1) == 1 else (size, groups)
    packed[3] = 4 * ceil(along[0] / 10) * along[1]
    if bits not in packed:
        raise ModelError(f"HQQ has 1, 2, 3, 4 and 8 bits, not {bits}")
    return packed[bits] + 2 * groups * w.itemsize


def _torchao(config: Config, w: Weight) -> int:
    kind, data = torchao_kind(config)
    if kind in ("int8weightonly", "int8dynamicactivationint8weight"):
        return w.numel + (w.itemsize if kind == "int8weightonly" else 4) * w.rows
    if kind.startswith("float8"):
        by_row = "row" in str(data.get("granularity", "")).lower() or kind == "float8weightonly"
        return w.numel + 4 * (w.rows if by_row else 1)
    if kind in ("int4weightonly", "int8dynamicactivationint4weight"):
        groups = ceil(w.columns / int(data.get("group_size") or 128))
        # A scale and a zero point of each group.
        return ceil(w.numel / 2) + 2 * groups * w.rows * w.itemsize
    raise ModelError(
        f"torchao {kind!r} is not known; known are Int4WeightOnly, Int8WeightOnly, "
        "Float8WeightOnly and those with dynamic activations in int8 or float8"
    )


def torchao_kind(config: Config) -> tuple[str, Config]:
    """Name of a torchao configuration in small letters, without "config", and its fields."""
    kind = config.get("quant_type")
    if isinstance(kind, Mapping):
        kind = kind.get("default", kind)
    if isinstance(kind, Mapping):
        data = kind.get("_data") or {}
        return str(kind.get("_type")).lower().replace("_", "").removesuffix("config"), data
    return str(kind).lower().replace("_", ""), config.get("quant_type_kwargs") or config


def _compressed_group(config: Config, path: str, patterns: NamePatterns) -> Config | None:
    """The group of a compressed-tensors configuration that holds a module; None where none does."""

    def named(target: str) -> bool:
        if target.startswith("re:"):
            return patterns.matches(target[3:], path)
        return path == target or path.endswith(f".{target}")

    if any(map(named, config.get("ignore") or ())):
        return None
    for group in (config.get("config_groups") or {}).values():
        if any(target == "Linear" or named(target) for target in group.get("targets") or ()):
            return group if group.get("weights") else None
    return None


def _compressed(config: Config, w: Weight) -> int:
    """By the first group; `stored_weights` gives each module its own."""
    group = next(iter((config.get("config_groups") or {}).values()))
    args = group["weights"]
    bits, kind = int(args.get("num_bits") or 8), args.get("type", "int")
    strategy, size = args.get("strategy"), args.get("group_size")
    if strategy is None:
        strategy = "group" if size else "tensor"
    scales = {
        "tensor": 1, "channel": w.rows, "token": w.rows,
        "group": w.rows * _groups({"group_size": size or 128}, w),
        "tensor_group": w.rows * _groups({"group_size": size or 16}, w),
    }  # fmt: skip
    if strategy == "block":
        high, wide = args.get("block_structure") or (128, 128)
        scales["block"] = ceil(w.rows / int(high)) * ceil(w.columns / int(wide))
    if strategy not in scales:
        raise ModelError(f"compressed-tensors strategy {strategy!r} is not known")
    count = scales[strategy]
    fmt = str(group.get("format") or config.get("format") or "")
    if kind == "float" and bits == 4:
        # nvfp4: scales in 8 bits and one of the whole; mxfp4: powers of two in 8 bits.
        return ceil(w.numel / 2) + count + (4 if strategy == "tensor_group" else 0)
    zeros = 0
    if "pack" in fmt:
        if not args.get("symmetric", True):
            zeros = 4 * ceil(w.rows * bits / 32) * (count // w.rows)
        return w.rows * 4 * ceil(w.columns * bits / 32) + w.itemsize * count + zeros + 2 * 8
    zeros = 0 if args.get("symmetric", True) else count
    return ceil(w.numel * (8 if bits > 4 else bits) / 8) + w.itemsize * count + zeros


def _of_compressed(config: Config) -> str:
    """By the first group, as `_compressed`: kernels multiply what activations are cast to."""
    group = next(iter((config.get("config_groups") or {}).values()))
    cast = group.get("input_activations") or {}
    kind, bits = cast.get("type", "int"), int(cast.get("num_bits") or 16)
    known = {("float", 8): "float8", ("float", 4): "float4", ("int", 8): "int8"}
    return known.get((kind, bits), "weights")


def _of_torchao(kind: str) -> str:
    if kind == "int8dynamicactivationint8weight":
        return "int8"
    return "float8" if kind == "float8dynamicactivationfloat8weight" else "weights"


def _gptq_covers(config: Config, path: str, patterns: NamePatterns) -> bool:
    inner = [name for names in config.get("modules_in_block_to_quantize") or () for name in names]
    if not re.search(r"\.\d+\.", path):  # GPTQ goes through the blocks; the output layer if asked
        return path.endswith("lm_head") and bool(config.get("lm_head"))
    dynamic = config.get("dynamic")
    left_out = [k[2:] for k in dynamic if k[:2] == "-:"] if isinstance(dynamic, Mapping) else []
    if any(patterns.matches(pattern, path) for pattern in left_out):
        return False
    return not inner or any(path.endswith(f".{name}") for name in inner)


SCHEMES: Mapping[str, Scheme] = {
    row.method: row
    for row in (
        Scheme("bitsandbytes", _bitsandbytes, "rows",
               "gemv_4bit for one row of activations, else a dense copy (bitsandbytes/autograd: "
               "matmul_4bit); LLM.int8 multiplies in 8 bits",
               ("llm_int8_skip_modules",),
               arithmetic=lambda c: "llm.int8" if c.get("load_in_8bit") else "weights",
               offloaded="bitsandbytes: from_pretrained takes a map "
               "with 'cpu' or 'disk' only with llm_int8_enable_fp32_cpu_offload=True, and keeps "
               "modules there unquantised: larger and slower than planned"),
        Scheme("gptq", _gptq, "never", "Marlin or ExLlama, which unpack in registers", (),
               experts=True, covers=_gptq_covers, block=_packed_block),
        Scheme("awq", _awq, "never", "Marlin or the GEMM of AWQ, which unpack in registers",
               add_default_skips=True, experts=True, block=_packed_block),
        Scheme("fp8", _fp8, "never", "matrix units in float8, or Triton", experts=True,
               arithmetic=lambda c: "float8", block=_fp8_block),
        # A scale of each row, and the bound of the inputs' scale.
        Scheme("fbgemm_fp8", lambda c, w: w.numel + 4 * w.rows + 4, "never", "FBGEMM in float8",
               experts=True, arithmetic=lambda c: "float8"),
        Scheme("mxfp4", lambda c, w: w.rows * (w.columns // 2 + w.columns // 32), "never",
               "Triton, which unpacks in registers", experts=True, linears=False,
               arithmetic=lambda c: "float4"),
        Scheme("hqq", _hqq, "always", "HQQLinear's default backend: dequantise, then multiply",
               ("skip_modules",), offloaded="HQQ: from_pretrained refuses a map with 'cpu' or "
               "'disk'; keep all on accelerators (--offload none)"),
        Scheme("torchao", _torchao, "never", "torchao's kernels, which unpack in registers",
               arithmetic=lambda c: _of_torchao(torchao_kind(c)[0]), block=_torchao_block),
        Scheme("compressed-tensors", _compressed, "never",
               "vLLM's kernels; transformers itself unpacks when it loads, unless run_compressed",
               (), experts=True,
               covers=lambda c, path, patterns: _compressed_group(c, path, patterns) is not None,
               arithmetic=_of_compressed, block=_compressed_block),
        # As `gdp.importers.huggingface.modelopt` makes groups of it.
        Scheme("modelopt", _compressed, "never",
               "kernels of vLLM, SGLang and TensorRT-LLM; transformers does not load it",
               (), experts=True,
               covers=lambda c, path, patterns: _compressed_group(c, path, patterns) is not None,
               arithmetic=_of_compressed, block=_compressed_block),
    )
}  # fmt: skip


def _compressed_to(weights: Config, cast: str = "", bits: int = 16) -> Config:
    """A scheme of compressed-tensors for all linear modules but the head, and experts; activations
    are cast to numbers of a type and so many bits, or left."""
    group = {
        "targets": ["Linear"], "weights": {**weights, "symmetric": True},
        "input_activations": {"num_bits": bits, "type": cast} if cast else None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "ignore": ["lm_head"],
        "config_groups": {"weights": group},
    }  # fmt: skip


_INT4 = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}
QUANTIZE: Mapping[str, Config | None] = {
    "none": None,
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "nf4-double": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True,
    },
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "fp8": {"quant_method": "fp8"},
    "hqq": {"quant_method": "hqq", "quant_config": {"nbits": 4, "group_size": 64},
            "skip_modules": ["lm_head"]},
    "int4": {"quant_method": "torchao", "quant_type": {"default": _INT4}},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": _compressed_to(
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "float", 4
    ),
    "w8a8": _compressed_to({"num_bits": 8, "type": "int", "strategy": "channel"}, "int", 8),
    "w4a16": _compressed_to({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
}  # fmt: skip
"""Configurations of `--quantize`: what a model would take if it were stored so."""
EXPERTS = "experts"
"""Key of the scheme of experts that are stored in another way than the rest, set here alone."""


def quantization_of(document: Config, quantize: str, where: str) -> Config | None:
    """The `quantization_config` to place a model with: that of `quantize`, else the document's own;
    None for weights as they are. Raises `ModelError` for a scheme that is not known."""
    if quantize:
        if quantize not in QUANTIZE:
            raise ModelError(
                f"no quantisation {quantize!r} to try; there are {', '.join(QUANTIZE)}"
            )
        return QUANTIZE[quantize]
    config = document.get("quantization_config")
    if config is None and isinstance(document.get("text_config"), Mapping):
        config = document["text_config"].get("quantization_config")
    if config is None or (isinstance(config, Mapping) and config.get("dequantize") is True):
        return None
    if isinstance(config, Mapping):
        check_quantization(config, where)
    method = config.get("quant_method") if isinstance(config, Mapping) else None
    fewer = ("load_in_4bit", "load_in_8bit")
    if isinstance(config, Mapping) and method is None and any(map(config.get, fewer)):
        method, config = "bitsandbytes", {**config, "quant_method": "bitsandbytes"}
    if method not in SCHEMES:
        raise ModelError(
            f"{where}: quantisation {method!r} is not known, only {', '.join(SCHEMES)}; --quantize "
            f"places it as if it were another ({', '.join(QUANTIZE)})"
        )
    return {**config, EXPERTS: _experts_apart(document, config)}


def _experts_apart(document: Config, config: Config) -> Config | None:
    """Scheme of the experts of DeepSeek V4, whose other weights are in 8 bits (`expert_dtype` of
    vLLM 0.33, `models/deepseek_v4/quant_config.py`, which takes 4 bits where nothing is said)."""
    if config.get("quant_method") != "fp8" or document.get("model_type") != "deepseek_v4":
        return None
    if document.get("expert_dtype") not in (None, "fp4"):
        return None
    return QUANTIZE["nvfp4" if config.get("moe_quant_algo") == "NVFP4" else "mxfp4"]


def cache_bits(document: Config) -> int:
    """Bits of keys and values in a checkpoint's `kv_cache_scheme`, which vLLM uses for its KV
    cache; 0 if absent."""
    parts = (document, document.get("text_config"))
    configs = [part.get("quantization_config") for part in parts if isinstance(part, Mapping)]
    schemes = [c.get("kv_cache_scheme") for c in configs if isinstance(c, Mapping)]
    named = [int(s.get("num_bits") or 0) for s in schemes if isinstance(s, Mapping)]
    return next(iter(named), 0)


def stored_weights(model: Any, config: Config, where: str) -> dict[str, StoredWeight]:
    """Bytes of each parameter of a transformers model as it is stored, by its path; those that are
    left as they are have no entry. Raises `ModelError` where a scheme has no such bits."""
    patterns, stored = NamePatterns(where), dict[str, StoredWeight]()
    for path, weight in _converted(model, SCHEMES[config["quant_method"]], config, patterns):
        own = (config.get(EXPERTS) if weight.matrices > 1 else None) or config
        scheme = SCHEMES[own["quant_method"]]
        if own is config and scheme.method in GROUPED:
            module = path.removesuffix(".weight")
            own = {
                **config,
                "config_groups": {"group": _compressed_group(config, module, patterns)},
            }
        try:
            nbytes = weight.matrices * scheme.nbytes(own, weight)
            arithmetic = scheme.arithmetic(own)
            block = scheme.block(own, weight.matrices > 1)
        except (ModelError, TypeError, ValueError, LookupError, ArithmeticError,
                AttributeError) as error:  # fmt: skip
            raise ModelError(f"{where}: quantization_config: {error}") from error
        copy = "never" if own.get("load_in_8bit") else scheme.dense_copy
        stored[path] = StoredWeight(nbytes, copy, arithmetic, block)
    return stored


def _converted(
    model: Any, scheme: Scheme, config: Config, patterns: NamePatterns
) -> Iterable[tuple[str, Weight]]:
    """Parameters that a scheme converts, by transformers' own rules for modules left out."""
    import torch
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer

    named = [config[key] for key in scheme.skips if config.get(key)]
    skips = HfQuantizer.get_modules_to_not_convert(
        model, list(named[0]) if named else None,
        getattr(model, "_keep_in_fp32_modules", None), scheme.add_default_skips,
    )  # fmt: skip
    by_rules = scheme.method not in ("gptq", *GROUPED)
    for path, module in model.named_modules():
        if by_rules and _is_skipped(path, skips, patterns):
            continue
        if not scheme.covers(config, path, patterns):
            continue
        if isinstance(module, torch.nn.Linear | Conv1D) and scheme.linears:
            rows, columns = module.weight.shape
            if isinstance(module, Conv1D):
                rows, columns = columns, rows
            yield f"{path}.weight", Weight(1, rows, columns, module.weight.element_size())
        elif scheme.experts and path.endswith("experts"):
            for name, weight in module.named_parameters(recurse=False):
                if weight.dim() == 3:
                    yield f"{path}.{name}", _experts(module, weight)


def _is_skipped(path: str, keys: list[str], patterns: NamePatterns) -> bool:
    """True for a module that is left out by a name or a pattern: at the end of its path, or from
    the start to the end of a part of it (`should_convert_module` of transformers)."""
    return path.endswith(tuple(keys)) or patterns.any_matches(keys, path, r"(?:(?<=\.)|(?=\.|$))")


def _experts(module: Any, weight: Any) -> Weight:
    """Stacked matrices of experts; some classes keep them transposed."""
    count, rows, columns = weight.shape
    if getattr(module, "is_transposed", False):
        rows, columns = columns, rows
    return Weight(count, rows, columns, weight.element_size())


def quantised_options(model: Any, config: Config, where: str) -> dict[str, Any]:
    """Options of a `TorchModel` whose weights are stored by a quantization_config."""
    stored = stored_weights(model, config, where)
    if not stored:
        raise ModelError(
            f"{where}: quantisation {config['quant_method']!r} converts none of its weights"
        )
    offloaded = SCHEMES[config["quant_method"]].offloaded
    return {"stored": stored, "assumed": (assumption(config),), "offloaded": offloaded}


def assumption(config: Config) -> str:
    """One sentence on the times of quantised products, and the kernels that they assume."""
    scheme = SCHEMES[config["quant_method"]]
    return (
        f"{scheme.method}: products take the bytes of their stored weights over the bandwidth, "
        f"plus unpacking ({scheme.kernel})"
    )


def experts_left(held: Iterable[tuple[str, int]], config: Config | None) -> str:
    """Bytes of experts that a scheme leaves as they are, with the schemes that would not, in a
    sentence; "" where there are none. `held` has the module path and the bytes of every weight, as
    it is stored."""
    scheme = None if config is None else SCHEMES[config["quant_method"]]
    if scheme is None or scheme.experts:
        return ""
    rows = list(held)
    left = sum(size for path, size in rows if path.endswith("experts"))
    if not left:
        return ""
    others = [
        name for name, own in QUANTIZE.items() if own and SCHEMES[own["quant_method"]].experts
    ]
    return (
        f"{format_bytes(left)} of {format_bytes(sum(size for _, size in rows))} of weights are "
        f"experts that {scheme.method} leaves at 16 bits: they are no Linear modules, which is all "
        f"that it converts; {', '.join(others)} store experts in fewer bits, too (vLLM makes fp8 "
        "when it loads), and so do GGUF files for llama.cpp"
    )


def apply_stored(
    listing: ProgramOps, weights: Mapping[str, Value], stored: Mapping[str, StoredWeight]
) -> None:
    """Give weights of a listed program the bytes that they are stored in, and the ops that read
    them the traffic and the work of unpacking."""
    changed: dict[int, tuple[int, StoredWeight]] = {}
    for path, value in weights.items():
        if path in stored and id(value) not in changed:
            changed[id(value)] = (value.nbytes, stored[path])
            value.stored_bytes = stored[path].nbytes
    for op in listing.ops:
        for value in op.ins:
            if id(value) in changed:
                _unpack(op, value, *changed[id(value)])


def _unpack(op: Op, value: Value, dense_bytes: int, stored: StoredWeight) -> None:
    """Less traffic for the weight's own bytes; of experts for the part that is read."""
    others = sum(v.nbytes for v in op.ins if v is not value) + sum(v.nbytes for v in op.outs)
    read = min(float(dense_bytes), max(0.0, op.traffic_bytes - others))
    numbers = read / value.itemsize
    one_row = op.flop <= 2.0 * numbers
    copied = stored.dense_copy == "always" or (stored.dense_copy == "rows" and not one_row)
    op.traffic_bytes += read * (stored.nbytes / dense_bytes - 1.0) + 2.0 * read * copied
    op.flop += 2.0 * numbers
    op.attributes = {**op.attributes, WEIGHT_ARITHMETIC: stored.arithmetic}
    if stored.block != (1, 1):
        op.attributes = {**op.attributes, WEIGHT_BLOCK: stored.block}
    if stored.arithmetic == "llm.int8":
        # Activations are written and read in 8 bits, results in 32 (`int8_vectorwise_quant`,
        # `int8_linear_matmul`, `int8_mm_dequant` of bitsandbytes/autograd).
        rows, made = (
            sum(v.nbytes / v.itemsize for v in values)
            for values in ([v for v in op.ins if v is not value], op.outs)
        )
        op.traffic_bytes += 2.0 * rows + 8.0 * made


def saved_bytes(model: Any, stored: Mapping[str, StoredWeight]) -> int:
    """Bytes that the weights take less than as dense arrays, tied ones once."""
    sizes = {
        path: weight.numel() * weight.element_size() for path, weight in model.named_parameters()
    }
    return sum(sizes[path] - kept.nbytes for path, kept in stored.items() if path in sizes)
