"""Prices of one component of a pipeline on a machine: seconds and bytes of every way to run it.

| way | weights rest | computed |
| --- | --- | --- |
| whole | on the device | there |
| moved | in host memory; on the device while the component runs (model offload) | there |
| blocks sent | in host memory; two blocks on the device, sent ahead (group offload) | there |
| split | blocks one after the other on several devices, or some in host memory | on accelerators |

Of a group offload with a stream, the next block is sent while one computes; of blocks that
the exported program sends when they run, nothing overlaps. Weights at rest stay in host memory, so
that nothing goes back.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from gdp.api.diffusion.choose import Way
from gdp.cluster.machines import machines
from gdp.cluster.types import Cluster
from gdp.costs.default import resolve_costs
from gdp.costs.offload import unpinned_bytes_per_s
from gdp.costs.sustained import call_joules, call_seconds
from gdp.graph.op_graph import OpGraph
from gdp.importers.diffusers.pipeline import Component
from gdp.question.prepare import problem_of
from gdp.question.question import Kept, Question
from gdp.sim.objectives import OBJECTIVES

Residence = Literal["whole", "moved", "blocks sent", "split"]
STEP_S = 3.8e-3
"""Host seconds between two passes of a denoiser: scheduler, copies of latents, Python. Fitted to
single-GPU seconds of ML.ENERGY's develop models."""
AHEAD = 2
"""Blocks on the device of a group offload: one that computes and one that arrives."""
SPLIT_OVER = 4
"""Devices at most that a component is split over."""


@dataclass(frozen=True, eq=False)
class PricedWay(Way):
    """A way with its words."""

    residence: Residence = "whole"
    devices: tuple[int, ...] = ()  # that compute, in the order of the blocks
    blocks: tuple[int, ...] = ()  # on each of these, where it is split
    sent_blocks: int = 0  # that rest in host memory and are sent in each pass
    call_s: float = 0.0  # of one call, weights on their way included

    @property
    def text(self) -> str:
        """The way in words."""
        if self.residence == "moved":
            return "moved there while it runs"
        if self.residence == "blocks sent":
            return f"{self.sent_blocks} blocks sent ahead in each pass"
        if self.sent_blocks:
            return f"{self.blocks[0]} blocks stay, {self.sent_blocks} sent in each pass"
        if self.residence == "split":
            return f"blocks {' + '.join(map(str, self.blocks))}"
        return "whole"


