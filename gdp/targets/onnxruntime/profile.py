"""Profiles by ONNX Runtime on one core: every kernel, and the whole without the profiler.

Kernels are timed at the level that users run (all); `profiler_kernels` says which ops each of them
stands for. Rounds with and without the profiler alternate. The statistic of a round is the mean of
its fastest quarter, which resolves less than the profiler's microsecond; of the rounds, the
smallest counts, because other work on the machine only ever adds time.
"""

import datetime
import json
import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gdp.base.cores import usable_cores
from gdp.base.errors import ClusterError
from gdp.costs.profile import Kernel, Overheads, Profile, ProfiledModel
from gdp.graph.op_graph import OpGraph
from gdp.importers.program import executed
from gdp.measure.record import statistic, this_core, timed
from gdp.targets.onnx_inputs import MADE_UP, make_inputs
from gdp.targets.onnx_source import Source, load_source, randomised
from gdp.targets.onnxruntime.sessions import make_session, pinned, versions

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileConfig:
    """Duration and cores of measuring."""

    core: int = 0  # the first of `threads` usable cores
    threads: int = 1
    rounds: int = 5
    seconds: float = 2.0  # per model, of all rounds together; loading comes on top
    min_runs: int = 4  # per round
    max_runs: int = 200
    seed: int = 0  # of inputs and of weights that a model lacks

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.min_runs < 2 or not self.seconds > 0:
            raise ValueError(
                f"rounds >= 1, min_runs >= 2 and seconds > 0 are needed, got {self.rounds}, "
                f"{self.min_runs} and {self.seconds}"
            )
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")


