"""GGUF files written field by field, so that each may be wrong: format version 3 of ggml."""

import struct
from typing import Any

_CODES = {"u32": (4, "<I"), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d")}


def document() -> dict[str, Any]:
    """Two blocks, the second with experts, as fields and as (dimensions, type) of tensors."""
    tensors: dict[str, Any] = {
        "token_embd.weight": [[16, 32], 0], "output_norm.weight": [[16], 0],
        "output.weight": [[16, 32], 0],
    }  # fmt: skip
    for block in range(2):
        at = f"blk.{block}."
        tensors |= {at + name: [[16], 0] for name in ("attn_norm.weight", "ffn_norm.weight")}
        tensors |= {f"{at}attn_{name}.weight": [[16, 16], 0] for name in ("q", "k", "v", "output")}
        many, ending = ([2], "_exps") if block else ([], "")
        if block:
            tensors[at + "ffn_gate_inp.weight"] = [[16, 2], 0]
        for name in ("gate", "up", "down"):
            tensors[f"{at}ffn_{name}{ending}.weight"] = [[16, 16, *many], 0]
    fields = {
        "general.architecture": "llama", "general.alignment": 32, "llama.embedding_length": 16,
        "llama.block_count": 2, "llama.attention.head_count": 2, "llama.context_length": 64,
        "llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": 16,
        "llama.expert_count": 2, "llama.expert_used_count": 1, "llama.vocab_size": 32,
        "llama.attention.key_length": 8, "llama.attention.value_length": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.model": "none",
        "tokenizer.ggml.tokens": ["a", "bc"], "tokenizer.ggml.scores": [0.5, 0.25],
    }  # fmt: skip
    return {"fields": fields, "tensors": tensors}


def encode(value: Any) -> bytes:
    """The file; parts of the document of another type than wanted are left out."""
    fields = value.get("fields") if isinstance(value, dict) else {}
    tensors = value.get("tensors") if isinstance(value, dict) else {}
    fields = fields if isinstance(fields, dict) else {}
    tensors = tensors if isinstance(tensors, dict) else {}
    infos, size = [], 0
    for name, said in tensors.items():
        dims, kind = said if isinstance(said, list) and len(said) == 2 else ([], 0)
        dims = [d for d in dims if isinstance(d, int)] if isinstance(dims, list) else []
        infos.append(
            _text(name) + struct.pack("<I", len(dims))
            + b"".join(struct.pack("<Q", d % 2**64) for d in dims)
            + struct.pack("<IQ", kind % 2**32 if isinstance(kind, int) else 0, size)
        )  # fmt: skip
        size += 4096
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(infos), len(fields))
    described = b"".join(_text(key) + _value(inner) for key, inner in fields.items())
    return head + described + b"".join(infos) + bytes(32 + size)


def _text(text: str) -> bytes:
    data = text.encode(errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, list):
        inner = [_value(v) for v in value if not isinstance(v, list | dict)]
        kind = inner[0][:4] if inner else struct.pack("<I", 4)
        inner = [data for data in inner if data[:4] == kind]
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(inner)) + b"".join(
            data[4:] for data in inner
        )  # fmt: skip
    if isinstance(value, int):
        form = "u32" if 0 <= value < 2**32 else "u64" if 0 <= value < 2**64 else "i64"
        low, high = (-(2**63), 2**63) if form == "i64" else (0, 2**64)
        code, packed = _CODES[form]
        return struct.pack("<I", code) + struct.pack(packed, min(max(value, low), high - 1))
    code, packed = _CODES["f64"]
    return struct.pack("<I", code) + struct.pack(packed, value if isinstance(value, float) else 0.0)
