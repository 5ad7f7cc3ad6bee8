"""Measured kernels of accelerators as rows to learn from.

Three public sources, neither of which is kept here:

* NVIDIA's AIConfigurator (Apache-2.0; `pip install -e ".[measured]"`):
  products, attention and experts of ten accelerators inside vLLM, SGLang and TensorRT-LLM;
* NeuSight (MIT; `kernels_neusight.csv.gz` of `--bench`): products, convolutions and elementwise
  kernels of seven older ones, in PyTorch and float32;
* LLMServingSim (MIT; `serving_layers.csv.gz` there): layers of language models on four GPUs.

Rows of one shape are merged by their median; where an engine has several kernels of one shape, it
is taken to use the fastest.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.cluster.presets import device_preset
from gdp.costs.measured.kernels import (
    ARITHMETIC,
    ENGINES,
    ENTERS_BYTES,
    KINDS,
    Kernels,
    descriptor_of,
)

SYSTEMS = {
    "a100_sxm": "a100", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200",
    "b300_sxm": "b300", "gb200": "gb200", "gb300": "gb300", "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000", "b60": "arc-b60",
}  # fmt: skip
NEUSIGHT = {
    "P4": "p4", "P100-PCIE-16GB": "p100-pcie", "V100-PCIE-32GB": "v100-pcie", "T4": "t4",
    "A100-PCIE-40GB": "a100-40", "A100 80GB PCIe": "a100", "MI100": "mi100", "MI210": "mi210",
}  # fmt: skip
FORMATS: dict[str, tuple[str, int]] = {
    "bfloat16": ("float16", 16), "float16": ("float16", 16), "fp8": ("float8", 8),
    "fp8_block": ("float8", 8), "nvfp4": ("float4", 4), "int4_wo": ("float16", 4),
    "int8_wo": ("float16", 8), "w4a16_mxfp4": ("float16", 4), "w4a8_mxfp4_mxfp8": ("float8", 4),
}  # fmt: skip
"""Type of the arithmetic and bits of a stored weight, by the name of a format in the tables."""
BLOCK_SCALED = frozenset(("fp8_block", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8"))
"""Formats with a scale for each block of a weight; those of others go by row, column or tensor,
and for nvfp4 are the only form."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Measured kernels, each of a device and of a shape (a layer, whatever its batch)."""

    kernels: Kernels
    seconds: Float[np.ndarray, "K"]
    device: Int[np.ndarray, "K"]  # index into `devices`
    devices: tuple[str, ...]  # presets
    shape: Int[np.ndarray, "K"]  # rows of one layer share it, on all devices

    def take(self, which: np.ndarray) -> "Rows":
        """The rows at these indices, or where a mask is true."""
        return Rows(
            self.kernels.take(which), self.seconds[which], self.device[which], self.devices,
            self.shape[which],
        )  # fmt: skip

    def held_shapes(self, share: float) -> Bool[np.ndarray, "K"]:
        """True for rows of this share of all shapes, the same on every device."""
        return (self.shape % 1000) < 1000 * share


def _rows(kind: str, engine: str, formats: Any, dims: dict[str, Any], seconds: Any) -> "_Part":
    count = len(seconds)
    arithmetic = [FORMATS[name][0] for name in formats]
    bits = [FORMATS[name][1] for name in formats]

    def column(name: str) -> np.ndarray:
        return np.broadcast_to(np.asarray(dims[name], dtype=float), (count,)).copy()

    kernels = Kernels(
        np.full(count, KINDS.index(kind)), np.full(count, ENGINES.index(engine)),
        np.array([ARITHMETIC.index(a) for a in arithmetic]), np.array(bits, dtype=float),
        np.array([float(name in BLOCK_SCALED) for name in formats]),
        *(column(name) for name in ("b", "m", "n", "k", "flop", "held", "moved")),
        numbers=np.zeros(count, dtype=np.int64),
    )  # fmt: skip
    layers = np.column_stack([column(name) for name in dims["layer"]])
    names, which = np.unique(layers, axis=0, return_inverse=True)
    codes = np.array([_code(kind, row) for row in names], dtype=np.int64)
    return kernels, np.asarray(seconds, dtype=float), codes[which]


