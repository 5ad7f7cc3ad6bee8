"""Small models of every importer, written or defined with nothing of gdp but its public names.

Files are written where the cases run; functions are named as `python:golden.models:NAME`. Weights
are shapes or zeros: no number in them reaches a placement.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def _mlp_node(make: Any, name: str, source: str) -> Any:
    """A product and its bias, named by what they make."""
    return make("Gemm", [source, f"{name}_w", f"{name}_b"], [name], name=name)


def _onnx_model(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: Any) -> Any:
    from onnx import TensorProto, helper, numpy_helper

    shown = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (*inputs, *outputs)]
    made = [numpy_helper.from_array(np.zeros(s, np.float32), n) for n, s in weights.items()]
    graph = helper.make_graph(nodes, "g", shown[: len(inputs)], shown[len(inputs) :], made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def write_towers(path: Path) -> None:
    """Two towers of dense layers that meet in a product, one deeper; the batch is symbolic."""
    import onnx
    from onnx.helper import make_node

    width, weights, nodes = 256, {}, []
    for tower, depth in (("user", 4), ("item", 3)):
        source = tower
        for layer in range(depth):
            name = f"{tower}{layer}"
            weights |= {f"{name}_w": (width, width), f"{name}_b": (width,)}
            nodes += [_mlp_node(make_node, name, source), make_node("Relu", [name], [f"{name}_a"])]
            source = f"{name}_a"
    nodes.append(make_node("Mul", ["user3_a", "item2_a"], ["joined"]))
    nodes.append(make_node("ReduceSum", ["joined"], ["score"], keepdims=0))
    inputs = [(name, ["batch", width]) for name in ("user", "item")]
    onnx.save(_onnx_model(nodes, inputs, [("score", [])], weights), path)


def write_attention(path: Path) -> None:
    """One block of attention and dense layers with shared positions, its shapes fixed."""
    import onnx
    from onnx.helper import make_node

    steps, width = 128, 192
    weights = {f"{name}_w": (width, width) for name in ("q", "k", "v", "o")}
    weights |= {"up_w": (width, 4 * width), "down_w": (4 * width, width), "place": (steps, width)}
    nodes = [make_node("Add", ["x", "place"], ["h"])]
    nodes += [make_node("MatMul", ["h", f"{name}_w"], [name]) for name in ("q", "k", "v")]
    nodes += [
        make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        make_node("MatMul", ["q", "kt"], ["scores"]),
        make_node("Softmax", ["scores"], ["weights"], axis=-1),
        make_node("MatMul", ["weights", "v"], ["mixed"]),
        make_node("MatMul", ["mixed", "o_w"], ["o"]),
        make_node("Add", ["h", "o"], ["r"]),
        make_node("MatMul", ["r", "up_w"], ["up"]),
        make_node("Sigmoid", ["up"], ["gate"]),
        make_node("Mul", ["up", "gate"], ["swish"]),
        make_node("MatMul", ["swish", "down_w"], ["down"]),
        make_node("Add", ["r", "down"], ["y"]),
    ]
    ends = [("x", [4, steps, width])], [("y", [4, steps, width])]
    onnx.save(_onnx_model(nodes, *ends, weights), path)


def write_fork_join(path: Path, blocks: int = 5, branches: int = 3, backward: bool = False) -> None:
    """A graph file: blocks that fork into unequal branches and join, in modules; with `backward`
    the second half of the blocks is the gradient of the first, and shares its weights."""
    types = ["Input", "MatMul", "Relu", "Add", "Output"]
    rows: list[tuple[str, int, float, int, str]] = [("in", 0, 0.0, 0, "")]
    edges: list[tuple[int, int]] = []
    last = 0
    for block in range(blocks):
        ends = []
        for branch in range(branches):
            size = 1 + (3 * block + 5 * branch) % 4
            scope = f"net.block{block}.branch{branch}"
            at = len(rows)
            rows.append((f"b{block}_{branch}", 1, 6e7 * size, 300_000 * size, scope))
            rows.append((f"a{block}_{branch}", 2, 2e5, 0, scope))
            edges += [(last, at), (at, at + 1)]
            ends.append(at + 1)
        edges += [(end, len(rows)) for end in ends]
        last = len(rows)
        rows.append((f"join{block}", 3, 1e5, 0, f"net.block{block}"))
    edges.append((last, len(rows)))
    rows.append(("out", 4, 0.0, 0, ""))
    names, kinds, flop, weight, scope = zip(*rows, strict=True)
    made = [op for op, kind in enumerate(kinds) if kind != 4]  # each makes one tensor
    scopes = sorted(set(scope))
    found = {
        "gdp_graph": 1, "name": "fork_join", "ops": names, "types": types, "type": kinds,
        "tensor_bytes": [40_000 * (1 + op % 3) for op in made], "producer": made,
        "use_tensor": [made.index(src) for src, _ in edges], "use_op": [dst for _, dst in edges],
        "flop": flop, "memory_traffic_bytes": [3e5 if f else 0.0 for f in flop],
        "weight_bytes": weight, "scopes": scopes, "scope": [scopes.index(s) for s in scope],
    }  # fmt: skip
    if backward:
        op_of = {row[0]: op for op, row in enumerate(rows)}
        late = [op for op, row in enumerate(rows) if _block(row[4]) >= (blocks + 1) // 2]
        first = [op_of[_twin(rows[op][0], blocks)] if op in late else op for op in range(len(rows))]
        found |= {"backward": late, "weight_id": first, "colocate": first}
        found["weight_bytes"] = [weight[op] for op in first]
    path.write_text(json.dumps(found))


def _block(scope: str) -> int:
    """The number of a module's block, -1 outside of blocks."""
    return int(scope.split(".")[1].removeprefix("block")) if scope else -1


