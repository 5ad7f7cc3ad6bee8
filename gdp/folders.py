"""Folders that gdp writes: a list of what is gdp's in them, and a swap that loses nothing.

`gdp.json` names the kind of a folder and every file that gdp wrote into it, with its SHA-256.
Whatever else lies in the folder is the user's and survives when the folder is written anew.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gdp.files import room, sync_folder, sync_tree

MANIFEST = "gdp.json"
SCHEMA = 1
# What checkpoints held before they had a manifest.
_CHECKPOINT_FILES = ("meta.json", "recipe.toml", "costs.npz", "metrics.jsonl")


class Manifest(msgspec.Struct):
    """`gdp.json` of a folder."""

    gdp_folder: int  # the schema
    kind: str
    files: dict[str, str]  # path from the folder: SHA-256, or "" where it is not known or changes


def write_manifest(folder: Path, kind: str, files: Mapping[str, str] | None = None) -> None:
    """Write `gdp.json`; without `files`, of all that lies in the folder."""
    if files is None:
        files = {name: digest(folder / name) for name in files_below(folder) if name != MANIFEST}
    data = msgspec.json.encode(Manifest(SCHEMA, kind, dict(files)))
    (folder / MANIFEST).write_bytes(msgspec.json.format(data, indent=1) + b"\n")


def read_manifest(folder: Path) -> Manifest | None:
    """What gdp wrote into a folder; None where gdp did not make it."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, RecursionError):
        return _unlisted_checkpoint(folder)


def _unlisted_checkpoint(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint or a training run from before there were any."""
    if (folder / "state" / "meta.json").is_file():
        return Manifest(SCHEMA, "run", {})
    try:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    if not {"schema", "sha256"} <= meta.keys():
        return None
    kind = "policy" if meta.get("kind") == "policy" else "state"
    kind = "costs" if "costs_format" in meta else kind
    named = [name for name in _CHECKPOINT_FILES if (folder / name).is_file()]
    weights = [f"weights/{name}" for name in files_below(folder / "weights")]
    return Manifest(SCHEMA, kind, dict.fromkeys([*named, *weights], ""))


def changed_files(folder: Path, manifest: Manifest) -> list[str]:
    """The files that gdp wrote and somebody has changed since, in order."""
    return [
        name
        for name, known in manifest.files.items()
        if known and (folder / name).is_file() and digest(folder / name) != known
    ]


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(folder: Path) -> list[str]:
    """All files and links below a folder, by their paths from it with slashes, sorted."""
    found = []
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found += [Path(place, name).relative_to(folder).as_posix() for name in [*names, *links]]
    return sorted(found)


def old_of(target: Path) -> Path:
    """Where a folder is while the new one takes its place."""
    return target.with_name(f".{target.name[:200]}.old")


def standing(target: Path) -> Path:
    """The folder to read: the target, or the old one where a crash came between two renames."""
    target = Path(os.path.realpath(target))
    old = old_of(target)
    return old if not target.exists() and old.is_dir() else target


def recover(target: Path) -> None:
    """Finish what a crash has interrupted: put the old folder back, or clear it away."""
    old = old_of(target)
    if not old.is_dir():
        return
    if target.exists():
        _retire(old, target)
    else:
        os.rename(old, target)
    sync_folder(target.parent)


def put_in_place(folder: Path, target: Path, kind: str) -> None:
    """Rename a finished folder to `target`, with the files of the folder that stood there which are
    not gdp's.

    A crash at any step leaves the old or the new folder whole, under its name or as `old_of` says;
    `standing` finds it, the next call clears up (but see `_replace_files`). Who may be replaced,
    `gdp.targets` decides.
    """
    recover(target)
    write_manifest(folder, kind)
    sync_tree(folder)
    if room(target) == target:
        _replace_files(folder, target)
        return
    if target.exists():
        _carry_over(target, folder)
        os.chmod(folder, target.stat().st_mode & 0o7777)
    try:
        if target.exists():
            os.rename(target, old_of(target))
        os.rename(folder, target)
        sync_folder(target.parent)
    finally:
        recover(target)


def _replace_files(folder: Path, target: Path) -> None:
    """The way of a target that cannot be renamed: file by file, what says whose they are last. A
    crash leaves files that do not belong together, which the digests in them tell."""
    gone = _own(target) & set(files_below(target))  # whatever else a manifest may name
    for name in _in_order(folder):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / name, target / name)
        gone.discard(name)
    for name in gone:
        (target / name).unlink(missing_ok=True)
    for place in {(target / name).parent for name in gone}:
        with contextlib.suppress(OSError):  # not empty
            place.rmdir()
    sync_folder(target)


def _in_order(folder: Path) -> list[str]:
    """All files below a folder, what says whose the others are at the end."""
    return sorted(files_below(folder), key=lambda name: name in (MANIFEST, "meta.json"))


def _own(folder: Path) -> set[str]:
    """The files that may go when the folder is written anew: gdp's, as gdp wrote them."""
    manifest = read_manifest(folder)
    if manifest is None:
        return set()
    return {MANIFEST, *manifest.files} - set(changed_files(folder, manifest))


def _carry_over(old: Path, new: Path) -> None:
    """Give the new folder all of the old one that is not gdp's."""
    own = _own(old)
    for name in files_below(old):
        if name in own or os.path.lexists(new / name):
            continue
        (new / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(old / name, new / name, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(old / name, new / name, follow_symlinks=False)


def _retire(old: Path, target: Path) -> None:
    """Remove an old folder; what somebody has put there meanwhile goes to the new one."""
    own = _own(old)
    for name in _in_order(old):  # for whoever has to go on after a crash
        if name in own or os.path.lexists(target / name):
            os.unlink(old / name)
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(old / name, target / name)
    shutil.rmtree(old)
