"""Kernels are compiled even where numba can keep them nowhere."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numba
import pytest
from numba.core import caching

from gdp.kernels import cache
from gdp.policy import compilation


def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without a home, of a package that root has installed."""

    def fail(self: object) -> None:
        raise OSError("read-only")

    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    for locator in (caching.InTreeCacheLocator, caching.UserWideCacheLocator):
        monkeypatch.setattr(locator, "ensure_cache_path", fail)


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
from numba.core import caching
def fail(self):
    raise OSError("read-only")
caching.InTreeCacheLocator.ensure_cache_path = fail
caching.UserWideCacheLocator.ensure_cache_path = fail
import gdp.graph.fuse_kernels
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
        compilation.cache_folder()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        compilation.use_cache()
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_every_kernel_asks_where_it_is_kept() -> None:
    package = Path(cache.__file__).parents[1]
    asked = re.compile(r"(?<!\w)cache=True")
    found = [path.name for path in package.rglob("*.py") if asked.search(path.read_text())]
    assert found == ["cache.py"]
