"""Checkpoints: any pytree of arrays with its recipe, written by Orbax, checked by SHA-256.

A checkpoint is a folder: `weights/` (Orbax, by the path of each leaf), `recipe.toml`, and
`meta.json` with the digest of the weights. It is written beside its place and renamed, so that a
crash leaves the old one.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gdp.errors import GdpError
from gdp.reading import Kind, convert, read_bytes, read_json

SCHEMA = 1


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
) -> str:
    """Write a checkpoint folder; returns the SHA-256 (hex) of its weights.

    `meta` holds whatever JSON the caller wants back from `read_meta`. Where several JAX processes
    train together, all of them call this with the same path on a shared disk; the first writes.
    """
    from orbax.checkpoint.experimental import v1 as orbax

    target = Path(path)
    leaves = _flatten(tree)
    digest = _digest(leaves)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _staging(target)
    try:
        orbax.save(str((staging / "weights").absolute()), dict(leaves))
        if not _is_first():
            return digest
        _forget_where(staging / "weights")
        (staging / "recipe.toml").write_text(recipe)
        files = files_digest(staging / "weights")
        document = {"schema": SCHEMA, "sha256": digest, "files_sha256": files, **(meta or {})}
        # NaN and infinity are no JSON; a reader gets null.
        document = json.loads(json.dumps(document), parse_constant=lambda name: None)
        text = json.dumps(document, indent=1, sort_keys=True)
        (staging / "meta.json").write_text(text)
        staging.chmod(0o755)
        _swap(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return digest


def load(path: str | os.PathLike[str], like: Any) -> Any:
    """The tree of a checkpoint, with the structure of `like`; raises `CheckpointError`."""
    import jax
    from orbax.checkpoint.experimental import v1 as orbax

    folder = Path(path)
    meta = read_meta(folder)
    # Orbax may wait for ever for what a damaged file does not hold.
    wanted_digest = meta.get("files_sha256")
    if wanted_digest is not None and files_digest(folder / "weights") != wanted_digest:
        raise CheckpointError(
            f"checkpoint {str(path)!r} is damaged: a file of its weights is missing or another; "
            "copy it again"
        )
    try:
        found = orbax.load(str((folder / "weights").absolute()))
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"checkpoint {str(path)!r}: its weights cannot be read: {first}"
        ) from None
    arrays = {name: np.asarray(leaf) for name, leaf in found.items()}
    if _digest(arrays) != meta["sha256"]:
        raise CheckpointError(
            f"checkpoint {str(path)!r} is damaged: its weights are not those of meta.json; copy it "
            "again"
        )
    wanted = {name: np.shape(leaf) for name, leaf in _paths(like)}
    for name, shape in wanted.items():
        if name not in arrays or arrays[name].shape != shape:
            found_shape = arrays[name].shape if name in arrays else "nothing"
            raise CheckpointError(
                f"checkpoint {str(path)!r} is for another network: {name} is {found_shape}, "
                f"{shape} wanted; use the recipe beside it"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def _is_first() -> bool:
    import jax

    return jax.process_index() == 0


def _staging(target: Path) -> Path:
    """Where to write before renaming: a name of its own, or one that all processes agree on."""
    import jax

    if jax.process_count() == 1:
        return Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    staging = target.parent / f".{target.name}.joint"
    if _is_first():
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    return staging


def read_meta(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` wrote beside the weights; raises `CheckpointError` where there is nothing."""
    if not (Path(path) / "meta.json").exists():
        raise CheckpointError(
            f"no checkpoint at {str(path)!r}; give the folder that `gdp pretrain -o` wrote"
        )
    document = read_json(Path(path) / "meta.json", KIND, dict)
    head = convert(document, KIND, _Meta, str(Path(path) / "meta.json"))
    if head.schema != SCHEMA:
        raise CheckpointError(
            f"checkpoint {str(path)!r} has schema {head.schema}, this gdp reads {SCHEMA}"
        )
    return document


def read_recipe(path: str | os.PathLike[str]) -> str:
    """The TOML recipe that a checkpoint was trained with."""
    read_meta(path)
    data = read_bytes(Path(path) / "recipe.toml", Kind("recipe", CheckpointError))
    return data.decode(errors="replace")


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


def _swap(staging: Path, target: Path) -> None:
    """Put a finished folder in its place; the old one goes last."""
    old = None
    if target.exists():
        old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
        os.replace(target, old / target.name)
    os.replace(staging, target)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
