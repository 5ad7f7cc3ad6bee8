"""Executes a placement of a JAX function, and measures it beside its baselines."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gdp.base.errors import ClusterError, ModelError
from gdp.cluster.types import Cluster
from gdp.importers.jax.trace import JaxModel, RecordedJax
from gdp.importers.program import executed
from gdp.measure.async_execution import (
    SEGMENT_RUNS,
    AsyncExecution,
    measured_rows,
    pieces_cycle,
    versions,
)
from gdp.measure.compare import compare
from gdp.measure.plan import ExecutionPlan
from gdp.measure.report import DEFAULT, PLACED, REPLICAS, SINGLE, RunReport, SegmentTime
from gdp.measure.request import RunRequest
from gdp.targets.jax.program import (
    Given,
    Layout,
    SegmentedJaxProgram,
    argument_values,
    as_numpy,
    tolerance,
)


def run_jax(request: RunRequest) -> RunReport:
    """Execute a placement: one jitted function per segment, transfers by `jax.device_put`.

    Arguments that are shapes get seeded values. Training steps start from the same parameters each
    time. Raises `ClusterError` where JAX has fewer devices than the cluster, and `MeasurementError`
    when a measured rate is impossible.
    """
    model: JaxModel = request.model
    cluster, measuring = request.cluster, request.measuring
    devices = jax_devices(cluster)
    recorded = model.record()
    if recorded.graph.digest != request.graph.digest:
        raise ModelError(
            f"{model.name}: the function has changed since graph {request.graph.name!r} was "
            "traced; load it again"
        )
    arguments = argument_values(model, measuring.seed)
    plan = request.plan
    measuring.say(f"compiling {len(plan.segment_device)} pieces and the uncut function")

    def cut(plan: ExecutionPlan) -> tuple[SegmentedJaxProgram, Given, AsyncExecution]:
        program = SegmentedJaxProgram(recorded, Layout.of(plan, devices, cluster.host))
        given = program.given(dict(zip(recorded.arguments, arguments, strict=True)))
        slots = pieces_cycle(program.pieces, plan).in_flight
        return program, given, _issued(slots, partial(program.issue, given))

    program, given, placed = cut(plan)
    whole = Uncut(model, recorded, arguments, devices[cluster.host])
    singles = whole.singles(cluster, devices) if request.baselines else {}
    expected = whole.reference(devices)  # first: a model that raises is not refused as placed
    computed = program.run(given)
    names = [f"output {i}" for i in range(len(computed))]
    comparison = compare(
        dict(zip(names, expected, strict=True)), dict(zip(names, computed, strict=True))
    )
    is_equal = comparison.max_relative_diff <= tolerance(request.graph, devices)
    comparison = replace(comparison, equal=is_equal)
    contenders = {PLACED: placed} | singles
    contenders |= {name: cut(other)[-1] for name, other in request.rival_plans.items()}
    if request.baselines:
        contenders |= whole.defaults(devices, trains=model.trains)
    rows = measured_rows(contenders, measuring)
    best = min(singles, key=lambda name: rows[name].latency_s, default="")
    notes = [f"devices: {', '.join(map(str, devices))}", *whole.notes]
    notes += [f"the single device is {best}"] if best else []
    return request.report(
        plan,
        rows | ({SINGLE: rows[best]} if best else {}),
        comparison,
        single=cluster.device_names.index(best) if best else None,
        random_weights=_has_shapes(model),
        segments=_segments(program, given, plan, cluster),
        samples_in_flight=placed.slots,
        cores=tuple(int(d.id) for d in devices),
        pinned=False,
        note="; ".join(notes),
        versions=versions("jax", "jaxlib", "numpy"),
    )  # fmt: skip


def _issued(slots: int, *issues: Callable[[], Any]) -> AsyncExecution:
    return AsyncExecution(issues, slots, block_until_ready)


class Uncut:
    """The jitted function itself, on any device: the reference and the baselines.

    What a device has no memory for is left out, and noted.
    """

    def __init__(
        self, model: JaxModel, recorded: RecordedJax, arguments: Sequence[Any], host: Any
    ) -> None:
        self.name, self.function = model.name, model.uncut()
        self.arguments, self.host = arguments, host
        # Graph inputs and results travel from and to the host, weights are where they are used.
        self.is_input = [value.maker >= 0 for value in recorded.arguments]
        self.results_to_host = 1 if model.trains else None
        self.notes: list[str] = []
        self._on: dict[Any, Callable[[], Any] | None] = {}

    def on(self, device: Any) -> Callable[[], Any] | None:
        """A function that starts one sample on a device; None where it does not fit."""
        import jax

        if device not in self._on:
            try:
                with executed(self.name):
                    self._on[device] = self._started(device)
            except ModelError as error:
                lacks_memory = "RESOURCE_EXHAUSTED" in str(error.__cause__)
                if not (isinstance(error.__cause__, jax.errors.JaxRuntimeError) and lacks_memory):
                    raise
                self.notes.append(f"the uncut model does not fit on {device}")
                self._on[device] = None
        return self._on[device]

    def _started(self, device: Any) -> Callable[[], Any]:
        import jax

        sharding = jax.sharding.SingleDeviceSharding(device)
        function = jax.jit(self.function, out_shardings=sharding)
        places = [self.host if is_input else device for is_input in self.is_input]
        held = [jax.device_put(a, place) for a, place in zip(self.arguments, places, strict=True)]
        # Sending what is there already costs as much as a small model.
        sent = [i for i, place in enumerate(places) if place != device]

        def issue() -> list[Any]:
            given = list(held)
            for i in sent:
                given[i] = jax.device_put(held[i], device)
            results = function(*given)
            if device == self.host:
                return list(results)
            leaving = slice(0, self.results_to_host)
            return [*jax.device_put(results[leaving], self.host), *results[len(results[leaving]) :]]

        jax.block_until_ready(issue())
        return issue

    def singles(self, cluster: Cluster, devices: Sequence[Any]) -> dict[str, AsyncExecution]:
        """One device of each kind."""
        contenders: dict[str, AsyncExecution] = {}
        kinds = set()
        for description, device in zip(cluster.devices, devices, strict=True):
            if description.kind not in kinds and (issue := self.on(device)) is not None:
                contenders[description.name] = _issued(2, issue)
            kinds.add(description.kind)
        return contenders

    def defaults(self, devices: Sequence[Any], *, trains: bool) -> dict[str, AsyncExecution]:
        """JAX's own choice of device, and a copy on every device that takes samples round-robin.
        Copies of a training step would train several models, so there are none."""
        import jax

        contenders = {}
        if (issue := self.on(jax.local_devices()[0])) is not None:
            contenders[DEFAULT] = _issued(2, issue)
        copies = [issue for device in devices if (issue := self.on(device)) is not None]
        if copies and not trains:
            contenders[REPLICAS] = _issued(2 * len(copies), *copies)
        return contenders

    def reference(self, devices: Sequence[Any]) -> list[np.ndarray]:
        """The leaves of the results, computed on the first device that can."""
        import jax

        for device in (*reversed(devices), jax.local_devices(backend="cpu")[0]):
            if (issue := self.on(device)) is not None:
                return [as_numpy(array) for array in issue()]
        raise ModelError("the uncut model fits on no device, so outputs cannot be compared")


def _segments(
    program: SegmentedJaxProgram, given: Given, plan: ExecutionPlan, cluster: Cluster
) -> tuple[SegmentTime, ...]:
    """Every piece alone, with its arguments on its device: medians."""
    arguments = program.arguments_of_pieces(given)
    spent = np.empty((SEGMENT_RUNS, len(program.pieces)))
    for i, j in np.ndindex(*spent.shape):
        start_s = time.perf_counter()
        block_until_ready(program.pieces[j].call(*arguments[j]))
        spent[i, j] = time.perf_counter() - start_s
    measured = np.median(spent, axis=0).tolist()
    return tuple(
        SegmentTime(
            device=cluster.device_names[piece.device],
            ops=piece.ops,
            input_bytes=sum(v.nbytes for v in piece.reads if v.maker >= 0),
            output_bytes=sum(v.nbytes for v in piece.makes),
            predicted_s=plan.segment_s[piece.segment] if piece.segment >= 0 else 0.0,
            measured_s=seconds,
            segment=piece.segment,
        )
        for piece, seconds in zip(program.pieces, measured, strict=True)
    )


def _has_shapes(model: JaxModel) -> bool:
    import jax

    leaves = jax.tree.leaves(model.args)
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


MORE_CPU_DEVICES = "XLA_FLAGS=--xla_force_host_platform_device_count"


def jax_devices(cluster: Cluster) -> tuple[Any, ...]:
    """JAX's devices for those of a cluster, in order: CPU devices for kinds `cpu...`, else
    accelerators.

    Raises:
        ClusterError: if JAX has fewer of them than the cluster.
    """
    import jax

    try:
        cpus = list(jax.local_devices(backend="cpu"))
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        cpus = []
    accelerators = [device for device in jax.local_devices() if device.platform != "cpu"]
    wanted = sum(device.is_cpu for device in cluster.devices)
    if wanted > len(cpus):
        raise ClusterError(
            f"cluster {cluster.name!r} has {wanted} CPU devices, JAX has {len(cpus)} here; split "
            f"the CPU with {MORE_CPU_DEVICES}={wanted}, or name a cluster with fewer"
        )
    if cluster.num_devices - wanted > len(accelerators):
        raise ClusterError(
            f"cluster {cluster.name!r} has {cluster.num_devices - wanted} accelerators, JAX sees "
            f"{len(accelerators)} here; install JAX for them, or name a cluster that fits"
        )
    free = {True: iter(cpus), False: iter(accelerators)}
    return tuple(next(free[device.is_cpu]) for device in cluster.devices)


def block_until_ready(tree: Any) -> None:
    """Wait until all arrays have been computed."""
    import jax

    jax.block_until_ready(tree)
