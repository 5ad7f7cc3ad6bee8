"""Executes a placement of a PyTorch module, and measures it beside its baselines."""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gdp.base.errors import ModelError
from gdp.cluster.types import Cluster
from gdp.importers.program import executed
from gdp.importers.pytorch.model import RecordedTorch, TorchModel
from gdp.measure.async_execution import (
    SEGMENT_RUNS,
    AsyncExecution,
    measured_rows,
    pieces_cycle,
    versions,
)
from gdp.measure.compare import compare
from gdp.measure.plan import ExecutionPlan
from gdp.measure.report import DEFAULT, PLACED, SINGLE, RunReport, SegmentTime
from gdp.measure.request import RunRequest
from gdp.sim.prediction import Prediction
from gdp.targets.pytorch.program import (
    SegmentedTorchProgram,
    Workers,
    moved,
    output_nodes,
    pieces,
    whole_piece,
)
from gdp.targets.torch_devices import named_arrays, torch_devices


def run_torch(request: RunRequest) -> RunReport:
    """Execute a placement: one graph module per segment, weights on their devices.

    Weights and inputs that are shapes only get seeded values. Raises `ClusterError` where torch has
    fewer devices than the cluster.
    """
    model: TorchModel = request.model
    graph, cluster, measuring = request.graph, request.cluster, request.measuring
    recorded = model.record()
    if recorded.graph.digest != graph.digest:
        raise ModelError(f"{model.name}: the module has changed since {graph.name!r} was traced")
    devices, cores = torch_devices(cluster)
    plan = request.plan
    measuring.say(f"cutting the module into {len(plan.segment_device)} pieces")
    given, drawn = values(recorded, measuring.seed)
    results = output_nodes(recorded)
    best = _fastest_alone(request.prediction)
    # Rivals never run at the same time, so one worker for each device serves all placements.
    pools = {PLACED: Workers(devices, cores), SINGLE: Workers([devices[best]], [cores[best]]),
             DEFAULT: Workers([devices[best]], [None])}  # fmt: skip

    def cut(plan: ExecutionPlan) -> tuple[SegmentedTorchProgram, AsyncExecution]:
        parts = pieces(recorded, plan.segment, plan.segment_device.tolist(), plan.order, devices)
        program = SegmentedTorchProgram(parts, pools[PLACED], given, results, cluster.host)
        slots = pieces_cycle(parts, plan).in_flight
        return program, AsyncExecution((program.issue,), slots, _wait)

    try:
        program, placed = cut(plan)
        uncut = _whole(recorded, devices[best], pools[SINGLE], given)
        with executed(model.name):
            expected = named_arrays(uncut.run())
        comparison = compare(expected, named_arrays(program.run()))
        contenders = {PLACED: placed}
        contenders |= {name: cut(other)[1] for name, other in request.rival_plans.items()}
        if request.baselines:
            default = _whole(recorded, devices[best], pools[DEFAULT], given)
            contenders[SINGLE] = AsyncExecution((uncut.issue,), 2, _wait)
            contenders[DEFAULT] = AsyncExecution((default.issue,), 2, _wait)
        rows = measured_rows(contenders, measuring)
        segments = _segments(program, plan, cluster)
    finally:
        for pool in pools.values():
            pool.close()
    return request.report(
        plan,
        rows,
        comparison,
        single=best,
        random_weights=drawn,
        segments=segments,
        samples_in_flight=placed.slots,
        cores=tuple(-1 if core is None else core for core in cores),
        pinned=hasattr(os, "sched_setaffinity"),
        note=f"the single device is {cluster.device_names[best]}",
        versions=versions("torch", "numpy"),
    )  # fmt: skip