@dataclass(frozen=True, eq=False)
class Memories:
    """Memories of a machine: devices may share one."""

    of: Int[np.ndarray, "D"]
    bytes: Int[np.ndarray, "M"]

    @classmethod
    def on(cls, cluster: Cluster) -> "Memories":
        """The memories of a cluster."""
        names = [d.memory_pool or d.name for d in cluster.devices]
        known = list(dict.fromkeys(names))
        of = np.array([known.index(name) for name in names])
        room = [next(d.memory_bytes for d, n in zip(cluster.devices, names, strict=True) if n == k)
                for k in known]  # fmt: skip
        return cls(of, np.array(room, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class PricedComponent:
    """Seconds and bytes of a component, whole and by part: part 0 is all outside of blocks,
    each other one a block. Q parts, D devices, R reads.

    The part outside is computed where the first block is.
    """

    component: Component
    part_s: Float[np.ndarray, "Q D"]  # of one call; inf where a device cannot compute it
    part_bytes: Int[np.ndarray, "Q"]  # weights
    activation_bytes: Int[np.ndarray, "D"]  # at most, beside the weights
    reads: Int[np.ndarray, "R 3"]  # (part that makes, part that reads, bytes), each tensor once
    part_j: Float[np.ndarray, "Q D"]  # joules of one call, above those of an idle device
    launch_s: float = 0.0  # of the host in one call, on accelerators
    scheme: str = ""  # that weights are stored in; "": 16 bits

    @property
    def step_s(self) -> float:
        """Host seconds beside each call, which are in those of the part outside of blocks."""
        component = self.component
        return STEP_S / component.calls if component.role == "denoise" else 0.0

    @property
    def weight_bytes(self) -> int:
        """Of all parts."""
        return int(self.part_bytes.sum())

    def call_s(self, device: int) -> float:
        """Seconds of one call whole on a device."""
        return float(self.part_s[:, device].sum())

    def joules(self, way: "PricedWay") -> float:
        """Joules of one request above those of idle devices."""
        at = np.full(len(self.part_bytes), way.devices[0])
        if way.residence == "split" and not way.sent_blocks:
            at[1:] = np.repeat(way.devices, way.blocks)
        call_j = float(self.part_j[np.arange(len(at)), at].sum())
        return self.component.passes * self.component.calls * call_j

    def crossing_s(self, at: Int[np.ndarray, "Q"], cluster: Cluster) -> float:
        """Seconds of one call in which tensors go from part to part on other devices."""
        if not len(self.reads):
            return 0.0
        sender, receiver = at[self.reads[:, 0]], at[self.reads[:, 1]]
        crosses = sender != receiver
        pair = sender[crosses], receiver[crosses]
        return float(
            (self.reads[crosses, 2] / cluster.link_bytes_per_s[pair]).sum()
            + cluster.link_latency_s[pair].sum()
        )


def priced(component: Component, cluster: Cluster, costs: Any, kept: Kept) -> PricedComponent:
    """Predicted seconds and bytes of a component on each device of a machine."""
    graph = component.graph
    model, _ = resolve_costs(costs, cluster, graph)
    part = part_of_ops(graph, [name for name, _ in component.blocks])
    count = len(component.blocks) + 1
    holders = graph.weight_holders()
    part_bytes = np.bincount(part[holders], graph.weight_bytes[holders], count).astype(np.int64)
    read = int(part_bytes.sum())
    part_bytes[0] += max(component.weight_bytes - read, 0)  # such as the encoder of a VAE
    returned = component.output_bytes if component.calls > 1 else 0
    call = call_seconds(graph, cluster, model)
    part_s = np.zeros((count, cluster.num_devices))
    joules = call_joules(graph, cluster, call.kernel_s)
    part_j = np.stack([np.bincount(part, of, count) for of in joules.T], axis=1)
    activations = np.zeros(cluster.num_devices, np.int64)
    problem = problem_of(Question(graph, cluster, costs=model, kept=kept))
    for d in range(cluster.num_devices):
        kernels, launches = call.kernel_s[:, d], call.launch_s[:, d]
        part_s[:, d] = np.bincount(
            part, launches if launches.sum() > kernels.sum() else kernels, count
        )
        if np.isfinite(part_s[:, d]).all():
            own = np.where(problem.graph.is_io, cluster.host, d)
            peak = int(OBJECTIVES["latency"].score(problem, own, None).peak_bytes[d])
            activations[d] = max(peak - read, 0) + returned
    own = PricedComponent(
        component, part_s, part_bytes, activations, _reads(graph, part), part_j,
        float(call.launch_s.sum(axis=0).max()),
    )  # fmt: skip
    part_s[0] += own.step_s
    return own


def part_of_ops(graph: OpGraph, blocks: list[str]) -> Int[np.ndarray, "N"]:
    """Part of each op: 1 + the block whose module it is of, 0 outside of blocks."""
    index = {name: i + 1 for i, name in enumerate(blocks)}
    of_scope: dict[str, int] = {}
    part = np.zeros(graph.num_ops, np.int64)
    for op, scope in enumerate(graph.scope):
        if scope not in of_scope:
            words = scope.split(".")
            inside = (".".join(words[:n]) for n in range(len(words), 0, -1))
            of_scope[scope] = next((index[name] for name in inside if name in index), 0)
        part[op] = of_scope[scope]
    return part


def _reads(graph: OpGraph, part: Int[np.ndarray, "N"]) -> Int[np.ndarray, "R 3"]:
    """Tensors that one part makes and another one reads: once for each part, as a runtime's hooks
    bring them to each module that is called."""
    sender, receiver = part[graph.producer[graph.use_tensor]], part[graph.use_op]
    outside = graph.is_io[graph.producer[graph.use_tensor]] | graph.is_io[graph.use_op]
    crosses = (sender != receiver) & ~outside
    rows = np.stack([graph.use_tensor, sender, receiver], axis=1)[crosses]
    rows = np.unique(rows, axis=0)
    return np.stack([rows[:, 1], rows[:, 2], graph.tensor_bytes[rows[:, 0]]], axis=1)


def ways_of(
    own: PricedComponent, phase: int, phases: int, cluster: Cluster, memories: Memories
) -> list[PricedWay]:
    """Every way to run a component on a machine."""
    at, host = machines(cluster), cluster.host
    devices = [
        d for d in range(cluster.num_devices)
        if at[d] == at[host] and np.isfinite(own.part_s[:, d]).all() and cluster.computes[d]
    ]  # fmt: skip
    builder = _Ways(own, phase, phases, cluster, memories)
    ways: list[PricedWay] = []
    for d in devices:
        ways.append(builder.whole(d))
        if not cluster.devices[d].is_cpu and memories.of[d] != memories.of[host]:
            ways += [builder.moved(d), *builder.sent(d)]
            ways += builder.partly_sent(d)
    cards = [d for d in devices if not cluster.devices[d].is_cpu]
    for count in range(2, min(len(cards), SPLIT_OVER) + 1):
        for group in itertools.permutations(cards, count):
            if _is_first(group, cards, cluster):
                ways += builder.split(group)
    return ways


def _is_first(group: tuple[int, ...], cards: list[int], cluster: Cluster) -> bool:
    """True for the first of all groups that differ by interchangeable cards alone."""
    taken: dict[Any, list[int]] = {}
    for d in group:
        taken.setdefault(card_class(cluster, d), []).append(d)
    return all(
        own == [d for d in cards if card_class(cluster, d) == key][: len(own)]
        for key, own in taken.items()
    )


def card_class(cluster: Cluster, d: int) -> tuple[str, int, float]:
    """Kind, memory and bandwidth of a device: equal ones are interchangeable."""
    device = cluster.devices[d]
    return device.kind, device.memory_bytes, device.bytes_per_s


@dataclass(frozen=True, eq=False)
class _Ways:
    """Ways of one component."""

    own: PricedComponent
    phase: int
    phases: int
    cluster: Cluster
    memories: Memories

    def _held(self, rows: dict[int, tuple[int, int]]) -> Int[np.ndarray, "P M"]:
        """Bytes by device: (in all phases, in the component's own beside them)."""
        held = np.zeros((self.phases, len(self.memories.bytes)), np.int64)
        for device, (always, while_running) in rows.items():
            held[:, self.memories.of[device]] += always
            held[self.phase, self.memories.of[device]] += while_running
        return held

    @property
    def _calls(self) -> float:
        """Of the component in one request."""
        return self.own.component.passes * self.own.component.calls

    def whole(self, d: int) -> PricedWay:
        """All weights on one device."""
        call_s = self.own.call_s(d)
        rows = {d: (self.own.weight_bytes, int(self.own.activation_bytes[d]))}
        return PricedWay(
            self._calls * call_s, self._held(rows), d, d, 0, "whole", (d,), call_s=call_s
        )

    def moved(self, d: int) -> PricedWay:
        """Weights in host memory that move to the device for all passes. An encoder moves again for
        a second prompt, as the others run in between."""
        host, weights = self.cluster.host, self.own.weight_bytes
        times = math.ceil(self._calls) if self.own.component.role == "encode" else 1
        rate = unpinned_bytes_per_s(self.cluster, host, d)
        call_s = self.own.call_s(d)
        activations = int(self.own.activation_bytes[d])
        rows = {host: (weights, 0), d: (0, weights + activations)}
        sent = times * weights
        seconds = self._calls * call_s + sent / rate
        return PricedWay(seconds, self._held(rows), d, d, sent, "moved", (d,), call_s=call_s)

    def sent(self, d: int) -> Iterator[PricedWay]:
        """Group offload: the next block is sent while one computes. diffusers takes for blocks the
        members of a component's own lists alone, and hooks into `forward`, which a decoder's
        `decode` does not call."""
        own, host = self.own, self.cluster.host
        listed = [path.count(".") == 1 for path, _ in own.component.blocks]
        blocks = np.flatnonzero([False, *listed])
        if not len(blocks) or own.component.role == "decode":
            return
        outside = np.setdiff1d(np.arange(len(own.part_bytes)), blocks)
        rate = float(self.cluster.link_bytes_per_s[host, d])  # pinned, as diffusers makes it
        way_s = np.append(own.part_bytes[blocks] / rate, 0.0)
        outside_bytes = int(own.part_bytes[outside].sum())
        outside_s = outside_bytes / rate + float(own.part_s[outside, d].sum())
        waits_s = np.maximum(own.part_s[blocks, d], way_s[1:])
        call_s = float(outside_s + way_s[0] + waits_s.sum())
        inside = outside_bytes + AHEAD * int(own.part_bytes[blocks].max())
        rows = {
            host: (own.weight_bytes, 0), d: (0, inside + int(own.activation_bytes[d]))
        }  # fmt: skip
        yield PricedWay(
            self._calls * call_s, self._held(rows), d, d, int(self._calls * own.weight_bytes),
            "blocks sent", (d,), sent_blocks=len(blocks), call_s=call_s,
        )  # fmt: skip

    def partly_sent(self, d: int) -> Iterator[PricedWay]:
        """The first blocks on the device, the others sent when they run."""
        own, host = self.own, self.cluster.host
        blocks = own.part_bytes[1:]
        rate = unpinned_bytes_per_s(self.cluster, host, d)
        for stay in range(1, len(blocks)):
            rest = int(blocks[stay:].sum())
            latency_s = (len(blocks) - stay) * float(self.cluster.link_latency_s[host, d])
            call_s = float(own.call_s(d) + rest / rate + latency_s)
            always = own.weight_bytes - rest
            beside = int(blocks[stay:].max()) + int(own.activation_bytes[d])
            rows = {host: (rest, 0), d: (always, beside)}
            sent = int(self._calls * rest)
            yield PricedWay(
                self._calls * call_s, self._held(rows), d, d, sent, "split", (d,), (stay,),
                len(blocks) - stay, call_s,
            )  # fmt: skip

    def split(self, group: tuple[int, ...]) -> Iterator[PricedWay]:
        """Blocks one after the other on several devices: on the first each possible number, on the
        others what is left by the speed of equal ones, or by their memory."""
        own, count = self.own, len(self.own.part_bytes) - 1
        room = np.array([self.memories.bytes[self.memories.of[d]] for d in group], dtype=float)
        for first in range(1, count - len(group) + 2):
            shares = room[1:] / room[1:].sum()
            ends = first + np.rint(np.cumsum(shares) * (count - first)).astype(int)
            sizes = np.diff(np.concatenate([[0, first], ends]))
            if (sizes < 1).any():
                continue
            at = np.concatenate([[group[0]], np.repeat(group, sizes)])
            call_s = float(own.part_s[np.arange(count + 1), at].sum())
            call_s += own.crossing_s(at, self.cluster)
            rows = {
                d: (int(own.part_bytes[at == d].sum()), int(own.activation_bytes[d])) for d in group
            }
            yield PricedWay(
                self._calls * call_s, self._held(rows), group[0], group[0], 0, "split", group,
                tuple(sizes.tolist()), call_s=call_s,
            )  # fmt: skip
