"""Executes a placement of a GGUF model with llama.cpp, by the flags that `gdp export` writes.

A process of its own (`worker`) loads the model as the flags say and times passes by llama.cpp's own
counters; a second context with a callback at the end of every piece says how they divide. Devices
of kind `rpc-core` are cores that llama.cpp's RPC server lends: it takes each for a GPU.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from gdp.base.cores import num_cores, usable_cores
from gdp.base.errors import ClusterError, MeasurementError, ModelError
from gdp.base.version import install_command
from gdp.cluster.types import CORE_KIND, Cluster, Device
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import DECODE
from gdp.importers.gguf_spec import GgufSpec, parse_gguf_spec
from gdp.measure.async_execution import versions
from gdp.measure.compare import Repeatable, compare
from gdp.measure.measuring import Quota, measure, one_at_a_time
from gdp.measure.report import (
    DEFAULT,
    PLACED,
    SINGLE,
    GenerationTimes,
    RunReport,
    SegmentTime,
    row,
)
from gdp.measure.request import RunRequest
from gdp.measure.statistics import Trace
from gdp.placement.placement import make_placement
from gdp.targets.llamacpp.flags import Slots, flags_of, slots_of
from gdp.targets.options import arguments

RPC_KIND = "rpc-core"
"""Begins the kinds of devices that are cores lent by llama.cpp's RPC server; what follows tells
those apart that are not alike, so that each is learned by itself."""
PIECE_RUNS = 5
"""Watched passes of which a piece's share of the seconds is the median."""
STEP_OF_LOGITS = 1 / 128
"""Of the largest logit, that two devices may differ by: products of quantised weights round their
inputs to 8 bits."""
NO_RPC = 3
"""Exit code of a worker that is to lend cores and cannot."""


class Tokens(NamedTuple):
    """One sample: a prompt and the steps behind it, or one step behind a filled cache."""

    prompt: int
    new: int
    depth: int


def tokens_of(spec: GgufSpec) -> Tokens:
    """Tokens that a sample of a spec computes; `ModelError` for several sequences."""
    if spec.batch > 1:
        raise ModelError("gdp run executes one sequence of a .gguf model: leave out --batch")
    if spec.draft.file:
        raise ModelError("gdp run executes no model that drafts: leave out draft")
    if spec.new:
        return Tokens(spec.prompt, spec.new, 0)
    return Tokens(0, 1, spec.sequence - 1) if spec.decode else Tokens(spec.sequence, 0, 0)


class LayerPiece(NamedTuple):
    """Layers, or parts of one, that llama.cpp computes on one device without interruption."""

    device: int
    end: str  # node of its graph that ends the piece
    ops: Int[np.ndarray, "_"]


def pieces_of(
    graph: OpGraph, slots: Slots, device: Int[np.ndarray, "N"]
) -> dict[str, list[LayerPiece]]:
    """The pieces of each phase ("prompt", "steps"), in the order in which they run."""
    stepping = graph.phase == DECODE
    if stepping.any():
        is_step = stepping
    else:  # one step, if it takes a token and has caches
        tokens = graph.tensor_bytes[graph.producer == graph.op_index["tokens"]]
        is_step = np.full(graph.num_ops, int(tokens[0]) == 4 and any(graph.cache_bytes > 0))
    computes = np.array([scope != "" for scope in graph.scope])  # not what takes a token
    pieces: dict[str, list[LayerPiece]] = {}
    for phase, mine in (("prompt", computes & ~is_step), ("steps", computes & is_step)):
        rows: list[tuple[int, str, list[np.ndarray]]] = []
        for where, end, ops in _parts(slots, device, mine):
            if rows and rows[-1][0] == where:
                rows[-1] = (where, end, [*rows[-1][2], ops])
            else:
                rows.append((where, end, [ops]))
        pieces[phase] = [LayerPiece(d, end, np.concatenate(ops)) for d, end, ops in rows]
    return pieces


def _parts(
    slots: Slots, device: Int[np.ndarray, "N"], mine: np.ndarray
) -> Iterator[tuple[int, str, np.ndarray]]:
    """(device, last node, ops) of each slot, and of each of its parts around experts elsewhere."""
    first = slots.embedding[mine[slots.embedding]]
    if not len(first):
        return
    yield int(device[first[0]]), "inp_embd", first
    for i, (layer, experts) in enumerate(zip(slots.layers, slots.experts, strict=True)):
        layer, experts = layer[mine[layer]], experts[mine[experts]]
        if not len(layer):  # emptied by an architecture search
            continue
        here = int(device[layer[0]])
        last = "result_output" if i == len(slots.layers) - 1 else f"l_out-{i}"
        if not len(experts) or device[experts[0]] == here:
            yield here, last, np.concatenate([layer, experts])
            continue
        yield here, f"ffn_moe_topk-{i}", layer[layer < experts.min()]
        yield int(device[experts[0]]), f"ffn_moe_down-{i}", experts
        yield here, last, layer[layer > experts.max()]


