"""Kernels are compiled even where numba can keep them nowhere."""

import errno
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numba
import pytest
from numba.core import caching

from gdp.base.files.disk_cache import cache_folder, use_xla_cache
from gdp.base.kernels import cache


def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without a home, of a package that root has installed."""

    def fail() -> None:
        raise OSError("read-only")

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(cache, "cache_folder", fail)


def test_without_a_writable_folder_a_temporary_one_is_used_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere(monkeypatch)
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(cache._probe)
    with caplog.at_level(logging.WARNING):
        assert cache.keeps_compiled()
    assert "set NUMBA_CACHE_DIR" in caplog.text
    folder = Path(numba.config.CACHE_DIR)
    assert folder.stat().st_mode & 0o777 == 0o700, "whoever writes to it runs code here"
    kept = numba.njit(cache=True)(cache._probe)
    assert Path(kept.stats.cache_path).is_relative_to(folder)


def test_without_a_temporary_folder_either_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**_: object) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    nowhere(monkeypatch)
    monkeypatch.setattr(cache.tempfile, "mkdtemp", fail)
    assert not cache.keeps_compiled()
    assert "compiled anew" in caplog.text


def test_the_temporary_folder_goes_with_the_process(tmp_path: Path) -> None:
    code = """
import numba
from gdp.base.files import disk_cache
def fail():
    raise OSError("read-only")
disk_cache.cache_folder = fail
import gdp.sim.kernels.events
print(numba.config.CACHE_DIR)
"""
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=env | {"TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.startswith(str(tmp_path))
    assert "kernels are compiled for this run alone" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_compiles_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a user whom the system does not know."""
    for name in ("HOME", "XDG_CACHE_HOME", "GDP_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987654321)
    with pytest.raises(RuntimeError, match="home directory"):
        cache_folder()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        use_xla_cache()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_every_kernel_asks_where_it_is_kept() -> None:
    package = Path(cache.__file__).parents[2]
    asked = re.compile(r"(?<!\w)cache=True")
    found = [path.name for path in package.rglob("*.py") if asked.search(path.read_text())]
    assert found == ["cache.py"]


KERNEL = """
import numba
from gdp.base.kernels.cache import KEEP

@numba.njit(cache=KEEP)
def double(x):
    return 2 * x
"""


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Declares a small kernel of gdp as a new process would, with a cache of its own."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_said", set())
    source = tmp_path / "tiny.py"
    source.write_text(KERNEL)

    def declared(name: str = "gdp.tiny_kernel") -> Any:
        spec = importlib.util.spec_from_file_location(name, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module.double

    return declared


def kept(folder: Path, ending: str) -> Path:
    (found,) = folder.rglob(f"*.{ending}")
    return found


def hits(kernel: Any) -> int:
    return sum(kernel.stats.cache_hits.values())


def stamps(package: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(cache, "_PACKAGE", package)
    cache._stamp.cache_clear()
    return {path.stem: cache._stamp(path) for path in package.rglob("*_kernels.py")}


def test_kernels_are_compiled_again_where_what_they_depend_on_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, the kernels that it calls, and theirs; the constants; nothing else."""
    uses = {
        "outer_kernels": ["inner_kernels"],
        "inner_kernels": ["innermost_kernels", "constants"],
        "innermost_kernels": [],
        "other_kernels": [],
        "constants": ["errors"],
        "errors": [],
    }
    for folder in (tmp_path / "a" / "gdp", tmp_path / "b" / "gdp"):
        folder.mkdir(parents=True)
        for name, imported in uses.items():
            lines = [f"from gdp.{each} import (\n    x,\n)\n" for each in imported]
            first = "from gdp.base.kernels.options import ENTRY\n" if "kernels" in name else ""
            (folder / f"{name}.py").write_text(f"# {name}\n{first}{''.join(lines)}")
        (folder / "base" / "kernels").mkdir(parents=True)
        (folder / "base" / "kernels" / "options.py").write_text("ENTRY = 1\n")
    package = tmp_path / "a" / "gdp"
    before = stamps(package, monkeypatch)
    assert len(set(before.values())) == 4
    assert stamps(tmp_path / "b" / "gdp", monkeypatch) == before, "another checkout"
    for edited, stale in {
        "innermost_kernels": {"outer_kernels", "inner_kernels", "innermost_kernels"},
        "constants": {"outer_kernels", "inner_kernels"},
        "other_kernels": {"other_kernels"},
        "errors": set(),
        "base/kernels/options": set(before),
    }.items():
        path = package / f"{edited}.py"
        text = path.read_text()
        path.write_text(f"{text}# edited\n")
        after = stamps(package, monkeypatch)
        assert {name for name in before if after[name] != before[name]} == stale, edited
        path.write_text(text)


def test_states_used_longest_ago_are_deleted(tmp_path: Path) -> None:
    for k in range(cache.MOST_STATES + 3):
        (tmp_path / f"gdp.tiny-{k:02}").mkdir()
        os.utime(tmp_path / f"gdp.tiny-{k:02}", (k, k))
    (tmp_path / "gdp.tiny_too-00").mkdir()
    cache._drop_oldest(tmp_path, "gdp.tiny-")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"gdp.tiny-{k:02}" for k in range(3, cache.MOST_STATES + 3)] + [
        "gdp.tiny_too-00"
    ]


def test_a_folder_that_others_can_write_to_is_not_trusted(
    declare: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert declare()(21) == 42
    kept(tmp_path, "nbi").parent.chmod(0o777)
    again = declare()
    assert (again(21), hits(again)) == (42, 0)
    (record,) = caplog.records
    assert "others can write to it" in record.getMessage()


@pytest.mark.parametrize("ending", ["nbc", "nbi"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_of_the_cache_that_is_cut_is_compiled_again(
    declare: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, ending: str,
    share: float,
) -> None:  # fmt: skip
    assert declare()(21) == 42
    path = kept(tmp_path, ending)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    again = declare()
    assert (again(21), hits(again)) == (42, 0)
    (record,) = caplog.records
    assert "is deleted and compiled again" in record.getMessage()
    assert str(path.parent) in record.getMessage()
    # The next start finds whole files.
    after = declare()
    assert (after(21), hits(after)) == (42, 1)
    assert len(caplog.records) == 1


def test_a_damaged_file_that_cannot_be_deleted_is_passed_over(
    declare: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert declare()(21) == 42
    kept(tmp_path, "nbc").write_bytes(b"")

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(cache.os, "unlink", refuse)
    assert declare()(21) == 42
    assert kept(tmp_path, "nbc").read_bytes() == b""


def test_a_full_disk_costs_the_cache_and_nothing_else(
    declare: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def full(self: object, name: str, data: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    with monkeypatch.context() as patched:
        patched.setattr(caching.IndexDataCacheFile, "_save_data", full)
        first, second = declare(), declare()
        assert first(21) == second(21) == 42
    (record,) = caplog.records
    assert "No space left on device; the next start compiles them again" in record.getMessage()
    assert declare()(21) == 42  # the index is there, what it names is not
    last = declare()
    assert (last(21), hits(last)) == (42, 1)


def test_kernels_of_others_keep_the_cache_of_numba(
    declare: Callable[[str], Any], tmp_path: Path
) -> None:
    theirs = declare("somebody.tiny_kernel")
    assert type(theirs._cache) is caching.FunctionCache
    assert type(declare("gdp.tiny_kernel")._cache) is cache.HealingCache
