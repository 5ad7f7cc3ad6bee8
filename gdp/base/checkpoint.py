"""Checkpoints: any pytree of arrays with its recipe, checked by SHA-256.

A checkpoint is a folder: `weights.npz` (the arrays by the path of each leaf), `recipe.toml`,
`meta.json` with the digest of the weights, more files of the caller, and `gdp.json`, the list of
all these. It is replaced as a whole, see `gdp.base.files.writing`.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gdp.base.errors import GdpError
from gdp.base.files.reading import Kind, convert, decode_arrays, read_bytes, read_json
from gdp.base.files.writing import OverwritePolicy, new_contents

SCHEMA = 1
META = "meta.json"
WEIGHTS = "weights.npz"


class CheckpointError(GdpError):
    """A checkpoint that is missing, damaged or made for another network."""


KIND = Kind("meta.json of a checkpoint", CheckpointError)
_WEIGHTS_KIND = Kind("file of weights", CheckpointError, "copy the whole checkpoint again")


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

    Where several JAX processes train together, all of them call this; the first writes.

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
        OSError: if the weights cannot be written.
    """
    import jax

    leaves = {name: np.asarray(leaf) for name, leaf in _paths(tree)}
    digest = _digest(leaves)
    if jax.process_index() > 0:
        return digest
    with new_contents(path, kind, OverwritePolicy(force=force)) as staging:
        np.savez(staging / WEIGHTS, **leaves)  # pyright: ignore[reportArgumentType]
        for name, data in (beside or {}).items():
            (staging / name).write_bytes(data)
        (staging / "recipe.toml").write_text(recipe)
        document = {"schema": SCHEMA, "sha256": digest, **(meta or {})}
        (staging / "meta.json").write_text(strict_json(document))
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

    JAX is not imported. Raises `CheckpointError`.
    """
    folder = Path(path)
    meta = read_meta(folder)
    where = folder / WEIGHTS
    arrays = decode_arrays(read_bytes(where, _WEIGHTS_KIND), _WEIGHTS_KIND, str(where))
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


def _digest(leaves: Mapping[str, np.ndarray]) -> str:
    sha = hashlib.sha256()
    for name in sorted(leaves):
        array = leaves[name]
        sha.update(f"{name} {array.dtype} {array.shape}\0".encode())
        sha.update(np.ascontiguousarray(array).tobytes())
    return sha.hexdigest()
