"""Valid ONNX models and documents that mutants are made of."""

import io
import json
import tomllib
from typing import Any

import numpy as np
import onnx
from onnx import parser

from gdp.base.files.reading import data_path
from gdp.importers.onnx.spec import packaged_models

_HEAD = '<ir_version: 9, opset_import: ["" : 18]>'
_MODELS = {
    "convolutions": """g (float[1,3,16,16] x) => (float[1,10] y) {
        c = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, w, b)
        s, r, m, v = Split <axis = 0, num_outputs = 4> (b)
        k = BatchNormalization (c, b, b, b, b)
        a = Relu (k)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1> (a)
        q = GlobalAveragePool (p)
        f = Flatten (q)
        w2 = ConstantOfShape (sh)
        y = Gemm <transB = 1> (f, w2)
    }""",
    "attention": """g (float[2,4,8] x) => (float[2,4,8] y) {
        sh = Shape (x)
        z = Constant <value = int64[1] {0}> ()
        b = Gather <axis = 0> (sh, z)
        t = Constant <value = int64[2] {-1, 8}> ()
        target = Concat <axis = 0> (b, t)
        h = Reshape (x, target)
        k = Transpose <perm = [0, 2, 1]> (h)
        hh = Transpose <perm = [0, 2, 1]> (h)
        e = Einsum <equation = "bij,bkj->bik"> (h, h)
        s = Softmax <axis = -1> (e)
        o = MatMul (s, h)
        y = Reshape (o, sh)
    }""",
    "ranges": """g (float[4] x) => (float[4] y) {
        s = Shape (x)
        zero = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()
        n = Squeeze (s)
        r = Range (zero, n, one)
        c = Cast <to = 1> (r)
        m = Where (big, c, x)
        u = Unsqueeze (m, ax)
        e = Expand (u, dims)
        t = Tile (x, s)
        y = Add (x, c)
    }""",
    "branches": """g (float[4] x, bool c) => (float[4] y) {
        y = If (c) <
            then_branch = a () => (float[4] p) { p = Relu (x) },
            else_branch = b () => (float[4] q) { q = Neg (x) }
        >
    }""",
    "loop": """g (float[4] x) => (float[4] y, float[3,4] all) {
        trips = Constant <value_int = 3> ()
        go = Constant <value = bool {1}> ()
        y, all = Loop (trips, go, x) <
            body = l (int64 i, bool c, float[4] s) => (bool co, float[4] so, float[4] sc)
            { co = Identity (c)  so = Add (s, s)  sc = Relu (so) }
        >
    }""",
    "scan": """g (float[4] x, float[5,4] xs) => (float[4] y, float[5,4] all) {
        y, all = Scan <num_scan_inputs = 1,
            body = l (float[4] s, float[4] v) => (float[4] so, float[4] sc)
            { so = Add (s, v)  sc = Relu (so) }
        > (x, xs)
    }""",
    "recurrent": """g (float[5,2,3] x) => (float[5,1,2,4] y) {
        y, h, c = LSTM <hidden_size = 4> (x, wl, rl)
    }""",
    "sequences": """g (float[6,4] x) => (float[6,4] y) {
        q = SplitToSequence <axis = 0> (x)
        at = Constant <value_int = 1> ()
        one = SequenceAt (q, at)
        more = SequenceInsert (q, one)
        y = ConcatFromSequence <axis = 0> (more)
    }""",
    "resize": """g (float[1,2,8,8] x) => (float[1,2,16,16] y) {
        r = Resize <mode = "linear"> (x, , scales)
        p = Pad (x, pads)
        t, at = TopK <axis = 1> (x, k)
        y = Clip (r)
    }""",
}
# Names that a text above reads without making them: small constants.
_CONSTANTS = {
    "sh": np.array([10, 4]), "ax": np.array([0]), "dims": np.array([3, 4]),
    "w": np.ones((4, 3, 3, 3), np.float32), "b": np.ones(4, np.float32),
    "wl": np.ones((1, 16, 3), np.float32), "rl": np.ones((1, 16, 4), np.float32),
    "scales": np.array([1, 1, 2, 2], np.float32),
    "big": np.array([True]), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "k": np.array([1]),
}  # fmt: skip


def onnx_seeds() -> list[onnx.ModelProto]:
    """Models of the kinds that exporters write, and the small ones of the onnx package."""
    found = []
    for text in _MODELS.values():
        model = parser.parse_model(_HEAD + text)
        made = {name for node in model.graph.node for name in node.output}
        made |= {tensor.name for tensor in model.graph.initializer}
        for name in sorted({name for node in model.graph.node for name in node.input} - made):
            if name in _CONSTANTS:
                tensor = onnx.numpy_helper.from_array(_CONSTANTS[name], name)
                model.graph.initializer.append(tensor)
        for value in list(model.graph.output):
            # What an op says of its output is inferred; a wrong claim would refuse the seed.
            value.type.tensor_type.ClearField("shape")
        for node in model.graph.node[:2]:
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'a.b', 'node']")
        found.append(model)
    for path in packaged_models().values():
        if path.stat().st_size < 4000:
            found.append(onnx.load(path))
    return found


def cost_folder() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(meta, arrays) of the shipped calibration, cut to two members and few fusions."""
    folder = sorted(data_path("checkpoints", "costs").glob("*/meta.json"))[0].parent
    meta = json.loads((folder / "meta.json").read_text())
    meta["report"] = {}
    with np.load(folder / "costs.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    for name, array in arrays.items():
        if name.startswith("layer_"):
            arrays[name] = array[:2]
        elif name.startswith("fusion_"):
            arrays[name] = array[:50]
    return meta, arrays


def npz(arrays: dict[str, Any]) -> bytes:
    """Arrays as an .npz."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


CLUSTER = tomllib.loads("""
name = "four"
host = "a"
default_bytes_per_s = 1e10
default_latency_s = 1e-5

[[device]]
name = "a"
kind = "cpu"
flop_per_s = { default = 1e11, float16 = 2e11 }
bytes_per_s = 1e10
memory_bytes = "2GiB"
dispatch_s = 1e-6
dispatch_per = "segment"

[[device]]
name = "b"
flop_per_s = 1e12
bytes_per_s = 1e11
memory_bytes = 1073741824
supported = ["MatMul", "Relu", "Conv", "Input", "Output"]

[[device]]
name = "c"
preset = "t4"
model = "a model"

[[link]]
src = "a"
dst = "b"
bytes_per_s = 1e9
latency_s = 1e-6
channel = "bus"
one_way = true
""")

CONSTRAINTS = tomllib.loads("""
together = ["b*"]

[[pin]]
match = "a"
devices = ["core0"]

[[forbid]]
match = "c"
devices = ["core1"]
""")

RECIPE = tomllib.loads("""
name = "x"
seed = 3
start = ""
[network]
features = "full"
width = 32
heads = 4
pooling = "directed"
summaries = true
[imitation]
updates = 5
noise = 0.05
[ppo]
updates = 7
clip = 0.2
samples = 4
[data]
corpus = ""
labels = ""
min_ops = 30
max_ops = 1000
random_graphs = 2
validation = 4
fresh = 0.5
instances = ["layered-60-1|3|latency|0"]
[run]
checkpoint_minutes = 1.0
validate_every = 5
""")

FINETUNE = {"updates": 5, "samples": 8, "explore": 0.5, "search": 0.4, "freedom": "gates_first"}