def _twin(name: str, blocks: int) -> str:
    """The product of a forward block whose weights a product of a backward one reads; itself for
    all other ops."""
    if not name.startswith("b"):
        return name
    block, branch = name[1:].split("_")
    return f"b{blocks - 1 - int(block)}_{branch}"


def write_llama(folder: Path) -> None:
    """A configuration of transformers: a small Llama whose head is not tied."""
    found = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048,
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        "dtype": "float32",
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(found))


def write_bert(folder: Path) -> None:
    """A configuration of transformers: a small BERT with tied embeddings."""
    found = {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 512,
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(found))


def write_gguf(path: Path, layers: int = 4, experts: int = 0) -> None:
    """A file of llama.cpp with quantised products, and experts in each block where asked."""
    import gguf

    width, inner, words, heads, key_heads = 256, 512, 1024, 4, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_feed_forward_length(inner)
    writer.add_context_length(512)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(words)
    writer.add_tokenizer_model("none")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    kind = gguf.GGMLQuantizationType.Q4_K
    block, size = gguf.GGML_QUANT_SIZES[kind]

    def product(name: str, *shape: int) -> None:
        packed = np.zeros((*shape[:-1], shape[-1] // block * size), np.uint8)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)

    def norm(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))

    product("token_embd", words, width)
    norm("output_norm", width)
    product("output", words, width)
    many, ending = ((experts,), "_exps") if experts else ((), "")
    key_width = width * key_heads // heads
    for at in (f"blk.{layer}." for layer in range(layers)):
        norm(at + "attn_norm", width)
        norm(at + "ffn_norm", width)
        for name, rows in (("q", width), ("k", key_width), ("v", key_width), ("output", width)):
            product(f"{at}attn_{name}", rows, width)
        if experts:
            norm(at + "ffn_gate_inp", experts, width)
        for name, shape in (("gate", (inner, width)), ("up", (inner, width))):
            product(f"{at}ffn_{name}{ending}", *many, *shape)
        product(f"{at}ffn_down{ending}", *many, width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


FILES: dict[str, Callable[[Path], None]] = {
    "towers.onnx": write_towers,
    "attention.onnx": write_attention,
    "fork_join.json": write_fork_join,
    "wide.json": lambda path: write_fork_join(path, 3, 4),
    "small.json": lambda path: write_fork_join(path, 2, 2),
    "training.gdpgraph": lambda path: write_fork_join(path, 4, 2, backward=True),
    "llama": write_llama,
    "bert": write_bert,
    "blocks.gguf": write_gguf,
    "experts.gguf": lambda path: write_gguf(path, 3, experts=4),
}
"""How the model files of the cases are written, by name."""


def f32(*shape: int) -> Any:
    """An array of JAX that does not exist."""
    import jax
    import jax.numpy as jnp

    return jax.ShapeDtypeStruct(shape, jnp.float32)


def jax_cnn() -> Any:
    """Convolutions with a residual, pooling and a dense layer; kernels are weights."""
    import jax

    def forward(kernels: Any, x: Any) -> Any:
        for kernel in kernels[:-1]:
            y = jax.lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = x + jax.nn.relu(y) if x.shape == y.shape else jax.nn.relu(y)
        return x.mean((1, 2)) @ kernels[-1]

    kernels = [f32(3, 3, 3, 32), f32(3, 3, 32, 32), f32(3, 3, 32, 32), f32(32, 10)]
    return forward, (kernels, f32(16, 32, 32, 3)), {"weight_argnums": 0}


def jax_mixers() -> Any:
    """Three experts that read one input and are mixed."""
    import jax.numpy as jnp

    def forward(params: Any, x: Any) -> Any:
        made = []
        for first, second in params["experts"]:
            made.append(jnp.tanh(jnp.tanh(x @ first) @ second))
        return sum(made) @ params["head"]

    expert = (f32(256, 512), f32(512, 256))
    params = {"experts": [expert, expert, expert], "head": f32(256, 64)}
    return forward, (params, f32(512, 256)), {"weight_argnums": 0}


def jax_step() -> Any:
    """A training step with momentum, two microbatches added up."""
    import jax.numpy as jnp
    import optax

    def loss(params: Any, batch: Any) -> Any:
        x, wanted = batch
        for w, b in params:
            x = jnp.tanh(x @ w + b)
        return jnp.square(x - wanted).mean()

    layers = [(f32(256, 256), f32(256)) for _ in range(3)]
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "microbatches": 2}
    return loss, (layers, (f32(256, 256), f32(256, 256))), options


def torch_towers() -> Any:
    """Two unequal towers that meet in a head, on the meta device."""
    import torch
    from torch import nn

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(
                *[m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU())]
            )
            self.right = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
            self.head = nn.Linear(256, 32)

        def forward(self, x: Any) -> Any:
            return self.head(self.left(x) + self.right(x))

    with torch.device("meta"):
        return Towers().eval(), (torch.zeros(512, 256),)


def torch_row() -> Any:
    """A row of unequal layers, which pipelines cut, on the meta device."""
    import torch
    from torch import nn

    sizes = [256, 512, 256, 768, 128, 512, 256]
    with torch.device("meta"):
        pairs = itertools.pairwise(sizes)
        layers = [m for a, b in pairs for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers).eval(), (torch.zeros(256, 256),)


def torch_step() -> Any:
    """A training step of a small row of layers."""
    import torch
    from torch import nn

    with torch.device("meta"):
        row = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 64))
        options = {"optimizer": "adamw", "loss": lambda y: y.square().mean()}
        return row, (torch.zeros(128, 128),), options