_Part = tuple[Kernels, np.ndarray, np.ndarray]


def _code(kind: str, row: np.ndarray) -> int:
    text = f"{kind} {row.tolist()}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


# AIConfigurator.


def package() -> Path:
    """Folder `systems` of the installed package; raises `FileNotFoundError`."""
    spec = find_spec("aiconfigurator_core")
    places = None if spec is None else spec.submodule_search_locations
    if not places:
        raise FileNotFoundError("the tables are not here: pip install -e '.[measured]'")
    return Path(next(iter(places))) / "systems"


def _tables(system: str, family: str, name: str) -> Iterator[tuple[str, Any]]:
    """(engine, table) of each engine: the largest of its versions, rows of one shape merged."""
    import pandas as pd

    folder = package() / "data" / system / family
    for engine in ENGINES:
        frames = [pd.read_parquet(p) for p in sorted(folder.glob(f"{engine}/*/{name}.parquet"))]
        if not frames:
            continue
        table = max(frames, key=len)
        # Two products instead of three: another kernel under the same sizes.
        table = table[~table.kernel_source.str.contains("nongated")]
        other = {"latency", "kernel_source", "framework", "version", "device", "op_name", "power"}
        keys = [c for c in table.columns if c not in other]
        by_source = table.groupby([*keys, "kernel_source"], dropna=False).latency.median()
        kernels = [k for k in ("gemm_dtype", "moe_dtype", "kv_cache_dtype") if k in keys]
        least = by_source.groupby(level=[*kernels, "kernel_source"]).transform("min")
        by_source = by_source[least < HOST_BOUND_MS]
        if by_source.empty:
            continue
        yield engine, by_source.groupby(level=keys, dropna=False).min().reset_index()


HOST_BOUND_MS = 0.05
"""Where even the smallest kernel of a format takes longer, the host was measured that launched it:
engines replay recorded graphs instead."""


def _products(system: str) -> Iterator[_Part]:
    for engine, t in _tables(system, "gemm", "gemm_perf"):
        t = t[t.gemm_dtype.isin(FORMATS)]
        m, n, k = (t[c].to_numpy(float) for c in "mnk")
        bits = np.array([FORMATS[f][1] for f in t.gemm_dtype])
        inner = np.array([ACTIVATION[FORMATS[f][0]] for f in t.gemm_dtype])
        yield _rows("product", engine, t.gemm_dtype, {
            "b": 1, "m": m, "n": n, "k": k, "flop": 2 * m * n * k, "held": n * k * bits / 8,
            "moved": m * k * inner + 2 * m * n, "layer": ("n", "k"),
        }, t.latency / 1e3)  # fmt: skip


ACTIVATION: Mapping[str, float] = dict(zip(ARITHMETIC, ENTERS_BYTES, strict=True))


def _prompts(system: str) -> Iterator[_Part]:
    for engine, t in _tables(system, "attention", "context_attention_perf"):
        t = t[t.attn_dtype.isin(FORMATS)]
        batch, new, heads, keys, size = (
            t[c].to_numpy(float)
            for c in ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
        )
        keys = np.where(keys == 0, heads, keys)
        window = t.get("window_size", 0 * batch)
        seen = np.where(window > 0, np.minimum(window, new), new)
        pairs = new * (new + 1) / 2 - (new - seen) * (new - seen + 1) / 2
        held_bits = np.array([FORMATS[f][1] for f in t.kv_cache_dtype])
        dims = {
            "b": batch * keys, "m": new * heads / keys, "n": seen, "k": size,
            "flop": 4 * batch * heads * pairs * size,
            "held": 2 * batch * keys * new * size * held_bits / 8,
            "moved": 2 * 2 * batch * heads * new * size,
            "layer": ("heads", "keys", "k"), "heads": heads, "keys": keys,
        }  # fmt: skip
        part = _rows("prompt attention", engine, t.attn_dtype, dims, t.latency / 1e3)
        yield _stored(part, held_bits)


