"""Exported PyTorch programs cut into graph modules, one per segment.

A view is taken in every segment that reads it, from its base. Every device has a worker of its own,
pinned to a core where the device is one; a segment starts when what it reads is there.
"""

import concurrent.futures
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.base.cores import num_cores
from gdp.base.errors import ModelError, RefusedError, reason_of
from gdp.importers.pytorch.model import RecordedTorch
from gdp.measure.async_execution import ProgramSegment

SMALL_COPY_BYTES = 64 << 10


def pieces(
    recorded: RecordedTorch,
    segment: Int[np.ndarray, "N"],
    segment_device: Sequence[int],
    order: Sequence[int],
    devices: Sequence[Any],
) -> list[ProgramSegment]:
    """The pieces in the order in which they run."""
    graph = recorded.program.graph
    of_node = {
        node: int(segment[recorded.op_of[op]])
        for node, op in recorded.listing.op_of.items()
        if op in recorded.op_of and node.op == "call_function"
    }
    steps: dict[int, list[Any]] = {}
    for node in graph.nodes:
        if node in of_node:
            steps.setdefault(of_node[node], []).append(node)
    results = output_nodes(recorded)
    built = {s: _Builder(nodes, of_node, devices[segment_device[s]]) for s, nodes in steps.items()}
    # Results that are views are taken on the device of their base.
    wanted = {source for b in built.values() for source in b.reads if source.op != "placeholder"}
    wanted |= {base for node in results for base in _bases(node, of_node)}
    segments = []
    for s in order:
        if s in built:
            makes = tuple(node for node in built[s].tensors() if node in wanted)
            segments.append(
                ProgramSegment(s, int(segment_device[s]), len(steps[s]), built[s].module(makes),
                      tuple(built[s].reads), makes)
            )  # fmt: skip
    return segments


def output_nodes(recorded: RecordedTorch) -> list[Any]:
    """The nodes that hold the results."""
    nodes = {node.name: node for node in recorded.program.graph.nodes}
    specs = recorded.program.graph_signature.output_specs
    return [
        nodes[s.arg.name] for s in specs if s.kind.name == "USER_OUTPUT" and s.arg.name in nodes
    ]


def _is_element(node: Any, of_node: Mapping[Any, int]) -> bool:
    """True for one of several results of an op."""
    import operator

    return node.target is operator.getitem and node.args[0] in of_node


def _bases(node: Any, of_node: Mapping[Any, int]) -> list[Any]:
    """The tensors of ops that a node, maybe a view, is made of."""
    if node in of_node or _is_element(node, of_node):
        return [node]
    return [base for source in node.all_input_nodes for base in _bases(source, of_node)]


class _Builder:
    """The graph of one segment."""

    def __init__(self, nodes: Sequence[Any], of_node: Mapping[Any, int], device: Any) -> None:
        import torch

        self.graph, self.device, self.of_node = torch.fx.Graph(), device, of_node
        self.own = set(nodes)
        self.reads: dict[Any, Any] = {}
        self.copies: dict[Any, Any] = {}
        for node in nodes:
            for source in node.all_input_nodes:
                self._read(source)
        for node in nodes:
            self._copy(node)

    def tensors(self) -> list[Any]:
        """Tensors that this segment may send: the results of its ops, element by element."""
        users = [user for node in self.own for user in node.users]
        single = [node for node in self.own if not isinstance(node.meta["val"], list | tuple)]
        return single + [user for user in users if _is_element(user, self.of_node)]

    def module(self, makes: Sequence[Any]) -> Any:
        """A `GraphModule` that returns these nodes; called once, as it ends the graph."""
        import torch

        self.graph.output(tuple(self._copy(node) for node in makes))
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)

    def _read(self, node: Any) -> None:
        """Placeholders come first: tensors read from other devices, through views as well."""
        if node in self.own or node in self.reads:
            return
        element = _is_element(node, self.of_node)
        if element and node.args[0] in self.own:
            return
        if node.op == "placeholder" or node in self.of_node or element:
            self.reads[node] = self.copies[node] = self.graph.placeholder(node.name)
        elif node.op == "get_attr":
            raise ModelError(f"{node.name}: control flow cannot be cut into pieces")
        else:
            for source in node.all_input_nodes:
                self._read(source)

    def _copy(self, node: Any) -> Any:
        if node not in self.copies:
            for source in node.all_input_nodes:
                self._copy(source)
            copy = self.graph.node_copy(node, lambda n: self.copies[n])
            copy.args = on_device(copy.args, self.device)
            copy.kwargs = on_device(copy.kwargs, self.device)
            self.copies[node] = copy
        return self.copies[node]


