"""Time and memory to import a Llama of 70 billion parameters, 15,000 nodes, without its weights.

    python benchmarks/import_speed.py [LAYERS]

The file is written the way exporters write it: symbolic batch and sequence, shapes computed by
chains of Shape, Gather and Concat, norms and rotary embeddings spelled out, every weight a
reference to an external file, which does not exist. The import runs in a process of its own, so
that the peak memory is its own, libraries included.
"""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

HIDDEN, INNER, VOCABULARY = 8192, 28672, 128256
HEADS, KV_HEADS, HEAD = 64, 8, 128

_ONE = helper.make_tensor("one", TensorProto.INT64, [1], [1])

_IMPORT = """
import json, resource, sys, time
start, used = time.perf_counter(), time.process_time()
from gdp.importers.onnx.model import load_onnx_model
from gdp.question.models import summary
found = load_onnx_model(sys.argv[1], {"batch": 1, "seq": 512})
seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - used
graph = found.graph
print(json.dumps({
    "import_s": seconds, "import_cpu_s": cpu_seconds,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "ops": int((~graph.is_io).sum()), "weight_bytes": summary(graph)["weight_bytes"],
    "flop": float(graph.flop.sum()), "weight_nodes": len(found.weight_nodes),
}))
"""


@dataclass
class Writer:
    """Nodes and weights as they grow. Every method returns the name of the value it makes."""

    nodes: list[onnx.NodeProto]
    weights: list[onnx.TensorProto]
    scope: str = ""

    def op(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"{self.scope}/{op_type}_{len(self.nodes)}"
        node = helper.make_node(op_type, inputs, [f"{name}_output"], name=name, **attributes)
        self.nodes.append(node)
        return node.output[0]

    def integers(self, *values: int) -> str:
        data = helper.make_tensor("value", TensorProto.INT64, [len(values)], values)
        return self.op("Constant", [], value=data)

    def number(self, value: float, dtype: int = TensorProto.FLOAT) -> str:
        return self.op("Constant", [], value=helper.make_tensor("value", dtype, [], [value]))

    def weight(self, name: str, *shape: int) -> str:
        """A half-precision weight in an external file that is not there."""
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT16, dims=shape)
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": "missing.data", "length": str(2 * math.prod(shape))}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=value)
        self.weights.append(tensor)
        return name

    def size(self, value: str, axis: int) -> str:
        """One dimension of a value, as a vector of one."""
        shape = self.op("Shape", [value])
        return self.op("Gather", [shape, self.integers(axis)], axis=0)

    def reshape(self, value: str, like: str, *tail: int) -> str:
        """To [batch of `like`, sequence of `like`, *tail]."""
        sizes = [self.size(like, 0), self.size(like, 1), self.integers(*tail)]
        return self.op("Reshape", [value, self.op("Concat", sizes, axis=0)])

    def linear(self, value: str, name: str, inputs: int, outputs: int) -> str:
        """PyTorch stores weights as [outputs, inputs]; the transpose is left to the runtime."""
        stored = self.weight(f"{name}.weight", outputs, inputs)
        return self.op("MatMul", [value, self.op("Transpose", [stored], perm=[1, 0])])

    def expand(self, value: str, shape: str) -> str:
        """An expand as it is exported: sizes of -1 are guarded, in case they were meant to stay."""
        rank = self.op("Shape", [shape])
        ones = self.op("ConstantOfShape", [rank], value=_ONE)
        kept = self.op("Equal", [shape, self.op("Mul", [ones, self.integers(-1)])])
        return self.op("Expand", [value, self.op("Where", [kept, ones, shape])])

    def norm(self, value: str, name: str) -> str:
        wide = self.op("Cast", [value], to=TensorProto.FLOAT)
        square = self.op("Pow", [wide, self.number(2.0)])
        mean = self.op("ReduceMean", [square], axes=[-1], keepdims=1)
        root = self.op("Sqrt", [self.op("Add", [mean, self.number(1e-5)])])
        inverse = self.op("Div", [self.number(1.0), root])
        narrow = self.op("Cast", [self.op("Mul", [wide, inverse])], to=TensorProto.FLOAT16)
        return self.op("Mul", [self.weight(f"{name}.weight", HIDDEN), narrow])