class Worker:
    """The process that runs llama.cpp."""

    def __init__(self, core: int, lent: Sequence[int]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), f"--core={core}"]
        command += [f"--lend={','.join(map(str, lent))}"] if lent else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def ask(self, verb: str, name: str, **more: Any) -> dict[str, Any]:
        """The answer to a request; raises `MeasurementError` where llama.cpp fails."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"verb": verb, "name": name, **more}) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise MeasurementError(self._why_it_ended())
        answer = json.loads(line)
        if "error" in answer:
            raise MeasurementError(answer["error"])
        return answer

    def _why_it_ended(self) -> str:
        code = self.process.wait()
        if code == NO_RPC:
            return (
                "llama-cpp-python is built without RPC, so it can lend no cores: build it with "
                "CMAKE_ARGS=-DGGML_RPC=ON pip install llama-cpp-python --no-binary llama-cpp-python"
            )
        assert self.process.stderr is not None
        lines = self.process.stderr.read().strip().splitlines()
        return f"llama.cpp ended with exit code {code}: {lines[-1] if lines else 'no reason given'}"

    def close(self) -> None:
        """End the process, and the servers with it."""
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()


@dataclass(frozen=True)
class LlamaContender:
    """Samples one at a time, timed by llama.cpp itself."""

    worker: Worker
    name: str
    tokens: Tokens
    phases: list[tuple[float, float]]  # seconds of the prompt and of the steps, of every sample
    slots: int = 1

    def run(self, quota: Quota) -> tuple[Trace, ...]:
        """Samples back to back until the quota is met."""

        def sample_s() -> float:
            answer = self.worker.ask("sample", self.name, tokens=self.tokens)
            self.phases.append((answer["prompt_s"], answer["steps_s"]))
            return answer["prompt_s"] + answer["steps_s"]

        return one_at_a_time(quota, sample_s)


def run_llamacpp(request: RunRequest) -> RunReport:
    """Execute a placement of a GGUF model by its flags, beside the processor alone and llama.cpp's
    own default (all layers on GPUs, divided by their memory).

    Seconds are llama.cpp's own, of a pass over the prompt and of the steps of decoding; the tokens
    are random. Raises `ClusterError` where the devices are not here, `PlacementError` where flags
    cannot say the placement, and `MeasurementError` where llama.cpp fails.
    """
    graph, cluster, device = request.graph, request.cluster, request.device
    measuring, spec = request.measuring, parse_gguf_spec(request.model)
    tokens, cores = tokens_of(spec), cores_of(cluster)
    lent = [c for c, d in zip(cores, cluster.devices, strict=True) if _is_lent(d)]
    plan, slots = request.plan, slots_of(graph)
    pieces = pieces_of(graph, slots, device)
    alone = np.full(graph.num_ops, cluster.host)
    _require_package()
    measuring.say("loading the model with llama.cpp")
    worker = Worker(cores[cluster.host], lent)
    threads = 1 if cluster.devices[cluster.host].kind == CORE_KIND else num_cores()

    def load(name: str, where: Int[np.ndarray, "N"], ends: Sequence[str] = ()) -> LlamaContender:
        flags = flags_of(graph, make_placement(graph, cluster, where), cluster)
        return started(name, replace(flags, mmproj="").arguments(), ends)

    def started(name: str, arguments: list[str], ends: Sequence[str] = ()) -> LlamaContender:
        arguments = [*arguments, "--threads", str(threads)]
        worker.ask("load", name, model=spec.path, arguments=arguments, ends=list(ends),
                   seed=measuring.seed)  # fmt: skip
        return LlamaContender(worker, name, tokens, [])

    try:
        ends = dict.fromkeys(piece.end for own in pieces.values() for piece in own)
        contenders = {PLACED: load(PLACED, device, tuple(ends)), SINGLE: load(SINGLE, alone)}
        difference = _compared(worker, tokens)
        for name, other in request.rival_plans.items():
            contenders[name] = load(name, other.device)
        if not request.baselines:
            del contenders[SINGLE]
        elif lent or len(cluster.devices) > 1:
            contenders[DEFAULT] = started(DEFAULT, default_arguments(graph, cluster))
        times = measure(contenders, measuring)
        shares = [worker.ask("pieces", PLACED, tokens=tokens) for _ in range(PIECE_RUNS)]
    finally:
        worker.close()
    phases = zip(*contenders[PLACED].phases, strict=True)
    reads_s, steps_s = (float(np.median(own)) for own in phases)
    seconds = {"prompt": reads_s, "steps": steps_s}
    return request.report(
        plan,
        {name: row(measured) for name, measured in times.items()},
        difference,
        random_weights=False,
        segments=_segments(request, pieces, shares, seconds),
        samples_in_flight=1,
        cores=tuple(cores),
        pinned=hasattr(os, "sched_setaffinity"),
        note=_told(tokens, reads_s, steps_s),
        generation=GenerationTimes(*tokens, reads_s, steps_s),
        versions=versions("llama-cpp-python", "numpy"),
    )  # fmt: skip


def default_arguments(graph: OpGraph, cluster: Cluster) -> list[str]:
    """Arguments that leave all but the context and the cache to llama.cpp."""
    alone = make_placement(graph, cluster, np.full(graph.num_ops, cluster.host))
    kept = ("--ctx-size", "--cache-type-k", "--cache-type-v", "--flash-attn")
    options = flags_of(graph, alone, cluster).options()
    return arguments(option for option in options if option.name in kept)


def cores_of(cluster: Cluster) -> list[int]:
    """Core of each device that is one, -1 for others: processors take the first, cores that are
    lent take them in turn. Raises `ClusterError` where the devices cannot all be llama.cpp's."""
    usable = usable_cores()
    lent = [_is_lent(device) for device in cluster.devices if not device.is_cpu]
    if any(lent) and not all(lent):
        raise ClusterError(
            f"cluster {cluster.name!r} has {RPC_KIND} devices beside others; llama.cpp numbers "
            "those that are lent first, so gdp runs either kind alone"
        )
    turns = iter(range(cluster.num_devices))
    cores = []
    for device in cluster.devices:
        if _is_lent(device):
            cores.append(usable[next(turns) % len(usable)])
        else:
            cores.append(usable[0] if device.kind == CORE_KIND else -1)
    return cores


