"""The call `learn_kernels`: measured kernels of a user's own card become its costs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gdp.base.errors import ArgumentError, one_line
from gdp.base.units import format_bytes, format_seconds
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.types import Device
from gdp.corrections.run import MeasurementFileError
from gdp.costs import machine
from gdp.costs.measured import own
from gdp.costs.measured.kernels import descriptor_of, floor_s
from gdp.costs.measured.network import shipped_network
from gdp.targets.measured_files import records_of_file

COLUMNS = ("kind", "b", "m", "n", "k", "dtype", "seconds")
FASTEST = 0.9
"""Share of the roofline's seconds below which a kernel is refused."""


@dataclass(frozen=True)
class LearnedKernels:
    """Kernels of a card that were read."""

    card: str  # kind of device
    kernels: int
    known: int  # kernels of the card, these among them
    off_before: float  # mean relative error of the network on these kernels, before any was known
    off: float  # the same on layers left out, after the others
    folder: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "card": self.card, "kernels": self.kernels, "known": self.known,
            "off_before": self.off_before, "off": self.off,
            "remembered_in": None if self.folder is None else str(self.folder),
        }  # fmt: skip


def are_kernels(path: str | os.PathLike[str]) -> bool:
    """True for a table with the columns of measured kernels."""
    return set(COLUMNS) <= records_of_file(path)[0].keys()


def learn_kernels(
    files: Sequence[str | os.PathLike[str]], cluster: Machine, *, keep: bool = True
) -> LearnedKernels:
    """Learn from measured kernels how fast a card really is, for PyTorch and engines that serve.

    Args:
        files: CSV with the columns kind, b, m, n, k, dtype and seconds, a kernel a row.
        cluster: A machine whose accelerators are all of the measured kind.
        keep: Remember it; else only say how far off predictions were.

    Raises:
        MeasurementFileError: A file cannot be read, a row is no kernel, or it is faster than the
            card can be.
        ArgumentError: The cluster has no accelerator, or several kinds.
    """
    cards = {x.kind: x for x in load_cluster(cluster).devices if not x.is_cpu}
    if len(cards) != 1:
        raise ArgumentError(
            f"the machine has {', '.join(cards) or 'no accelerator'}; name one with the measured "
            "card alone, such as --cluster cpu+rtx3090"
        )
    card = next(iter(cards.values()))
    network = shipped_network()
    if network is None:
        raise ArgumentError("the kernel network is not here: install gdp again")
    rows = [row for file in files for row in _rows(file, card)]
    if len(rows) < own.LEAST_KERNELS:
        raise MeasurementFileError(
            f"{files[0]} has {len(rows)} kernels; measure {own.LEAST_KERNELS} or more"
        )
    made = own.CardKernels(card.kind, machine.now(), tuple(rows[-own.MOST_KERNELS :]))
    folder = own.remember([made]) if keep else None
    kernels, seconds = own.kernels_of(rows), np.array([row.seconds for row in rows])
    before, after = own.held_out_error(network[0], kernels, descriptor_of(card), seconds)
    known = own.remembered().get(card.kind) if keep else None
    return LearnedKernels(
        card.kind, len(rows), len(known.kernels if known else rows), before, after, folder
    )


def _rows(path: str | os.PathLike[str], card: Device) -> list[own.KernelRow]:
    """Kernels of a file; raises `MeasurementFileError` for one that cannot be."""
    rows = []
    for line, record in enumerate(records_of_file(path), 2):
        where, extra = f"{path}, row {line}", record.keys() - set(COLUMNS)
        if extra or record.keys() != set(COLUMNS):
            raise MeasurementFileError(
                one_line(f"{where}: its columns must be {','.join(COLUMNS)}, it has "
                         f"{','.join(map(str, record))}")
            )  # fmt: skip
        try:
            rows.append(msgspec.convert(record, own.KernelRow, strict=False))
        except msgspec.ValidationError as error:
            raise MeasurementFileError(one_line(f"{where}: {error}")) from None
        if rows[-1].kind == "prompt attention" and rows[-1].m % rows[-1].n:
            raise MeasurementFileError(
                f"{where}: a whole prompt of n tokens has m = n x query heads of each key head, "
                f"not {rows[-1].m:g} for {rows[-1].n:g}"
            )
    kernels, silicon = own.kernels_of(rows), descriptor_of(card)
    peaks = np.array(silicon.flop_per_s)[kernels.arithmetic]
    least = floor_s(kernels, peaks, np.full(len(rows), silicon.bytes_per_s))
    for i in np.flatnonzero([row.seconds for row in rows] < FASTEST * least).tolist():
        bound = (
            f"{kernels.flop[i] / 1e9:.3g} GFLOP at {peaks[i] / 1e12:.3g} TFLOP/s"
            if kernels.flop[i] / peaks[i] > kernels.total_bytes[i] / silicon.bytes_per_s
            else f"{format_bytes(int(kernels.total_bytes[i]))} at "
            f"{silicon.bytes_per_s / 1e9:.4g} GB/s"
        )
        raise MeasurementFileError(
            f"{path}, row {i + 2}: {rows[i].kind} in {format_seconds(rows[i].seconds)} cannot be, "
            f"as {bound} take {format_seconds(float(least[i]))}: wait for the card before the "
            "clock stops, and let each run read other tensors than its cache holds"
        )
    return rows
