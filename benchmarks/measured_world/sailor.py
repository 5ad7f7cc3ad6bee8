"""Seconds of a training iteration beside measured plans of stages, copies and tensor splits.

    python -m benchmarks.measured_world sailor --rows sailor_plans.csv

`--rows` is a CSV file with columns plan, cluster, model, layers_per_stage, stage_devices,
micro_batch, global_batch, measured_seconds_per_iteration, gradient_reduce_seconds and suspect: the
measured plans of Sailor (eth-easl/sailor, SOSP 2025) for OPT-350M on GH200 and on mixes of RTX
3090, RTX 2080 and Titan RTX. gdp has no plan of such a form, so that the parts are its own and
this file puts them together:

- a layer is that of Sailor's model (`opt_model.py`: float32, attention op by op, no dropout, an
  embedding and a head of their own), as one rank holds it, traced by `trace_torch_training_step`
  and simulated by `gdp.simulate`; embedding and head count with the last stage;
- the ranks of a stage reduce activations twice a layer, forward and backward (`collective_s`);
- micro-batches go through stages as 1F1B has them: the sum of the stages, and the slowest once
  more for each further micro-batch. Each rank sends its part of the activations or gradients to
  each stage beside its own; both directions of a link work at once;
- copies of a stage reduce their gradients behind the last micro-batch, in a ring.

Known of the machines: NGC's container multiplies float32 as TF32 where the card can. Plans of at
most two nodes are looked at. They tell three constants: the rate of each network between two ranks,
which is that of the gradients in the column beside the seconds; what the host takes to launch a
layer of Megatron-DeepSpeed, where a micro-batch is one sequence on four GH200; and, for the column
"kernels after looked-at", a factor on the cards' seconds. All other plans are told.
"""

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import numpy as np

import gdp
from benchmarks.tables import head
from gdp.cluster.presets import cluster_preset, device_preset
from gdp.cluster.types import Cluster, Device, Link, make_cluster
from gdp.costs.default import DATASHEET, SHIPPED
from gdp.costs.measured.collectives import collective_s
from gdp.graph.op_graph import OpGraph
from gdp.importers.pytorch.model import trace_torch_training_step
from gdp.placement.placement import make_placement

HIDDEN, HEADS, FEED_FORWARD, TOKENS, WORDS, ITEM = 1024, 16, 4096, 2048, 50257, 4
"""Of OPT-350M as it was trained; `ITEM` is the bytes of a number."""
PADDED_TO = 128
"""The words of each rank are a multiple of it."""
OPTIMIZER_PASSES = 7
"""Of Adam over numbers of the parameters: reads four of each, writes three."""
REDUCES = 4
"""All-reduces of a layer: two forward, two backward."""
OTHERS = {
    "clariden/OPT-350/N2_D2": "12.5 GB at most, which is two sequences of a micro-batch, not eight "
    "(32.6 GB in N16_D16, of the same layers and ranks)",
}  # fmt: skip
"""Rows that say another micro-batch than was run, by their measured memory."""
NETWORK_ROW = "N2_D2"
"""Looked-at row of each cluster whose gradients tell the rate of its network."""
HOST_S = 2.9e-3
"""Of a layer, forward and backward: 2.281 s of 32 micro-batches of 24 layers, in which the cards
compute for half of it (`clariden/OPT-350/N1_D1_M4_G32`)."""


class Node(NamedTuple):
    """A kind of machine: cards of a preset, of which some numbers are others."""

    preset: str
    link: str
    float32: float
    bytes_per_s: float


NODES = {
    # H100 of 132 multiprocessors; TF32 without sparsity, HBM3 of 96 GB: GH200 datasheet, 2023.
    "GH-96": Node("h100", "nvlink", 494.7e12, 4.0e12),
    # TF32 is not faster than float32 there: GA102 whitepaper, 2021.
    "RTX-3090": Node("rtx3090", "pcie3", 35.6e12, 936.2e9),
    # Turing has no TF32: TITAN RTX and GeForce RTX 2080, specifications of 2018.
    "Titan-RTX": Node("rtx2080ti", "pcie3", 16.3e12, 672e9),
    "RTX-2080": Node("rtx2080ti", "pcie3", 10.1e12, 448e9),
}
NETWORK_LATENCY_S = 1e-5