def on_device(arguments: Any, device: Any) -> Any:
    """A node's arguments with this device for every one that they name."""
    import torch
    from torch.fx.node import map_aggregate

    return map_aggregate(arguments, lambda x: device if isinstance(x, torch.device) else x)


def whole_piece(recorded: RecordedTorch, device: Any) -> ProgramSegment:
    """The uncut program on one device."""
    one = np.zeros(recorded.graph.num_ops, np.int64)
    (whole,) = pieces(recorded, one, [0], [0], [device])
    return whole


class Workers:
    """One thread per device of the cluster; cores are pinned, and compute with one thread each."""

    def __init__(self, devices: Sequence[Any], cores: Sequence[int | None]) -> None:
        self.devices = list(devices)
        self.pools = [
            concurrent.futures.ThreadPoolExecutor(1, initializer=_settle, initargs=(core,))
            for core in cores
        ]

    def submit(self, device: int, task: Callable[[], Any]) -> Any:
        """A future of the task, run behind the earlier ones of its device."""
        return self.pools[device].submit(task)

    def close(self) -> None:
        """Wait for all tasks, then end the threads."""
        for pool in self.pools:
            pool.shutdown()


def _settle(core: int | None) -> None:
    import torch

    if core is None:
        torch.set_num_threads(num_cores())
        return
    # Threads of OpenMP inherit the mask of the thread that starts them.
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


class SegmentedTorchProgram:
    """The pieces on their devices, and every transfer between them."""

    def __init__(
        self, segments: Sequence[ProgramSegment], workers: Workers, given: Mapping[Any, Any],
        results: Sequence[Any], host: int,
    ) -> None:  # fmt: skip
        self.pieces, self.workers, self.given = list(segments), workers, dict(given)
        self.results, self.host = list(results), host
        self.maker = {node: k for k, piece in enumerate(segments) for node in piece.makes}
        inputs = {n for piece in segments for n in piece.reads if n.op == "placeholder"}
        held = {n for n in inputs if n in self.given}
        self.resident = {
            (node, piece.device): self.given[node].to(workers.devices[piece.device])
            for piece in segments
            for node in piece.reads
            if node in held
        }

    def issue(self) -> list[Any]:
        """Starts one sample; returns a future per result."""
        running: list[Any] = []
        for piece in self.pieces:
            running.append(self.workers.submit(piece.device, self._task(piece, list(running))))
        return [running[self.maker[node]] for node in self.results if node in self.maker]

    def _task(self, piece: ProgramSegment, running: list[Any]) -> Callable[[], dict[Any, Any]]:
        import torch

        def task() -> dict[Any, Any]:
            with torch.inference_mode():
                arguments = [self._argument(node, piece.device, running) for node in piece.reads]
                try:
                    made = piece.call(*arguments)
                except RuntimeError as error:  # of torch's ops: nothing else is called there
                    raise RefusedError(
                        f"PyTorch does not execute this: {reason_of(error)}"
                    ) from error
                return dict(zip(piece.makes, made, strict=True))

        return task

    def _argument(self, node: Any, device: int, running: list[Any]) -> Any:
        if (node, device) in self.resident:
            return self.resident[node, device]
        tensor = running[self.maker[node]].result()[node]
        return moved(tensor, self.workers.devices[device])

    def run(self) -> list[Any]:
        """The results of one sample, on the host."""
        futures = self.issue()
        remaining = iter(futures)
        return [
            moved(next(remaining).result()[node], self.workers.devices[self.host]).detach()
            for node in self.results
            if node in self.maker
        ]


def moved(tensor: Any, device: Any) -> Any:
    """A tensor on a device. Large copies to and from CUDA devices run on a stream of their own,
    from and to pinned memory; the device's other work waits for them, the host does not. Small ones
    go behind the device's other work: to pin memory and to join streams takes 135 us on an H200."""
    import torch

    if tensor.device == device:
        return tensor
    small = tensor.numel() * tensor.element_size() <= SMALL_COPY_BYTES
    if small or "cuda" not in (tensor.device.type, device.type):
        return tensor.to(device)
    if tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    on_card = device if device.type == "cuda" else tensor.device
    stream = torch.cuda.Stream(on_card)
    stream.wait_stream(torch.cuda.current_stream(on_card))
    with torch.cuda.stream(stream):
        copied = tensor.to(device, non_blocking=True)
        tensor.record_stream(stream) if tensor.is_cuda else None
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(stream)
        copied.record_stream(torch.cuda.current_stream(device))
    else:
        stream.synchronize()  # the host reads it next
    return copied
