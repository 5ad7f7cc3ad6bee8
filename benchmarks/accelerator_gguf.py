"""GGUF files that llama.cpp executes on this machine's accelerator: a part of
`benchmarks.accelerator`."""

import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import gdp
from benchmarks.accelerator import COSTS, Bench, Row, accelerator_of, failed
from benchmarks.llamacpp import ModelSize, write_model
from gdp.api.generation import generation_answer
from gdp.base.cores import num_cores
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement, make_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.targets.llamacpp.flags import flags_of, slots_of
from gdp.targets.llamacpp.run import Tokens, Worker

GGUF = (
    ModelSize("dense", "Q4_K", 32, 4096, 11264, 32, 8),
    ModelSize("dense", "F16", 24, 2048, 8192, 32, 8),
    ModelSize("mixture", "Q8_0", 24, 2048, 2816, 16, 4, experts=16, used=2),
)
GGUF_TINY = (
    ModelSize("dense", "Q4_K", 4, 256, 512, 4, 2),
    ModelSize("mixture", "Q8_0", 4, 256, 512, 4, 2, experts=4),
)
GGUF_ROUNDS = 4
LIMITED = 0.45
"""Of the file's bytes, that the accelerator's memory has under the limit."""


def gguf_model(bench: Bench, size: ModelSize) -> Iterator[Row]:
    """A GGUF file by llama.cpp: whole on the accelerator, and with less memory than that takes."""
    name = f"{size.name}, {size.parameters:.1f}B, {size.kind}"
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder, "model.gguf"), size, hollow=bench.kept is not None)
        spec = gdp.Generation(path, prompt=bench.prompt, new=bench.new)
        graph, card = gdp.load(spec), accelerator_of(bench.cluster)
        limit = int(LIMITED * path.stat().st_size)
        devices = [
            replace(d, memory_bytes=limit, reserve_bytes=0) if i == card else d
            for i, d in enumerate(bench.cluster.devices)
        ]
        less = replace(bench.cluster, devices=tuple(devices))
        search = gdp.Search(seconds=3.0)
        worker = Worker(-1, []) if bench.kept is None else None
        try:
            whole = np.where(graph.is_io, bench.cluster.host, card)
            whole[slots_of(graph).embedding] = bench.cluster.host
            ways = {"alone": (bench.cluster, make_placement(graph, bench.cluster, whole))}
            try:
                found = gdp.place(spec, less, target="llamacpp", search=search)
                ways["gdp's flags"] = (found.question.cluster, found.placement)
            except gdp.GdpError as error:
                yield Row(name, "gdp's flags", "", note=failed(error))
            for rule, placement in _rules(graph, less, card).items():
                ways[rule] = (less, placement)
            for way, (cluster, placement) in ways.items():
                try:
                    yield from _llama(bench, worker, name, path, graph, way, cluster, placement)
                except Exception as error:
                    traceback.print_exc()
                    yield Row(name, way, "", note=failed(error))
        finally:
            if worker is not None:
                worker.close()


def _rules(graph: OpGraph, cluster: Cluster, card: int) -> dict[str, Placement]:
    """As many whole layers on the card as fit; for a mixture all but as many experts as must go."""
    slots = slots_of(graph)
    host, found = cluster.host, {}

    def fits(device: np.ndarray) -> bool:
        placement = make_placement(graph, cluster, device)
        return solve.simulate(Question(graph, cluster), placement).feasible

    count = len(slots.layers)
    for layers in range(count, -1, -1):
        device = np.full(graph.num_ops, host)
        for slot in range(count - layers, count):
            device[slots.layers[slot]] = device[slots.experts[slot]] = card
        if fits(device):
            found[f"-ngl {layers}"] = make_placement(graph, cluster, device)
            break
    if any(map(len, slots.experts)):
        for away in range(count + 1):
            device = np.full(graph.num_ops, host)
            for slot in range(count):
                device[slots.layers[slot]] = card
                device[slots.experts[slot]] = host if slot < away else card
            if fits(device):
                found[f"-ngl {count} -ncmoe {away}"] = make_placement(graph, cluster, device)
                break
    return found


def _llama(
    bench: Bench, worker: Worker | None, name: str, path: Path, graph: OpGraph, way: str,
    cluster: Cluster, placement: Placement,
) -> Iterator[Row]:  # fmt: skip
    """Both phases of a placement, told and measured by llama.cpp itself."""
    told: dict[str, dict[str, float]] = {"first token": {}, "step": {}}
    for label, costs in COSTS.items():
        question = Question(graph, cluster, costs=costs)
        answer = generation_answer(question, placement, solve.simulate(question, placement))
        assert answer is not None
        told["first token"][label] = answer.first_token_s
        told["step"][label] = answer.token_s
    if worker is None:
        assert bench.kept is not None
        for part, seconds in told.items():
            if (name, way, part) in bench.kept:
                yield Row(name, way, part, bench.kept[name, way, part], seconds)
        return
    words = [*flags_of(graph, placement, cluster).arguments(), "--threads", str(num_cores())]
    worker.ask("load", "placed", model=str(path), arguments=words, ends=[], seed=0)
    tokens = Tokens(bench.prompt, bench.new, 0)
    rows = [worker.ask("sample", "placed", tokens=tokens) for _ in range(GGUF_ROUNDS + 1)][1:]
    reads = float(np.median([row["prompt_s"] for row in rows]))
    steps = float(np.median([row["steps_s"] for row in rows])) / bench.new
    yield Row(name, way, "first token", reads, told["first token"])
    yield Row(name, way, "step", steps, told["step"])
