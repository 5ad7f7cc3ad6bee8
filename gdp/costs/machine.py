"""Memory of this machine: measured runs, kept in a folder of the user's.

`GDP_DATA_DIR`, else gdp's part of the user's data folder, holds one file of JSON for each tuning of
a model; two processes write two files. A file counts where processor or accelerators, the runtime
and its version, and the costs it was learned on are the same.
"""

import datetime
import functools
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from gdp.base.files.reading import Kind, read_json
from gdp.base.files.writing import indented_json, write_atomic
from gdp.cluster.detect import cpu_model
from gdp.cluster.types import Cluster
from gdp.costs.adapt import Adaptation, AdaptedCosts, Run, adapt
from gdp.costs.base import CostModel
from gdp.costs.profile import ProfileError
from gdp.graph.op_graph import OpGraph
from gdp.graph.source import Source

SCHEMA = 1
MOST_PIECES = 600
"""Pieces of all runs that a fit reads, the newest first: a fit takes their number to the third."""
_Off = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_KIND = Kind("record of a machine", ProfileError, "tune again: gdp tune")


class TunedDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device that was measured."""

    kind: str
    model: str  # name of the processor or accelerator


class MachineRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model that was measured on a machine."""

    schema: int
    date: str
    model: str
    digest: str  # of its graph
    runtime: str
    versions: dict[str, str]  # of the runtime
    costs: str  # label of the costs that the runs are relative to
    devices: tuple[TunedDevice, ...]
    runs: tuple[Run, ...]
    off_before: _Off  # mean share by which predictions of whole models missed
    off: _Off  # the same, of predictions made after learning


def data_folder() -> Path | None:
    """Folder of all that is kept of machines; None where there is no home folder."""
    if named := os.environ.get("GDP_DATA_DIR"):
        return Path(named) / "machine"
    try:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return Path(base) / "gdp" / "machine"


_RUNTIMES: Mapping[Source, str] = {
    "onnx": "onnxruntime", "jax": "jax", "torch": "torch", "gguf": "llama-cpp-python"
}  # fmt: skip


def runtime_of(graph: OpGraph) -> str:
    """Distribution of the runtime that executes such a graph by default."""
    return _RUNTIMES[graph.source]


def remember(record: MachineRecord) -> Path:
    """Keep a record, instead of earlier ones of the same model, runtime and costs.

    Raises:
        OSError: if it cannot be written.
    """
    folder = data_folder()
    if folder is None:
        raise OSError("there is no home folder: set GDP_DATA_DIR to a folder of your own")
    path = folder / f"{record.digest[:16]}-{record.runtime}-{secrets.token_hex(4)}.json"
    older = [p for p, r in _read(folder).items() if _subject(r) == _subject(record)]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, encode(record))
    for old in older:
        old.unlink(missing_ok=True)
    return path


def encode(record: MachineRecord) -> bytes:
    """A record as JSON."""
    return indented_json(record)


def _subject(record: MachineRecord) -> tuple[object, ...]:
    return (record.digest, record.runtime, record.costs, record.devices)


def records() -> list[MachineRecord]:
    """All records, oldest first. A damaged file is left out: it costs knowledge, no answer."""
    folder = data_folder()
    return [] if folder is None else sorted(_read(folder).values(), key=lambda r: r.date)


def _read(folder: Path) -> dict[Path, MachineRecord]:
    records = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            record = read_json(path, _KIND, MachineRecord)
        except (ProfileError, OSError):
            continue
        if record.schema == SCHEMA:
            records[path] = record
    return records


def forget() -> int:
    """Delete all records; returns how many there were."""
    folder = data_folder()
    files = sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else []
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def read_record(path: str | os.PathLike[str]) -> MachineRecord:
    """A record from a file of `gdp tune --write-costs`; raises `ProfileError` for another."""
    record = read_json(path, _KIND, MachineRecord)
    if record.schema != SCHEMA:
        raise ProfileError(f"{os.fspath(path)}: schema {record.schema}, this gdp reads {SCHEMA}")
    return record


def measured_devices(cluster: Cluster) -> tuple[TunedDevice, ...]:
    """Kinds and models of the devices of a cluster, which are on this machine."""
    return tuple(dict.fromkeys(
        TunedDevice(d.kind, d.model or (cpu_model() if d.is_cpu else "")) for d in cluster.devices
    ))  # fmt: skip


def now() -> str:
    """Date and time, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Knowledge:
    """Records that hold for a cluster, a runtime and costs."""

    records: Sequence[MachineRecord] = field(default=())

    @property
    def runs(self) -> list[Run]:
        """The newest runs, at most of `MOST_PIECES` pieces together."""
        kept: list[Run] = []
        for run in (run for record in self.records[::-1] for run in record.runs[::-1]):
            if kept and sum(len(r.pieces) for r in kept) + len(run.pieces) > MOST_PIECES:
                break
            kept.append(run)
        return kept[::-1]

    def adaptation(self) -> Adaptation:
        """The multipliers that these runs teach."""
        return adapt(self.runs)

    def after(self, record: MachineRecord) -> "Knowledge":
        """This knowledge once a record is remembered, instead of earlier ones of its subject."""
        others = (r for r in self.records if _subject(r) != _subject(record))
        return Knowledge([*others, record])

    def label(self) -> str:
        """Number of models that taught it, and the error of the last predictions."""
        count = len({record.digest for record in self.records})
        off = self.records[-1].off
        models = f"{count} model{'s' if count > 1 else ''}"
        return f"this machine, tuned on {models}, {off:.0%} off when last checked"


def knowledge(cluster: Cluster, runtime: str, costs: str) -> Knowledge:
    """Records of a cluster's devices under a runtime, relative to the costs of a label."""
    devices, installed = set(measured_devices(cluster)), runtime_versions(runtime)
    return Knowledge([
        r for r in records()
        if r.runtime == runtime and r.costs == costs and set(r.devices) <= devices
        and all(installed.get(name) == version for name, version in r.versions.items())
    ])  # fmt: skip


def runtime_versions(runtime: str) -> dict[str, str]:
    """The version of a runtime's distribution; empty where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return {runtime: version(runtime)}
    except PackageNotFoundError:
        return {}


def remembered_costs(
    base: CostModel, label: str, cluster: Cluster, graph: OpGraph
) -> tuple[CostModel, str]:
    """The costs with all that is remembered of this machine, and their label; as given where
    nothing is."""
    folder = data_folder()
    if folder is None or not folder.is_dir() or not any(folder.iterdir()):
        return base, label
    known = knowledge(cluster, runtime_of(graph), label)
    if not known.records:
        return base, label
    return AdaptedCosts(base, _fitted(known.records)), f"{known.label()}; {label}"


def _fitted(records: Sequence[MachineRecord]) -> Adaptation:
    return _fit(tuple(encode(record) for record in records))


@functools.lru_cache(maxsize=8)
def _fit(encoded: tuple[bytes, ...]) -> Adaptation:
    return Knowledge([msgspec.json.decode(e, type=MachineRecord) for e in encoded]).adaptation()


def recorded_costs(base: CostModel, label: str, record: MachineRecord) -> tuple[CostModel, str]:
    """The costs as one record corrects them, and their label.

    Raises:
        ProfileError: if the record is relative to other costs.
    """
    if record.costs != label:
        raise ProfileError(
            f"the record of {record.model} is relative to costs {record.costs!r}, here they are "
            f"{label!r}; tune again: gdp tune"
        )
    return AdaptedCosts(base, _fitted([record])), f"tuned on {record.model}; {label}"