def _tokens(system: str) -> Iterator[_Part]:
    for engine, t in _tables(system, "attention", "generation_attention_perf"):
        t = t[t.attn_dtype.isin(FORMATS)]
        batch, heads, keys, size = (
            t[c].to_numpy(float)
            for c in ("batch_size", "num_heads", "num_key_value_heads", "head_dim")
        )
        keys = np.where(keys == 0, heads, keys)
        context = t.isl.to_numpy(float) + t.step.to_numpy(float)
        window = t.get("window_size", 0 * batch)
        seen = np.where(window > 0, np.minimum(window, context), context)
        held_bits = np.array([FORMATS[f][1] for f in t.kv_cache_dtype])
        dims = {
            "b": batch * keys, "m": heads / keys, "n": seen, "k": size,
            "flop": 4 * batch * heads * seen * size,
            "held": 2 * batch * keys * seen * size * held_bits / 8,
            "moved": 2 * 2 * batch * heads * size,
            "layer": ("heads", "keys", "k"), "heads": heads, "keys": keys,
        }  # fmt: skip
        part = _rows("token attention", engine, t.attn_dtype, dims, t.latency / 1e3)
        yield _stored(part, held_bits)


def _stored(part: _Part, bits: np.ndarray) -> _Part:
    kernels, seconds, shape = part
    kernels.stored_bits[:] = bits
    return kernels, seconds, shape


ROUTING = "power_law_1.01"
"""How tokens choose experts: unevenly, as they do in use, but not at the extreme that was tried."""


def _experts(system: str) -> Iterator[_Part]:
    for engine, t in _tables(system, "moe", "moe_perf"):
        t = t[t.moe_dtype.isin(FORMATS) & (t.distribution == ROUTING)]
        t = t[t.num_experts >= t.moe_ep_size]
        tokens, hidden, inner, top, experts = (
            t[c].to_numpy(float)
            for c in ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
        )
        shards = t.moe_ep_size.to_numpy(float)
        local, inner = experts / shards, inner / t.moe_tp_size.to_numpy(float)
        rows = tokens * top / shards
        working = local * (1 - (1 - 1 / local) ** np.maximum(rows, 1))
        bits = np.array([FORMATS[f][1] for f in t.moe_dtype])
        enters = np.array([ACTIVATION[FORMATS[f][0]] for f in t.moe_dtype])
        yield _rows("experts", engine, t.moe_dtype, {
            "b": working, "m": np.maximum(rows / working, 1), "n": inner, "k": hidden,
            "flop": 6 * rows * inner * hidden, "held": 3 * working * inner * hidden * bits / 8,
            "moved": (enters + 2) * tokens * hidden, "layer": ("k", "inner", "top", "experts"),
            "inner": inner, "top": top, "experts": experts,
        }, t.latency / 1e3)  # fmt: skip


FAMILIES: tuple[Callable[[str], Iterator[_Part]], ...] = (_products, _prompts, _tokens, _experts)


# NeuSight.

_ELEMENTWISE = {"relu": 1, "gelu": 1, "tanh": 1}


def _neusight(table: Any) -> Iterator[_Part]:
    for op, t in table.groupby("op"):
        shapes = np.array([[int(x) for x in s.split("x")] for s in t["shape"]], dtype=float)
        kind, dims = _neusight_dims(str(op), shapes)
        layer = ("n", "k") if kind in ("product", "batched product", "convolution") else ("n",)
        kernels, seconds, shape = _rows(
            kind, "torch", ["bfloat16"] * len(t), dims | {"layer": layer}, t.latency_ms / 1e3
        )
        kernels.arithmetic[:] = ARITHMETIC.index("float32")
        kernels.stored_bits[:] = 32
        yield kernels, seconds, shape


