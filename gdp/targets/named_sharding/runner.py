"""Divides the parameters of a JAX function over a mesh, as sharding.json says, and checks it.

    PYTHONPATH=. python shard.py MODULE:FUNCTION [--rounds N]

FUNCTION is yours, and MODULE must be importable: called without arguments it returns (function,
(parameters, *inputs)), where parameters are a dictionary of arrays by the names and with the axes
of the checkpoint of transformers. The function is compiled uncut and divided; results are compared,
seconds printed. In a program of your own: `parameters = divide(parameters)`, then call the jitted
function as ever. Where the plan is of processors, JAX's processor is made into as many devices as
it needs.
"""

import argparse
import functools
import importlib
import json
import os
import statistics
import time
from pathlib import Path

TOLERANCE = 1e-4
"""Of the largest magnitude of a result of float32; types of fewer digits are allowed more."""


@functools.cache
def plan():
    """The contents of sharding.json."""
    return json.loads((Path(__file__).resolve().parent / "sharding.json").read_text("utf-8"))


def make_mesh():
    """The mesh of the plan, over the first devices of JAX."""
    import jax
    import numpy as np

    ((axis, count),) = plan()["mesh"].items()
    devices = jax.devices(plan()["platform"] or None)
    if len(devices) < count:
        raise SystemExit(f"the plan is of {count} devices and JAX has {len(devices)}; on a "
                         "processor set XLA_FLAGS=--xla_force_host_platform_device_count="
                         f"{count}")  # fmt: skip
    return jax.sharding.Mesh(np.array(devices[:count]), (axis,))


def shardings(parameters, mesh):
    """The `NamedSharding` of every parameter, by name."""
    from jax.sharding import NamedSharding, PartitionSpec

    found = {}
    for name, array in parameters.items():
        planned = plan()["parameters"].get(name)
        if planned is None:
            raise SystemExit(f"the plan has no parameter {name!r}; use names of the checkpoint")
        if list(array.shape) != planned["shape"]:
            raise SystemExit(f"{name!r} has shape {tuple(array.shape)}, and the plan is of "
                             f"{tuple(planned['shape'])}")  # fmt: skip
        found[name] = NamedSharding(mesh, PartitionSpec(*planned["spec"]))
    return found


def divide(parameters, mesh=None):
    """The parameters on the devices of a mesh, each device with its own part."""
    import jax

    return jax.device_put(parameters, shardings(parameters, mesh or make_mesh()))


def round_seconds(call, rounds):
    """Seconds of each round, behind one that compiles."""
    import jax

    jax.block_until_ready(call())
    spent = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        jax.block_until_ready(call())
        spent.append(time.perf_counter() - start_s)
    return spent


def largest_difference(computed, wanted):
    """As a share of the largest magnitude, over all results."""
    import jax
    import numpy as np

    worst = 0.0
    for one, other in zip(*map(jax.tree.leaves, (computed, wanted)), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = max(float(np.abs(other).max(initial=0.0)), 1e-30)
        worst = max(worst, float(np.abs(one - other).max(initial=0.0)) / scale)
    return worst


def main():
    """Check and time a function."""
    parser = argparse.ArgumentParser(description="Divide a JAX function as sharding.json says.")
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="what to call; it is imported")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ((axis, count),) = plan()["mesh"].items()
    if plan()["platform"] == "cpu":  # read once, when JAX starts; the last of equal flags counts
        flag = f"--xla_force_host_platform_device_count={count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    module, _, name = options.function.partition(":")
    function, (parameters, *inputs) = getattr(importlib.import_module(module), name)()
    call, mesh = jax.jit(function), make_mesh()
    whole = jax.device_put((parameters, *inputs), mesh.devices.flat[0])
    parts = divide(parameters, mesh), *jax.device_put(inputs, NamedSharding(mesh, PartitionSpec()))
    wanted, computed = call(*whole), call(*parts)
    off = largest_difference(computed, wanted)
    types = {leaf.dtype.itemsize for leaf in jax.tree.leaves(wanted)}
    print(json.dumps({
        "mesh": {axis: count}, "devices": [str(d) for d in mesh.devices.flat],
        "outputs_equal": off <= (TOLERANCE if min(types) > 2 else 5e-2), "max_relative_diff": off,
        "divided_s": statistics.median(round_seconds(lambda: call(*parts), options.rounds)),
        "uncut_s": statistics.median(round_seconds(lambda: call(*whole), options.rounds)),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
