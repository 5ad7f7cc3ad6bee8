"""A person's rules, by family, and the placements on one device.

convolutional: the whole model on the fastest accelerator; at these sizes nobody splits it.
recurrent: one layer per accelerator, in turn, as GNMT's authors did.
transformer: the layers in as many equal stretches as there are accelerators.

A layer is known by its ops' module path (`layer3`, `lstm0`); what has none goes with the layer that
made its largest input, or with the one before it in the program, whichever is better: a person
would try both. A convolutional model that no accelerator holds is placed as a transformer.
Accelerators are the devices of the fastest kind.
"""

import re
from typing import Literal

import numpy as np

from benchmarks.published.baselines.common import Arena, Found, compute_s
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem

Family = Literal["convolutional", "recurrent", "transformer"]


def expert(problem: Problem, family: Family) -> Found:
    """The placement of the rule."""
    arena = Arena(problem, 64)
    accelerators = fastest_kind(problem)
    if family == "convolutional" and _holds(problem, accelerators[0]):
        return only_on(problem, int(accelerators[0]))
    for after in (True, False):
        layer = layers(problem, after)
        count = int(layer.max()) + 1
        recurrent = family == "recurrent"
        chosen = layer % len(accelerators) if recurrent else layer * len(accelerators) // count
        _judge(arena, accelerators[chosen])
    return arena.found()


def _holds(problem: Problem, device: int) -> bool:
    """True where one device holds the whole model."""
    return only_on(problem, device).assignment is not None


def only_on(problem: Problem, device: int) -> Found:
    """Everything on one device, as far as it may be there."""
    arena = Arena(problem, 64)
    _judge(arena, np.full(problem.num_ops, device))
    return arena.found()


def fastest_kind(problem: Problem) -> np.ndarray:
    """The devices of the kind that runs all the work fastest."""
    total = compute_s(problem).sum(axis=0)
    kinds = np.array([device.kind for device in problem.cluster.devices])
    return np.flatnonzero(kinds == kinds[total.argmin()])


_LAYER = re.compile(r"(stack\d+_layer\d+)|(?:layer|lstm|gru|cell|block|stage)(\d+(?:_\d+)?)")
_FIRST = re.compile(r"encoder/(forward|backward)")  # the two directions of GNMT's first layer


def layers(problem: Problem, by_input: bool = True) -> np.ndarray:
    """The layer of every op, 0.. in order; what has no number is of the layer that made its largest
    input, with weights that others share of those; or of the layer before it in the program.

    `lstm1` of an encoder and `layer1` of a decoder are one layer, and so are those of all segments
    and time steps.
    """
    a = arrays_of(problem)
    found = np.zeros(problem.num_ops, dtype=np.int64)
    known: dict[str, int] = {}
    number = 0
    for op, scope in enumerate(problem.graph.scope):
        path = _LAYER.search(scope)
        name = (path.group(1) or path.group(2)) if path else "0" if _FIRST.search(scope) else None
        first = a.group_op[a.group_start[problem.group[op]]]
        read = a.in_tensor[a.in_start[op] : a.in_start[op + 1]]
        if name is not None:
            number = known.setdefault(name, len(known))
        found[op] = number
        if by_input and first < op:
            found[op] = found[first]
        elif by_input and name is None:
            maker = a.producer[read[a.sent_bytes[read].argmax()]] if len(read) else 0
            found[op] = found[maker]
    return found


def _judge(arena: Arena, device: np.ndarray) -> None:
    """Rate under every rule of priority; the ops of a node go where its first one goes."""
    first = np.unique(arena.nodes.node_of, return_index=True)[1]
    arena.seconds(device[first][None])
