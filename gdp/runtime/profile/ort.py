"""Measures models on one core with ONNX Runtime: every kernel, and the whole without the profiler.

Kernels are timed at the level that users run (all); `profiler_kernels` says which ops each of them
stands for. Rounds with and without the profiler alternate. The statistic of a round is the mean of
its fastest quarter, which resolves less than the profiler's microsecond; of the rounds, the
smallest counts, because other work on the machine only ever adds time.
"""

import datetime
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gdp.costs.profile import Kernel, Overheads, Profile, ProfiledModel
from gdp.errors import ClusterError
from gdp.graph.op_graph import OpGraph
from gdp.runtime.ort.inputs import make_inputs
from gdp.runtime.ort.sessions import pinned, usable_cores, versions
from gdp.runtime.ort.source import Source, load_source, randomised
from gdp.runtime.ort.weights import external_locations
from gdp.runtime.profile.kernels import HELPERS, kernel_nodes, tagged
from gdp.runtime.profile.record import statistic, this_core

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProfileConfig:
    """How long and where to measure."""

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
    found = []
    for name, family, path in models:
        if progress is not None:
            progress(name)
        graph = load_onnx(str(path), dict(dims or {}))
        found.append(profile_source(load_source(path), graph, name, family, config))
    return Profile(
        device=this_core(config.threads),
        runtime="onnxruntime",
        threads=config.threads,
        level="all",
        versions=dict(versions()),
        date=datetime.date.today().isoformat(),
        models=tuple(found),
        overheads=measure_all_overheads(config) if overheads else Overheads(),
    )


def measure_all_overheads(config: ProfileConfig) -> Overheads:
    """What sessions and hand-overs cost on the configured core and its first neighbour."""
    from gdp.runtime.profile.overheads import measure_overheads

    others = sorted(usable_cores() - {config.core})
    return measure_overheads(config.core, others[0] if others else None, config.rounds)


def cores_of(config: ProfileConfig) -> list[int]:
    """The cores to measure on; raises `ClusterError` when there are too few."""
    usable = [core for core in sorted(usable_cores()) if core >= config.core]
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
            f"{', '.join(map(str, sorted(usable_cores())))}"
        )


def profile_source(
    source: Source, graph: OpGraph, name: str, family: str, config: ProfileConfig
) -> ProfiledModel:
    """One model, its kernels and its latency; `graph` is imported from the same model."""
    source = randomised(source, config.seed)
    feeds = make_inputs(source.model, graph, config.seed)
    with tempfile.TemporaryDirectory() as folder, pinned(cores_of(config)):
        plain = _session(source, source.model, config)
        copy = tagged(source.model)
        saved, prefix = Path(folder) / "optimised.onnx", Path(folder) / "times"
        profiled = _session(source, copy, config, saved=saved, profile=prefix)
        optimised = onnx.load(saved, load_external_data=False)
        run_plain, run_profiled = _runner(plain, feeds), _runner(profiled, feeds)
        runs = _count(run_plain, config)
        rounds = []
        for _ in range(config.rounds):
            rounds.append(_times(run_plain, runs))
            _times(run_profiled, runs)
        path = profiled.end_profiling()
        times = _kernel_times(Path(path), config.rounds, runs)
    ops = _ops_of_nodes(source.model, graph)
    kernels = []
    for node, nodes in zip(optimised.graph.node, kernel_nodes(copy, optimised), strict=True):
        if node.name not in times:
            continue
        seconds, spread = statistic(times[node.name])
        kernel_name = node.op_type if node.op_type in HELPERS else _name(nodes, source.model, node)
        mine = tuple(sorted({ops[i] for i in nodes if i in ops}))
        kernels.append(Kernel(kernel_name, node.op_type, mine, seconds, spread))
    return ProfiledModel(
        name=name, family=family, graph=graph, latency_s=statistic(np.array(rounds))[0],
        kernels=tuple(kernels), runs=runs, rounds=config.rounds,
    )  # fmt: skip


def _name(nodes: list[int], model: onnx.ModelProto, kernel: onnx.NodeProto) -> str:
    """The name of the first node that a kernel stands for."""
    return model.graph.node[nodes[0]].name if nodes else kernel.op_type


def _session(
    source: Source,
    model: onnx.ModelProto,
    config: ProfileConfig,
    *,
    saved: Path | None = None,
    profile: Path | None = None,
) -> Any:
    """A session at level all that saves its optimised form and its times where asked."""
    from gdp.runtime.ort.telemetry import ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = config.threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    if saved is not None:
        options.optimized_model_filepath = str(saved)
        # Weights beside the file: protobuf cannot hold 2 GB, and nobody reads them.
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", "weights.bin"
        )
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    if external_locations(model):
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(source.folder)
        )
    held = [i.name for i in model.graph.initializer if i.name in source.weights]
    values = [ort.OrtValue.ortvalue_from_numpy(source.weights[name]) for name in held]
    if held:
        options.add_external_initializers(held, values)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _runner(session: Any, feeds: Mapping[str, np.ndarray]) -> Callable[[], None]:
    """A call with everything bound beforehand, as the runtime of cut models does it."""
    from gdp.runtime.ort.telemetry import ort

    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for value in session.get_inputs():
        binding.bind_ortvalue_input(value.name, values[value.name])
    for value in session.get_outputs():
        binding.bind_output(value.name, "cpu")
    session.run_with_iobinding(binding)
    # The first run allocates; from now on outputs are written where they were.
    for value, made in zip(session.get_outputs(), binding.get_outputs(), strict=True):
        binding.bind_ortvalue_output(value.name, made)
    return lambda: session.run_with_iobinding(binding)


def _count(run: Callable[[], None], config: ProfileConfig) -> int:
    """Runs per round, from three that also warm up."""
    seconds = float(_times(run, 3).min())
    share = config.seconds / (2 * config.rounds)
    return int(np.clip(share / max(seconds, 1e-7), config.min_runs, config.max_runs))


def _times(run: Callable[[], None], runs: int) -> np.ndarray:
    seconds = np.empty(runs)
    for i in range(runs):
        start_s = time.perf_counter()
        run()
        seconds[i] = time.perf_counter() - start_s
    return seconds


def _kernel_times(path: Path, rounds: int, runs: int) -> dict[str, np.ndarray]:
    """Of every kernel by name, its seconds [rounds, runs]; runs that warmed up are left out."""
    found: dict[str, list[float]] = {}
    for event in json.loads(path.read_text()):
        name = event.get("name", "")
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            found.setdefault(name.removesuffix("_kernel_time"), []).append(event["dur"] * 1e-6)
    os.unlink(path)
    wanted = rounds * runs
    short = [name for name, seconds in found.items() if len(seconds) < wanted]
    if short:
        LOG.warning("%d kernels ran less often than the model; they are left out", len(short))
    return {
        name: np.array(seconds[-wanted:]).reshape(rounds, runs)
        for name, seconds in found.items()
        if len(seconds) >= wanted
    }


def _ops_of_nodes(model: onnx.ModelProto, graph: OpGraph) -> dict[int, int]:
    """The op of every node that is one."""
    return {
        i: graph.op_index[node.name]
        for i, node in enumerate(model.graph.node)
        if node.name in graph.op_index
    }