class Stage(NamedTuple):
    """Layers on the ranks of one machine."""

    layers: int  # of the model
    is_first: bool  # has the embedding
    is_last: bool  # has the head
    node: str
    ranks: int


@dataclass(frozen=True)
class Plan:
    """A measured plan: pipelines that train side by side."""

    name: str
    pipelines: tuple[tuple[Stage, ...], ...]
    micro_batch: int
    global_batch: int
    seconds: float
    reduce_s: float
    suspect: str

    @property
    def cluster(self) -> str:
        """Name of the machines."""
        return self.name.partition("/")[0]

    @property
    def is_mixed(self) -> bool:
        """True for cards of several kinds."""
        return len({stage.node for pipeline in self.pipelines for stage in pipeline}) > 1

    @property
    def is_looked_at(self) -> bool:
        """True for plans that constants may be read from."""
        return int(re.findall(r"/N(\d+)", self.name)[0]) <= 2

    @property
    def micro_batches(self) -> int:
        """That each pipeline takes in turn."""
        return self.global_batch // self.micro_batch // len(self.pipelines)


def plans(path: Path) -> list[Plan]:
    """The rows of a file, which count embedding and head as layers."""
    found = []
    with path.open() as file:
        for row in csv.DictReader(file):
            groups = [part.split(" layers on ") for part in row["stage_devices"].split(" || ")]
            stages = []
            for k, (count, members) in enumerate(groups):
                first, last = k == 0, k == len(groups) - 1
                copies = [re.fullmatch(r"(.+):\d+\(tp(\d+)\)", one) for one in members.split(" | ")]
                stages.append([
                    Stage(int(count) - first - last, first, last, copy[1], int(copy[2]))
                    for copy in copies if copy
                ])  # fmt: skip
            found.append(
                Plan(
                    row["plan"], tuple(zip(*stages, strict=True)), int(row["micro_batch"]),
                    int(row["global_batch"]), float(row["measured_seconds_per_iteration"]),
                    float(row["gradient_reduce_seconds"]),
                    row["suspect"] or OTHERS.get(row["plan"], ""),
                )
            )  # fmt: skip
    return found