def profile_models(
    models: Sequence[tuple[str, str, str | Path]],
    config: ProfileConfig | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    overheads: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """The profile of (name, family, path or onnx:NAME) models on one core of this machine."""
    from gdp.importers.onnx.model import load_onnx

    config = config or ProfileConfig()
    require_core(config.core)
    profiles = []
    for name, family, path in models:
        if progress is not None:
            progress(name)
        graph = load_onnx(str(path), dict(dims or {}))
        profiles.append(profile_source(load_source(path, dims), graph, name, family, config))
    return Profile(
        device=this_core(config.threads),
        runtime="onnxruntime",
        threads=config.threads,
        level="all",
        versions=dict(versions()),
        date=datetime.date.today().isoformat(),
        models=tuple(profiles),
        overheads=measure_all_overheads(config) if overheads else Overheads(),
    )


def measure_all_overheads(config: ProfileConfig) -> Overheads:
    """Costs of sessions and hand-overs on the configured core and its first neighbour."""
    from gdp.targets.onnxruntime.overheads import measure_overheads

    others = [core for core in usable_cores() if core != config.core]
    return measure_overheads(config.core, others[0] if others else None, config.rounds)


def cores_of(config: ProfileConfig) -> list[int]:
    """The cores to measure on; raises `ClusterError` when there are too few."""
    usable = [core for core in usable_cores() if core >= config.core]
    if len(usable) < config.threads:
        raise ClusterError(
            f"{config.threads} threads need as many cores from core {config.core} on; this process "
            f"may use {len(usable)} of them"
        )
    return usable[: config.threads]


def require_core(core: int) -> None:
    """Raise `ClusterError` when this process may not use a core."""
    if core not in usable_cores():
        raise ClusterError(
            f"core {core} is not usable; this process may use cores "
            f"{', '.join(map(str, usable_cores()))}"
        )


def profile_source(
    source: Source, graph: OpGraph, name: str, family: str, config: ProfileConfig
) -> ProfiledModel:
    """One model, its kernels and its latency; `graph` is imported from the same model."""
    source = randomised(source, config.seed)
    feeds = make_inputs(source.model, graph, config.seed)
    with tempfile.TemporaryDirectory() as folder, pinned(cores_of(config)):
        plain = make_session(source.model, source, threads=config.threads)
        copy = tagged(source.model)
        saved, prefix = Path(folder) / "optimised.onnx", Path(folder) / "times"
        profiled = make_session(
            copy, source, threads=config.threads, optimised=saved, profile=prefix
        )
        optimised = onnx.load(saved, load_external_data=False)
        with executed(name, MADE_UP):
            run_plain, run_profiled = _runner(plain, feeds), _runner(profiled, feeds)
        warm_up_s = float(timed(run_plain, 3).min())
        share_s = config.seconds / (2 * config.rounds)
        runs = int(np.clip(share_s / max(warm_up_s, 1e-7), config.min_runs, config.max_runs))
        rounds = []
        for _ in range(config.rounds):
            rounds.append(timed(run_plain, runs))
            timed(run_profiled, runs)
        path = profiled.end_profiling()
        times = _kernel_times(Path(path), config.rounds, runs)
    op_of = [graph.op_index.get(node.name) for node in source.model.graph.node]
    kernels = []
    for node, nodes in zip(optimised.graph.node, kernel_nodes(copy, optimised), strict=True):
        if node.name not in times:
            continue
        seconds, spread = statistic(times[node.name])
        named = nodes and node.op_type not in HELPERS
        kernel_name = source.model.graph.node[nodes[0]].name if named else node.op_type
        mine = tuple(sorted({op for i in nodes if (op := op_of[i]) is not None}))
        kernels.append(Kernel(kernel_name, node.op_type, mine, seconds, spread))
    return ProfiledModel(
        name=name, family=family, graph=graph, latency_s=statistic(np.array(rounds))[0],
        kernels=tuple(kernels), runs=runs, rounds=config.rounds,
    )  # fmt: skip


def _runner(session: Any, feeds: Mapping[str, np.ndarray]) -> Callable[[], None]:
    """A call with everything bound beforehand, as the runtime of cut models does it."""
    from gdp.targets.onnxruntime.telemetry import ort

    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for value in session.get_inputs():
        binding.bind_ortvalue_input(value.name, values[value.name])
    for value in session.get_outputs():
        binding.bind_output(value.name, "cpu")
    session.run_with_iobinding(binding)
    # The first run allocates; from now on outputs are written where they were.
    for value, output in zip(session.get_outputs(), binding.get_outputs(), strict=True):
        binding.bind_ortvalue_output(value.name, output)
    return lambda: session.run_with_iobinding(binding)


def _kernel_times(path: Path, rounds: int, runs: int) -> dict[str, np.ndarray]:
    """Of every kernel by name, its seconds [rounds, runs]; runs that warmed up are left out."""
    seconds_of: dict[str, list[float]] = {}
    for event in json.loads(path.read_text()):
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            seconds_of.setdefault(name.removesuffix("_kernel_time"), []).append(event["dur"] * 1e-6)
    Path(path).unlink()
    wanted = rounds * runs
    short = [name for name, seconds in seconds_of.items() if len(seconds) < wanted]
    if short:
        LOG.warning("%d kernels ran less often than the model; they are left out", len(short))
    return {
        name: np.array(seconds[-wanted:]).reshape(rounds, runs)
        for name, seconds in seconds_of.items()
        if len(seconds) >= wanted
    }


_TAG = re.compile(r"gdp([0-9]+)_")
HELPERS = frozenset({"ReorderInput", "ReorderOutput"})
"""Kernels that only change a tensor's layout for a neighbour."""


def tagged(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose nodes are named by position, so that their names are found in kernels' names."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for i, node in enumerate(copy.graph.node):
        node.name = f"gdp{i}_"
    return copy


def kernel_nodes(model: onnx.ModelProto, optimised: onnx.ModelProto) -> list[list[int]]:
    """For every node of the optimised form, its nodes of the tagged model.

    A helper gets the nodes of the kernel it serves. Nodes folded away belong to no kernel.
    """
    return _Matching(model.graph, optimised.graph).match()


class _Matching:
    """The two graphs by name, and who claims which node."""

    def __init__(self, graph: onnx.GraphProto, optimised: onnx.GraphProto) -> None:
        self.nodes = list(graph.node)
        self.kernels = list(optimised.node)
        self.maker = {name: i for i, n in enumerate(self.nodes) for name in n.output if name}
        self.kernel_of_value = {n: k for k, x in enumerate(self.kernels) for n in x.output if n}
        self.owner: dict[int, int] = {}

    def match(self) -> list[list[int]]:
        """Nodes of the model by kernel, in order of kernels."""
        for k, kernel in enumerate(self.kernels):
            for tag in _TAG.findall(kernel.name):
                self.owner.setdefault(int(tag), k)
        ends = [self._ends(kernel) for kernel in self.kernels]
        boundary = set(self.kernel_of_value)
        for k, nodes in enumerate(ends):
            for node in nodes:
                boundary.update(self.nodes[node].output)
                self.owner.setdefault(node, k)
        for k, nodes in enumerate(ends):
            for node in {*nodes, *(int(tag) for tag in _TAG.findall(self.kernels[k].name))}:
                if self.owner.get(node) == k:
                    self._claim_behind(node, k, boundary)
        self._claim_rest()
        of_kernel: list[list[int]] = [[] for _ in self.kernels]
        for node, k in sorted(self.owner.items()):
            of_kernel[k].append(node)
        return [nodes or self._served(k, of_kernel) for k, nodes in enumerate(of_kernel)]

    def _ends(self, kernel: onnx.NodeProto) -> list[int]:
        """The nodes that make the kernel's outputs."""
        if kernel.op_type in HELPERS:
            return []
        # A kernel in a blocked layout is named after the tensor that it made before it was moved
        # there; additions and activations that it took up later follow in `_claim_rest`.
        blocked = re.fullmatch(r"(.*?)(_bn|_mul)?_nchwc(_[0-9]+)?", kernel.name)
        names = [blocked[1]] if blocked else list(kernel.output)
        return [self.maker[name] for name in names if name in self.maker]

    def _claim_behind(self, node: int, k: int, boundary: set[str]) -> None:
        """Claim the predecessors of a node back to tensors made by other kernels, or to the node
        that gave the kernel its type."""
        core = self.kernels[k].op_type.removeprefix("Fused")
        stack = [node]
        while stack:
            here = self.nodes[stack.pop()]
            if here.op_type == core:
                continue
            for name in here.input:
                before = self.maker.get(name)
                if before is not None and name not in boundary and before not in self.owner:
                    self.owner[before] = k
                    stack.append(before)

    def _claim_rest(self) -> None:
        """Nodes in no kernel yet follow the last kernel they read from: additions and activations
        that a fusion took up, and dropped views."""
        for i, node in enumerate(self.nodes):
            if i not in self.owner:
                before = [self.maker[n] for n in node.input if n in self.maker]
                owners = [self.owner[b] for b in before if b in self.owner]
                if owners:
                    self.owner[i] = max(owners)

    def _served(self, k: int, of_kernel: list[list[int]]) -> list[int]:
        """The nodes of the kernel that a helper works for: the maker's, or the first reader's."""
        kernel = self.kernels[k]
        made_by = [self.kernel_of_value.get(name) for name in kernel.input]
        makers = [of_kernel[m] for m in made_by if m is not None and of_kernel[m]]
        readers = [
            of_kernel[r]
            for r, other in enumerate(self.kernels)
            if of_kernel[r] and set(other.input) & set(kernel.output)
        ]
        order = readers + makers if kernel.op_type == "ReorderInput" else makers + readers
        return order[0] if order else []
