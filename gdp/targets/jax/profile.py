"""Profiles of JAX functions on one device, segment by segment, each compiled as when cut.

A compiler fuses what it compiles together, so single primitives cannot be timed. A function's
jaxpr is cut into runs of equations; every run is jitted and timed by itself, as a function of its
own to which rates are fitted. The whole function is timed beside them.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdp.base.cores import num_cores
from gdp.base.errors import ClusterError
from gdp.cluster.presets import kind_of
from gdp.costs.profile import DeviceRecord, Kernel, Overheads, Profile, ProfiledModel
from gdp.importers.jax.trace import JaxModel
from gdp.importers.program import executed
from gdp.measure.record import (
    SIZES_BYTES,
    bandwidth,
    copy_overheads,
    runs_within,
    statistic,
    timed,
    timed_rounds,
)

EQUATIONS = 12
"""Of one segment, about: a layer or less."""


@dataclass(frozen=True)
class Segment:
    """Consecutive equations as a function, with its arguments."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def profile_functions(
    functions: Sequence[tuple[str, str, Callable[..., Any], Sequence[Any]]],
    platform: str = "cpu",
    *,
    rounds: int = 5,
    seconds: float = 2.0,
    equations: int = EQUATIONS,
) -> Profile:
    """The profile of (name, family, function, example arguments) on a JAX platform."""
    device = jax_device(platform)
    models: list[ProfiledModel] = []
    for name, family, fn, arguments in functions:
        models += profile_function(fn, arguments, name, family, device, rounds, seconds, equations)
    import jax

    return Profile(
        device=DeviceRecord(kind_of(device.platform, device.device_kind), device.device_kind),
        runtime="jax",
        threads=0,  # XLA decides
        level="jit",
        versions={"jax": jax.__version__, "numpy": np.__version__},
        date=datetime.date.today().isoformat(),
        models=tuple(models),
        overheads=transfer_overheads(device, rounds),
    )


def jax_device(platform: str) -> Any:
    """The first device of a platform; raises `ClusterError` where there is none."""
    import jax

    try:
        return jax.devices(platform)[0]
    except RuntimeError:
        platforms = sorted({d.platform for d in jax.devices()})
        raise ClusterError(
            f"JAX has no device of platform {platform!r} here; it has {', '.join(platforms)}"
        ) from None


def profile_function(
    fn: Callable[..., Any],
    arguments: Sequence[Any],
    name: str,
    family: str,
    device: Any,
    rounds: int = 5,
    seconds: float = 2.0,
    equations: int = EQUATIONS,
) -> list[ProfiledModel]:
    """The whole function as one kernel, and every segment of it."""
    import jax

    values = tuple(jax.device_put(materialise(a), device) for a in arguments)
    with executed(name):
        parts = [Segment(name, fn, values), *cut(fn, values, name, equations)]
    share = seconds / max(len(parts), 1)
    models = []
    for part in parts:
        model = _measure(part, family, device, rounds, max(share, 0.02))
        if model is not None:
            models.append(model)
    return models


