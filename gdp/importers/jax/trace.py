"""JAX functions as graphs, traced from shapes alone: inference, and whole training steps.

Each primitive is an op. Calls (jit, custom derivatives, rematerialisation) are entered; a scan is
unrolled on request or kept as one op that costs its length times its body; while and cond stay
one op. Nothing is executed and no array is allocated: arguments may be
`jax.ShapeDtypeStruct`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from gdp.graph.op_graph import OpGraph
from gdp.importers.jax.flatten import Options, Program
from gdp.importers.jax.listing import Listing, list_call, list_training_step
from gdp.importers.program.build import build
from gdp.importers.program.traced import Traced, report


def trace(
    fn: Callable[..., Any],
    *args: Any,
    weight_argnums: int | Sequence[int] = (),
    name: str | None = None,
    unroll_scan: bool | int = False,
    trip_count: int | None = None,
) -> OpGraph:
    """The graph of `fn(*args)`; what was estimated or assumed is logged.

    Arguments in `weight_argnums` are weights that the ops hold, as are arrays that `fn` closes
    over; the others are graph inputs. `unroll_scan` is True, or the greatest length to unroll;
    `trip_count` is that of while loops. Equations that a transposition made are backward.
    """
    held = {weight_argnums} if isinstance(weight_argnums, int) else set(weight_argnums)
    held = {i + len(args) if i < 0 else i for i in held}
    if not held <= set(range(len(args))):
        raise ValueError(f"weight_argnums {sorted(held)} do not fit {len(args)} arguments")
    program = Program(options=Options(unroll_scan, trip_count, mark_transposed=True))
    label = name or getattr(fn, "__name__", "traced")
    found = traced(list_call(fn, args, held, label, program))
    report(found)
    return found.graph


def trace_training_step(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    optimizer: Any = None,
    microbatches: int = 1,
    has_aux: bool = False,
    name: str | None = None,
    unroll_scan: bool | int = False,
    trip_count: int | None = None,
) -> OpGraph:
    """The graph of one step: `loss_fn(params, batch)`, its gradients, and an optax update.

    Parameters and optimizer state are weights that never move: all ops that read a parameter, and
    those that update it or its state, share a colocation id. Leaves of `batch` are graph inputs,
    the loss is the output. Ops that depend on the gradient of the loss are backward, as are
    rematerialised ones (which wait for that gradient) and the optimizer. With `microbatches` the
    leading axis of the batch is cut, gradients are added up, and the update runs once. Without an
    optimizer the gradients stay where they are made.
    """
    label = name or getattr(loss_fn, "__name__", "loss") + "_step"
    program = Program(options=Options(unroll_scan, trip_count))
    found = traced(
        list_training_step(loss_fn, params, batch, optimizer, microbatches, has_aux, label, program)
    )
    report(found)
    return found.graph


def traced(listing: Listing) -> Traced:
    """The graph of a listing, with what was estimated or assumed."""
    program = listing.program
    return Traced(
        build(listing.label, program, listing.results),
        tuple(sorted(program.estimated)),
        tuple(dict.fromkeys(program.assumptions)),
    )
