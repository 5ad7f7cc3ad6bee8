"""The answer about several models on one box, as data."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from gdp.api.box.models import BoxModel
from gdp.api.box.pricing import EngineMemory, Priced
from gdp.cluster.types import Cluster


@dataclass(frozen=True)
class Speed:
    """Latency and throughput; TTFT and TPOT are those that 95% of the requests keep."""

    ttft_s: float
    tpot_s: float
    tokens_per_s: float


@dataclass(frozen=True, eq=False)
class PlacedModel:
    """One model of the answer; without a price it is left out."""

    model: BoxModel
    priced: Priced | None
    group: int | None = None  # of models that take turns; None: by itself
    slowdown: float = 1.0  # while all other engines on its devices are busy
    served: float = 0.0  # part of its demand
    demand: float = 0.0  # requests/s
    commands: tuple[str, ...] = ()  # for a shell
    environment: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # for which it is left out
    sm_percent: int = 0  # most SMs of its cards that it computes on (NVIDIA MPS); 0: all

    @property
    def load_s(self) -> float:
        """Seconds of loading that a request waits for where another model has its place."""
        return self.priced.load_s if self.priced is not None else 0.0

    @property
    def alone(self) -> Speed | None:
        """While no other model works; prompts take their time on its part of the SMs."""
        return self._speed(1.0, 0.0)

    @property
    def busy(self) -> Speed | None:
        """While all other models on its devices work all the time; in a group its weights are to be
        loaded first."""
        return self._speed(self.slowdown, self.load_s if self.group is not None else 0.0)

    def _speed(self, slow: float, wait_s: float) -> Speed | None:
        if self.priced is None:
            return None
        served, prompts = self.priced.served, max(slow, 100 / (self.sm_percent or 100))
        first_s = served.first_token.p95_s * prompts + wait_s
        return Speed(first_s, served.token.p95_s * slow, served.tokens_per_s / slow)

    def excess(self, speed: Speed) -> float:
        """The largest ratio of seconds to their limit; 1 where both are kept."""
        within = self.model.within
        pairs = (speed.ttft_s, within.first_s), (speed.tpot_s, within.token_s)
        return max(1.0, *(seconds / limit for seconds, limit in pairs))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        model, priced = self.model, self.priced
        plain: dict[str, Any] = {
            "name": model.name, "spec": model.spec, "engine": model.engine,
            "residence": model.residence, "idle_s": model.idle_s, "weight": model.weight,
            "context": model.context, "placed": priced is not None, "reason": self.reason,
        }  # fmt: skip
        if priced is None:
            return plain
        limits = model.within._asdict()
        return plain | {
            "devices": [h.device for h, b in zip(priced.held, priced.busy, strict=True) if b > 0],
            "layout": priced.layout, "group": self.group, "share": priced.share,
            "memory": [h._asdict() | {"all_bytes": h.all_bytes} for h in priced.held],
            "busy": list(priced.busy), "cache_tokens": priced.cache_tokens, "slots": priced.slots,
            "alone": asdict(self.alone) if self.alone else None,
            "all_busy": asdict(self.busy) if self.busy else None,
            "slowdown": self.slowdown, "sm_percent": self.sm_percent, "load_s": priced.load_s,
            "demand_per_s": self.demand, "capacity_per_s": priced.capacity, "served": self.served,
            "within": {k: None if math.isinf(s) else s for k, s in limits.items()},
            "environment": self.environment, "commands": list(self.commands),
        }  # fmt: skip


@dataclass(frozen=True)
class DeviceUse:
    """Bytes on one device of the box, of all that is loaded at once."""

    device: str
    engines: tuple[
        tuple[str, EngineMemory], ...
    ]  # by model; of a group all, of which one is loaded
    loaded_bytes: int  # at most
    room_bytes: int | None  # that engines may take; None: no limit


@dataclass(frozen=True, eq=False)
class BoxAnswer:
    """Several models on one box.

    A `load` up to 1 serves all demands, of which it is the share of the busiest device's time, or
    of a group's; beyond, the lightest model gets 1 / load of its demand, and a model of k times its
    weight k times as much, at most all. No packing has less than `load_bound`.
    """

    cluster: Cluster
    models: tuple[PlacedModel, ...]
    devices: tuple[DeviceUse, ...]
    load: float
    load_bound: float
    proven: bool  # no packing of these options is better
    moved_bytes_per_s: float  # of weights that take turns
    options: int
    plans: int
    pricing_s: float
    packing_s: float
    disk: str  # bandwidth of the disk in words
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """True where every model is placed and keeps its limits whatever the others do."""
        return all(m.busy is not None and m.excess(m.busy) <= 1 + 1e-9 for m in self.models)

    @property
    def keeps_limits_alone(self) -> bool:
        """True where every model is placed, and keeps its limits while the others are idle."""
        return all(m.alone is not None and m.excess(_waiting(m)) <= 1 + 1e-9 for m in self.models)

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of models that take turns."""
        numbers = sorted({m.group for m in self.models if m.group is not None})
        return tuple(tuple(m.model.name for m in self.models if m.group == g) for g in numbers)

    def to_json(self) -> dict[str, Any]:
        """Plain data with the field names of the command line's `--json`."""
        return {
            "feasible": self.feasible, "keeps_limits_alone": self.keeps_limits_alone,
            "models": [m.to_json() for m in self.models],
            "groups": [list(names) for names in self.groups],
            "devices": [
                {
                    "device": use.device, "loaded_bytes": use.loaded_bytes,
                    "room_bytes": use.room_bytes,
                    "engines": {name: held._asdict() for name, held in use.engines},
                }
                for use in self.devices
            ],
            "load": self.load, "load_bound": self.load_bound, "proven": self.proven,
            "moved_bytes_per_s": self.moved_bytes_per_s, "options": self.options,
            "plans": self.plans, "pricing_s": self.pricing_s, "packing_s": self.packing_s,
            "disk": self.disk, "advice": list(self.advice), "notes": list(self.notes),
        }  # fmt: skip


def _waiting(model: PlacedModel) -> Speed:
    """The speed alone, with the loading that a group makes it wait for."""
    alone = model.alone
    assert alone is not None
    wait = model.load_s if model.group is not None else 0.0
    return Speed(alone.ttft_s + wait, alone.tpot_s, alone.tokens_per_s)
