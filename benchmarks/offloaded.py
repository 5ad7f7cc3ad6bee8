"""One model with too little memory on the accelerator: gdp's plans, accelerate's own map, and
offloading by hand, executed one after the other."""

import gc
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gdp.base.cores import usable_cores
from gdp.cluster.types import Cluster, Device, make_cluster
from gdp.costs.base import CostModel
from gdp.costs.offload import Streamed
from gdp.importers.pytorch.model import TorchModel
from gdp.measure.plan import make_plan
from gdp.measure.statistics import estimate
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints, streamed_bytes
from gdp.placement.placement import make_placement
from gdp.question import solve
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.targets.hf_accelerate.device_map import device_map
from gdp.targets.hf_accelerate.plan import (
    balanced_map,
    cluster_with_offload,
    plan_accelerate,
)
from gdp.targets.modules import kept_modules

ROUNDS, MAX_RUNS = 7, 36
WARM_UPS = 2
TOLERANCE = 1e-3
"""Of the largest magnitude of the logits: kernels of other devices add up in another order."""
BY_HAND = 0.85
"""Of the limit, what is filled with weights by hand; the rest is for tensors and what streams."""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Machine:
    """A processor and an accelerator, or what stands for one in a rehearsal."""

    device: Any  # torch's
    host: Device
    accelerator: Device
    latency_s: float
    bytes_per_s: float
    scratch: Path

    def box(self, limit: int | None = None) -> Cluster:
        """Both, the accelerator with so many bytes."""
        card = self.accelerator
        if limit is not None:
            card = replace(card, memory_bytes=limit)
        return make_cluster(
            f"cpu+{card.kind}", [self.host, card],
            default_latency_s=self.latency_s, default_bytes_per_s=self.bytes_per_s,
        )  # fmt: skip

    @property
    def is_cuda(self) -> bool:
        """Not in a rehearsal."""
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the accelerator has nothing to do."""
        import torch

        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def executed(
    make: Callable[[], TorchModel], machine: Machine, costs: CostModel, share: float, seconds: float
) -> dict[str, Any]:
    """Every contender's measured beside its predicted time; one that fails says why."""
    weights = sum(p.numel() * p.element_size() for p in make().module.parameters())
    limit = int(share * weights)
    ways: dict[str, Callable[..., tuple[Call, float | None]]] = {
        "one device, no limit": _alone, "gdp, op by op": _by_ops, "gdp for accelerate": _by_gdp,
        "accelerate's own map": _by_accelerate, "by hand": _by_hand,
    }  # fmt: skip
    found: dict[str, Any] = {"limit_bytes": limit, "weight_bytes": weights, "contenders": {}}
    wanted = None
    end_s = time.monotonic() + seconds
    for i, (name, way) in enumerate(ways.items()):
        left_s = (end_s - time.monotonic()) / (len(ways) - i)
        try:
            model = make()
            call, predicted_s = way(model, machine, costs, limit)
            row, logits = measured(call, machine, left_s / 2)
            wanted = logits if wanted is None else wanted
            found["contenders"][name] = row | {"predicted_s": predicted_s, **equal(logits, wanted)}
            del call, model, logits
        except Exception as error:  # the others are measured all the same
            found["contenders"][name] = {"failed": f"{type(error).__name__}: {error}"}
        gc.collect()
        if machine.is_cuda:
            import torch

            torch.cuda.empty_cache()
    return found


def measured(call: Call, machine: Machine, seconds: float) -> tuple[dict[str, Any], Any]:
    """Median of rounds with a 95% interval, the peak on the accelerator, and what
    was computed; warmed up, and waited for."""
    import torch

    if machine.is_cuda:
        torch.cuda.reset_peak_memory_stats(machine.device)

    def once() -> float:
        machine.wait()
        start_s = time.perf_counter()
        call()
        machine.wait()
        return time.perf_counter() - start_s

    with torch.inference_mode():
        logits = call().float().cpu()
        once_s = [once() for _ in range(WARM_UPS)][-1]
        runs = int(np.clip(seconds / ROUNDS / max(once_s, 1e-6), 1, MAX_RUNS))
        rounds = [np.array([once() for _ in range(runs)]) for _ in range(ROUNDS)]
    said = estimate([float(np.median(own)) for own in rounds])
    peak = torch.cuda.max_memory_allocated(machine.device) if machine.is_cuda else None
    return {
        "measured_s": said.value, "interval_s": [max(said.low, 0.0), said.high],
        "runs": runs * ROUNDS, "peak_bytes": peak,
    }, logits  # fmt: skip


def equal(found: Any, wanted: Any) -> dict[str, Any]:
    """Agreement of logits, and how far they are apart as a share of the largest magnitude."""
    apart = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    return {"outputs_equal": math.isfinite(apart) and apart <= TOLERANCE, "apart": apart}


def _on(device: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if hasattr(v, "to") else v for k, v in inputs.items()}


