"""Folders are swapped whole: a kill at any step leaves the old or the new one, and no user's file
is ever lost."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gdp.base.files.writing import (
    files_below,
    read_manifest,
    replace_folder,
    staging_folder,
)

STEPS = ("rename", "replace", "link", "unlink", "mkdir")


class Killed(BaseException):
    """The process is gone: nothing that it would have done afterwards happens."""


class Mortal:
    """Lets a number of changes to the disk happen, then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
        self.left, self.monkeypatch = left, monkeypatch
        for name in STEPS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        rmdir, rmtree = os.rmdir, shutil.rmtree
        monkeypatch.setattr(os, "rmdir", self._counted(rmdir))
        monkeypatch.setattr(shutil, "rmtree", self._counted(rmtree))

    def _counted(self, call: Callable) -> Callable:
        def counted(*arguments: Any, **named: Any) -> Any:
            if self.left <= 0:
                raise Killed
            self.left -= 1
            return call(*arguments, **named)

        return counted


def fill(folder: Path, version: str, names: tuple[str, ...] = ("a", "deep/b")) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(version)


def write(target: Path, version: str, names: tuple[str, ...] = ("a", "deep/b")) -> None:
    with staging_folder(target) as folder:
        fill(folder, version, names)
        replace_folder(folder, target, "thing")


def version(folder: Path) -> str:
    found = {(folder / name).read_text() for name in ("a", "deep/b")}
    assert len(found) == 1, "half of one and half of another"
    return found.pop()


def standing_names(folder: Path) -> list[str]:
    """What is there without the folders that killed processes have left."""
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def standing(target: Path) -> Path:
    """The target, or where there is none the old folder that stands beside it."""
    return target if target.exists() else next(target.parent.glob(f".{target.name}.old-*"))


def killed_at_every_step(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[], Path]
) -> Iterator[Path]:
    """The target after a write that was killed after 0, 1, 2 ... changes, until one is not."""
    for left in range(1000):
        target = prepare()
        with monkeypatch.context() as patch:
            Mortal(patch, left)
            try:
                write(target, "new")
            except Killed:
                pass
            else:
                assert left > 3, "a swap has more steps than that"
                return
        yield target


def test_a_kill_at_any_step_leaves_one_whole_folder_and_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter(range(1000))

    def prepare() -> Path:
        target = tmp_path / f"run{next(runs)}" / "ck"
        write(target, "old", ("a", "deep/b", "only_old"))
        (target / "thesis.txt").write_text("years of work")
        return target

    seen = set()
    for target in killed_at_every_step(monkeypatch, prepare):
        found = standing(target)
        seen.add((found == target, version(found)))
        assert (found / "thesis.txt").read_text() == "years of work"
        write(target, "newer")
        assert version(target) == "newer"
        assert (found / "thesis.txt").read_text() == "years of work"
        assert not (target / "only_old").exists()
        assert standing_names(target.parent) == ["ck"]
    assert seen == {(True, "old"), (False, "old"), (True, "new")}


def test_a_kill_at_the_first_write_leaves_nothing_or_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter(range(1000))
    for target in killed_at_every_step(monkeypatch, lambda: tmp_path / f"run{next(runs)}" / "ck"):
        assert not target.exists() or version(target) == "new"
        write(target, "newer")
        assert version(target) == "newer"
        assert standing_names(target.parent) == ["ck"]


def test_an_error_at_a_rename_puts_the_old_folder_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "ck", "old")
    rename = os.rename

    def once(source: Path, target: Path) -> None:
        if Path(target).name == "ck" and ".tmp-" in Path(source).name:
            raise OSError("no space")
        rename(source, target)

    monkeypatch.setattr(os, "rename", once)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / "ck", "new")
    assert version(tmp_path / "ck") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def test_changed_files_and_links_of_the_user_are_carried_over(tmp_path: Path) -> None:
    target = tmp_path / "ck"
    write(target, "old", ("a", "deep/b", "notes"))
    (target / "notes").write_text("mine now")
    (target / "link").symlink_to("nowhere")
    write(target, "new")
    assert (target / "notes").read_text() == "mine now"
    assert os.readlink(target / "link") == "nowhere"
    manifest = read_manifest(target)
    assert manifest is not None
    assert sorted(manifest.files) == ["a", "deep/b"], "what is the user's stays the user's"
    assert files_below(target) == ["a", "deep/b", "gdp.json", "link", "notes"]


def test_a_folder_keeps_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "ck"
    write(target, "old")
    target.chmod(0o700)
    write(target, "new")
    assert target.stat().st_mode & 0o777 == 0o700