def materialise(tree: Any) -> Any:
    """Example arguments with values: shapes become small random numbers, integers zero."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            drawn = 0.1 * rng.standard_normal(leaf.shape, dtype=np.float32)
            return jnp.asarray(drawn, leaf.dtype)
        return jnp.zeros(leaf.shape, leaf.dtype)

    kind = jax.ShapeDtypeStruct
    return jax.tree.map(value, tree, is_leaf=lambda leaf: isinstance(leaf, kind))


def cut(fn: Callable[..., Any], values: Sequence[Any], name: str, equations: int) -> list[Segment]:
    """Segments of about `size` equations, with the values that the function itself computes."""
    import jax
    from jax.extend import core

    flat, treedef = jax.tree.flatten(tuple(values))
    closed = jax.make_jaxpr(lambda *leaves: fn(*jax.tree.unflatten(treedef, leaves)))(*flat)
    while len(closed.jaxpr.eqns) == 1 and "jaxpr" in closed.jaxpr.eqns[0].params:
        inner = closed.jaxpr.eqns[0].params["jaxpr"]
        same = list(closed.jaxpr.eqns[0].invars) == list(closed.jaxpr.invars)
        if not (isinstance(inner, core.ClosedJaxpr) and same):
            break
        closed = inner
    jaxpr = closed.jaxpr
    values_of: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values_of.update(zip(jaxpr.invars, flat, strict=True))
    outputs = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    segments = []
    for first in range(0, len(jaxpr.eqns), equations):
        chunk = jaxpr.eqns[first : first + equations]
        later = outputs | {v for e in jaxpr.eqns[first + equations :] for v in _variables(e.invars)}
        results = {v for e in chunk for v in e.outvars}
        variables = (v for e in chunk for v in _variables(e.invars))
        reads = list(dict.fromkeys(v for v in variables if v not in results))
        gives = [v for e in chunk for v in e.outvars if v in later]
        if not gives:
            continue
        piece = core.Jaxpr(
            constvars=(), invars=reads, outvars=gives, eqns=list(chunk), effects=jaxpr.effects,
            debug_info=jaxpr.debug_info,
        )  # fmt: skip
        function = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(piece, ())))
        arguments = tuple(values_of[v] for v in reads)
        segments.append(Segment(f"{name}/{first}", function, arguments))
        values_of.update(zip(gives, function(*arguments), strict=True))
    return segments


def _variables(values: Sequence[Any]) -> list[Any]:
    from jax.extend import core

    return [v for v in values if not isinstance(v, core.Literal)]


def _measure(
    part: Segment, family: str, device: Any, rounds: int, seconds: float
) -> ProfiledModel | None:
    """One segment; None where nothing is computed."""
    import jax

    from gdp.importers.jax.trace import trace

    graph = trace(part.function, *part.arguments, name=part.name)
    ops = tuple(int(i) for i in np.flatnonzero(~graph.is_io))
    if not ops:
        return None
    compiled = jax.jit(part.function)
    arguments = jax.device_put(part.arguments, device)

    def run() -> None:
        jax.block_until_ready(compiled(*arguments))

    with executed(part.name):
        run()
    times = timed_rounds(run, rounds, seconds)
    least_s, spread = statistic(times)
    kernel = Kernel(part.name, "jit", ops, least_s, spread)
    return ProfiledModel(part.name, family, graph, least_s, (kernel,), times.shape[1], rounds)


def _between_cpus(call_s: float, rounds: int) -> Overheads:
    """Time of a copy to JAX's next CPU device, if there is one: of a chain of calls that alternates
    between two devices, less that of the chain on one."""
    import jax
    import jax.numpy as jnp

    devices = jax.devices("cpu")[:2]
    if len(devices) < 2:
        return Overheads(session_s=call_s)
    hops = 8
    negate = [
        jax.jit(jnp.negative, out_shardings=jax.sharding.SingleDeviceSharding(device))
        for device in devices
    ]

    def chain_s(size_bytes: int, step: int) -> float:
        first = jax.device_put(jnp.zeros(size_bytes // 4), devices[0])

        def run() -> None:
            value = first
            for hop in range(hops):
                at = hop * step % 2
                value = negate[at](jax.device_put(value, devices[at]) if step else value)
            jax.block_until_ready(value)

        run()
        return statistic(timed_rounds(run, rounds, 0.2))[0]

    extra_s = [(chain_s(size, 1) - chain_s(size, 0)) / (hops - 1) for size in SIZES_BYTES[:-1]]
    return Overheads(
        session_s=call_s,
        handover_s=max(float(np.median(extra_s[:2])), 0.0),
        handover_bytes_per_s=bandwidth(SIZES_BYTES[:-1], extra_s, 1e11),
    )


def quick_profile(
    entries: Sequence[tuple[str, JaxModel]],
    rounds: int = 5,
    seconds: float = 0.6,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Profile whole functions on all of this machine's cores; `gdp.costs.work_rates` fits
    rates to such a profile.

    Args:
        entries: (family, model) of the functions, such as `small_models` of
            `gdp.targets.jax.small_models` has them.
        rounds: in each of which every function is run.
        seconds: for the runs of one function, in all rounds.
        progress: is called with the name of each model before it is compiled.
    """
    import jax

    from gdp.cluster.detect import cpu_model
    from gdp.targets.jax.program import argument_values

    device = jax_device("cpu")
    ready: list[Callable[[], None]] = []
    for _, model in entries:
        if progress is not None:
            progress(model.name)
        function = jax.jit(model.uncut())
        values = jax.device_put(argument_values(model, 0), device)

        def run(function: Any = function, values: Any = values) -> None:
            jax.block_until_ready(function(*values))

        run()
        ready.append(run)
    counts = [runs_within(run, seconds / rounds) for run in ready]
    # All models in every round: what disturbs the machine for a while spoils a round of each.
    times = list(zip(*([timed(run, n) for run, n in zip(ready, counts, strict=True)]
                       for _ in range(rounds)), strict=True))  # fmt: skip
    models = []
    for (family, model), own in zip(entries, map(np.array, times), strict=True):
        graph = model.trace().graph
        # Runs of one function differ by a tenth; `gdp run` reports their median.
        usual_s = float(np.median(own, axis=1).min())
        ops = tuple(np.flatnonzero(~graph.is_io).tolist())
        kernel = Kernel(model.name, "jit", ops, usual_s, statistic(own)[1])
        models.append(
            ProfiledModel(model.name, family, graph, usual_s, (kernel,), own.shape[1], rounds)
        )
    return Profile(
        device=DeviceRecord("cpu", cpu_model()),
        runtime="jax",
        threads=num_cores(),
        level="jit",
        versions={"jax": jax.__version__, "numpy": np.__version__},
        date=datetime.date.today().isoformat(),
        models=tuple(models),
        overheads=transfer_overheads(device, rounds),
        statistic="smallest over rounds of the median of a round's runs",
    )


def transfer_overheads(device: Any, rounds: int = 5) -> Overheads:
    """Latency and bandwidth of sending from the host, and the cost of one jitted call."""
    import jax
    import jax.numpy as jnp

    tiny = jax.device_put(jnp.zeros(1), device)
    add = jax.jit(lambda x: x + 1)
    jax.block_until_ready(add(tiny))
    call_s = statistic(timed_rounds(lambda: jax.block_until_ready(add(tiny)), rounds, 0.1))[0]
    if device.platform == "cpu":
        return _between_cpus(call_s, rounds)
    seconds = []
    for size in SIZES_BYTES:
        host = np.zeros(size // 4, np.float32)

        def send(host: np.ndarray = host) -> None:
            jax.block_until_ready(jax.device_put(host, device))

        send()
        seconds.append(statistic(timed_rounds(send, rounds, 0.2))[0])
    return copy_overheads(call_s, seconds)
