"""JAX functions and training steps become graphs with costs that can be checked by hand."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gdp.base.errors import ModelError
from gdp.graph.fuse import fuse
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph
from gdp.importers.jax.trace import JaxModel, trace, trace_training_step


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ops(graph: OpGraph, op_type: str) -> list[int]:
    return [i for i, kind in enumerate(graph.op_types) if kind == op_type]


def inner(graph: OpGraph) -> list[str]:
    return [kind for kind in graph.op_types if kind not in (INPUT, OUTPUT)]


def mlp(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return x


def mlp_loss(params, x):
    return jnp.square(mlp(params, x)).mean()


LAYERS = [(f32(8, 16), f32(16)), (f32(16, 4), f32(4))]


def test_a_layer_is_a_product_a_sum_and_a_tanh() -> None:
    graph = trace(mlp, LAYERS[:1], f32(2, 8), weight_argnums=0)
    assert graph.op_types == ("Input", "dot_general", "add", "tanh", "Output")
    assert graph.flop.tolist() == [0, 2 * 2 * 8 * 16, 32, 32, 0]
    # x (64 B) and w (512 B) in, 128 B out; then 128 B and the bias (64 B, not its broadcast).
    assert graph.memory_traffic_bytes.tolist() == [0, 704, 320, 256, 0]
    assert graph.weight_bytes.tolist() == [0, 512, 64, 0, 0]
    assert graph.tensor_bytes.tolist() == [64, 128, 128, 128]
    assert not graph.is_backward.any()


def test_arguments_that_are_not_weights_are_inputs() -> None:
    graph = trace(mlp, LAYERS[:1], f32(2, 8), weight_argnums=())
    assert len(ops(graph, INPUT)) == 3
    assert graph.weight_bytes.sum() == 0
    with pytest.raises(ModelError, match="do not fit 2 arguments"):
        trace(mlp, LAYERS, f32(2, 8), weight_argnums=2)


def test_trees_of_arrays_before_the_data_are_weights_and_that_is_said() -> None:
    """Not the last argument, whatever its form, and not an array by itself."""
    said = JaxModel("mlp", mlp, (LAYERS[:1], f32(2, 8))).trace()
    assert len(ops(said.graph, INPUT)) == 1
    assert said.graph.weight_bytes.sum() == 4 * (8 * 16 + 16)
    assert "argument 0, a tree of arrays, is taken for weights" in said.assumptions[0]
    swapped = JaxModel("mlp", lambda x, layers: mlp(layers, x), (f32(2, 8), LAYERS[:1])).trace()
    assert len(ops(swapped.graph, INPUT)) == 3
    assert not swapped.assumptions


def test_arrays_closed_over_are_weights_and_counted_once_on_a_device() -> None:
    table = jnp.ones((16, 16))
    graph = trace(lambda x: (x @ table) @ table, f32(4, 16))
    first, second = ops(graph, "dot_general")
    assert graph.weight_bytes[[first, second]].tolist() == [1024, 1024]
    assert graph.weight_id[first] == graph.weight_id[second]


def scanned(params, x):
    return jax.lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, params)[0]


def test_a_scan_is_one_op_or_its_iterations() -> None:
    kept = trace(scanned, f32(5, 8, 8), f32(2, 8), weight_argnums=0, unroll_scan=False)
    unrolled = trace(scanned, f32(5, 8, 8), f32(2, 8), weight_argnums=0)
    assert inner(kept) == ["scan"]
    assert inner(unrolled) == ["dot_general", "sin"] * 5
    assert kept.flop.sum() == unrolled.flop.sum() == 5 * (2 * 2 * 8 * 8 + 16)
    assert kept.weight_bytes.sum() == unrolled.weight_bytes.sum() == 5 * 8 * 8 * 4
    assert inner(trace(scanned, f32(5, 8, 8), f32(2, 8), unroll_scan=4)) == ["scan"]
    assert "sin" in inner(trace(scanned, f32(5, 8, 8), f32(2, 8), unroll_scan=5))
    # Over data, not over layers.
    assert inner(trace(scanned, f32(5, 8, 8), f32(2, 8))) == ["scan"]


@pytest.mark.parametrize("reverse", [False, True])
def test_unrolled_rows_come_in_the_order_of_the_loop(reverse: bool) -> None:
    """Row i of the outputs feeds row i of a second loop, whichever way both run."""

    def two_loops(x):
        def body(c, row):
            return c + row, c * row

        _, rows = jax.lax.scan(body, jnp.zeros(4), x, reverse=reverse)
        return jax.lax.scan(body, jnp.zeros(4), rows, reverse=not reverse)[0]

    graph = trace(two_loops, f32(3, 4), unroll_scan=True)
    rows = [dict(graph.detail[i].attributes)["row"] for i in ops(graph, "slice")]
    assert sorted(rows) == [0, 1, 2]
    assert "concatenate" not in graph.op_types  # rows pass from loop to loop one by one


def test_a_while_loop_costs_its_trip_count_which_is_assumed_aloud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loop(x):
        return jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))

    given = JaxModel("loop", loop, (f32(8, 8),), {"trip_count": 9}).trace()
    assert not given.assumptions
    assert given.graph.flop[ops(given.graph, "while")[0]] == 9 * (2 * 8**3 + 1 + 1)
    with caplog.at_level(logging.WARNING):
        trace(loop, f32(8, 8))
    assert "assumed to run once" in caplog.text


def test_a_branch_costs_its_dearest_arm() -> None:
    def branch(flag, x):
        return jax.lax.cond(flag, lambda a: a @ a, lambda a: a + 1, x)

    graph = trace(branch, jax.ShapeDtypeStruct((), bool), f32(8, 8))
    assert graph.flop[ops(graph, "cond")[0]] == 2 * 8**3


def test_calls_are_entered() -> None:
    @jax.custom_vjp
    def double(x):
        return x * 2

    double.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))

    def nested(x):
        return jax.jit(lambda a: jax.nn.relu(jax.checkpoint(jnp.sin)(double(a))))(x)

    assert inner(trace(nested, f32(8))) == ["mul", "sin", "max"]


def test_convolutions_cost_the_same_forward_and_backward() -> None:
    """Input and weight gradients of a convolution do as many multiply-adds as it does."""

    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), ((0, 0), (0, 0)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    args = f32(4, 8, 8, 6), f32(2, 2, 6, 10)
    flop = 2 * (4 * 4 * 4 * 10) * (2 * 2 * 6)
    assert trace(conv, *args).flop.sum() == flop
    graph = trace(jax.grad(lambda x, w: conv(x, w).sum(), argnums=(0, 1)), *args)
    assert graph.flop[ops(graph, "conv_general_dilated")].tolist() == [flop, flop]


@pytest.mark.parametrize(
    ("fn", "shapes", "op_type", "flop"),
    [
        (lambda x: x.sum(0), [(8, 4)], "reduce_sum", 32),
        (lambda x: jnp.cumsum(x, 0), [(8, 4)], "cumsum", 32),
        (lambda x: jnp.sort(x, 0), [(8, 4)], "sort", 32 * 3),
        (lambda x: jnp.fft.fft(x), [(8,)], "fft", 5 * 8 * 3),
        (lambda x, y: jnp.stack([x, y]), [(8,), (8,)], "stack", 0),
        (lambda x: x.T, [(8, 4)], "transpose", 0),
    ],
)
def test_costs_of_other_primitives(fn, shapes, op_type: str, flop: float) -> None:
    traced = JaxModel("fn", fn, tuple(f32(*shape) for shape in shapes)).trace()
    assert traced.graph.flop[ops(traced.graph, op_type)].tolist() == [flop]
    assert traced.estimated == ()


def test_a_gather_reads_rows_and_not_the_table() -> None:
    def look(table, i):
        return table.at[i].get(mode="promise_in_bounds")

    graph = trace(look, f32(1000, 8), jax.ShapeDtypeStruct((5,), jnp.int32), weight_argnums=0)
    gather = ops(graph, "gather")[0]
    assert graph.memory_traffic_bytes[gather] < 2 * 5 * 8 * 4 + 100
    assert graph.weight_bytes[gather] == 1000 * 8 * 4


def test_rows_of_a_stacked_weight_are_weights_of_their_own() -> None:
    graph = trace(lambda w, x: sum(x @ m for m in jnp.unstack(w)), f32(3, 8, 8), f32(2, 8),
                  weight_argnums=0)  # fmt: skip
    dots = ops(graph, "dot_general")
    assert graph.weight_bytes[dots].tolist() == [256, 256, 256]
    assert len(set(graph.weight_id[dots].tolist())) == 3


def test_rows_of_a_weight_that_is_also_read_whole_are_all_of_it() -> None:
    graph = trace(lambda w, x: sum(x @ m for m in jnp.unstack(w)) + w.sum(), f32(3, 8, 8),
                  f32(2, 8), weight_argnums=0)  # fmt: skip
    readers = [*ops(graph, "dot_general"), *ops(graph, "reduce_sum")]
    assert graph.weight_bytes[readers].tolist() == [768] * 4
    assert len(set(graph.weight_id[readers].tolist())) == 1


def test_a_constant_that_only_gradients_read_is_of_the_backward_pass() -> None:
    @jax.custom_vjp
    def double(x):
        return x * 2

    double.defvjp(lambda x: (x * 2, jnp.arange(8.0)), lambda row, g: (g * row,))

    def loss(w, x):
        return (double(x @ w) + jnp.arange(8.0)[::-1]).sum()

    graph = trace_training_step(loss, f32(8, 8), f32(2, 8))
    src, dst = graph.edges
    for op in ops(graph, "iota"):
        assert graph.is_backward[op] == graph.is_backward[dst[src == op]].all()
    assert sorted(graph.is_backward[ops(graph, "iota")].tolist()) == [False, True]


def test_a_training_step_by_its_parts() -> None:
    graph = trace_training_step(mlp_loss, LAYERS, f32(2, 8), optimizer=optax.adam(1e-3))
    forward = [graph.op_types[i] for i in np.flatnonzero(~graph.is_backward & ~graph.is_io)]
    assert forward.count("dot_general") == 2
    assert forward.count("tanh") == 2
    backward = [graph.op_types[i] for i in np.flatnonzero(graph.is_backward)]
    assert backward.count("dot_general") == 3  # two weight gradients, one input gradient
    # Parameters and both moments, each held once; the input is no weight.
    assert graph.weight_bytes.sum() == 3 * 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert [graph.op_types[i] for i in np.flatnonzero(graph.is_io)] == [INPUT, OUTPUT]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_no_edge_leads_from_the_backward_pass_into_the_forward_pass(microbatches: int) -> None:
    graph = trace_training_step(
        mlp_loss, LAYERS, f32(8, 8), optimizer=optax.adam(1e-3), microbatches=microbatches
    )
    src, dst = graph.edges
    late = graph.is_backward[src] & ~graph.is_backward[dst] & ~graph.is_io[dst]
    assert not late.any()
    assert len(ops(graph, INPUT)) == microbatches
    assert len(ops(graph, OUTPUT)) == 1


@pytest.mark.parametrize("microbatches", [1, 2])
def test_all_that_touches_a_parameter_shares_a_device(microbatches: int) -> None:
    """Two layers, so two products with a weight each: their classes differ and hold the updates."""
    graph = trace_training_step(
        mlp_loss, LAYERS, f32(4, 8), optimizer=optax.adam(1e-3), microbatches=microbatches
    )
    held = np.flatnonzero(graph.weight_bytes)
    classes = [set(graph.colocate[held[graph.weight_bytes[held] == size]].tolist())
               for size in (4 * 8 * 16, 4 * 16, 4 * 16 * 4, 4 * 4)]  # fmt: skip
    assert [len(c) for c in classes] == [1, 1, 1, 1]
    assert len(set.union(*classes)) == 4
    forward = np.flatnonzero(~graph.is_backward & (np.array(graph.op_types) == "dot_general"))
    assert set(graph.colocate[forward].tolist()) == classes[0] | classes[2]
    # All of Adam's ops on whole arrays belong to some parameter.
    for op in np.flatnonzero([name.startswith("optimizer/") for name in graph.op_names]):
        if graph.detail[op].output_shapes[0]:
            assert graph.colocate[op] in set.union(*classes)


def test_clipping_by_the_global_norm_does_not_tie_parameters_together() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    graph = trace_training_step(mlp_loss, LAYERS, f32(4, 8), optimizer=optimizer)
    held = graph.colocate[graph.weight_bytes > 0]
    assert len(set(held.tolist())) == 4


def test_unrolled_layers_of_a_stacked_parameter_keep_apart_in_training() -> None:
    def loss(w, x):
        return jnp.square(scanned(w, x)).mean()

    graph = trace_training_step(
        loss, f32(3, 8, 8), f32(2, 8), optimizer=optax.adam(1e-3), unroll_scan=True
    )
    dots = np.flatnonzero(~graph.is_backward & (np.array(graph.op_types) == "dot_general"))
    assert len(dots) == len(set(graph.colocate[dots].tolist())) == 3
    assert graph.weight_bytes.sum() == 3 * 3 * 8 * 8 * 4


def test_rematerialised_ops_are_backward_and_wait_for_the_gradient() -> None:
    def loss(w, x):
        hidden = jax.checkpoint(lambda a: jnp.sin(jnp.cos(a @ w)))(x)
        return jnp.square(hidden).sum()

    graph = trace_training_step(loss, f32(8, 8), f32(2, 8))
    again = [i for i in ops(graph, "cos") if graph.is_backward[i]]
    assert again
    src, dst = graph.edges
    products = [i for i in ops(graph, "dot_general") if graph.is_backward[i]]
    for op in (*again, *products):
        assert graph.is_backward[src[dst == op]].any()


def test_a_fused_training_step_keeps_its_totals() -> None:
    graph = trace_training_step(mlp_loss, LAYERS, f32(64, 8), optimizer=optax.adam(1e-3))
    small = fuse(graph).graph
    assert small.num_ops < graph.num_ops / 3
    assert small.flop.sum() == pytest.approx(graph.flop.sum())
    assert small.weight_bytes.sum() == graph.weight_bytes.sum()


def test_names_are_unique_readable_and_the_same_every_time() -> None:
    def named(params, x):
        with jax.named_scope("head"):
            return mlp(params, x)

    graph = trace(named, LAYERS, f32(2, 8), weight_argnums=0)
    assert "head/dot_general" in graph.op_names
    assert "head/dot_general.1" in graph.op_names
    assert graph.scope[graph.op_index["head/tanh"]] == "head"
    assert graph.digest == trace(named, LAYERS, f32(2, 8), weight_argnums=0).digest


def test_dead_code_makes_no_ops() -> None:
    graph = trace(lambda x, y: (jnp.sin(x) + 1, jnp.cos(y) * 0)[0], f32(4), f32(4))
    assert graph.op_types == ("Input", "sin", "add", "Output")


def test_what_cannot_be_traced_is_said_in_one_line() -> None:
    with pytest.raises(ModelError, match="cannot be traced by JAX") as caught:
        trace(lambda x, y: x @ y, f32(2, 3), f32(2, 3))
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="the loss must be one number"):
        trace_training_step(lambda w, x: x @ w, f32(4, 4), f32(2, 4))
    with pytest.raises(ValueError, match="does not divide into 3 parts"):
        trace_training_step(mlp_loss, LAYERS, f32(4, 8), microbatches=3)


def test_an_array_given_twice_keeps_both_places() -> None:
    graph = trace(lambda x: jnp.einsum("bi,bi->b", x, x) @ x @ (x.T @ x), f32(4, 4))
    # Per sample a product of two vectors; then a vector, and a matrix, by a matrix.
    assert sorted(graph.flop[op] for op in ops(graph, "dot_general")) == [32, 32, 32, 128]
    src, dst = graph.edges
    assert len(set(zip(src, dst, strict=True))) == len(src)  # one use of each array


def test_what_a_function_prints_or_exits_with_is_not_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def prints(x):
        print("in the function")
        return x * 2

    def leaves(x):
        raise SystemExit(0)

    assert inner(trace(prints, f32(2))) == ["mul"]
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "in the function\n")
    with pytest.raises(ModelError, match="cannot be traced by JAX: SystemExit: 0"):
        trace(leaves, f32(2))
    with pytest.raises(ModelError, match="has no ops: it returns its inputs"):
        trace(lambda x: x, f32(2))
