"""Cost files: folders with meta.json and, of learned kernels, their weights as NumPy arrays."""

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from gdp.base import checkpoint
from gdp.base.files.reading import Kind, convert, decode_arrays, read_bytes
from gdp.base.files.writing import OverwritePolicy, new_contents
from gdp.costs.features import SIZES, TRANSFER_TERMS, num_other
from gdp.costs.kernels import FusionTable
from gdp.costs.learned import Calibration, Ensemble, KernelNetworks, log_terms
from gdp.costs.profile import DeviceRecord, ProfileError
from gdp.costs.work_rates import WorkRates

ARRAYS = "costs.npz"
FORMAT = 1
"""Of arrays."""
RATES_FORMAT = 2
"""Of rates of work, which are in meta.json."""
PLAIN = ("other_mean", "other_scale", "fusion_key", "fusion_yes", "fusion_count")
LAYERS = tuple(f"layer_{name}" for name in ("embed", "b1", "c1", "b2", "c2", "b3", "c3"))
UNREAD = ("noise",)  # of older files
MAX_WEIGHT = 1e6
"""Far beyond the weights that fitting finds, and far from where sums overflow."""
_KIND = Kind("cost file", ProfileError)


class _Learned(msgspec.Struct):
    mean: Annotated[float, msgspec.Meta(ge=0)] | None = None


class _ModelError(msgspec.Struct):
    learned: _Learned = msgspec.field(default_factory=_Learned)


class _Report(msgspec.Struct):
    """Errors on held-out models, of the report stored with the arrays."""

    model_error: _ModelError = msgspec.field(default_factory=_ModelError)


class _Meta(msgspec.Struct):
    """Keys of `meta.json` that `load_costs` reads."""

    device: DeviceRecord
    runtime: str
    level: str
    versions: dict[str, str]
    date: str
    arrays_sha256: str = ""
    types: tuple[str, ...] = ()
    scale: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    rates: dict[str, float] | None = None
    transfer: tuple[Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)], ...] = ()
    segment_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    handover_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    handover_bytes_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e30)] | None = None
    report: _Report = msgspec.field(default_factory=_Report)


def save_costs(
    calibration: Calibration,
    path: str | os.PathLike[str],
    *,
    report: Mapping[str, Any] | None = None,
    recipe: str = "",
    force: bool = False,
) -> None:
    """Write a cost file; `report` goes into its meta.json.

    Raises `TargetError` where something else stands at the path, unless `force`.
    """
    predictor, data, own = calibration.predictor, b"", dict[str, Any]()
    if isinstance(predictor, KernelNetworks):
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **_tree(predictor))  # type: ignore[arg-type]
        data = buffer.getvalue()
        own = {
            "costs_format": FORMAT, "arrays_sha256": hashlib.sha256(data).hexdigest(),
            "types": list(predictor.ensemble.types), "scale": predictor.scale,
            "transfer": list(predictor.transfer),
        }  # fmt: skip
    else:
        own = {"costs_format": RATES_FORMAT, "rates": dict(predictor.rates)}
    meta = {
        "schema": checkpoint.SCHEMA,
        "sha256": hashlib.sha256(data).hexdigest(),
        "device": {
            "kind": calibration.device.kind, "model": calibration.device.model,
            "features": list(calibration.device.features),
        },
        **{
            name: getattr(calibration, name)
            for name in ("runtime", "level", "date", "segment_s", "handover_s",
                         "handover_bytes_per_s")
        },
        "versions": dict(calibration.versions),
        "report": dict(report or {}),
        **own,
    }  # fmt: skip
    with new_contents(path, "costs", OverwritePolicy(force=force)) as folder:
        if data:
            (folder / ARRAYS).write_bytes(data)
        (folder / "recipe.toml").write_text(recipe)
        (folder / "meta.json").write_text(checkpoint.strict_json(meta))


def load_costs(path: str | os.PathLike[str]) -> Calibration:
    """Read a cost file; raises `ProfileError` or `CheckpointError` when it is malformed."""
    folder = Path(path)
    if not (folder / "meta.json").exists():
        raise ProfileError(
            f"no cost file {str(path)!r}; give the folder that `gdp calibrate -o` wrote"
        )
    meta = checkpoint.read_meta(folder)
    if meta.get("costs_format") not in (FORMAT, RATES_FORMAT):
        raise ProfileError(f"{str(path)!r} is no cost file of format {FORMAT}; calibrate again")
    head = convert(meta, _KIND, _Meta, str(folder / "meta.json"))
    if meta["costs_format"] == RATES_FORMAT:
        return _calibration(head, WorkRates(head.rates or {}))
    where = folder / ARRAYS
    data = read_bytes(where, Kind("file of arrays", ProfileError, "calibrate again"))
    if hashlib.sha256(data).hexdigest() != head.arrays_sha256:
        raise ProfileError(f"{str(path)!r}: {ARRAYS} is damaged; copy the folder again")
    try:
        return _calibration(head, _networks(head, decode_arrays(data, _KIND, str(where))))
    except ValueError as error:
        raise ProfileError(f"{where} does not fit the meta.json beside it: {error}") from None


