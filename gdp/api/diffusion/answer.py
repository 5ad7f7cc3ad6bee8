"""The answer about an image or video pipeline on a machine, as data."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from gdp.api.diffusion.parallel import ParallelDegrees
from gdp.api.diffusion.pricing import Memories, PricedComponent, PricedWay
from gdp.cluster.types import UNLIMITED_BYTES, Cluster
from gdp.importers.diffusers.pipeline import DiffusionPipeline


@dataclass(frozen=True, eq=False)
class PlacedComponent:
    """A component of the answer."""

    priced: PricedComponent
    way: PricedWay

    @property
    def name(self) -> str:
        """As the pipeline calls it."""
        return self.priced.component.name

    @property
    def role(self) -> str:
        """Part of the request: "encode", "denoise" or "decode"."""
        return self.priced.component.role


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """A way for every component, on all cards in parallel or on single ones."""

    degrees: ParallelDegrees
    cards: tuple[int, ...]  # that each hold the whole pipeline; () where each component has its own
    cluster: Cluster  # of the devices of ways: the machine, or of it the host and the first card
    placed: tuple[PlacedComponent, ...]
    seconds: float  # of one request
    held_bytes: Int[np.ndarray, "P M"]
    options: int  # ways of all components
    joules: float | None = None  # of one request, of its accelerators; None: unknown

    @property
    def watts(self) -> float | None:
        """Mean power of its accelerators; None: unknown."""
        return None if self.joules is None or self.seconds <= 0 else self.joules / self.seconds

    @property
    def text(self) -> str:
        """Cards that work together, in words."""
        if self.cards:
            return f"{self.degrees} on {len(self.cards)} cards"
        return "each component on devices of its own"


@dataclass(frozen=True, eq=False)
class PipelineAnswer:
    """The best plan of a pipeline. Times are predictions in seconds."""

    pipeline: DiffusionPipeline
    cluster: Cluster
    plan: PipelinePlan | None  # None: nothing fits
    others: tuple[PipelinePlan, ...] = ()  # best of each other kind, the quickest first
    advice: tuple[str, ...] = ()
    costs: str = ""
    dtype: str = "bfloat16"  # of weights and activations
    notes: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """True where a plan fits."""
        return self.plan is not None

    @property
    def seconds(self) -> float:
        """Of one request: all its images or videos."""
        return np.inf if self.plan is None else self.plan.seconds

    @property
    def item_s(self) -> float:
        """Seconds for each image or video."""
        return self.seconds / self.pipeline.request.batch

    @property
    def item_j(self) -> float | None:
        """Joules of the accelerators for each image or video; None: unknown."""
        joules = None if self.plan is None else self.plan.joules
        return None if joules is None else joules / self.pipeline.request.batch

    def memory(self) -> list[dict[str, Any]]:
        """Bytes on each memory in each phase, and its limit; `None` where it has none."""
        plan = self.plan
        if plan is None:
            return []
        memories = Memories.on(plan.cluster)
        host = memories.of[plan.cluster.host]
        rows = []
        for m, room in enumerate(memories.bytes.tolist()):
            # Processes on several cards each have their own weights in host memory.
            copies = len(plan.cards) if plan.cards and m == host else 1
            held = {
                p.name: copies * int(plan.held_bytes[i, m]) for i, p in enumerate(plan.placed)
            }  # fmt: skip
            if max(held.values()) > 0:
                devices = [d for d in range(plan.cluster.num_devices) if memories.of[d] == m]
                rows.append({
                    "devices": self.names(tuple(devices)), "held_bytes": held,
                    "room_bytes": room if room < UNLIMITED_BYTES else None,
                })  # fmt: skip
        return rows

    def names(self, devices: tuple[int, ...]) -> list[str]:
        """Names of devices of the plan: the first card of a parallel plan stands for all."""
        plan = self.plan
        assert plan is not None
        found: list[str] = []
        for d in devices:
            others = plan.cards if plan.cards and d != plan.cluster.host else ()
            names = plan.cluster.device_names
            found += [self.cluster.device_names[c] for c in others] or [names[d]]
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data, with units in the names."""
        plan = self.plan
        found: dict[str, Any] = {
            "pipeline": self.pipeline.name, "class": self.pipeline.class_name,
            "request": asdict(self.pipeline.request), "feasible": self.feasible,
            "advice": list(self.advice), "notes": list(self.notes), "costs": self.costs,
            "dtype": self.dtype,
        }  # fmt: skip
        if plan is None:
            return found
        return found | {
            "seconds": plan.seconds, "seconds_per_item": self.item_s, "joules": plan.joules,
            "joules_per_item": self.item_j, "watts": plan.watts,
            "parallel": plan.degrees._asdict() | {"cards": [
                self.cluster.device_names[d] for d in plan.cards
            ]},
            "components": [self._component(p) for p in plan.placed], "memory": self.memory(),
            "others": [
                {"plan": o.text, "seconds": o.seconds, "joules": o.joules} for o in self.others
            ],
            "options": plan.options,
        }  # fmt: skip

    def _component(self, placed: PlacedComponent) -> dict[str, Any]:
        way, component = placed.way, placed.priced.component
        return {
            "name": component.name, "class": component.class_name, "role": component.role,
            "parameters": component.parameters, "weight_bytes": placed.priced.weight_bytes,
            "residence": way.residence, "devices": self.names(way.devices),
            "blocks": list(way.blocks), "sent_blocks": way.sent_blocks,
            "passes": component.passes, "calls": component.calls,
            "seconds_per_call": way.call_s, "seconds": way.seconds,
            "moved_bytes": way.moved_bytes,
        }  # fmt: skip
