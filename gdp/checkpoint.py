"""Checkpoints: any pytree of arrays with its recipe, written by Orbax, checked by SHA-256.

A checkpoint is a folder: `weights/` (Orbax, by the path of each leaf), `weights.npz` (the same
arrays, for readers without JAX), `recipe.toml`, `meta.json` with the digest of the weights,
whatever else the caller keeps with them, and `gdp.json`, the list of all these. It is written
beside its place and renamed, so that a crash leaves the old one; where that happens between two
renames, whoever reads or writes next finds the old one beside its place.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gdp.errors import GdpError
from gdp.files.folders import put_in_place, standing
from gdp.files.reading import Kind, convert, decode_arrays, read_bytes, read_json
from gdp.files.targets import Permit, require_folder
from gdp.files.writing import staging as new_folder

SCHEMA = 1
PLAIN = "weights.npz"
"""Beside Orbax's folder, whose library takes longer to import than an answer may."""


class CheckpointError(GdpError):
    """A checkpoint that is missing, damaged or made for another network."""


KIND = Kind("meta.json of a checkpoint", CheckpointError)


class _Meta(msgspec.Struct):
    """What every checkpoint says of itself, beside what its writer wants back."""

    schema: int
    sha256: str


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    recipe: str = "",
    meta: Mapping[str, Any] | None = None,
    kind: str = "state",
    beside: Mapping[str, bytes] | None = None,
    force: bool = False,
) -> str:
    """Write a checkpoint folder; returns the SHA-256 (hex) of its weights.

    `meta` holds whatever JSON the caller wants back from `read_meta`, `beside` more files of the
    folder by name. Where several JAX processes train together, all of them call this with the same
    path on a shared disk; the first writes. Raises `TargetError` where something stands at the path
    that is no checkpoint of this kind, unless `force`.
    """
    target = Path(os.path.realpath(path))
    if _is_first():
        require_folder(target, kind, Permit(force=force))
    leaves = _flatten(tree)
    digest = _digest(leaves)
    with _staging(target) as staging:
        _write_weights(staging / "weights", leaves, target)
        if not _is_first():
            return digest
        _forget_where(staging / "weights")
        np.savez(staging / PLAIN, **leaves)  # pyright: ignore[reportArgumentType]
        for name, data in (beside or {}).items():
            (staging / name).write_bytes(data)
        (staging / "recipe.toml").write_text(recipe)
        files = files_digest(staging / "weights")
        document = {"schema": SCHEMA, "sha256": digest, "files_sha256": files, **(meta or {})}
        # NaN and infinity are no JSON; a reader gets null.
        document = json.loads(json.dumps(document), parse_constant=lambda name: None)
        (staging / "meta.json").write_text(json.dumps(document, indent=1, sort_keys=True))
        put_in_place(staging, target, kind)
    return digest


def load(path: str | os.PathLike[str], like: Any) -> Any:
    """The tree of a checkpoint, with the structure of `like`; raises `CheckpointError`."""
    import jax

    arrays = load_arrays(path, {name: np.shape(leaf) for name, leaf in _paths(like)})
    return jax.tree.unflatten(jax.tree.structure(like), list(arrays.values()))


