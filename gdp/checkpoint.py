"""Checkpoints: any pytree of arrays with its recipe, written by Orbax, checked by SHA-256.

A checkpoint is a folder: `weights/` (Orbax, by the path of each leaf), `weights.npz` (the same
arrays for readers without JAX, derived when saved), `recipe.toml`, `meta.json` with the digest of
the weights, more files of the caller, and `gdp.json`, the list of all these. It is replaced as a
whole, see `gdp.files.writing`.
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
from gdp.files.reading import Kind, convert, decode_arrays, read_bytes, read_json
from gdp.files.writing import (
    OverwritePolicy,
    changed_files,
    check_folder_writable,
    read_manifest,
    replace_folder,
    staging_folder,
)

SCHEMA = 1
META = "meta.json"
PLAIN = "weights.npz"
"""Second copy of the weights, since importing Orbax takes longer than a placement."""


class CheckpointError(GdpError):
    """A checkpoint that is missing, damaged or made for another network."""


KIND = Kind("meta.json of a checkpoint", CheckpointError)
_WEIGHTS_KIND = Kind("file of weights", CheckpointError)


class _Meta(msgspec.Struct):
    """Keys of `meta.json` that every checkpoint has."""

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
    """Write a checkpoint folder.

    Where several JAX processes train together, all of them call this with the same path on a shared
    disk; the first writes.

    Args:
        path: Folder to write.
        tree: Pytree of arrays.
        recipe: Text of `recipe.toml`.
        meta: JSON that `read_meta` returns besides the digest.
        kind: Kind of the folder; one of another kind is not replaced.
        beside: Contents of further files by name.
        force: Replace whatever stands at the path.

    Returns:
        SHA-256 (hex) of the weights.

    Raises:
        TargetError: if something else than a checkpoint of this kind stands at the path.
        CheckpointError: if the weights cannot be written.
    """
    target = Path(os.path.realpath(path))
    if _is_first():
        check_folder_writable(target, kind, OverwritePolicy(force=force))
    leaves = _flatten(tree)
    digest = _digest(leaves)
    with _staging(target) as staging:
        _write_weights(staging / "weights", leaves, target)
        if not _is_first():
            return digest
        if (mark := staging / "weights" / "commit_success.txt").exists():
            mark.write_text("committed")  # Orbax notes the path of the temporary folder
        np.savez(staging / PLAIN, **leaves)  # pyright: ignore[reportArgumentType]
        for name, data in (beside or {}).items():
            (staging / name).write_bytes(data)
        (staging / "recipe.toml").write_text(recipe)
        document = {"schema": SCHEMA, "sha256": digest, **(meta or {})}
        (staging / "meta.json").write_text(strict_json(document))
        replace_folder(staging, target, kind)
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
    folder = Path(path)
    meta = read_meta(folder)
    arrays = _read_arrays(folder)
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


def _read_arrays(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of the .npz copy, or of Orbax's folder where there is none."""
    if (folder / PLAIN).exists():
        where = folder / PLAIN
        return decode_arrays(read_bytes(where, _WEIGHTS_KIND), _WEIGHTS_KIND, str(where))
    # Orbax may wait for ever for bytes that a damaged file does not hold.
    manifest = read_manifest(folder)
    listed = [] if manifest is None else [n for n in manifest.files if n.startswith("weights/")]
    changed = [] if manifest is None else changed_files(folder, manifest)
    if any(name in changed or not (folder / name).is_file() for name in listed):
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is damaged: a file of its weights is missing or another; "
            "copy it again"
        )
    try:
        leaves = _orbax().load(str((folder / "weights").absolute()))
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"checkpoint {str(folder)!r}: its weights cannot be read: {first}"
        ) from None
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def _write_weights(folder: Path, leaves: Mapping[str, np.ndarray], target: Path) -> None:
    """Write Orbax's folder; a full disk is an `OSError` that names the checkpoint, anything else
    a `CheckpointError`."""
    try:
        _orbax().save(str(folder.absolute()), dict(leaves))
    except OSError:
        raise
    except Exception as error:
        if _is_of_several():
            raise  # for the training, which knows that another process may have ended
        first = next(iter(str(error).splitlines()), type(error).__name__)
        # The library below Orbax has errors of its own for those of the system.
        if "RESOURCE_EXHAUSTED" in first or os.strerror(errno.ENOSPC) in first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from None
        raise CheckpointError(
            f"checkpoint {str(target)!r}: its weights cannot be written: {first}"
        ) from None


def _orbax() -> Any:
    """Orbax, with its threads' copies of the errors that it raises taken out of the log."""
    from orbax.checkpoint.experimental import v1 as orbax

    logging.getLogger("absl").addFilter(_is_news)  # the same one twice is one
    return orbax


def _is_news(record: logging.LogRecord) -> bool:
    """Drop tracebacks of Orbax's threads, of which a full disk gives dozens."""
    return not (record.exc_info and "SignalingThread" in record.getMessage())


def _is_of_several() -> bool:
    import jax

    return jax.process_count() > 1


def _is_first() -> bool:
    import jax

    return jax.process_index() == 0


@contextlib.contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Temporary folder to write into; where several processes save, all know its name."""
    import jax

    if jax.process_count() == 1:
        with staging_folder(target) as folder:
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


def strict_json(document: Mapping[str, Any]) -> str:
    """JSON text in which NaN and infinity, which JSON does not have, are null."""
    finite = json.loads(json.dumps(document), parse_constant=lambda name: None)
    return json.dumps(finite, indent=1, sort_keys=True)


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of `meta.json`; raises `CheckpointError` where there is none."""
    folder = Path(path)
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
