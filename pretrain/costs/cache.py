"""Rows of `pretrain.costs.tables` in a file, as reading the tables takes minutes."""

from dataclasses import fields
from pathlib import Path

import numpy as np

from gdp.costs.measured.kernels import Kernels
from pretrain.costs.tables import Rows


def write(path: Path, rows: Rows) -> None:
    """Keep the rows in an `.npz` file."""
    kernels = {f.name: getattr(rows.kernels, f.name) for f in fields(Kernels)}
    np.savez(
        path, seconds=rows.seconds, device=rows.device, devices=np.array(rows.devices),
        shape=rows.shape, **kernels,
    )  # fmt: skip


def read(path: Path) -> Rows:
    """The rows of a file of `write`."""
    with np.load(path, allow_pickle=False) as file:
        told = {f.name: file[f.name] for f in fields(Kernels) if f.name in file}
        kernels = Kernels(**{"numbers": np.zeros(len(file["kind"]), dtype=np.int64), **told})
        devices = tuple(str(name) for name in file["devices"])
        return Rows(kernels, file["seconds"], file["device"], devices, file["shape"])
