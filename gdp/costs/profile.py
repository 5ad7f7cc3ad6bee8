"""Profiles: measured seconds of every kernel of some models on one device.

A profile holds the graphs of the models beside the times, so that a cost model can be fitted again
without the models. It stores seconds; it knows no runtime.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict, replace

from gdp.base.errors import GdpError
from gdp.base.files.reading import Kind, read_json
from gdp.base.files.writing import gzipped, write_atomic
from gdp.costs.base import MeasuredSeconds, Seconds
from gdp.graph.file import decode_graph, encode_graph
from gdp.graph.op_graph import OpGraph

SCHEMA = 1
STATISTIC = "smallest over rounds of the mean of the fastest quarter of a round's runs"


class ProfileError(GdpError):
    """A malformed profile, or one that does not belong with the others."""


_KIND = Kind("profile", ProfileError, "make one with `gdp profile`")
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Kernel(msgspec.Struct, frozen=True, array_like=True):
    """A unit that the runtime executed, and the ops of the graph that it stands for."""

    name: str
    type: str  # the runtime's own operator type
    ops: tuple[_Count, ...]  # indices of the graph's ops; empty for work that no op stands for
    seconds: Seconds
    spread: Annotated[float, msgspec.Meta(ge=0, le=1e30)]  # (median over rounds - least) / least


class ProfiledModel(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    """One model at one size. The runtime's profiler times kernels, a plain clock the latency."""

    name: str
    family: str  # sizes and widths of one architecture share a family; held out together
    graph: OpGraph
    latency_s: MeasuredSeconds  # of the whole session, without the profiler, session call included
    kernels: tuple[Kernel, ...]
    runs: _Count
    rounds: _Count

    @property
    def kernel_s(self) -> float:
        """Seconds of all kernels."""
        return sum(kernel.seconds for kernel in self.kernels)


class Overheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Overheads of execution in addition to kernels; None where not measured."""

    session_s: Seconds | None = None  # one call of a session, however small
    cut_s: Seconds | None = None  # what a further piece of a cut model adds, beyond kernels, call
    kernel_s: Seconds | None = None  # between two kernels of one session
    handover_s: Seconds | None = None  # waking the thread on another core
    handover_bytes_per_s: _Positive | None = None  # reading what another core wrote


class DeviceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured device, as far as times depend on it."""

    kind: str  # of gdp.cluster.types.Device
    model: str  # the processor's or accelerator's name
    features: tuple[str, ...] = ()  # what kernels are chosen by, such as "avx2"


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Models measured on one device with one set of libraries."""

    device: DeviceRecord
    runtime: str  # "onnxruntime" or "jax"
    threads: Annotated[int, msgspec.Meta(ge=0, le=2**20)]
    level: str  # of the runtime's graph optimisation
    versions: dict[str, str]
    date: str  # YYYY-MM-DD
    models: tuple[ProfiledModel, ...]
    overheads: Overheads = Overheads()
    statistic: str = STATISTIC

    @property
    def setting(self) -> tuple[DeviceRecord, str, int, str]:
        """Properties in which two profiles must agree to be merged."""
        return self.device, self.runtime, self.threads, self.level


class _Model(ProfiledModel, frozen=True, eq=False):
    graph: msgspec.Raw  # type: ignore[assignment] # pyright: ignore[reportIncompatibleVariableOverride]


class _File(Profile, frozen=True, kw_only=True):
    """The JSON form of a profile, in which nothing is optional."""

    gdp_profile: int  # the schema version
    models: tuple[_Model, ...]  # pyright: ignore[reportIncompatibleVariableOverride]
    overheads: Overheads
    statistic: str


def merge(profiles: Sequence[Profile]) -> Profile:
    """One profile of all models; a model measured several times keeps its smallest times.

    Raises `ProfileError` when devices, runtimes, threads or levels differ. The date is the latest.
    """
    if not profiles:
        raise ValueError("merge needs at least one profile")
    first = profiles[0]
    for other in profiles[1:]:
        if other.setting != first.setting:
            raise ProfileError(
                f"profiles of different settings cannot be merged: {_describe(first)} and "
                f"{_describe(other)}; calibrate them one by one"
            )
    models: dict[str, ProfiledModel] = {}
    for model in (model for profile in profiles for model in profile.models):
        key = f"{model.name} {model.graph.digest}"
        models[key] = _fastest(models[key], model) if key in models else model
    latest = max(profiles, key=lambda profile: profile.date)
    return replace(latest, models=tuple(models.values()), overheads=_merge_overheads(profiles))


def _fastest(a: ProfiledModel, b: ProfiledModel) -> ProfiledModel:
    """The smaller times of two measurements; of different kernels, the faster measurement."""
    if [k.ops for k in a.kernels] != [k.ops for k in b.kernels]:
        return min(a, b, key=lambda model: model.latency_s)
    kernels = tuple(
        replace(x, seconds=min(x.seconds, y.seconds), spread=max(x.spread, y.spread))
        for x, y in zip(a.kernels, b.kernels, strict=True)
    )
    return replace(
        a, latency_s=min(a.latency_s, b.latency_s), kernels=kernels,
        runs=a.runs + b.runs, rounds=a.rounds + b.rounds,
    )  # fmt: skip


def _merge_overheads(profiles: Sequence[Profile]) -> Overheads:
    """The lowest latencies and the highest bandwidths of several profiles."""
    merged: dict[str, float | None] = {}
    for name in Overheads.__struct_fields__:
        seen = [v for p in profiles if (v := getattr(p.overheads, name)) is not None]
        best = max if name.endswith("per_s") else min
        merged[name] = best(seen) if seen else None
    return Overheads(**merged)


def _describe(profile: Profile) -> str:
    device = profile.device
    parts = [device.kind, device.model, *device.features, profile.runtime]
    return f"{' '.join(p for p in parts if p)} ({profile.threads} threads, level {profile.level})"


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON, gzipped where the name ends in .gz."""
    document = asdict(profile) | {
        "gdp_profile": SCHEMA,
        "versions": dict(sorted(profile.versions.items())),
        "models": [_encode_model(model) for model in profile.models],
    }
    data = msgspec.json.encode(document)
    write_atomic(path, gzipped(data) if str(path).endswith(".gz") else data)


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile; raises `ProfileError` when it is malformed."""
    document = asdict(read_json(path, _KIND, _File))
    schema = document.pop("gdp_profile")
    if schema != SCHEMA:
        raise ProfileError(
            f"{path} has profile schema {schema}, this gdp reads {SCHEMA}; profile again"
        )
    models = tuple(_decode_model(model, str(path)) for model in document.pop("models"))
    return Profile(**document, models=models)


def _encode_model(model: ProfiledModel) -> dict[str, Any]:
    # Four digits are more than any measurement repeats.
    return asdict(model) | {
        "latency_s": float(f"{model.latency_s:.6g}"),
        "kernels": [
            replace(k, seconds=float(f"{k.seconds:.4g}"), spread=round(float(k.spread), 3))
            for k in model.kernels
        ],
        "graph": msgspec.Raw(encode_graph(model.graph)),
    }


def _decode_model(model: _Model, path: str) -> ProfiledModel:
    graph = decode_graph(bytes(model.graph), f"{path}, model {model.name!r}")
    for kernel in model.kernels:
        if max(kernel.ops, default=0) >= graph.num_ops:
            raise ProfileError(
                f"{path}: kernel {kernel.name!r} of model {model.name!r} has an op that does not "
                f"exist: {max(kernel.ops)} of {graph.num_ops}"
            )
    fields: dict[str, Any] = {**asdict(model), "graph": graph}
    return ProfiledModel(**fields)
