"""Cost files: a folder with the weights as an Orbax checkpoint, and as NumPy arrays to place with.

Reading the arrays takes milliseconds and no JAX; the checkpoint is for whoever fits on.
"""

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from gdp import checkpoint
from gdp.costs.features import TRANSFER_TERMS
from gdp.costs.kernels import FusionTable
from gdp.costs.learned import Calibration, Ensemble
from gdp.costs.profile import DeviceRecord, ProfileError
from gdp.files import write_atomic
from gdp.reading import Kind, convert, decode_arrays, read_bytes

ARRAYS = "costs.npz"
FORMAT = 1
_KIND = Kind("cost file", ProfileError)


class _Meta(msgspec.Struct):
    """What `save_costs` writes beside the arrays, as far as it is read again."""

    arrays_sha256: str
    device: DeviceRecord
    runtime: str
    level: str
    versions: dict[str, str]
    date: str
    types: tuple[str, ...]
    scale: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    transfer: tuple[Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)], ...] = ()


def save_costs(
    calibration: Calibration,
    path: str | os.PathLike[str],
    *,
    report: Mapping[str, Any] | None = None,
    recipe: str = "",
) -> None:
    """Write a cost file; `report` is kept beside it for people."""
    tree = _tree(calibration)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **tree)  # type: ignore[arg-type]
    data = buffer.getvalue()
    meta = {
        "costs_format": FORMAT,
        "arrays_sha256": hashlib.sha256(data).hexdigest(),
        "device": {
            "kind": calibration.device.kind, "model": calibration.device.model,
            "features": list(calibration.device.features),
        },
        "runtime": calibration.runtime,
        "level": calibration.level,
        "versions": dict(calibration.versions),
        "date": calibration.date,
        "types": list(calibration.ensemble.types),
        "scale": calibration.scale,
        "transfer": list(calibration.transfer),
        "report": dict(report or {}),
    }  # fmt: skip
    checkpoint.save(path, tree, recipe=recipe, meta=meta)
    write_atomic(Path(path) / ARRAYS, data)


def load_costs(path: str | os.PathLike[str]) -> Calibration:
    """Read a cost file; raises `ProfileError` or `CheckpointError` when it is malformed."""
    if not (Path(path) / "meta.json").exists():
        raise ProfileError(
            f"no cost file {str(path)!r}; give the folder that `gdp calibrate -o` wrote"
        )
    meta = checkpoint.read_meta(path)
    if meta.get("costs_format") != FORMAT:
        raise ProfileError(f"{str(path)!r} is no cost file of format {FORMAT}; calibrate again")
    head = convert(meta, _KIND, _Meta, str(Path(path) / "meta.json"))
    where = Path(path) / ARRAYS
    data = read_bytes(where, Kind("file of arrays", ProfileError, "calibrate again"))
    if hashlib.sha256(data).hexdigest() != head.arrays_sha256:
        raise ProfileError(f"{str(path)!r}: {ARRAYS} is damaged; copy the folder again")
    try:
        return _calibration(head, decode_arrays(data, _KIND, str(where)))
    except ValueError as error:
        raise ProfileError(f"{where} does not fit the meta.json beside it: {error}") from None


def _tree(calibration: Calibration) -> dict[str, np.ndarray]:
    ensemble, fusions = calibration.ensemble, calibration.fusions
    tree = {f"layer_{name}": array for name, array in ensemble.layers.items()}
    for name in ("other_mean", "other_scale", "noise"):
        tree[name] = np.asarray(getattr(ensemble, name), np.float32)
    tree["fusion_key"] = fusions.key
    tree["fusion_yes"] = fusions.yes.astype(np.float32)
    tree["fusion_count"] = fusions.count.astype(np.float32)
    return tree


def _calibration(meta: _Meta, found: Mapping[str, np.ndarray]) -> Calibration:
    """Raises `ValueError` where an array is missing or of another shape."""
    for name in ("fusion_key", "fusion_yes", "fusion_count", "other_mean", "other_scale", "noise"):
        if name not in found:
            raise ValueError(f"array {name!r} is missing")

    def wide(name: str) -> np.ndarray:
        return found[name].astype(np.float64)

    calibration = Calibration(
        device=meta.device,
        runtime=meta.runtime,
        level=meta.level,
        versions=meta.versions,
        date=meta.date,
        fusions=FusionTable(found["fusion_key"], wide("fusion_yes"), wide("fusion_count")),
        ensemble=Ensemble(
            meta.types, wide("other_mean"), wide("other_scale"), wide("noise"),
            {
                name.removeprefix("layer_"): array.astype(np.float64)
                for name, array in found.items()
                if name.startswith("layer_")
            },
        ),
        scale=meta.scale,
        transfer=meta.transfer,
    )  # fmt: skip
    calibration.ensemble.check()
    if len(meta.transfer) not in (0, TRANSFER_TERMS):
        raise ValueError(f"transfer has {len(meta.transfer)} coefficients, {TRANSFER_TERMS} wanted")
    return calibration
