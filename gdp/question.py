"""The question that a placement answers, kept in its file, so that later commands need the file
alone: model, machine, objective, demands, costs, and the runtime that it was planned for."""

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from gdp.cluster.file import cluster_of_toml, cluster_toml
from gdp.cluster.reserve import default_reserve
from gdp.cluster.types import Cluster, Device
from gdp.constraints import Constraints
from gdp.errors import PlacementError

_PREFIX = "hf:"


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Arguments of `gdp.place`. The digest of the model's graph stands in the placement itself."""

    model: str = ""  # path or spec with its options; empty for a graph or traced model
    dims: dict[str, int] = {}
    cluster: str = ""  # as TOML, memory limits included
    objective: str = "latency"
    constraints: Constraints = msgspec.field(default_factory=Constraints)
    costs: str = ""  # path, or "shipped"; empty for the default or a callable
    costs_sha256: str = ""  # of the files there
    target: str = ""  # runtime that was planned for
    granularity: str = ""
    offload: str = ""

    def machine(self) -> Cluster | None:
        """The cluster, limits included."""
        return cluster_of_toml(self.cluster, "the placement's cluster") if self.cluster else None

    def located(self, folder: Path) -> "Question":
        """The question with paths that are found in a folder and not here made to lead there."""
        model, costs = _found(self.model, folder), _found(self.costs, folder)
        return replace(self, model=model, costs=costs)

    def require_costs(self) -> str | None:
        """The costs, None for the default; raises `PlacementError` where their files changed."""
        if self.costs_sha256 and digest_of(self.costs) != self.costs_sha256:
            raise PlacementError(
                f"the placement was made with other costs than {self.costs!r} holds now; give "
                "--costs, or place again"
            )
        return self.costs or None

    def require_cluster(self, given: Cluster) -> None:
        """Raise `PlacementError` with the first difference where another cluster is given; devices
        with more memory than what was planned with, or with the default reserve of as much, are
        the same."""
        own = self.machine()
        if own is None:
            return
        if own.device_names == given.device_names:
            limited = map(_limited_as, given.devices, own.devices)
            given = dataclasses.replace(given, devices=tuple(limited))
        if cluster_toml(given) != self.cluster:
            raise PlacementError(
                f"the placement was made for another cluster: {_difference(own, given)}; leave "
                "--cluster out to use its own, or place again"
            )

    def require_constraints(self, given: Constraints) -> None:
        """Raise `PlacementError` where other demands are given than the placement was made with."""
        if given not in (Constraints(), self.constraints):
            raise PlacementError(
                "the placement was made with other constraints; leave these out to use its own, or "
                "place again"
            )


def _limited_as(given: Device, own: Device) -> Device:
    """A device with the limit, reserve and pool of another one, where it has room for these."""
    room = given.memory_bytes
    if given.reserve_bytes == default_reserve(given):  # nothing was said of it
        room = given.total_bytes
    if room < own.memory_bytes or not own.total_bytes <= given.total_bytes:
        return given
    return dataclasses.replace(
        given, memory_bytes=own.memory_bytes, reserve_bytes=own.reserve_bytes,
        memory_pool=own.memory_pool,
    )  # fmt: skip


def digest_of(path: str) -> str:
    """SHA-256 of a file, or of the files of a folder with their names; "" where there is none."""
    root = Path(path)
    if root.is_file():
        return hashlib.sha256(root.read_bytes()).hexdigest()
    if not root.is_dir():
        return ""
    whole = hashlib.sha256()
    for file in sorted(p for p in root.rglob("*") if p.is_file()):
        whole.update(f"{file.relative_to(root).as_posix()}\0".encode())
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def costs_named(costs: Any) -> tuple[str, str]:
    """Name and digest of costs as `gdp.place` takes them; empty for the default and a callable."""
    if not isinstance(costs, str | os.PathLike):
        return "", ""
    return os.fspath(costs), digest_of(os.fspath(costs))


def _found(spec: str, folder: Path) -> str:
    """The spec, or with its path below a folder where it is found there and not here."""
    prefix = _PREFIX if spec.startswith(_PREFIX) else ""
    path, mark, options = spec.removeprefix(prefix).partition("?")
    if not path or Path(path).exists() or not (folder / path).exists():
        return spec
    return f"{prefix}{folder / path}{mark}{options}"


def _difference(own: Cluster, given: Cluster) -> str:
    """The first thing that two clusters do not share."""
    if own.device_names != given.device_names:
        return f"devices {', '.join(own.device_names)}, not {', '.join(given.device_names)}"
    parts: tuple[tuple[str, Callable[[Cluster, int], Any]], ...] = (
        ("memory", lambda c, d: c.devices[d].memory_bytes),
        ("kind", lambda c, d: c.devices[d].kind),
        ("speed", lambda c, d: (c.devices[d].flop_per_s, c.devices[d].bytes_per_s)),
        ("description", lambda c, d: c.devices[d]),
    )
    for what, part in parts:
        for d, name in enumerate(own.device_names):
            if part(own, d) != part(given, d):
                return f"{what} of {name} differs"
    return "host or links differ" if own.name == given.name else f"{own.name!r}, not {given.name!r}"
