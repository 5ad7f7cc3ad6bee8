"""Checks of this machine: libraries, devices, runtimes, matching costs, caches, the policy.

An exception of a library is the result of its check and does not stop the others.
"""

import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from gdp.base.units import format_bytes
from gdp.base.version import DISTRIBUTION, gdp_version, install_command
from gdp.cluster.types import UNLIMITED_BYTES
from gdp.targets.table import RUNTIMES

OK, NONE, WARN, FAIL = "ok", "-", "warn", "fail"
FOR_USERS = ("metis", "exact", "openvino", "torch", "gguf", "llamacpp", "cluster", "plots")
"""The extras that a user of gdp may want; the others are for who works on it."""


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    area: str
    name: str
    # OK; NONE: an extra that is not installed; WARN: gdp works, but less well; FAIL: part of gdp
    # does not work.
    status: str
    found: str
    advice: str = ""


def examine() -> dict[str, Any]:
    """Results of all checks as plain data; `healthy` if nothing fails, `warns` if something works
    less well than it could."""
    checks = list[Check]()
    for area, look in AREAS.items():
        try:
            checks += look()
        except Exception as error:  # whatever a broken library raises
            checks.append(Check(area, area, FAIL, f"{type(error).__name__}: {error}"))
    return {
        "gdp": gdp_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "healthy": all(check.status != FAIL for check in checks),
        "warns": any(check.status == WARN for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def _libraries() -> Iterator[Check]:
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        yield Check(
            "libraries", DISTRIBUTION, WARN, "not installed: run from a source tree",
            f"{install_command()} installs its libraries",
        )  # fmt: skip
        return
    for requirement in wanted:
        match = re.search(r"""extra == ['"]([^'"]+)['"]""", str(requirement.marker or ""))
        if match is None or match[1] in FOR_USERS:
            yield _library(requirement, match and match[1])


def _library(requirement: Any, extra: str | None) -> Check:
    """Check of a library, of the core or of an extra."""
    install = install_command(extra or "")
    area = f"extra {extra}" if extra else "libraries"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        status = FAIL if extra is None else NONE
        return Check(area, requirement.name, status, "not installed", install)
    if requirement.specifier.contains(version, prereleases=True):
        return Check(area, requirement.name, OK, version)
    status = FAIL if extra is None else WARN
    message = f"{version}, but {requirement.specifier} is wanted"
    return Check(area, requirement.name, status, message, install)


def _runtimes() -> Iterator[Check]:
    for row in RUNTIMES.values():
        try:
            metadata.version(row.distribution)
        except metadata.PackageNotFoundError:
            continue
        try:
            yield Check("runtimes", row.title, OK, ", ".join(row.devices()))
        except Exception as error:  # an import or a driver that fails in its own way
            yield Check("runtimes", row.title, FAIL, f"{type(error).__name__}: {error}",
                        f"reinstall {row.distribution}")  # fmt: skip


def _devices() -> Iterator[Check]:
    """This machine's devices, and the costs that a placement on them uses."""
    from gdp.cluster.detect import local_cluster
    from gdp.costs.default import FROM_DATASHEETS, calibrated, source_of

    for device in local_cluster().devices:
        memory = format_bytes(device.total_bytes) if device.memory_bytes < UNLIMITED_BYTES else "-"
        model = f", {device.model}" if device.model else ""
        shared = " shared" if device.memory_pool else ""
        yield Check("devices", device.name, OK, f"{device.kind}, {memory}{shared}{model}")
        source = source_of(device)
        if device.is_cpu and not calibrated(device):
            yield Check("costs", device.name, WARN, source,
                        "gdp profile --quick learns it in half a minute")  # fmt: skip
        elif source == FROM_DATASHEETS:
            yield Check("costs", device.name, WARN, source,
                        "measure models on it: gdp profile MODEL --device torch:cuda")  # fmt: skip
        else:
            yield Check("costs", device.name, OK, source)


def _presets() -> Iterator[Check]:
    """The presets of accelerators by maker and family, and of processors."""
    from gdp.cluster.table import presets
    from gdp.costs.measured.network import measured_families

    families: dict[tuple[str, str], list[str]] = {}
    for name, entry in presets().items():
        families.setdefault((entry.maker, entry.family), []).append(name)
    for (maker, family), names in sorted(families.items()):
        measured = not maker or family in measured_families()
        title = f"{maker} {family}" if maker else "processors"
        listed = ", ".join(sorted(names)) + ("" if measured else " (from datasheets)")
        yield Check("presets", title, OK, listed)


def _remembered() -> Iterator[Check]:
    """Tuned models of this machine."""
    from gdp.costs.machine import data_folder, records

    kept = records()
    if not kept:
        yield Check("costs", "this machine", OK, "nothing learned yet: gdp tune MODEL learns it")
    for record in kept:
        yield Check(
            "costs", record.model, OK,
            f"tuned {record.date[:10]} with {record.runtime}, {len(record.runs)} runs, "
            f"{record.off:.0%} off when last checked ({record.off_before:.0%} before)",
        )  # fmt: skip
    if kept:
        yield Check("costs", "kept in", OK, f"{data_folder()}; gdp tune --forget removes it")


def _caches() -> Iterator[Check]:
    from gdp.base.files.disk_cache import usage
    from gdp.base.kernels import cache
    from gdp.importers.pytorch.trace_cache import TRACES, keeps_traces

    where = cache.kept_in()
    if where is not None:
        yield Check("caches", "compiled kernels", OK, where)
    else:
        yield Check(
            "caches", "compiled kernels", WARN,
            "no folder can be written to: every run compiles for a minute",
            "set NUMBA_CACHE_DIR to a folder that can be written to",
        )  # fmt: skip
    traces = usage(TRACES)
    if not keeps_traces():
        yield Check("caches", "traces", OK, "not kept: GDP_KEEP_TRACES is off")
    elif traces is None:
        yield Check("caches", "traces", WARN, "not kept: there is no home folder",
                    "set GDP_CACHE_DIR to a folder of your own")  # fmt: skip
    else:
        size = f"{traces.files} of hf: models, {format_bytes(traces.size_bytes)}"
        yield Check("caches", "traces", OK, f"{traces.folder}: {size}")


def _checkpoints() -> Iterator[Check]:
    from gdp.costs.default import shipped
    from gdp.policy.method import load
    from gdp.policy.policy import default_checkpoint

    folder = default_checkpoint()
    if (folder / "meta.json").exists():
        load(None)
        yield Check("checkpoints", "policy", OK, str(folder))
    else:
        yield Check("checkpoints", "policy", WARN, f"none at {folder}", "gdp pretrain makes one")
    labels = [calibration.label() for calibration in shipped()]
    yield Check("checkpoints", "costs", OK if labels else WARN, "; ".join(labels) or "none")


AREAS: dict[str, Callable[[], Iterator[Check]]] = {
    "libraries": _libraries, "runtimes": _runtimes, "devices": _devices, "presets": _presets,
    "this machine": _remembered, "caches": _caches,
    "checkpoints": _checkpoints,
}  # fmt: skip