def _is_lent(device: Device) -> bool:
    return device.kind.startswith(RPC_KIND)


def _require_package() -> None:
    from importlib.util import find_spec

    if find_spec("llama_cpp") is None:
        raise ModelError(
            f"executing .gguf models needs llama-cpp-python: {install_command('llamacpp')}"
        )


def _compared(worker: Worker, tokens: Tokens) -> Any:
    """Compare the logits of the placed model with those of the processor alone."""
    values = {}
    for name in (SINGLE, PLACED):
        worker.ask("sample", name, tokens=tokens)
        values[name] = {"logits": np.array(worker.ask("logits", name)["logits"], np.float32)}
    step = STEP_OF_LOGITS * float(np.abs(values[SINGLE]["logits"]).max())
    return compare(
        values[SINGLE], values[PLACED], Repeatable(step={"logits": step}), is_output=False
    )


def _segments(
    request: RunRequest, pieces: Mapping[str, Sequence[LayerPiece]],
    shares: Sequence[Mapping[str, Mapping[str, float]]], seconds: Mapping[str, float],
) -> tuple[SegmentTime, ...]:  # fmt: skip
    """The plan's segments with their parts of llama.cpp's seconds."""
    graph, plan = request.graph, request.plan
    measured: dict[int, float] = {}
    for phase, own in pieces.items():
        spent = np.array([[run[phase].get(piece.end, 0.0) for piece in own] for run in shares])
        parts = np.median(spent, axis=0) if len(own) else np.zeros(0)
        if len(own) > 1 and not parts[1:].all():
            missing = own[1 + int(np.argmin(parts[1:]))].end
            raise ModelError(
                f"{graph.name}: llama.cpp computes no {missing!r} in models of this architecture, "
                "so gdp cannot tell what each device took"
            )
        for piece, part in zip(own, parts / max(parts.sum(), 1e-12), strict=True):
            ids = np.unique(plan.segment[piece.ops])
            weight = np.array([plan.segment_s[s] for s in ids])
            for s, w in zip(ids.tolist(), weight / max(weight.sum(), 1e-12), strict=True):
                measured[s] = measured.get(s, 0.0) + seconds[phase] * float(part) * float(w)
    return tuple(
        plan.segment_time(graph, request.cluster, s, (plan.segment == s) & ~graph.is_io, spent_s)
        for s, spent_s in sorted(measured.items())
    )


def _told(tokens: Tokens, reads_s: float, steps_s: float) -> str:
    """Tokens per second of both phases."""
    phases = []
    if tokens.prompt and reads_s > 0:
        phases.append(f"prompt {tokens.prompt / reads_s:.1f} tokens/s")
    if tokens.new and steps_s > 0:
        phases.append(f"decode {tokens.new / steps_s:.1f} tokens/s")
    return f"{', '.join(phases)}, by llama.cpp's own timings"