def rotary(writer: Writer, value: str, cosine: str, sine: str) -> str:
    """x cos + rotate_half(x) sin."""
    axis, half = writer.integers(-1), writer.integers(HEAD // 2)
    first = writer.op("Slice", [value, writer.integers(0), half, axis, writer.integers(1)])
    end = writer.integers(HEAD)
    second = writer.op("Slice", [value, half, end, axis, writer.integers(1)])
    turned = writer.op("Concat", [writer.op("Neg", [second]), first], axis=-1)
    cosine = writer.op("Unsqueeze", [cosine, writer.integers(1)])
    sine = writer.op("Unsqueeze", [sine, writer.integers(1)])
    straight = writer.op("Mul", [value, cosine])
    return writer.op("Add", [straight, writer.op("Mul", [turned, sine])])


def heads(writer: Writer, value: str, like: str, count: int) -> str:
    split = writer.reshape(value, like, count, HEAD)
    return writer.op("Transpose", [split], perm=[0, 2, 1, 3])


def repeat(writer: Writer, value: str, like: str) -> str:
    """Each key-value head for its group of query heads."""
    groups = HEADS // KV_HEADS
    batch, length = writer.size(like, 0), writer.size(like, 1)
    middle = writer.integers(KV_HEADS, groups)
    shape = writer.op("Concat", [batch, middle, length, writer.integers(HEAD)], axis=0)
    wide = writer.expand(writer.op("Unsqueeze", [value, writer.integers(2)]), shape)
    target = [writer.size(like, 0), writer.integers(HEADS), writer.size(like, 1)]
    joined = writer.op("Concat", [*target, writer.integers(HEAD)], axis=0)
    return writer.op("Reshape", [wide, joined])


def layer(writer: Writer, x: str, index: int, cosine: str, sine: str, mask: str) -> str:
    name = f"model.layers.{index}"
    writer.scope = f"/model/layers.{index}/input_layernorm"
    normed = writer.norm(x, f"{name}.input_layernorm")
    writer.scope = f"/model/layers.{index}/self_attn"
    width, kv_width = HEADS * HEAD, KV_HEADS * HEAD
    query = heads(writer, writer.linear(normed, f"{name}.q_proj", HIDDEN, width), normed, HEADS)
    key = heads(writer, writer.linear(normed, f"{name}.k_proj", HIDDEN, kv_width), normed, KV_HEADS)
    value = writer.linear(normed, f"{name}.v_proj", HIDDEN, kv_width)
    value = repeat(writer, heads(writer, value, normed, KV_HEADS), normed)
    query = rotary(writer, query, cosine, sine)
    key = repeat(writer, rotary(writer, key, cosine, sine), normed)
    scores = writer.op("MatMul", [query, writer.op("Transpose", [key], perm=[0, 1, 3, 2])])
    scale = writer.number(HEAD**-0.5, TensorProto.FLOAT16)
    end, step = writer.size(key, 2), writer.integers(1)
    mask = writer.op("Slice", [mask, writer.integers(0), end, writer.integers(3), step])
    masked = writer.op("Add", [writer.op("Mul", [scores, scale]), mask])
    wide = writer.op("Cast", [masked], to=TensorProto.FLOAT)
    share = writer.op("Cast", [writer.op("Softmax", [wide], axis=-1)], to=TensorProto.FLOAT16)
    mixed = writer.op("Transpose", [writer.op("MatMul", [share, value])], perm=[0, 2, 1, 3])
    joined = writer.reshape(mixed, normed, width)
    x = writer.op("Add", [x, writer.linear(joined, f"{name}.o_proj", width, HIDDEN)])
    writer.scope = f"/model/layers.{index}/post_attention_layernorm"
    normed = writer.norm(x, f"{name}.post_attention_layernorm")
    writer.scope = f"/model/layers.{index}/mlp"
    gate = writer.linear(normed, f"{name}.gate_proj", HIDDEN, INNER)
    active = writer.op("Mul", [gate, writer.op("Sigmoid", [gate])])
    up = writer.linear(normed, f"{name}.up_proj", HIDDEN, INNER)
    down = writer.linear(writer.op("Mul", [active, up]), f"{name}.down_proj", INNER, HIDDEN)
    return writer.op("Add", [x, down])


def llama(layers: int) -> onnx.ModelProto:
    """The model; 80 layers are the 70-billion one."""
    writer = Writer([], [])
    table = writer.weight("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    x = writer.op("Gather", [table, "input_ids"], axis=0)
    writer.scope = "/model/rotary_emb"
    half = TensorProto.FLOAT16
    positions = writer.op("Unsqueeze", ["position_ids", writer.integers(2)])
    angle = writer.op("Cast", [positions], to=half)
    angle = writer.op("Mul", [angle, writer.weight("model.rotary_emb.inv_freq", HEAD)])
    cosine, sine = writer.op("Cos", [angle]), writer.op("Sin", [angle])
    for index in range(layers):
        x = layer(writer, x, index, cosine, sine, "mask")
    writer.scope = "/model/norm"
    x = writer.norm(x, "model.norm")
    writer.scope = ""
    head = writer.weight("lm_head.weight", HIDDEN, VOCABULARY)
    writer.nodes.append(helper.make_node("MatMul", [x, head], ["logits"], name="/lm_head/MatMul"))
    ids = TensorProto.INT64
    graph = helper.make_graph(
        writer.nodes,
        "llama",
        [
            helper.make_tensor_value_info("input_ids", ids, ["batch", "seq"]),
            helper.make_tensor_value_info("position_ids", ids, ["batch", "seq"]),
            helper.make_tensor_value_info("mask", half, ["batch", 1, "seq", "seq"]),
        ],
        [helper.make_tensor_value_info("logits", half, ["batch", "seq", VOCABULARY])],
        writer.weights,
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8)


def measure(path: Path) -> dict[str, float]:
    """Seconds, peak bytes and counts of an import in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, str(path)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def main() -> None:
    model = llama(int(sys.argv[1]) if len(sys.argv) > 1 else 80)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama.onnx"
        path.write_bytes(model.SerializeToString())
        row = measure(path)
    print(f"nodes        {len(model.graph.node):,} ({row['ops']:,} ops, constants folded)")
    print(f"parameters   {row['weight_bytes'] / 2e9:.1f} G of two bytes, none of them loaded")
    print(f"import       {row['import_s']:.2f} s, {row['import_cpu_s']:.2f} CPU s")
    print(f"peak memory  {row['peak_bytes'] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
