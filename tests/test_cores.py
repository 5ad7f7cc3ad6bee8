"""The cores that this process may use: one answer, whoever asks."""

import os
from dataclasses import replace
from typing import Any

import pytest

from gdp.base.cores import num_cores, usable_cores
from gdp.base.errors import ClusterError
from gdp.base.tasks import engine_of
from gdp.cluster.detect import local_cluster
from gdp.cluster.presets import device_preset
from gdp.cluster.types import make_cluster
from gdp.sim import latency
from gdp.targets.llamacpp import run as llamacpp
from gdp.targets.onnxruntime import sessions
from gdp.targets.onnxruntime.profile import ProfileConfig, cores_of, require_core
from tests import tiny


@pytest.fixture(params=["an affinity", "no affinity"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Three of sixty-four cores, and the three of a system without affinities, such as macOS."""
    if request.param == "no affinity":
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.delattr(os, "sched_setaffinity", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 3)
        return [0, 1, 2]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {41, 5, 2}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    return [2, 5, 41]


def test_cores_come_in_order_and_are_counted(cores: list[int]) -> None:
    assert usable_cores() == cores
    assert num_cores() == 3


def test_a_system_that_does_not_know_has_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == [0]


def test_detection_and_worker_processes_take_them_all(cores: list[int]) -> None:
    assert local_cluster(run=lambda _: None).num_devices == len(cores)
    assert engine_of(None, None).processes == len(cores)
    assert engine_of(2, None).processes == 2


def test_onnx_runtime_runs_and_is_profiled_on_them(cores: list[int]) -> None:
    named = make_cluster("named", [device_preset("cpu-core", f"core{core}") for core in cores])
    assert sessions.core_of_device(named) == tuple(cores)
    assert cores_of(ProfileConfig(core=cores[0], threads=3)) == cores
    require_core(cores[1])
    with pytest.raises(ClusterError, match=f"may use cores {', '.join(map(str, cores))}"):
        require_core(63)


def test_llama_cpp_lends_them_in_turn(cores: list[int]) -> None:
    kinds = ("cpu-core", "rpc-core", "rpc-core", "rpc-core", "rpc-core")
    devices = [device_preset("cpu-core", f"d{i}") for i in range(len(kinds))]
    lent = [replace(d, kind=kind) for d, kind in zip(devices, kinds, strict=True)]
    assert llamacpp.cores_of(make_cluster("lent", lent)) == [cores[0], *cores, cores[0]]


def test_simulations_take_as_many_threads(
    cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    kept = latency.ThreadPoolExecutor

    def pool(threads: int) -> Any:
        asked.append(threads)
        return kept(threads)

    monkeypatch.setattr(latency, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(latency, "_SMALL", 1)
    latency.split(tiny.fork_join(), 64, None, lambda work, first, end: None)
    assert asked == [len(cores) - 1]  # beside the calling one


def test_torch_places_on_them_and_an_uncut_module_computes_with_all(
    cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from gdp.targets.pytorch.program import _settle
    from gdp.targets.torch_devices import torch_devices

    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    _settle(None)
    assert threads == [len(cores)]
    names = [f"core{i}" for i in range(len(cores) + 1)]
    devices = [device_preset("cpu-core", name) for name in names]
    assert torch_devices(make_cluster("all", devices[:-1]))[1] == cores
    whole = device_preset("cpu", "all cores")
    assert torch_devices(make_cluster("both", [whole, devices[0]]))[1] == [None, cores[0]]
    with pytest.raises(ClusterError, match=f"torch has {len(cores)} cores"):
        torch_devices(make_cluster("more", devices))