def _words(ranks: int) -> int:
    step = PADDED_TO * ranks
    return -(-WORDS // step) * step


def _module(ranks: int, layers: int) -> Any:
    """The part of a rank, on the meta device."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // ranks)
            self.dense = nn.Linear(HIDDEN // ranks, HIDDEN)
            self.up = nn.Linear(HIDDEN, FEED_FORWARD // ranks)
            self.down = nn.Linear(FEED_FORWARD // ranks, HIDDEN)

        def forward(self, x: Any, mask: Any) -> Any:
            batch, heads, size = x.shape[1], HEADS // ranks, HIDDEN // HEADS
            parts = self.qkv(self.before(x)).view(TOKENS, batch, heads, 3 * size).chunk(3, -1)
            q, k, v = (p.reshape(TOKENS, batch * heads, size).transpose(0, 1) for p in parts)
            scores = (q @ k.transpose(1, 2)).masked_fill(mask, -1e4)
            made = (torch.softmax(scores, -1) @ v).transpose(0, 1)
            x = x + self.dense(made.reshape(TOKENS, batch, HIDDEN // ranks))
            return x + self.down(torch.relu(self.up(self.between(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            words = _words(ranks) // ranks
            self.embed, self.position = (nn.Embedding(n, HIDDEN) for n in (words, TOKENS))
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, words, bias=False)

        def forward(self, words: Any, mask: Any) -> Any:
            x = self.embed(words) + self.position.weight[:, None]
            for layer in self.layers:
                x = layer(x, mask)
            logits = self.head(self.norm(x)).flatten(0, 1)
            return nn.functional.cross_entropy(logits, words.flatten())

    return Model().to("meta")


@cache
def graph(ranks: int, layers: int, batch: int) -> OpGraph:
    """Forward and backward of a rank's part of so many layers, embedding and head."""
    import torch

    words = torch.empty(TOKENS, batch, dtype=torch.long, device="meta")
    mask = torch.empty(TOKENS, TOKENS, dtype=torch.bool, device="meta")
    return trace_torch_training_step(_module(ranks, layers), (words, mask), optimizer=None)


def device(node: str) -> Device:
    """A card."""
    own = NODES[node]
    speeds = {"default": own.float32, "float32": own.float32}
    return replace(device_preset(own.preset), flop_per_s=speeds, bytes_per_s=own.bytes_per_s)


@cache
def machine(node: str, ranks: int) -> Cluster:
    """Cards of one machine and their links."""
    own = NODES[node]
    cluster = cluster_preset(f"{ranks}x{own.preset}-{own.link}")
    cards = (replace(device(node), name=one.name) for one in cluster.devices)
    return replace(cluster, devices=tuple(cards))


@cache
def compute_s(node: str, ranks: int, batch: int, costs: str) -> tuple[float, float]:
    """Seconds of a micro-batch, forward and backward: of a layer, and of embedding and head."""
    alone = make_cluster(node, [device(node)])
    one, two = (
        gdp.simulate(
            made, make_placement(made, alone, np.zeros(made.num_ops, dtype=np.int64)), alone,
            costs=costs,
        ).latency_s
        for made in (graph(ranks, layers, batch) for layers in (1, 2))
    )  # fmt: skip
    return two - one, max(0.0, 2 * one - two)


@dataclass(frozen=True)
class Predictor:
    """Seconds of plans by one cost model."""

    costs: str
    network: Mapping[str, float]  # bytes/s between ranks, by cluster
    factor: Mapping[str, float] = field(default_factory=dict)  # on the cards' seconds, by cluster

    def iteration_s(self, plan: Plan) -> float:
        """Seconds of an iteration of a plan: its slowest pipeline, gradients and the update."""
        last = max(self._pipeline_s(plan, pipeline) for pipeline in plan.pipelines)
        rate = self.network[plan.cluster]
        copies = list(zip(*plan.pipelines, strict=True))
        reduce_s = max(gradients_s([one.ranks for one in stage], size_bytes(stage[0]), rate)
                       for stage in copies)  # fmt: skip
        update_s = max(
            OPTIMIZER_PASSES * size_bytes(stage) / NODES[stage.node].bytes_per_s
            for pipeline in plan.pipelines for stage in pipeline
        )  # fmt: skip
        return last + reduce_s + update_s

    def _pipeline_s(self, plan: Plan, pipeline: tuple[Stage, ...]) -> float:
        factor = self.factor.get(plan.cluster, 1.0)
        stages = [self._stage_s(stage, plan.micro_batch, factor) for stage in pipeline]
        sends = [0.0] * len(stages)
        sent = plan.micro_batch * TOKENS * HIDDEN * ITEM
        for k, (a, b) in enumerate(pairwise(pipeline)):
            each = sent / max(a.ranks, b.ranks) / self.network[plan.cluster] + NETWORK_LATENCY_S
            sends[k] += each
            sends[k + 1] += each
        return one_f_one_b_s([a + b for a, b in zip(stages, sends, strict=True)],
                             plan.micro_batches)  # fmt: skip

    def _stage_s(self, stage: Stage, batch: int, factor: float) -> float:
        """Seconds of a micro-batch on a stage, forward and backward."""
        layer_s, ends_s = compute_s(stage.node, stage.ranks, batch, self.costs)
        size = batch * TOKENS * HIDDEN * ITEM
        reduce_s = REDUCES * float(
            collective_s(machine(stage.node, stage.ranks), range(stage.ranks), "all_reduce", size)
        )
        each = max(layer_s * factor + reduce_s, HOST_S)
        return stage.layers * each + stage.is_last * ends_s * factor


def one_f_one_b_s(stages: list[float], micro_batches: int) -> float:
    """Seconds of micro-batches that go through stages, each with one forward and one backward."""
    return sum(stages) + (micro_batches - 1) * max(stages)


def size_bytes(stage: Stage) -> float:
    """Bytes of the parameters of a rank."""
    layer = 12 * HIDDEN**2  # biases and norms are a thousandth of it
    ends = _words(stage.ranks) * HIDDEN * (stage.is_first + stage.is_last)
    return ITEM * (stage.layers * layer + ends) / stage.ranks


def gradients_s(ranks: list[int], size: float, rate: float) -> float:
    """Seconds of an all-reduce among the copies of a stage, one machine each."""
    cards = [replace(device("GH-96"), name=f"copy{k}") for k in range(len(ranks))]
    links = [
        Link(a.name, b.name, rate, NETWORK_LATENCY_S, channel=f"{a.name} out", one_way=True)
        for a in cards for b in cards if a is not b
    ]  # fmt: skip
    return float(collective_s(make_cluster("copies", cards, links), range(len(ranks)),
                              "all_reduce", size))  # fmt: skip


def network_of(asked: Iterable[Plan]) -> dict[str, float]:
    """Bytes a second between ranks by cluster, as the gradients of a looked-at row tell."""
    found = {}
    for plan in asked:
        if plan.name.endswith(f"/{NETWORK_ROW}"):
            (stage, *_), copies = plan.pipelines[0], len(plan.pipelines)
            found[plan.cluster] = 2 * (copies - 1) / copies * size_bytes(stage) / plan.reduce_s
    return found


def told(asked: list[Plan], columns: dict[str, dict[str, float]]) -> Iterator[str]:
    """A line for each plan, then errors of those that were not looked at."""
    yield head("plan | looked at | measured s | " + " | ".join(columns), 1)
    for plan in asked:
        cells = " | ".join(
            f"{own[plan.name]:.2f} ({own[plan.name] / plan.seconds - 1:+.0%})"
            for own in columns.values()
        )
        looked = "yes" if plan.is_looked_at else f"suspect: {plan.suspect}" if plan.suspect else ""
        yield f"| {plan.name} | {looked} | {plan.seconds:.2f} | {cells} |"
    yield ""
    groups = {
        "not looked at": [p for p in asked if not p.is_looked_at and not p.suspect],
        "looked at": [p for p in asked if p.is_looked_at and not p.suspect],
        "suspect": [p for p in asked if p.suspect],
    }
    yield head("plans | | " + " | ".join(f"{name}: median, worst" for name in columns), 1)
    for group, rows in groups.items():
        for name in sorted({plan.cluster for plan in rows}):
            own = [plan for plan in rows if plan.cluster == name]
            cells = []
            for seconds in columns.values():
                off = [abs(seconds[plan.name] / plan.seconds - 1) for plan in own]
                cells.append(f"{median(off):.1%}, {max(off):.0%}")
            mixed = "unlike cards" if own[0].is_mixed else "cards alike"
            yield f"| {name} ({mixed}), {group} | {len(own)} | {' | '.join(cells)} |"
    for plan in asked:
        if plan.suspect:
            yield f"{plan.name} is doubtful: {plan.suspect}"


def factors(asked: Iterable[Plan], seconds: Mapping[str, float]) -> dict[str, float]:
    """Measured over predicted seconds of the looked-at plans of each cluster, but of those that
    told the host's."""
    logs: dict[str, list[float]] = {}
    for plan in asked:
        if plan.is_looked_at and not plan.suspect and plan.micro_batch > 1:
            logs.setdefault(plan.cluster, []).append(math.log(plan.seconds / seconds[plan.name]))
    return {name: math.exp(sum(own) / len(own)) for name, own in logs.items()}


@click.command("sailor", help=__doc__)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
def main(rows: Path) -> None:
    asked = plans(rows)
    network = network_of(asked)
    columns: dict[str, dict[str, float]] = {}
    for name, costs in (("predicted", SHIPPED), ("datasheets", DATASHEET)):
        plain = Predictor(costs, network)
        columns[name] = {plan.name: plain.iteration_s(plan) for plan in asked}
        fitted = replace(plain, factor=factors(asked, columns[name]))
        columns[f"{name}, kernels after looked-at"] = {
            plan.name: fitted.iteration_s(plan) for plan in asked
        }
    click.echo("\n".join(told(asked, columns)))
