"""Models of one box: a TOML file with a `[[model]]` each, or the same from Python."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gdp.base.errors import ArgumentError
from gdp.base.files.reading import Kind, convert, decode_toml, read_bytes
from gdp.base.units import parse_bytes
from gdp.importers.spec import ModelSpec
from gdp.question.models import HF_PREFIX, is_gguf, spec_of
from gdp.sim.traffic import Traffic
from gdp.sim.traffic_text import NO_LIMITS, TrafficLimits, parse_limits, parse_traffic
from gdp.targets.table import TARGETS

KIND = Kind("file of several models", ArgumentError)
OTHER = "other"
"""A server that gdp does not plan: its memory and seconds are given."""
ENGINES: Mapping[str, str] = {
    "llamacpp": "llamacpp", "vllm": "vllm", "sglang": "vllm", "transformers": "accelerate",
    OTHER: "",
}  # fmt: skip
"""Engines, and the target that plans each alone."""
PROMPT, NEW = 2048, 256
"""Tokens of a request where neither traffic nor a smaller context says them."""
ALWAYS, ON_DEMAND = "always", "on demand"
_IDLE = re.compile(r"idle after (\d{1,6}) ?(s|min|h)")
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_SET_BY_TRAFFIC = ("batch", "prompt", "new", "context", "requests")


class Within(msgspec.Struct, forbid_unknown_fields=True):
    """Limits that 95% of the requests are to keep."""

    ttft: str = ""
    tpot: str = ""


class ModelEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A `[[model]]`."""

    spec: str
    name: str = ""
    engine: str = ""
    context: int | None = None
    traffic: str = ""
    within: Within = msgspec.field(default_factory=Within)
    residence: str = ALWAYS
    weight: float = 1.0
    devices: list[str] = []
    memory: int | str | None = None  # of engine "other"
    seconds: float | None = None  # of a request, of engine "other"
    command: str = ""  # of engine "other"


class BoxEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A file of several models."""

    model: list[ModelEntry]


@dataclass(frozen=True)
class BoxModel:
    """A model of a box, as it was asked for."""

    name: str
    spec: str
    engine: str  # of `ENGINES`
    traffic: Traffic
    within: TrafficLimits = NO_LIMITS
    context: int = 0  # tokens of one request; 0: those of the longest one
    residence: str = ALWAYS
    idle_s: int = 0  # after which it is unloaded; 0: never, or as soon as another one is asked
    weight: float = 1.0
    devices: tuple[str, ...] = ()  # on which it may run; (): any
    memory_bytes: int = 0
    seconds: float = 0.0
    command: str = ""

    @property
    def swaps(self) -> bool:
        """True where it may be unloaded."""
        return self.residence != ALWAYS

    @property
    def target(self) -> str:
        """The target that plans it alone; "" for none."""
        return ENGINES[self.engine]

    @property
    def rate(self) -> float:
        """Requests/s that arrive; 0 where clients ask again once they are answered."""
        traffic = self.traffic
        last_s = max(r.at_s for r in traffic.requests)
        given = traffic.rate or (len(traffic.requests) / last_s if last_s else 0.0)
        return 0.0 if traffic.concurrency else given


def holds_models(path: str | os.PathLike[str]) -> bool:
    """True for a TOML file with a `[[model]]`."""
    if not os.fspath(path).endswith(".toml") or not Path(path).is_file():
        return False
    return re.search(rb"^\s*\[\[\s*model\s*\]\]", read_bytes(path, KIND), re.MULTILINE) is not None


def read_models(
    models: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
) -> tuple[BoxModel, ...]:
    """The models of a file, or of mappings with the keys of a `[[model]]`.

    Raises:
        ArgumentError: A key or value is unknown, or a name stands twice.
    """
    if isinstance(models, str | os.PathLike):
        where, folder = os.fspath(models), Path(models).parent
        entries = decode_toml(read_bytes(models, KIND), KIND, BoxEntry, where).model
    else:
        where, folder = "models", Path()
        raw = {"model": [dict(model) for model in models]}
        entries = convert(raw, KIND, BoxEntry, where).model
    if not entries:
        raise ArgumentError(f"{where} has no [[model]]: give at least one")
    known = [_model(entry, folder) for entry in entries]
    names = [model.name for model in known]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ArgumentError(
            f"{where}: {names.count(twice)} models have the name {twice!r}; give each a name of "
            "its own"
        )
    return tuple(known)


def _model(entry: ModelEntry, folder: Path) -> BoxModel:
    name = entry.name or Path(ModelSpec.of(entry.spec).path.removeprefix(HF_PREFIX)).stem
    where = f"model {name!r}"
    if not re.fullmatch(r"[\w.:-]+", name):
        raise ArgumentError(f"{where}: a name has letters, digits, and '._:-' alone; give name")
    spec = _beside(entry.spec, folder)
    engine = entry.engine or ("llamacpp" if is_gguf(spec) else "vllm")
    if engine not in ENGINES:
        reason = "is not known"
        if engine in TARGETS:
            reason = "cannot share a card: it has no server with a share of memory"
        raise ArgumentError(f"{where}: engine {engine!r} {reason}; there are {', '.join(ENGINES)}")
    if is_gguf(spec) != (engine == "llamacpp") and engine != OTHER:
        needs = ".gguf files" if engine == "llamacpp" else "hf: models"
        raise ArgumentError(f"{where}: engine {engine!r} is for {needs}, not for {entry.spec!r}")
    if engine == OTHER and (entry.memory is None or entry.seconds is None):
        raise ArgumentError(
            f"{where}: of engine 'other' gdp plans nothing: give memory, such as '6GiB', and "
            "seconds of a request"
        )
    if engine != OTHER and (entry.memory is not None or entry.seconds is not None):
        raise ArgumentError(f"{where}: memory and seconds are of engine 'other' alone")
    set_by = [o for o in ModelSpec.of(spec).options if o in _SET_BY_TRAFFIC]
    if set_by:
        raise ArgumentError(f"{where}: traffic and context say tokens: leave out ?{set_by[0]}")
    if not 0 < entry.weight < float("inf"):
        raise ArgumentError(f"{where}: weight must be a positive number, got {entry.weight:g}")
    seconds = entry.seconds
    if seconds is not None and not 0 < seconds < 1e9:
        raise ArgumentError(f"{where}: seconds must be a positive number, got {seconds:g}")
    residence, idle_s = _residence(entry.residence, where)
    traffic = _traffic(entry, where)
    longest = max(r.prompt + r.new for r in traffic.requests)
    if entry.context is not None and entry.context < longest:
        raise ArgumentError(
            f"{where}: context {entry.context} is less than the {longest} tokens of its longest "
            "request; give more context or shorter requests"
        )
    return BoxModel(
        name, spec, engine, traffic, _limits(entry.within, where), entry.context or 0, residence,
        idle_s, entry.weight, tuple(entry.devices), _bytes(entry.memory, where),
        seconds or 0.0, entry.command,
    )  # fmt: skip


def _beside(spec: str, folder: Path) -> str:
    """A specification whose file is looked for where one is, then beside the file of models."""
    own = ModelSpec.of(spec)
    prefix = HF_PREFIX if own.path.startswith(HF_PREFIX) else ""
    path = own.path.removeprefix(HF_PREFIX)
    beside = folder / path
    if not Path(path).exists() and beside.exists():
        return spec_of(ModelSpec(prefix + os.fspath(beside), own.options))
    return spec


def _residence(text: str, where: str) -> tuple[str, int]:
    if text in (ALWAYS, ON_DEMAND):
        return text, 0
    if match := _IDLE.fullmatch(text):
        return "idle", int(match[1]) * _SECONDS[match[2]]
    raise ArgumentError(
        f"{where}: residence is 'always', 'on demand' or 'idle after 5 min', got {text!r}"
    )


def _traffic(entry: ModelEntry, where: str) -> Traffic:
    if entry.traffic:
        try:
            return parse_traffic(entry.traffic)
        except ArgumentError as error:
            raise ArgumentError(f"{where}: traffic: {error}") from None
    room = entry.context or PROMPT + NEW
    if room < 2:
        raise ArgumentError(f"{where}: context must be at least 2, got {entry.context}")
    new = min(NEW, room // 2)
    return parse_traffic(f"concurrency=1,prompt={min(PROMPT, room - new)},new={new}")


def _limits(within: Within, where: str) -> TrafficLimits:
    parts = [
        f"{name}={value}" for name, value in (("first", within.ttft), ("token", within.tpot))
        if value
    ]  # fmt: skip
    try:
        return parse_limits(",".join(parts)) if parts else NO_LIMITS
    except ArgumentError:
        raise ArgumentError(
            f"{where}: within must look like {{ ttft = '2s', tpot = '60ms' }}"
        ) from None


def _bytes(memory: int | str | None, where: str) -> int:
    try:
        size = parse_bytes(memory or 0)
    except ValueError as error:
        raise ArgumentError(f"{where}: memory: {error}") from None
    if size < 0:
        raise ArgumentError(f"{where}: memory must not be negative, got {memory!r}")
    return size