def _neusight_dims(op: str, shapes: np.ndarray) -> tuple[str, dict[str, Any]]:
    if op in ("linear", "bmm"):
        b, m, n, k = shapes.T
        work = {"b": b, "m": m, "n": n, "k": k, "flop": 2 * b * m * n * k}
        if op == "linear":
            rows = b * m
            work |= {"b": 1, "m": rows, "held": 4 * n * k, "moved": 4 * rows * (k + n)}
            return "product", work
        return "batched product", work | {"held": 0, "moved": 4 * b * (m * k + n * k + m * n)}
    if op == "conv":
        batch, inputs, outputs, taps, size, stride, pad = shapes.T
        side = np.floor((size + 2 * pad - taps) / stride) + 1
        m, k = batch * side**2, inputs * taps**2
        return "convolution", {
            "b": 1, "m": m, "n": outputs, "k": k, "flop": 2 * m * outputs * k,
            "held": 4 * outputs * k, "moved": 4 * (batch * inputs * size**2 + m * outputs),
        }  # fmt: skip
    m, n = shapes.T
    reads = 1.0 if op in _ELEMENTWISE or op.endswith("u") or op in ("softmax", "ln") else 2.0
    kind = {"softmax": "softmax", "ln": "normalisation"}.get(op, "elementwise")
    flop = (5.0 if kind != "elementwise" else 1.0) * m * n
    moved = 4 * (reads + 1) * m * n
    return kind, {"b": 1, "m": m, "n": n, "k": reads, "flop": flop, "held": 0, "moved": moved}


# LLMServingSim.

SERVING = {
    "RTX3090": ("rtx3090", "torch"), "A6000": ("a6000", "torch"), "H100": ("h100", "torch"),
    "RTXPRO6000": ("rtx-pro-6000", "vllm"),
}  # fmt: skip
"""Preset and engine by the name of a device in `serving_layers.csv.gz`. Of those that an older
tool measured outside of an engine products alone are read: its small layers hold more than that."""


class _Widths(NamedTuple):
    """Sizes of a language model."""

    hidden: int
    inner: int
    heads: int
    keys: int
    head: int
    words: int


LANGUAGE_MODELS = {
    "meta-llama/Llama-3.1-8B": _Widths(4096, 14336, 32, 8, 128, 128256),
    "meta-llama/Llama-3.1-70B": _Widths(8192, 28672, 64, 8, 128, 128256),
    "mistralai/Mixtral-8x7B-v0.1": _Widths(4096, 14336, 32, 8, 128, 32000),
    "microsoft/Phi-mini-MoE-instruct": _Widths(4096, 960, 32, 8, 128, 32064),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _Widths(2048, 768, 32, 4, 128, 151936),
}
"""From the configurations that their makers publish."""


def _serving(table: Any, engine: str) -> Iterator[_Part]:
    """Layers of language models; of attention, steps that are all prompt or all tokens."""
    for (name, shards), t in table.groupby(["model", "tp"]):
        w, own = LANGUAGE_MODELS[str(name)], float(shards)
        queries, keys = w.heads * w.head / own, w.keys * w.head / own
        products = {
            "q_proj": (queries, w.hidden), "k_proj": (keys, w.hidden),
            "v_proj": (keys, w.hidden), "o_proj": (w.hidden, queries),
            "qkv_proj": (queries + 2 * keys, w.hidden),
            "gate_proj": (w.inner / own, w.hidden), "up_proj": (w.inner / own, w.hidden),
            "gate_up_proj": (2 * w.inner / own, w.hidden), "down_proj": (w.hidden, w.inner / own),
            "lm_head": (w.words / own, w.hidden),
        }  # fmt: skip
        rows = {
            "input_layernorm": w.hidden, "post_layernorm": w.hidden, "layernorm": w.hidden,
            "final_layernorm": w.hidden, "act_fn": w.inner / own,
            "rope": queries + keys, "rotary_emb": queries + keys,
        }  # fmt: skip
        for layer, part in t.groupby("layer"):
            m = part.tokens.to_numpy(float)
            seconds, formats = part.ms.to_numpy(float) / 1e3, ["bfloat16"] * len(part)
            if layer in products:
                n, k = products[str(layer)]
                yield _rows("product", engine, formats, {
                    "b": 1, "m": m, "n": n, "k": k, "flop": 2 * m * n * k, "held": 2 * n * k,
                    "moved": 2 * m * (n + k), "layer": ("n", "k"),
                }, seconds)  # fmt: skip
            elif layer in rows and engine == "vllm":
                n = rows[str(layer)]
                norm = "norm" in str(layer)
                reads = 2.0 if layer == "act_fn" else 1.0
                yield _rows("normalisation" if norm else "elementwise", engine, formats, {
                    "b": 1, "m": m, "n": n, "k": reads, "flop": (4 if norm else 3) * m * n,
                    "held": 0, "moved": 2 * (reads + 1) * m * n, "layer": ("n",),
                }, seconds)  # fmt: skip
            elif layer in ("attention", "attn") and engine == "vllm":
                yield from _served_attention(part, w, own, engine)


