"""Memory of measured runs: a JSON file for each, in a folder of the user's.

`GDP_DATA_DIR`, else gdp's part of the user's data folder. An exported file holds several runs in
the same form: names of devices, versions, sizes, seconds; nothing of the user, no paths.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from gdp.base.files.reading import Kind, read_json
from gdp.base.files.writing import indented_json, write_atomic
from gdp.corrections.features import EngineStack
from gdp.corrections.process import Lesson
from gdp.corrections.run import MeasurementFileError
from gdp.costs.machine import data_folder
from gdp.costs.measured.own import CardKernels

SCHEMA = 1
MOST_RUNS = 200
"""Newest runs of a stack that count."""
_KIND = Kind("file of measured runs", MeasurementFileError, "write one with gdp learn --export")
_Size = Annotated[float, msgspec.Meta(ge=0, le=1e16)]
_Name = Annotated[str, msgspec.Meta(max_length=400)]
_Told = dict[_Name, Annotated[float, msgspec.Meta(ge=0, le=1e9)]]


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One load of a measured run, and what it teaches of its stack."""

    date: _Name
    tool: _Name
    stack: EngineStack
    model: _Name  # its last name, without folders
    format: _Name
    costs: Annotated[str, msgspec.Meta(max_length=10_000)]  # label, of predictions of the passes
    prompt: _Size
    new: _Size
    concurrency: _Size
    measured: _Told  # seconds and rates as the file told them
    predicted: _Told  # the same, before anything was learned
    passes: Annotated[tuple[Lesson, ...], msgspec.Meta(max_length=2)]

    @property
    def subject(self) -> str:
        """Digest of all but the date and the predictions: a run that is read twice counts once."""
        sizes = {name: float(getattr(self, name)) for name in ("prompt", "new", "concurrency")}
        own = msgspec.structs.replace(self, date="", predicted={}, passes=(), costs="", **sizes)
        return hashlib.sha256(msgspec.json.encode(own)).hexdigest()[:24]


class RunFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Several runs and kernels, as they are exchanged."""

    schema: int
    runs: tuple[RunRecord, ...]
    cards: tuple[CardKernels, ...] = ()  # measured kernels


def runs_folder() -> Path | None:
    """Folder of measured runs; None where there is no home folder."""
    folder = data_folder()
    return None if folder is None else folder.parent / "runs"


def remember(runs: Sequence[RunRecord]) -> Path:
    """Keep runs, instead of the same ones as they were read before.

    Raises:
        OSError: if they cannot be written.
    """
    folder = runs_folder()
    if folder is None:
        raise OSError("there is no home folder: set GDP_DATA_DIR to a folder of your own")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for run in runs:
        write_atomic(folder / f"{run.subject}.json", indented_json(RunFile(SCHEMA, (run,))))
    return folder


def remembered() -> dict[Path, RunRecord]:
    """All runs by their files, oldest first. A damaged file is left out: it costs knowledge, no
    answer."""
    folder = runs_folder()
    if folder is None or not folder.is_dir():
        return {}
    files = ((path, path.stat()) for path in sorted(folder.glob("*.json")))
    return dict(_read(tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in files)))


@functools.lru_cache(maxsize=1)
def _read(files: tuple[tuple[Path, int, int], ...]) -> dict[Path, RunRecord]:
    """Runs of files by date; a question asks for them once a plan, and reads them once."""
    found = dict[Path, RunRecord]()
    for path, *_ in files:
        try:
            found[path] = read_runs(path)[0]
        except (MeasurementFileError, OSError, IndexError):
            continue
    return dict(sorted(found.items(), key=lambda item: item[1].date))


def read_runs(path: str | os.PathLike[str]) -> tuple[RunRecord, ...]:
    """Runs of a file of `gdp learn --export`; raises `MeasurementFileError` for another."""
    return read_file(path).runs


def read_file(path: str | os.PathLike[str]) -> RunFile:
    """All of such a file; raises `MeasurementFileError` for another."""
    document = read_json(path, _KIND, RunFile)
    if document.schema != SCHEMA:
        raise MeasurementFileError(
            f"{os.fspath(path)}: schema {document.schema}, this gdp reads {SCHEMA}"
        )
    return document


def exported(runs: Sequence[RunRecord], cards: Sequence[CardKernels] = ()) -> bytes:
    """Runs and kernels as one JSON file."""
    return indented_json(RunFile(SCHEMA, tuple(runs), tuple(cards)))


def forget(keys: Sequence[str] | None = None) -> int:
    """Delete the runs of stacks with these keys, or of all; returns how many there were."""
    gone = [path for path, run in remembered().items() if keys is None or run.stack.key in keys]
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


def runs_of(stack: EngineStack, costs: str) -> list[RunRecord]:
    """The newest runs of a stack under costs of the same label; of a stack without a version those
    of the version that was measured last."""
    known = remembered().values()
    own = [run for run in known if run.costs == costs and run.passes and _same(run.stack, stack)]
    if own and not stack.version:
        own = [run for run in own if run.stack.key == own[-1].stack.key]
    return own[-MOST_RUNS:]


def _same(one: EngineStack, other: EngineStack) -> bool:
    named = (one.engine, one.backend, one.card, one.host)
    same_version = not other.version or one.key == other.key
    return same_version and named == (other.engine, other.backend, other.card, other.host)
