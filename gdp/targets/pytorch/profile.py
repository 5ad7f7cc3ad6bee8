"""Profiles of PyTorch modules on one device as they run eagerly: every op, and the whole.

The exported program is executed node by node, so that every op finds the caches that its
predecessors left; on the CPU a clock is read around each, on CUDA an event lies between two, which
shows what waiting for a launch costs. Views belong to the op that reads them first. The whole is
timed without either.
"""

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from gdp.base.errors import ClusterError
from gdp.cluster.presets import kind_of
from gdp.costs.profile import DeviceRecord, Kernel, Overheads, Profile, ProfiledModel
from gdp.importers.program import executed
from gdp.importers.pytorch.model import RecordedTorch, TorchModel
from gdp.measure.record import SIZES_BYTES, copy_overheads, statistic, this_core, timed_rounds
from gdp.targets.pytorch.program import Workers, moved, on_device, whole_piece
from gdp.targets.pytorch.run import values

MAX_RUNS = 200  # of one model and round


def profile_modules(
    models: Sequence[tuple[str, str, TorchModel]],
    device: str = "cpu",
    *,
    rounds: int = 5,
    seconds: float = 2.0,
    overheads: bool = True,
) -> Profile:
    """The profile of (name, family, model) on a torch device: "cpu", one thread, or "cuda".

    `seconds` is for one model, about. Raises `ClusterError` where torch has no such device.
    """
    import torch

    place = torch_device(device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        profiles = [profile_module(model, name, family, place, rounds, seconds)
                for name, family, model in models]  # fmt: skip
        extra = transfer_overheads(place, rounds) if overheads else Overheads()
    finally:
        torch.set_num_threads(threads)
    if place.type == "cpu":
        record = this_core()
    else:
        card = torch.cuda.get_device_name(place)
        record = DeviceRecord(kind_of("gpu", card), card)
    return Profile(
        device=record, runtime="torch", threads=1, level="eager",
        versions={"torch": str(torch.__version__), "numpy": np.__version__},
        date=datetime.date.today().isoformat(), models=tuple(profiles), overheads=extra,
    )  # fmt: skip


def torch_device(name: str) -> Any:
    """The torch device; raises `ClusterError` where there is none."""
    import torch

    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ClusterError("torch has no CUDA device here; profile torch:cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ClusterError(f"torch device {name!r} must be cpu or cuda")
    return torch.device(name)


def profile_module(
    model: TorchModel, name: str, family: str, device: Any, rounds: int = 5, seconds: float = 2.0
) -> ProfiledModel:
    """One module: half of the seconds for its ops, half for the whole."""
    import torch

    recorded = model.record()
    given = {node: value.to(device) for node, value in values(recorded, 0)[0].items()}
    whole = whole_piece(recorded, device)
    arguments = [given[node] for node in whole.reads]
    nodes = [node for node in recorded.program.graph.nodes if node.op == "call_function"]
    with torch.inference_mode():
        with executed(name):
            whole.call(*arguments)
        times = _repeated(lambda: whole.call(*arguments), device, rounds, seconds / 2)
        latency_s = statistic(times)[0]
        runs = int(np.clip(seconds / 2 / rounds / max(latency_s, 1e-6), 1, MAX_RUNS))
        # Values whose last reader is each node are let go; weights and inputs stay.
        last_use: dict[Any, list[Any]] = {}
        for source, node in {s: n for n in nodes for s in n.all_input_nodes}.items():
            if source.op == "call_function":
                last_use.setdefault(node, []).append(source)
        per_node = np.empty((len(nodes), rounds, runs))
        run_nodes(nodes, given, device, last_use)
        for i in range(rounds):
            for j in range(runs):
                per_node[:, i, j] = run_nodes(nodes, given, device, last_use)
    kernels = _kernels(recorded, nodes, per_node)
    return ProfiledModel(
        name, family, recorded.graph, latency_s, kernels, times.shape[1] + runs, rounds
    )


def run_nodes(
    nodes: Sequence[Any], given: dict[Any, Any], device: Any, last_use: dict[Any, list[Any]]
) -> Float[np.ndarray, "N"]:
    """Seconds of every node of one run."""
    import torch
    from torch.fx.node import map_arg

    held = dict(given)
    stamps: list[Any] = []
    spent = np.empty(len(nodes))
    on_card = device.type == "cuda"
    for k, node in enumerate(nodes):
        args = map_arg(on_device(node.args, device), lambda n: held[n])
        kwargs = map_arg(on_device(node.kwargs, device), lambda n: held[n])
        if on_card:
            stamps.append(torch.cuda.Event(enable_timing=True))
            stamps[-1].record()
            held[node] = node.target(*args, **kwargs)
        else:
            start_s = time.perf_counter()
            held[node] = node.target(*args, **kwargs)
            spent[k] = time.perf_counter() - start_s
        for dead in last_use.get(node, ()):
            held.pop(dead, None)
    if on_card:
        stamps.append(torch.cuda.Event(enable_timing=True))
        stamps[-1].record()
        torch.cuda.synchronize(device)
        for k in range(len(nodes)):
            spent[k] = stamps[k].elapsed_time(stamps[k + 1]) * 1e-3
    return spent


def _kernels(
    recorded: RecordedTorch, nodes: Sequence[Any], seconds: np.ndarray
) -> tuple[Kernel, ...]:
    """One kernel per op, with the views that only it or others behind it read."""
    op_of = {
        node: recorded.op_of[op]
        for node, op in recorded.listing.op_of.items()
        if op in recorded.op_of
    }
    place = {node: k for k, node in enumerate(nodes)}
    total: dict[Any, np.ndarray] = {node: seconds[place[node]] for node in nodes if node in op_of}
    owner = {node: node for node in total}
    for node in reversed(nodes):  # users come first
        if node not in owner:
            users = sorted((user for user in node.users if user in owner), key=place.__getitem__)
            if users:
                owner[node] = owner[users[0]]
                total[owner[node]] = total[owner[node]] + seconds[place[node]]
    kernels = []
    for node, times in total.items():
        least_s, spread = statistic(times)
        kind = recorded.graph.op_types[op_of[node]]
        kernels.append(Kernel(node.name, kind, (op_of[node],), least_s, spread))
    return tuple(kernels)


def _repeated(
    run: Callable[[], Any], device: Any, rounds: int, seconds: float
) -> Float[np.ndarray, "R T"]:
    """Seconds of every call, behind one that is not counted."""
    import torch

    def finished() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    finished()
    return timed_rounds(finished, rounds, seconds, 2, MAX_RUNS)


def transfer_overheads(device: Any, rounds: int = 5) -> Overheads:
    """One call of a piece on its worker, however small; on CUDA, latency and bandwidth of copies
    from the host's memory, too."""
    import torch

    pool = Workers([device], [None])
    try:

        def call() -> Any:
            return pool.submit(0, lambda: None).result()

        call_s = statistic(_repeated(call, torch.device("cpu"), rounds, 0.1))[0]
    finally:
        pool.close()
    if device.type == "cpu":
        return Overheads(session_s=call_s)
    return copy_overheads(call_s, copy_seconds(device, rounds))


def copy_seconds(device: Any, rounds: int = 5, back: bool = False) -> list[float]:
    """Seconds of copies of `SIZES_BYTES` to the device as placements make them, or back."""
    import torch

    seconds = []
    for size in SIZES_BYTES:
        tensor = torch.zeros(size // 4)
        source, target = (tensor.to(device), torch.device("cpu")) if back else (tensor, device)

        def copy(source: Any = source, target: Any = target) -> None:
            moved(source, target)

        seconds.append(statistic(_repeated(copy, device, rounds, 0.2))[0])
    return seconds