def values(recorded: RecordedTorch, seed: int) -> tuple[dict[Any, Any], bool]:
    """A tensor for every placeholder, and whether weights had to be drawn. Inputs are the examples,
    where these have data."""
    import torch

    program, generator = recorded.program, torch.Generator().manual_seed(seed)
    signature = program.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
               **signature.inputs_to_lifted_tensor_constants}  # fmt: skip
    examples = _examples(program)
    tensors: dict[Any, Any] = {}
    tied: dict[int, Any] = {}
    drawn = False
    for node in program.graph.nodes:
        shape = node.meta.get("val")
        if node.op != "placeholder" or not hasattr(shape, "element_size"):
            continue
        target = targets.get(node.name)
        held = program.state_dict.get(target, program.constants.get(target)) if target else None
        if held is not None and _has_data(held):
            tensors[node] = held.detach()
            continue
        if node.name in examples:
            tensors[node] = examples[node.name]
            continue
        drawn |= held is not None
        # Tied weights are one tensor.
        key = id(node) if held is None else int(held.untyped_storage()._cdata)  # noqa: SLF001
        if key not in tied:
            tied[key] = _drawn(shape, held is not None, generator)
        tensors[node] = tied[key]
    return tensors, drawn


def _has_data(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not (isinstance(tensor, FakeTensor) or tensor.is_meta)


def _examples(program: Any) -> dict[str, Any]:
    """The traced module's inputs, by placeholder, if they have values: its behaviour may depend on
    them."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(program.example_inputs)
    names = program.graph_signature.user_inputs
    if len(leaves) != len(names):
        return {}
    return {
        str(name): leaf.detach()
        for name, leaf in zip(names, leaves, strict=True)
        if torch.is_tensor(leaf) and _has_data(leaf)
    }


def _drawn(like: Any, is_weight: bool, generator: Any) -> Any:
    """Normal floats, weights scaled; integers 0 or 1, which any vocabulary allows."""
    import torch

    shape = tuple(like.shape)
    if like.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    if not like.dtype.is_floating_point:
        return torch.randint(2, shape, generator=generator, dtype=like.dtype)
    tensor = torch.randn(shape, generator=generator)
    if is_weight and len(shape) < 2:
        tensor = 0.5 + 0.1 * tensor.abs()
    elif is_weight:
        tensor = tensor / shape[-1] ** 0.5
    return tensor.to(like.dtype)


def _whole(
    recorded: RecordedTorch, device: Any, pool: Workers, given: Any
) -> SegmentedTorchProgram:
    """The module uncut on one device."""
    whole = whole_piece(recorded, device)
    return SegmentedTorchProgram([whole], pool, given, output_nodes(recorded), 0)


def _fastest_alone(prediction: Prediction) -> int:
    """The device with the least predicted seconds for the whole model."""
    compute_s, is_io = prediction.problem.compute_s, prediction.problem.graph.is_io
    total_s = np.where(np.isfinite(compute_s), compute_s, 0.0).sum(axis=0)
    return int(np.where(np.isfinite(compute_s[~is_io]).all(axis=0), total_s, np.inf).argmin())


def _wait(futures: Sequence[Any]) -> None:
    import torch

    for future in futures:
        for tensor in future.result().values():
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)


def _segments(
    program: SegmentedTorchProgram, plan: ExecutionPlan, cluster: Cluster
) -> tuple[SegmentTime, ...]:
    """Every piece alone, on its worker: medians."""
    computed: dict[Any, Any] = {}
    times = []
    for piece in program.pieces:
        device = program.workers.devices[piece.device]
        arguments = [
            program.resident[n, piece.device]
            if (n, piece.device) in program.resident
            else moved(computed[n], device)
            for n in piece.reads
        ]
        call = _finished(piece.call, arguments, device)
        spent, outs = [], ()
        call()  # libraries of an accelerator load with their first call
        for _ in range(SEGMENT_RUNS):
            start_s = time.perf_counter()
            outs = program.workers.submit(piece.device, call).result()
            spent.append(time.perf_counter() - start_s)
        computed.update(zip(piece.makes, outs, strict=True))
        sent = [n for n in piece.reads if n in program.maker]
        times.append(
            SegmentTime(
                device=cluster.device_names[piece.device], ops=piece.ops,
                input_bytes=sum(_nbytes(computed[n]) for n in sent),
                output_bytes=sum(map(_nbytes, outs)),
                predicted_s=plan.segment_s[piece.segment],
                measured_s=float(np.median(spent)),
                segment=piece.segment,
            )
        )  # fmt: skip
    return tuple(times)


def _finished(module: Any, arguments: Sequence[Any], device: Any) -> Any:
    """A call of a module that returns when the device has computed, not when it was issued."""
    import torch

    def task() -> Any:
        with torch.inference_mode():
            made = module(*arguments)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return made

    return task


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
