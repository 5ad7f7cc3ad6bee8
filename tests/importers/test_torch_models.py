"""PyTorch modules become graphs: FLOPs as torch counts them, weights once, views merged."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gdp.base.errors import ModelError
from gdp.graph.file import decode_graph, encode_graph
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph
from gdp.importers.pytorch.export import exported
from gdp.importers.pytorch.model import TorchModel, trace_torch
from gdp.question.models import inspect_model, summary

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
nn = torch.nn


def inner(graph: OpGraph) -> list[str]:
    return [kind for kind in graph.op_types if kind not in (INPUT, OUTPUT)]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        return self.down(torch.relu(self.up(x)))


class Function(nn.Module):
    """A function as a module, with a buffer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def meta(*shape: int) -> Any:
    return torch.empty(*shape, device="meta")


def test_a_small_network_by_hand() -> None:
    graph = trace_torch(Mlp(), (meta(2, 8),))
    assert graph.op_types == ("Input", "linear", "relu", "linear", "Output")
    assert graph.op_names == ("x", "up/linear", "relu", "down/linear", "output")
    assert graph.flop.tolist() == [0, 2 * 2 * 8 * 16 + 32, 32, 2 * 2 * 16 * 4 + 8, 0]
    assert graph.weight_bytes.tolist() == [0, 4 * (128 + 16), 0, 4 * (64 + 4), 0]
    # x 64 B, weight 512, bias 64 in, 128 out.
    assert graph.memory_traffic_bytes[1] == 64 + 512 + 64 + 128
    assert graph.tensor_bytes.tolist() == [64, 128, 128, 32]
    assert graph.scope == ("", "up", "", "down", "")


def test_lines_of_code_are_not_written_down_and_are_again_afterwards() -> None:
    def stacks(program: Any) -> list[bool]:
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        return [bool(node.stack_trace) for node in nodes]

    assert stacks(exported(Mlp(), (meta(2, 8),), {}, label="mlp")) == [False] * 3
    with pytest.raises(ModelError):
        exported(Branches(), (meta(4),), {}, label="branches")
    assert stacks(torch.export.export(Mlp(), (torch.zeros(2, 8),))) == [True] * 3


def test_views_are_their_base_and_copies_are_ops() -> None:
    def function(module: Any, x: Any) -> Any:
        halves = x.reshape(2, 8).t().chunk(2)
        return halves[0] * 2 + halves[1].reshape(-1)[:1]

    graph = trace_torch(Function(function), (meta(16),))
    assert inner(graph) == ["mul", "reshape", "add"]  # the last view has to be copied
    by_name = dict(zip(graph.op_names, graph.memory_traffic_bytes, strict=True))
    assert by_name["mul"] == 32 + 32  # the half it reads, not all of x


def test_what_is_written_in_place_is_read_by_those_who_read_later() -> None:
    def function(module: Any, x: Any) -> Any:
        y = x * 2
        y[0].add_(1)
        return y * 3

    graph = trace_torch(Function(function), (meta(4, 4),))
    kinds = inner(graph)
    assert "add" in kinds
    assert not any(kind.endswith("_") for kind in kinds)
    last = graph.op_index["mul.1"]
    src, dst = graph.edges
    before = {graph.op_types[s] for s in src[dst == last]}
    assert before == {"select_scatter"}


def test_a_buffer_that_is_updated_stays_where_it_is_read() -> None:
    norm = nn.BatchNorm1d(4).train()
    graph = trace_torch(norm, (meta(8, 4),))
    assert graph.weight_bytes.sum() >= 4 * 4 * 4  # scale, shift, mean, variance
    counted = Function(lambda module, x: x + module.scale.add_(1.0))
    graph = trace_torch(counted, (meta(8, 4),))
    assert inner(graph) == ["add", "add"]
    assert graph.weight_bytes.tolist().count(16) == 1


@pytest.mark.parametrize(("trains", "ops"), [(False, ["relu"]), (True, ["dropout", "relu"])])
def test_dropout_is_an_op_in_training_only(trains: bool, ops: list[str]) -> None:
    graph = trace_torch(nn.Sequential(nn.Dropout(0.5), nn.ReLU()).train(trains), (meta(4),))
    assert inner(graph) == ops


