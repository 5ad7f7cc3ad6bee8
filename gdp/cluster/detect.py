"""The cluster that this machine is: cores, and the GPUs that the tools present report."""

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gdp.cluster.presets import (
    CORE_BYTES_PER_S,
    CORE_LATENCY_S,
    PCIE_BYTES_PER_S,
    PCIE_LATENCY_S,
    device_names,
    device_preset,
)
from gdp.cluster.topology import read_topology
from gdp.cluster.types import Cluster, Device, Link, make_cluster

LOG = logging.getLogger(__name__)
MAX_CORES = 8
Run = Callable[[list[str]], str | None]


def local_cluster(*, max_cores: int = MAX_CORES, run: Run | None = None) -> Cluster:
    """This machine: its GPUs beside the CPU as one device, or, without GPUs, its cores.

    GPUs come from nvidia-smi or rocm-smi, or from JAX where a JAX accelerator plug-in is
    installed; unknown models get the preset with the nearest memory. Cores are those that this
    process may use, at most `max_cores`.
    """
    run = _output if run is None else run
    gpus = _nvidia(run) or _rocm(run) or _jax_devices()
    if not gpus:
        return _cores(max_cores)
    count = len(available_cores())
    base = device_preset("cpu", "cpu")
    cpu = replace(
        base,
        memory_bytes=memory_bytes(),
        model=cpu_model(),
        # The preset has 16 cores; arithmetic scales with cores, memory bandwidth does not.
        flop_per_s={"default": base.flop_per_s["default"] * count / 16},
    )
    links = read_topology(run(["nvidia-smi", "topo", "-m"]) or "", [g.name for g in gpus])
    joined = {(link.src, link.dst) for link in links}
    devices = [cpu, *gpus]
    for a in devices:
        for b in devices:
            if a is not b and (a.name, b.name) not in joined:
                links.append(
                    Link(a.name, b.name, PCIE_BYTES_PER_S["pcie4"], PCIE_LATENCY_S,
                         channel=f"{a.name} out", one_way=True)
                )  # fmt: skip
    return make_cluster("local", devices, links)


def available_cores() -> list[int]:
    """Ids of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def memory_bytes() -> int:
    """Main memory of this machine, or the preset's where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return device_preset("cpu").memory_bytes


def cpu_model() -> str:
    """The processor's name and its widest vector unit, such as "AMD EPYC avx512", or ""."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    entry = {
        key.strip(): value.strip()
        for key, _, value in (line.partition(":") for line in lines)
        if key.strip() in ("model name", "flags")
    }
    flags = entry.get("flags", "").split()
    widest = next((w for w, f in (("avx512", "avx512f"), ("avx2", "avx2")) if f in flags), "")
    return " ".join(part for part in (entry.get("model name", ""), widest) if part)


def _cores(max_cores: int) -> Cluster:
    cores = available_cores()
    if len(cores) > max_cores:
        LOG.info(
            "using %d of %d cores; name a cluster such as 16xcpu-core for more",
            max_cores,
            len(cores),
        )
    devices = [
        replace(
            device_preset("cpu-core", f"core{i}"),
            memory_bytes=memory_bytes(),
            model=cpu_model(),
            memory_pool="ram",
        )
        for i in range(min(len(cores), max_cores))
    ]
    links = [
        Link(a.name, b.name, CORE_BYTES_PER_S, CORE_LATENCY_S, one_way=True)
        for a in devices
        for b in devices
        if a is not b
    ]
    return make_cluster("local", devices, links)


def _output(command: list[str]) -> str | None:
    """What a tool prints, or None where it is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        LOG.warning("%s does not answer (%s); its devices are left out", command[0], error)
        return None
    return done.stdout


def _nvidia(run: Run) -> list[Device]:
    text = run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    devices = []
    for i, line in enumerate((text or "").strip().splitlines()):
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdigit():
            devices.append(_gpu(f"gpu{i}", name.strip(), int(mebibytes) * 2**20))
    return devices


def _rocm(run: Run) -> list[Device]:
    text = run(["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"])
    if not text:
        return []
    import msgspec

    try:
        cards = msgspec.json.decode(text, type=dict[str, dict[str, str]])
    except msgspec.DecodeError:
        LOG.warning("rocm-smi prints no JSON; its devices are left out")
        return []
    devices = []
    for entry in cards.values():
        size = next((v for k, v in entry.items() if "Total Memory" in k and v.isdigit()), None)
        if size is not None:
            name = next((v for k, v in entry.items() if "Card" in k), "AMD GPU")
            devices.append(_gpu(f"gpu{len(devices)}", name, int(size)))
    return devices


def _jax_devices() -> list[Device]:
    from importlib.metadata import entry_points

    # Importing JAX costs a second, so only where a plug-in promises an accelerator.
    if not entry_points(group="jax_plugins"):
        return []
    import jax

    try:
        found = [d for d in jax.devices() if d.platform != "cpu"]
    except RuntimeError as error:
        LOG.warning("JAX has an accelerator plug-in that does not start: %s", error)
        return []
    devices = []
    for i, device in enumerate(found):
        stats = device.memory_stats() or {}
        devices.append(
            _gpu(f"{device.platform}{i}", device.device_kind, stats.get("bytes_limit", 0))
        )
    return devices


def _gpu(name: str, model: str, size_bytes: int) -> Device:
    """A GPU with the numbers of its preset, or of the preset with the nearest memory."""
    word = model.lower().replace(" ", "")
    presets = [p for p in device_names() if not p.startswith("cpu")]
    match = [p for p in presets if p.replace("-", "") in word.replace("-", "")]
    if match:
        preset = max(match, key=len)
    else:
        preset = min(presets, key=lambda p: abs(device_preset(p).memory_bytes - size_bytes))
        LOG.warning("no preset for %s (%s): using the numbers of %s", name, model, preset)
    base = device_preset(preset, name)
    return replace(base, memory_bytes=size_bytes or base.memory_bytes, model=model)