def load_arrays(
    path: str | os.PathLike[str], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by their paths, in the order of the wanted shapes.

    Without JAX where the plain copy is there. Raises `CheckpointError`.
    """
    folder = standing(Path(path))
    meta = read_meta(folder)
    arrays = _read_arrays(folder, meta.get("files_sha256"))
    if _digest(arrays) != meta["sha256"]:
        raise CheckpointError(
            f"checkpoint {str(path)!r} is damaged: its weights are not those of meta.json; copy it "
            "again"
        )
    for name, shape in wanted.items():
        if name not in arrays or arrays[name].shape != shape:
            found_shape = arrays[name].shape if name in arrays else "nothing"
            raise CheckpointError(
                f"checkpoint {str(path)!r} is for another network: {name} is {found_shape}, "
                f"{shape} wanted; use the recipe beside it"
            )
    return {name: arrays[name] for name in wanted}


def _read_arrays(folder: Path, files_sha256: str | None) -> dict[str, np.ndarray]:
    """All arrays of the plain copy, or of Orbax's folder where there is none."""
    if (folder / PLAIN).exists():
        where = folder / PLAIN
        return decode_arrays(read_bytes(where, KIND), KIND, str(where))
    # Orbax may wait for ever for what a damaged file does not hold.
    if files_sha256 is not None and files_digest(folder / "weights") != files_sha256:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is damaged: a file of its weights is missing or another; "
            "copy it again"
        )
    try:
        found = _orbax().load(str((folder / "weights").absolute()))
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"checkpoint {str(folder)!r}: its weights cannot be read: {first}"
        ) from None
    return {name: np.asarray(leaf) for name, leaf in found.items()}


def _write_weights(folder: Path, leaves: Mapping[str, np.ndarray], target: Path) -> None:
    """Write Orbax's folder; a full disk is an `OSError` that names the checkpoint, anything else
    a `CheckpointError`."""
    try:
        _orbax().save(str(folder.absolute()), dict(leaves))
    except OSError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        # The library below Orbax has errors of its own for those of the system.
        if "RESOURCE_EXHAUSTED" in first or os.strerror(errno.ENOSPC) in first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from None
        raise CheckpointError(
            f"checkpoint {str(target)!r}: its weights cannot be written: {first}"
        ) from None


def _orbax() -> Any:
    """Orbax, whose threads say nothing of errors that it raises besides."""
    from orbax.checkpoint.experimental import v1 as orbax

    logging.getLogger("absl").addFilter(_is_news)  # the same one twice is one
    return orbax


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a record is more than the traceback of a thread; a full disk gives dozens."""
    return not (record.exc_info and "SignalingThread" in record.getMessage())


def _is_first() -> bool:
    import jax

    return jax.process_index() == 0


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Where to write before renaming: a name of its own, or one that all processes agree on."""
    import jax

    if jax.process_count() == 1:
        with new_folder(target) as folder:
            yield folder
        return
    folder = target.with_name(f".{target.name}.joint")
    if not _is_first():
        yield folder
        return
    # One job at a time trains into a folder: what is here is left of a killed one.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` wrote beside the weights; raises `CheckpointError` where there is nothing."""
    folder = standing(Path(path))
    if not (folder / "meta.json").exists():
        raise CheckpointError(
            f"no checkpoint at {str(path)!r}; give the folder that `gdp pretrain -o` wrote"
        )
    document = read_json(folder / "meta.json", KIND, dict)
    head = convert(document, KIND, _Meta, str(folder / "meta.json"))
    if head.schema != SCHEMA:
        raise CheckpointError(
            f"checkpoint {str(path)!r} has schema {head.schema}, this gdp reads {SCHEMA}"
        )
    return document


def _paths(tree: Any) -> list[tuple[str, Any]]:
    import jax

    return [
        ("/".join(_key(step) for step in steps), leaf)
        for steps, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _key(step: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(step, field):
            return str(getattr(step, field))
    return str(step)


def _flatten(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in _paths(tree)}


def _digest(leaves: Mapping[str, np.ndarray]) -> str:
    sha = hashlib.sha256()
    for name in sorted(leaves):
        array = leaves[name]
        sha.update(f"{name} {array.dtype} {array.shape}\0".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()


def files_digest(folder: Path) -> str:
    """SHA-256 (hex) of the names and contents of all files in a folder."""
    sha = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sha.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                sha.update(chunk)
    return sha.hexdigest()


def _forget_where(folder: Path) -> None:
    """Orbax notes the path it wrote to, which says more of the machine than a reader wants."""
    mark = folder / "commit_success.txt"
    if mark.exists():
        mark.write_text("committed")