def test_a_tied_weight_counts_once_where_both_readers_are() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
            self.head.weight = self.embed.weight

        def forward(self, ids: Any) -> Any:
            return self.head(self.embed(ids))

    ids = torch.zeros(3, dtype=torch.long, device="meta")
    traced = TorchModel("tied", Tied(), (ids,)).trace()
    assert traced.parameters == 50 * 8 + 50
    graph = traced.graph
    embed, head = graph.op_index["embed/embedding"], graph.op_index["head/linear"]
    assert graph.weight_id[embed] == graph.weight_id[head]
    assert summary(graph)["weight_bytes"] == 4 * (50 * 8 + 50)
    assert graph.memory_traffic_bytes[embed] == 3 * (32 + 32 + 8)


def test_layers_that_share_a_small_bias_hold_their_own_matrices_alone() -> None:
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.bias = first.bias
    graph = trace_torch(nn.Sequential(first, second), (meta(2, 16),))
    assert inner(graph) == ["linear", "linear"]
    assert graph.weight_bytes[graph.weight_bytes > 0].tolist() == [4 * (256 + 16)] * 2


def test_an_input_that_is_held_is_a_weight() -> None:
    function = Function(lambda module, x, cache: x @ cache)
    free = trace_torch(function, (meta(2, 8), meta(8, 4)))
    held = trace_torch(function, (meta(2, 8), meta(8, 4)), held=("args_1",))
    assert [free.op_types.count(INPUT), held.op_types.count(INPUT)] == [2, 1]
    assert held.weight_bytes.sum() == 128
    with pytest.raises(ModelError, match="no input 'cash' to hold"):
        trace_torch(function, (meta(2, 8), meta(8, 4)), held=("cash",))


def test_dynamic_sizes_are_those_of_the_example() -> None:
    batch = torch.export.Dim("batch", min=2, max=64)
    free = trace_torch(Mlp(), (meta(4, 8),), dynamic_shapes={"x": {0: batch}})
    fixed = trace_torch(Mlp(), (meta(4, 8),))
    assert free.flop.tolist() == fixed.flop.tolist()
    assert free.tensor_bytes.tolist() == fixed.tensor_bytes.tolist()


def test_both_branches_of_a_condition_are_counted() -> None:
    class Branches(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x + 1, (x,))

    graph = trace_torch(Branches(), (meta(8, 8),))
    # A product, and a sum of 64 numbers; the condition itself adds up 64 and compares one.
    assert graph.flop.sum() == 2 * 8 * 8 * 8 + 64 + 64 + 1


def test_a_single_number_ties_no_ops() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = (nn.Parameter(torch.ones(shape)) for shape in ((), (4,)))

        def forward(self, x: Any) -> Any:
            return torch.relu(x * self.scale + self.shift) * self.scale

    graph = trace_torch(Scaled(), (meta(2, 4),))
    assert graph.weight_bytes.tolist() == [0, 0, 16, 0, 0, 0]


def test_the_arithmetic_is_that_of_what_is_read() -> None:
    """A comparison of floats makes truth values."""
    graph = trace_torch(Function(lambda module, x: (x > 0) & (x < 1)), (meta(4),))
    types = {kind: graph.detail[graph.op_index[kind]].dtype for kind in ("gt", "lt")}
    assert types == {"gt": "float32", "lt": "float32"}