def _tree(networks: KernelNetworks) -> dict[str, np.ndarray]:
    ensemble, fusions = networks.ensemble, networks.fusions
    tree = {f"layer_{k}": np.asarray(array, np.float32) for k, array in ensemble.layers.items()}
    for name in ("other_mean", "other_scale"):
        tree[name] = np.asarray(getattr(ensemble, name), np.float32)
    tree["fusion_key"] = fusions.key
    tree["fusion_yes"] = fusions.yes.astype(np.float32)
    tree["fusion_count"] = fusions.count.astype(np.float32)
    return tree


def _calibration(meta: _Meta, predictor: KernelNetworks | WorkRates) -> Calibration:
    return Calibration(
        meta.device, meta.runtime, meta.level, meta.versions, meta.date, predictor,
        segment_s=meta.segment_s, handover_s=meta.handover_s,
        handover_bytes_per_s=meta.handover_bytes_per_s,
        mean_error=meta.report.model_error.learned.mean,
    )  # fmt: skip


def _networks(meta: _Meta, arrays: Mapping[str, np.ndarray]) -> KernelNetworks:
    """Raises `ValueError` where an array is missing or of another shape."""
    _check(meta, arrays)

    def wide(name: str) -> np.ndarray:
        return arrays[name].astype(np.float64)

    return KernelNetworks(
        FusionTable(arrays["fusion_key"], wide("fusion_yes"), wide("fusion_count")),
        Ensemble(
            meta.types, wide("other_mean"), wide("other_scale"),
            {
                name.removeprefix("layer_"): wide(name)
                for name in arrays
                if name.startswith("layer_")
            },
        ),
        scale=meta.scale, transfer=meta.transfer,
    )  # fmt: skip


def _check(meta: _Meta, found: Mapping[str, np.ndarray]) -> None:
    """Raise `ValueError` naming the array that contradicts the others, or its reader."""
    shapes = {name: array.shape for name, array in found.items()}
    for name in (*PLAIN, *LAYERS):
        if name not in shapes:
            raise ValueError(f"array {name!r} is missing")
    if unknown := sorted(set(shapes) - {*PLAIN, *LAYERS, *UNREAD}):
        raise ValueError(f"array {unknown[0]!r} has no meaning")
    v, o, j = len(meta.types), num_other(), log_terms(np.zeros((0, len(SIZES)))).shape[1]
    m, e = shapes["layer_embed"][:1], shapes["layer_embed"][2:]
    h, g, k = shapes["layer_c1"][1:], shapes["layer_c2"][1:], shapes["fusion_key"][:1]
    wanted = {
        "other_mean": (o,), "other_scale": (o,),
        "fusion_key": k, "fusion_yes": k, "fusion_count": k,
        "layer_embed": (*m, o + 2 * v, *e), "layer_b1": (*m, o + sum(e), *h),
        "layer_c1": (*m, *h), "layer_b2": (*m, *h, *g), "layer_c2": (*m, *g),
        "layer_b3": (*m, *g, j), "layer_c3": (*m, j),
    }  # fmt: skip
    ranks = {"layer_embed": 3, "layer_c1": 2, "layer_c2": 2}
    for name, shape in wanted.items():
        if shapes[name] != shape or len(shape) != ranks.get(name, len(shape)):
            raise ValueError(f"{name} has shape {shapes[name]}, {shape} wanted")
        if name.startswith("layer_") and not (np.abs(found[name]) <= MAX_WEIGHT).all():
            raise ValueError(f"{name} holds weights beyond {MAX_WEIGHT:g}")
    if not (found["other_scale"] > 0).all():
        raise ValueError("other_scale must be > 0")
    if found["fusion_key"].dtype != np.int64 or (np.diff(found["fusion_key"]) < 0).any():
        raise ValueError("fusion_key must be a sorted row of 64-bit integers")
    if len(meta.transfer) not in (0, TRANSFER_TERMS):
        raise ValueError(f"transfer has {len(meta.transfer)} coefficients, {TRANSFER_TERMS} wanted")
