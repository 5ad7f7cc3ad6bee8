"""Checkpoints: any pytree of arrays with its recipe, written by Orbax, checked by SHA-256.

A checkpoint is a folder: `weights/` (Orbax, by the path of each leaf), `recipe.toml`, `meta.json`
with the digest of the weights, whatever else the caller keeps with them, and `gdp.json`, the list
of all these. It is written beside its place and renamed, so that a crash leaves the old one; where
that happens between two renames, whoever reads or writes next finds the old one beside its place.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gdp.errors import GdpError
from gdp.files import staging as new_folder
from gdp.folders import put_in_place, standing
from gdp.reading import Kind, convert, read_bytes, read_json
from gdp.targets import Permit, require_folder

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
    from orbax.checkpoint.experimental import v1 as orbax

    target = Path(os.path.realpath(path))
    if _is_first():
        require_folder(target, kind, Permit(force=force))
    leaves = _flatten(tree)
    digest = _digest(leaves)
    with _staging(target) as staging:
        orbax.save(str((staging / "weights").absolute()), dict(leaves))
        if not _is_first():
            return digest
        _forget_where(staging / "weights")
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
    from orbax.checkpoint.experimental import v1 as orbax

    folder = standing(Path(path))
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


def read_recipe(path: str | os.PathLike[str]) -> str:
    """The TOML recipe that a checkpoint was trained with."""
    read_meta(path)
    where = standing(Path(path)) / "recipe.toml"
    return read_bytes(where, Kind("recipe", CheckpointError)).decode(errors="replace")


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