def _served_attention(table: Any, w: _Widths, shards: float, engine: str) -> Iterator[_Part]:
    heads, keys = w.heads / shards, w.keys / shards
    sizes = {"k": w.head, "heads": heads, "keys": keys, "layer": ("heads", "keys", "k")}
    prompts = table[(table.prefill_tokens > 0) & ~(table.decode_sequences > 0)]
    new, before = (prompts[c].to_numpy(float) for c in ("prefill_tokens", "prefill_context"))
    seen = new + before
    if len(prompts):
        yield _rows("prompt attention", engine, ["bfloat16"] * len(prompts), {
            "b": keys, "m": new * heads / keys, "n": seen,
            "flop": 4 * heads * w.head * (new * before + new * (new + 1) / 2),
            "held": 4 * keys * seen * w.head, "moved": 4 * heads * new * w.head, **sizes,
        }, prompts.ms / 1e3)  # fmt: skip
    steps = table[(table.decode_sequences > 0) & ~(table.prefill_tokens > 0)]
    steps = steps[steps.decode_context > 0]
    batch, seen = (steps[c].to_numpy(float) for c in ("decode_sequences", "decode_context"))
    if len(steps):
        yield _rows("token attention", engine, ["bfloat16"] * len(steps), {
            "b": batch * keys, "m": heads / keys, "n": seen,
            "flop": 4 * batch * heads * seen * w.head,
            "held": 4 * batch * keys * seen * w.head, "moved": 4 * batch * heads * w.head, **sizes,
        }, steps.ms / 1e3)  # fmt: skip


# All of them.


def measured_rows(bench: Path | None, *, cap: int, seed: int = 0) -> Rows:
    """Rows of every source.

    Args:
        bench: Folder of `kernels_neusight.csv.gz`; None leaves it out.
        cap: Most rows of one table: a class on a device in an engine.
        seed: Of the rows that are drawn of larger ones.
    """
    import pandas as pd

    rng = np.random.default_rng(seed)
    devices: list[str] = []
    parts: list[tuple[_Part, str]] = []
    for system, preset in SYSTEMS.items():
        parts += [(part, preset) for family in FAMILIES for part in family(system)]
    if bench is not None:
        frame = pd.read_csv(bench / "kernels_neusight.csv.gz")
        for name, own in frame.groupby("device"):
            parts += [(part, NEUSIGHT[str(name)]) for part in _neusight(own)]
        frame = pd.read_csv(bench / "serving_layers.csv.gz", low_memory=False)
        for name, own in frame[frame.device.isin(list(SERVING))].groupby("device"):
            preset, engine = SERVING[str(name)]
            parts += [(part, preset) for part in _serving(own, engine)]
    devices = list(dict.fromkeys(preset for _, preset in parts))
    chosen: list[tuple[_Part, int]] = []
    for (kernels, seconds, shape), preset in parts:
        keep = np.flatnonzero(np.isfinite(seconds) & (seconds > 0))
        keep = np.sort(rng.permutation(keep)[:cap])
        chosen.append(((kernels.take(keep), seconds[keep], shape[keep]), devices.index(preset)))
    return Rows(
        Kernels.concatenate([part[0] for part, _ in chosen]),
        np.concatenate([part[1] for part, _ in chosen]),
        np.concatenate([np.full(len(part[1]), d) for part, d in chosen]),
        tuple(devices),
        np.concatenate([part[2] for part, _ in chosen]),
    )


def silicon(rows: Rows) -> list[Any]:
    """The silicon of the devices of rows."""
    return [descriptor_of(device_preset(name)) for name in rows.devices]
