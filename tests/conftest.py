"""Shapes and types of gdp are checked in every test: `tests/typecheck.py`."""

import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs of JAX are compiled for one test each: that takes longer than to run them.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# By content, and read when jax is first imported: also programs of tests that train nothing.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gdp", "xla"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
# Tests that open sessions of their own shall no more send telemetry than gdp does.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
# Answers shall not depend on what was learned of the machine, nor on what tests before them left.
os.environ["GDP_DATA_DIR"] = tempfile.mkdtemp(prefix="gdp-tests-")

from typecheck import checked_package

atexit.register(shutil.rmtree, os.environ["GDP_DATA_DIR"], ignore_errors=True)

# Modules, traces and compilers' trees are millions of objects, nearly none of which is garbage.
gc.set_threshold(50_000, 20, 50)
# Numba kernels opt out with `@no_type_check` under `@njit`: a wrapper would not compile.
checked_package("gdp")


WHOLE_RUN = 1000
"""Tests from which a run needs nearly all kernels."""


@pytest.fixture(autouse=True)
def _levels_of_logs() -> Iterator[None]:
    """A command with `--verbose` says more in its own process, not in the tests after it."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def traces_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither read nor keep traces: the digest of a kept one knows no code that a test replaces."""
    monkeypatch.setenv("GDP_KEEP_TRACES", "0")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what is imported out of garbage collection; workers of a whole run compile first."""
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ and len(session.items) > WHOLE_RUN:
        from workers import compile_kernels

        config: Any = session.config
        compile_kernels(config._tmp_path_factory.getbasetemp().parent)


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer and smaller shapes of the policy network: problems have fewer than 64 ops or than 256,
    on at most 8 devices. Compiling the network takes longer than all that a test trains."""
    from gdp.policy.model import network

    monkeypatch.setattr(network, "OP_SIZES", (64, *network.OP_SIZES))
    monkeypatch.setattr(network, "DEVICE_SIZES", network.DEVICE_SIZES[1:])


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs the program in the tests' own process: (exit code, stdout, stderr)."""
    from gdp.cli import main

    def program(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gdp", *map(str, args)])
        with pytest.raises(SystemExit) as done:
            main.main()
        out, err = capfd.readouterr()
        return int(done.value.code or 0), out, err

    return program


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal files as `tests/workers.py` says, unless another way is asked for."""
    if config.getvalue("dist") != "loadfile":
        return None
    from workers import ByLibrary

    return ByLibrary(config, log)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that is skipped whole: workers tell of one only, where several share a reason."""
    _note_skip(report)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that is skipped."""
    _note_skip(report)


def _note_skip(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Add what is skipped to the file that GDP_SKIPPED names; .ci/run has it run elsewhere."""
    path = os.environ.get("GDP_SKIPPED")
    if path and report.skipped and not hasattr(report, "wasxfail"):
        with Path(path).open("a") as file:
            file.write(f"{report.nodeid}\n")
