"""Cost files: a folder with the weights as an Orbax checkpoint, and as NumPy arrays to place with.

Reading the arrays takes milliseconds and no JAX; the checkpoint is for whoever fits on.
"""

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gdp import checkpoint
from gdp.costs.kernels import FusionTable
from gdp.costs.learned import Calibration, Ensemble
from gdp.costs.profile import DeviceRecord, ProfileError
from gdp.files import write_atomic

ARRAYS = "costs.npz"
FORMAT = 1


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
        "segment_s": calibration.segment_s,
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
    try:
        data = (Path(path) / ARRAYS).read_bytes()
    except OSError as error:
        raise ProfileError(
            f"{str(path)!r}: {ARRAYS} cannot be read: {error.strerror}; calibrate again"
        ) from None
    if hashlib.sha256(data).hexdigest() != meta["arrays_sha256"]:
        raise ProfileError(f"{str(path)!r}: {ARRAYS} is damaged; copy the folder again")
    with np.load(io.BytesIO(data)) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    return _calibration(meta, found)


def _tree(calibration: Calibration) -> dict[str, np.ndarray]:
    ensemble, fusions = calibration.ensemble, calibration.fusions
    tree = {f"layer_{k}": np.asarray(array, np.float32) for k, array in ensemble.layers.items()}
    for name in ("other_mean", "other_scale", "noise"):
        tree[name] = np.asarray(getattr(ensemble, name), np.float32)
    tree["fusion_key"] = fusions.key
    tree["fusion_yes"] = fusions.yes.astype(np.float32)
    tree["fusion_count"] = fusions.count.astype(np.float32)
    return tree


def _calibration(meta: Mapping[str, Any], found: Mapping[str, np.ndarray]) -> Calibration:
    def wide(name: str) -> np.ndarray:
        return found[name].astype(np.float64)

    device = meta["device"]
    return Calibration(
        device=DeviceRecord(device["kind"], device["model"], tuple(device["features"])),
        runtime=meta["runtime"],
        level=meta["level"],
        versions=meta["versions"],
        date=meta["date"],
        fusions=FusionTable(found["fusion_key"], wide("fusion_yes"), wide("fusion_count")),
        ensemble=Ensemble(
            tuple(meta["types"]), wide("other_mean"), wide("other_scale"), wide("noise"),
            {
                name.removeprefix("layer_"): array.astype(np.float64)
                for name, array in found.items()
                if name.startswith("layer_")
            },
        ),
        scale=meta["scale"],
        transfer=tuple(meta.get("transfer", ())),
        segment_s=meta.get("segment_s"),
    )  # fmt: skip