class Branches(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1 if x.sum() > 0 else (x - 1) * 2


def test_a_branch_on_data_is_that_of_real_examples_and_refused_without() -> None:
    for value, kinds in ((1.0, ["add"]), (-1.0, ["sub", "mul"])):
        found = TorchModel("m", Branches(), (torch.full((4,), value),)).trace()
        assert inner(found.graph) == kinds
        assert "the way of the example inputs is taken" in found.assumptions[0]
    with pytest.raises(ModelError, match=r"depends on data .*\.py:\d+\): give real .*torch\.cond"):
        trace_torch(Branches(), (meta(4),))


def test_a_refusal_prints_nothing_and_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    class Numpy(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.from_numpy(x.numpy() * 2)

    class Leaves(nn.Module):
        def forward(self, x: Any) -> Any:
            raise SystemExit(0)

    for module, said in ((Branches(), "torch.cond"), (Numpy(), "of torch instead of NumPy's"),
                         (Leaves(), "SystemExit: 0; the module ends the program")):  # fmt: skip
        with pytest.raises(ModelError) as refused:
            trace_torch(module, (torch.empty(4, device="meta" if said == "torch.cond" else "cpu"),))
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_what_is_no_module_and_what_computes_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match=r"a torch\.nn\.Module or a function .* got int"):
        trace_torch(3)
    with pytest.raises(ModelError, match="no option 'lr'"):
        TorchModel("m", Mlp(), (), {}, {"lr": 1})
    same = Function(lambda module, x: (x, module.scale))
    with pytest.raises(ModelError, match="has no ops: it returns its inputs and weights"):
        trace_torch(same, (meta(4),))
    # Beside what is computed, both may be returned.
    more = trace_torch(Function(lambda module, x: (x * 2, x, module.scale)), (meta(4),))
    assert inner(more) == ["mul"]


class WritesData(nn.Module):
    """Adds one to its weight's data in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Any) -> Any:
        self.w.data.add_(1)
        return x @ self.w


def test_writing_to_the_data_of_a_weight_without_memory_is_refused() -> None:
    """torch's decompositions end the process over it."""
    with pytest.raises(ModelError, match=r"data of a weight outside of autograd .*no_grad"):
        trace_torch(WritesData().to("meta"), (torch.randn(2, 8),))


def test_what_a_module_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    def prints(module: Any, x: Any) -> Any:
        print("in forward")
        return x * module.scale

    trace_torch(Function(prints), (meta(4),))
    said = capsys.readouterr()
    assert (said.out, "in forward" in said.err) == ("", True)


def test_functions_and_scripted_modules_are_placed() -> None:
    net = Mlp()
    graph = trace_torch(lambda x: net(x) * 2, (torch.ones(2, 8),))
    assert inner(graph) == ["linear", "relu", "linear", "mul"]
    assert graph.weight_bytes.sum() == 4 * (128 + 16 + 64 + 4)

    def double(x: Any) -> Any:
        return x @ x

    assert trace_torch(double, (meta(4, 4),)).name == "double"
    example = torch.ones(2, 8)
    scripted, plain = torch.jit.trace(net, example), trace_torch(net, (example,))
    graph = trace_torch(scripted, (example,))
    assert inner(graph) == inner(plain)
    assert (graph.flop == plain.flop).all()
    assert (graph.weight_bytes == plain.weight_bytes).all()


attend = nn.functional.scaled_dot_product_attention
REPEATED = [
    (attend.__name__, lambda q, x: attend(x, x, x), 16 * (2 * 4 + 1 + 5 + 2 * 4)),
    (attend.__name__, lambda q, x: attend(q, x, x), 16 * (2 * 4 + 1 + 5 + 2 * 4)),
    ("einsum", lambda q, x: torch.einsum("bi,bi->b", x, x), 2 * 16),
    ("einsum", lambda q, x: torch.einsum("bi,ij,bj->b", x, q, x), 2 * 64 + 2 * 16),
    ("addmm", lambda q, x: torch.addmm(x, x, x), 2 * 64 + 16),
    ("bilinear", lambda q, x: nn.functional.bilinear(x, x, torch.ones(3, 4, 4)),
     12 * (2 * 16 + 2 * 4)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "function", "flop"), REPEATED)
def test_a_tensor_given_twice_keeps_both_places(kind: str, function: Any, flop: float) -> None:
    graph = trace_torch(Function(lambda m, q, x: function(q, x)), (torch.ones(4, 4),) * 2)
    op = graph.op_types.index(kind)
    assert graph.flop[op] == flop
    src, dst = graph.edges
    assert len(set(src[dst == op])) == (dst == op).sum()  # one use of each tensor


def test_a_tensor_given_twice_is_read_once() -> None:
    graph = trace_torch(Function(lambda m, x: x * x), (meta(4, 4),))
    op = graph.op_types.index("mul")
    assert graph.memory_traffic_bytes[op] == 64 + 64
    assert graph.detail[op].input_shapes == ((4, 4), (4, 4))
    assert graph.flop[op] == 16


def test_sizes_that_depend_on_data_are_their_upper_bound() -> None:
    def function(module: Any, x: Any) -> Any:
        return torch.nonzero(x) * 2, x[x > 0].sum(), torch.unique(x)

    found = TorchModel("m", Function(function), (meta(4, 6),)).trace()
    graph = found.graph
    sizes = {graph.op_types[p]: graph.tensor_bytes[t] for t, p in enumerate(graph.producer)}
    assert sizes["nonzero"] == sizes["mul"] == 24 * 2 * 8
    assert sizes["index"] == sizes["_unique2"] == 24 * 4
    assert any("'nonzero' makes depends on data; its upper bound 24x2" in said
               for said in found.assumptions)  # fmt: skip
    product = trace_torch(Function(lambda m, x: x[x[:, 0] > 0] @ x.t()), (meta(6, 4),))
    assert product.flop[product.op_types.index("matmul")] == 2 * 6 * 6 * 4


def test_sizes_without_a_bound_and_sparse_tensors_are_refused() -> None:
    class Inner(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.part = Function(function)

        def forward(self, x: Any) -> Any:
            return self.part(x)

    cases = [
        (lambda m, x: torch.repeat_interleave(x, x.long()), "'repeat_interleave' in module 'part'"),
        (lambda m, x: x.to_sparse() * 2, "op 'to_sparse' in module 'part' makes a sparse tensor"),
    ]
    for function, said in cases:
        with pytest.raises(ModelError, match=said):
            trace_torch(Inner(function), (meta(4),))


@pytest.mark.parametrize("family", ["bert", "llama", "mixtral"])
def test_flop_are_those_of_torchs_counter_and_parameters_equal(family: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.torch_models import build

    # Wide enough that products dominate, as in models that are used; never allocated by gdp.
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2000}
    model, inputs = build(family, "cpu", **sizes)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    found = TorchModel(family, model, (), inputs).trace()
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.estimated == ()
    counted = counter.get_total_flops()
    if family == "mixtral":  # the counter does not see the experts' products
        counted += 2 * 16 * 2 * 3 * 2 * 256 * 1024
    products = sum(
        f
        for f, kind in zip(found.graph.flop, found.graph.op_types, strict=True)
        if kind in ("linear", "scaled_dot_product_attention", "grouped_mm_fallback", "_grouped_mm")
    )
    assert counted <= products <= 1.01 * counted
    assert found.graph.flop.sum() == pytest.approx(counted, rel=0.02)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # What several ops read beside tied weights, such as positions, may be counted twice.
    assert weights <= summary(found.graph)["weight_bytes"] <= weights + 2 * buffers


@pytest.mark.slow
def test_a_model_of_69_billion_parameters_is_traced_without_its_weights() -> None:
    code = (
        "import torch; from torch import nn;"
        "from gdp.importers.pytorch.model import TorchModel;"
        "torch.set_default_device('meta');"
        "layers = [nn.Linear(65536, 65536, bias=False) for _ in range(16)];"
        "found = TorchModel('big', nn.Sequential(*layers), (torch.empty(1, 65536),)).trace();"
        # Not ru_maxrss, which a child inherits from the process that started it.
        "peak = next(l for l in open('/proc/self/status') if l.startswith('VmHWM'));"
        "print(found.parameters, peak.split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    parameters, peak_kib = map(int, done.stdout.split()[-2:])
    assert parameters == 16 * 65536**2
    assert peak_kib < 2_000_000


def test_graphs_of_open_slices_and_infinite_masks_are_read_as_written() -> None:
    """torch writes to `x[::2]` up to 2**63 - 1, and JSON has no infinity."""

    def function(_: Any, x: Any) -> Any:
        out = torch.empty_like(x)
        out[..., ::2] = x[..., 1::2].masked_fill(x[..., ::2] > 0, float("-inf"))
        out[..., 1::2] = x[..., ::2].clamp(-(2**63), float("inf"))
        return out

    graph = trace_torch(Function(function), (torch.ones(2, 8),))
    ends = [d.attributes.get("end") for d in graph.detail]
    assert 2**63 - 1 in ends
    assert decode_graph(encode_graph(graph), "a graph").digest == graph.digest


def test_inputs_go_where_the_weights_are() -> None:
    """Shapes alone are wanted, so a module with weights takes inputs without, and the other way."""
    with torch.device("meta"):
        empty = Mlp()
    graphs = [trace_torch(m, (x,)) for m in (Mlp(), empty) for x in (meta(2, 8), torch.ones(2, 8))]
    assert len({graph.digest for graph in graphs}) == 1


@pytest.mark.parametrize("inputs", ["(x,)", "{'input': x}", "x"])
def test_a_python_function_may_return_a_module(
    inputs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"torch_model_{len(inputs)}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\ndef make():\n"
        f"    x = torch.empty(2, 8, device='meta')\n    return torch.nn.Linear(8, 4), {inputs}\n"
    )
    found = inspect_model(f"python:{name}:make")
    assert (found["parameters"], found["flop"]) == (36, 2 * 2 * 8 * 4 + 8)