def _alone(model: TorchModel, machine: Machine, costs: CostModel, limit: int) -> Any:
    """The whole module on the accelerator."""
    graph, box = model.trace().graph, machine.box()
    device = np.where(graph.is_io, box.host, 1)
    score = solve.simulate(Question(graph, box, costs=costs), make_placement(graph, box, device))
    module = model.module.to(machine.device)
    return (lambda: module(**_on(machine.device, model.kwargs))[0]), score.latency_s


def _by_ops(model: TorchModel, machine: Machine, costs: CostModel, limit: int) -> Any:
    """gdp's placement op by op: the processor computes, too."""
    import torch

    from gdp.targets.pytorch.program import SegmentedTorchProgram, Workers, output_nodes, pieces
    from gdp.targets.pytorch.run import values

    recorded, box = model.record(), machine.box(limit)
    search = Search(seed=0, seconds=None, evaluations=400)
    found = solve.solve(Question(recorded.graph, box, costs=costs, search=search))
    plan = make_plan(prepare_placement(found.question, found.placement), "latency")
    devices = [torch.device("cpu"), machine.device]
    core = usable_cores()[0]
    made = pieces(recorded, plan.segment, plan.segment_device.tolist(), plan.order, devices)
    given = values(recorded, 0)[0]
    given |= {node: model.kwargs[node.name] for node in given if node.name in model.kwargs}
    program = SegmentedTorchProgram(
        made, Workers(devices, [core, None]), given, output_nodes(recorded), 0
    )
    return (lambda: program.run()[0]), plan.latency_s


def _by_gdp(model: TorchModel, machine: Machine, costs: CostModel, limit: int) -> Any:
    """gdp's device map, followed by accelerate."""
    graph, box = model.trace().graph, machine.box(limit)
    whole = tuple(kept_modules(model.module))
    search = Search(seed=0, seconds=None, evaluations=200)
    placed = plan_accelerate(
        Question(graph, box, constraints=Constraints(whole=whole), costs=costs, search=search)
    )
    found = device_map(graph, placed.placement, placed.question.cluster, model.module)
    return dispatched(model, machine, found), placed.score.latency_s


def _by_accelerate(model: TorchModel, machine: Machine, costs: CostModel, limit: int) -> Any:
    """accelerate's own map, followed by accelerate."""
    graph, box = model.trace().graph, machine.box(limit)
    constraints = Constraints(whole=tuple(kept_modules(model.module)))
    streams = cluster_with_offload(box, "cpu", streamed_bytes(graph, constraints))
    found = dict(balanced_map(model.module, graph, box) or {})
    placement = make_placement(graph, streams, found)
    score = solve.simulate(Question(graph, streams, costs=Streamed(costs)), placement)
    return dispatched(model, machine, found), score.latency_s


def dispatched(model: TorchModel, machine: Machine, found: Mapping[str, Any]) -> Call:
    import accelerate

    if set(found.values()) <= {"cpu", "disk"}:
        # Such a map would have accelerate compute on the processor.
        module = accelerate.cpu_offload(model.module, execution_device=machine.device)
    elif machine.is_cuda:
        module = accelerate.dispatch_model(model.module, dict(found))
    else:  # a rehearsal: the accelerator is the processor, what is offloaded lies on disk

        def here(path: str) -> str:
            holds = bool(model.module.get_submodule(path).state_dict())
            return "disk" if found[path] == "cpu" and holds else "cpu"

        module = accelerate.dispatch_model(
            model.module, {path: here(path) for path in found}, main_device=machine.device,
            offload_dir=tempfile.mkdtemp(dir=machine.scratch),
        )  # fmt: skip
    return lambda: module(**_on(machine.device, model.kwargs))[0]


def _by_hand(model: TorchModel, machine: Machine, costs: CostModel, limit: int) -> Any:
    """Modules in the order of the code, as many as fit; the others' weights are copied to the
    accelerator before each call, from pinned memory, and dropped behind it."""
    paths = set(kept_modules(model.module))
    outer = [p for p in paths if not any(p.startswith(f"{q}.") for q in paths)]
    order = [name for name, _ in model.module.named_modules() if name in outer]
    room, held = int(BY_HAND * limit), set()
    for path in order:
        part = model.module.get_submodule(path)
        tensors = [t for t in (*part.parameters(), *part.buffers()) if id(t) not in held]
        size = sum(t.numel() * t.element_size() for t in tensors)
        if size <= room:
            room -= size
            held |= {id(t) for t in tensors}
            part.to(machine.device)
        else:
            _stream(part, machine)
    return (lambda: model.module(**_on(machine.device, model.kwargs))[0]), None


def _stream(part: Any, machine: Machine) -> None:
    tensors = [*part.parameters(), *part.buffers()]
    rest = [t.data.pin_memory() if machine.is_cuda else t.data for t in tensors]

    def before(*_: Any) -> None:
        for tensor, home in zip(tensors, rest, strict=True):
            tensor.data = home.to(machine.device, non_blocking=True)

    def after(*_: Any) -> None:
        for tensor, home in zip(tensors, rest, strict=True):
            tensor.data = home

    part.register_forward_pre_hook(before)
    part.register_forward_hook(after)
