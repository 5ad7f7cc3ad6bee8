"""Results in the cache on disk: whole or not at all, and never more than may be."""

import os
from pathlib import Path

import pytest

from gdp.base.files.disk_cache import cache_folder, read_cached, usage, use_xla_cache, write_cached


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GDP_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "gdp" / "k"


def test_a_result_comes_back(folder: Path) -> None:
    assert cache_folder() == folder.parent
    assert read_cached("k", "a") is None
    write_cached("k", "a", b"data")
    assert read_cached("k", "a") == b"data"
    found = usage("k")
    assert found is not None
    assert (found.folder, found.files) == (folder, 1)
    assert folder.stat().st_mode & 0o077 == 0


def test_every_damage_is_noticed(folder: Path) -> None:
    write_cached("k", "a", b"data" * 10)
    whole = (folder / "a").read_bytes()
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(len(whole))]
    for data in damaged:
        (folder / "a").write_bytes(data)
        assert read_cached("k", "a") is None


def test_what_was_used_longest_ago_goes_first(folder: Path) -> None:
    """Three of equal size where two have room; `a` is used again, so `b` goes."""
    for age, key in enumerate("ba"):
        write_cached("k", key, os.urandom(1000))
        os.utime(folder / key, (1000 + age, 1000 + age))
    os.utime(folder / "a", (500, 500))
    assert read_cached("k", "a") is not None
    write_cached("k", "c", os.urandom(1000), most_bytes=2500)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c"]
    write_cached("k", "d", os.urandom(3000), most_bytes=2500)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "c"]


def test_a_folder_that_others_write_to_is_not_used(folder: Path) -> None:
    write_cached("k", "a", b"data")
    folder.chmod(0o777)
    assert read_cached("k", "a") is None
    write_cached("k", "b", b"data")
    assert not (folder / "b").exists()


def test_a_place_that_cannot_be_written_costs_nothing(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    write_cached("k", "a", b"data")
    assert read_cached("k", "a") is None


def test_compiled_programs_are_not_read_from_where_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are code; traces, which are data, are not read from there either."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    set_to: list[str] = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_to.append(name))
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None, raising=False)
    monkeypatch.setenv("GDP_CACHE_DIR", str(tmp_path))
    use_xla_cache()
    assert "jax_compilation_cache_dir" in set_to
    set_to.clear()
    (tmp_path / "xla").chmod(0o777)
    use_xla_cache()
    assert not set_to


def test_what_unpacks_without_end_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDP_CACHE_DIR", str(tmp_path))
    write_cached("things", "key", b"0" * 5000)
    assert read_cached("things", "key") == b"0" * 5000
    monkeypatch.setattr("gdp.base.files.disk_cache.MAX_BYTES", 4000)
    assert read_cached("things", "key") is None
