"""Detection of this machine: its cores, the GPUs that installed tools report, the bandwidth of main
memory, measured by reading arrays that no cache holds, and the arithmetic of its cores, by products
of matrices."""

import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gdp.base.cores import num_cores, usable_cores
from gdp.base.errors import ClusterError
from gdp.cluster.links import (
    NVLINK_BYTES_PER_S,
    NVLINK_LATENCY_S,
    PATHS,
    PCIE_LATENCY_S,
    pcie_bytes_per_s,
)
from gdp.cluster.presets import (
    CORE_BYTES_PER_S,
    CORE_LATENCY_S,
    device_preset,
    preset_links,
    preset_of_model,
    presets,
)
from gdp.cluster.reserve import reserved
from gdp.cluster.types import CORE_KIND, Cluster, Device, Link, make_cluster

LOG = logging.getLogger(__name__)
MAX_CORES = 8
AVX512_UNITS = 2.0
"""Width of two units of 512 bits over that of two of 256, as the core of the preset has."""
PRESET_CORES = 8
"""Cores of the preset "cpu"."""
ARRAY_BYTES = 128 << 20
"""Of each thread that measures bandwidth: several times the last-level cache that it can have."""
MOST_BYTES = 2 << 30
SECONDS = 1.0
Run = Callable[[list[str]], str | None]


def local_cluster(*, max_cores: int = MAX_CORES, run: Run | None = None) -> Cluster:
    """Detect this machine: its GPUs and the CPU as one device, or, without GPUs, its cores.

    GPUs come from nvidia-smi or rocm-smi, or from JAX if a JAX accelerator plug-in is installed;
    unknown models get the preset with the nearest memory. Their backend of llama.cpp is what an
    installed llama-cpp-python was built with.

    Args:
        max_cores: Most cores, of those that this process may use.
        run: Runs a command and returns its output, None if it fails.
    """
    run = _output if run is None else run
    gpus = _nvidia(run) or _rocm(run) or _jax_devices()
    if not gpus:
        return _cores(max_cores)
    count = num_cores()
    base = device_preset("cpu", "cpu")
    cpu = replace(
        _sized(base, memory_bytes()),
        model=cpu_model(),
        sockets=num_sockets(),
        # The preset has 8 cores; arithmetic scales with cores, memory bandwidth does not.
        flop_per_s={"default": base.flop_per_s["default"] * count / PRESET_CORES},
    )
    matrix = run(["nvidia-smi", "topo", "-m"]) or ""
    links = read_topology(matrix, [g.name for g in gpus], [g.kind for g in gpus])
    joined = {(link.src, link.dst) for link in links}
    devices, lanes = [cpu, *gpus], _host_links(run, gpus)
    for link in preset_links(devices, [d.kind for d in devices]):
        if (link.src, link.dst) not in joined:
            known = [lanes[name] for name in (link.src, link.dst) if name in lanes]
            over_pcie = known and link.latency_s == PCIE_LATENCY_S
            links.append(replace(link, bytes_per_s=min(known)) if over_pcie else link)
    return make_cluster("local", devices, links)


def memory_bytes() -> int:
    """Main memory of this machine, or the preset's if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return device_preset("cpu").total_bytes


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


def num_sockets(cpuinfo: str = "/proc/cpuinfo") -> int:
    """Number of processor sockets; 1 if the system does not report it."""
    try:
        text = Path(cpuinfo).read_text()
    except OSError:
        return 1
    return max(1, len(set(re.findall(r"^physical id\s*:\s*(\d+)", text, re.MULTILINE))))


def _cores(max_cores: int) -> Cluster:
    cores, model = usable_cores(), cpu_model()
    core = device_preset("cpu-core")
    if model.endswith("avx512"):
        core = replace(core, flop_per_s={k: AVX512_UNITS * v for k, v in core.flop_per_s.items()})
    if len(cores) > max_cores:
        LOG.info(
            "using %d of %d cores; name a cluster such as 16xcpu-core for more",
            max_cores,
            len(cores),
        )
    devices = [
        replace(
            _sized(replace(core, name=f"core{i}"), memory_bytes()),
            model=model,
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


def _sized(device: Device, total_bytes: int) -> Device:
    """The device with the memory that it reports, and the default reserve of that."""
    return reserved(replace(device, memory_bytes=total_bytes, reserve_bytes=0))


def _output(command: list[str]) -> str | None:
    """Output of a command, or None if it is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        LOG.warning("%s does not answer (%s); its devices are left out", command[0], error)
        return None
    return done.stdout


def _nvidia(run: Run) -> list[Device]:
    rows = _queried(run, "name,memory.total")
    capabilities = [
        float(row[0]) if re.fullmatch(r"[0-9]{1,2}\.[0-9]", row[0]) else 0.0
        for row in _queried(run, "compute_cap")
    ]
    devices = []
    for i, row in enumerate(rows):
        if len(row) > 1 and row[-1].isdigit():
            own = capabilities[i] if i < len(capabilities) else 0.0
            size_bytes = int(row[-1]) * 2**20
            devices.append(_gpu(f"gpu{i}", ",".join(row[:-1]), size_bytes, "nvidia", own))
    return devices


def _host_links(run: Run, gpus: Sequence[Device]) -> dict[str, float]:
    """Bytes per second each way between the host and GPUs, by the generation and the lanes that the
    driver names; without those of which it names none. A link that rests has dropped to another
    generation, but never to fewer lanes."""
    rows = _queried(run, "pcie.link.gen.max,pcie.link.width.current")
    return {
        gpu.name: pcie_bytes_per_s(int(row[0]), int(row[1]))
        for gpu, row in zip(gpus, rows, strict=False)
        if len(row) == 2 and all(cell.isdigit() for cell in row) and int(row[1])
    }


def _queried(run: Run, fields: str) -> list[list[str]]:
    """Cells of a query of nvidia-smi, a row for each GPU."""
    text = run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]) or ""
    return [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]


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
            devices.append(_gpu(f"gpu{len(devices)}", name, int(size), "amd"))
    return devices


def _jax_devices() -> list[Device]:
    from importlib.metadata import entry_points

    # Importing JAX costs a second, so only where a plug-in promises an accelerator.
    if not entry_points(group="jax_plugins"):
        return []
    import jax

    try:
        accelerators = [d for d in jax.devices() if d.platform != "cpu"]
    except RuntimeError as error:
        LOG.warning("JAX has an accelerator plug-in that does not start: %s", error)
        return []
    devices = []
    for i, device in enumerate(accelerators):
        stats = device.memory_stats() or {}
        devices.append(
            _gpu(f"{device.platform}{i}", device.device_kind, stats.get("bytes_limit", 0))
        )
    return devices


def _gpu(
    name: str, model: str, size_bytes: int, maker: str = "", capability: float = 0.0
) -> Device:  # fmt: skip
    """A GPU with the numbers of its preset, or of that of its maker, and of its compute capability
    where one is, with the nearest memory."""
    preset = preset_of_model(model, size_bytes)
    if preset is None:
        known = {p: x for p, x in presets().items() if x.maker and not x.unified}
        known = {p: x for p, x in known.items() if x.maker == maker} or known
        same = {p: x for p, x in known.items() if x.compute_capability == capability} or known
        preset = min(same, key=lambda p: abs(device_preset(p).total_bytes - size_bytes))
        LOG.warning("no preset for %s (%s): using the numbers of %s", name, model, preset)
    base = device_preset(preset, name)
    device = _sized(base, size_bytes or base.total_bytes)
    own, backend = capability or base.compute_capability, backend_of(preset, ggml_libraries())
    return replace(device, model=model, compute_capability=own, backend=backend)


def ggml_libraries() -> list[str]:
    """Names of the libraries that an installed llama-cpp-python computes with; none without it."""
    from importlib.util import find_spec

    found = find_spec("llama_cpp")
    if found is None or found.origin is None:
        return []
    return sorted(path.name for path in (Path(found.origin).parent / "lib").glob("*ggml-*"))


_LIBRARIES = {"nvidia": "cuda", "amd": "hip", "intel": "sycl", "apple": "metal"}


def backend_of(preset: str, libraries: Sequence[str]) -> str:
    """Backend of llama.cpp on a GPU according to an installed build: Vulkan if it has no other for
    its maker; "" for the usual one, and without a build.

    >>> backend_of("rx7900xtx", ["libggml-cpu.so", "libggml-vulkan.so"])
    'vulkan'
    """
    own = _LIBRARIES.get(presets()[preset].maker, "none")
    has = {name for name in (own, "vulkan") if any(f"ggml-{name}" in lib for lib in libraries)}
    return "vulkan" if has == {"vulkan"} else ""


def read_topology(text: str, names: list[str], kinds: Sequence[str] = ()) -> list[Link]:
    """The links among the GPUs of a `nvidia-smi topo -m` matrix.

    Empty text has no links. Raises `ClusterError` when the matrix and `names` disagree or a cell
    is unknown. Pairs that cross sockets (SYS) share one channel each way.

    Args:
        text: The matrix.
        names: Of the GPUs, in its order.
        kinds: Presets of the GPUs, of which the fifth generation has links twice as fast.
    """
    rows = [
        line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s+(X|NV|P|N|S)", line)
    ]
    if not rows:
        return []
    if len(rows) != len(names):
        raise ClusterError(f"the topology has {len(rows)} GPUs, the cluster {len(names)}")
    fifth = [(presets()[kind].nvlink_bytes_per_s or 0.0) >= NVLINK5_BYTES_PER_S for kind in kinds]
    nvlink = NVLINK_BYTES_PER_S * (2 if fifth and all(fifth) else 1)
    links = []
    for i, row in enumerate(rows):
        for j, cell in enumerate(row[1 : len(rows) + 1]):
            if i != j:
                links.append(_topology_link(names[i], names[j], cell, nvlink))
    return links


NVLINK5_BYTES_PER_S = 900e9
"""Of 18 links of the fifth generation, 50 GB/s each way (NVIDIA Blackwell architecture, 2024)."""


def _topology_link(src: str, dst: str, cell: str, nvlink_bytes_per_s: float) -> Link:
    if match := re.fullmatch(r"NV(\d+)", cell):
        speed = int(match[1]) * nvlink_bytes_per_s
        return Link(src, dst, speed, NVLINK_LATENCY_S, one_way=True)
    if cell not in PATHS:
        raise ClusterError(
            f"topology: {src} to {dst} is {cell!r}; known are NV#, {', '.join(PATHS)}"
        )
    bandwidth, latency = PATHS[cell]
    channel = "socket" if cell == "SYS" else f"{src} out"
    return Link(src, dst, bandwidth, latency, channel=channel, one_way=True)


class Bandwidth(NamedTuple):
    """Bytes per second that are read from main memory, of the best round: others use it, too."""

    one_core: float
    all_cores: float
    cores: int


def measure_bandwidth(cores: int, seconds: float = SECONDS) -> Bandwidth:
    """Bandwidth of one thread and of one per core, each measured for half of the seconds."""
    from concurrent.futures import ThreadPoolExecutor

    size = min(ARRAY_BYTES, MOST_BYTES // cores)
    arrays = [np.ones(size // 4, dtype=np.float32) for _ in range(cores)]

    def best(threads: int) -> float:
        # numpy gives the interpreter's lock away while it reduces; a maximum only reads.
        fastest, end_s = 0.0, time.perf_counter() + seconds / 2
        with ThreadPoolExecutor(threads) as pool:
            while True:
                started_s = time.perf_counter()
                list(pool.map(np.maximum.reduce, arrays[:threads]))
                now_s = time.perf_counter()
                fastest = max(fastest, threads * size / (now_s - started_s))
                if now_s >= end_s:
                    return fastest

    one = best(1)
    # Two threads of one core never read more than one does.
    return Bandwidth(one, max(one, best(cores)) if cores > 1 else one, cores)


class Arithmetic(NamedTuple):
    """FLOP/s of products of float32 matrices, of the best round: others use the cores, too."""

    one_core: float
    all_cores: float
    cores: int


PRODUCT = 1024
"""Rows and columns of the matrices that are multiplied, which outer caches hold."""
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_MULTIPLY = """
import time, numpy as np
a = np.ones(({size}, {size}), np.float32); b = a.copy(); c = a @ b
best, end = 1e9, time.perf_counter() + {seconds}
while True:
    start = time.perf_counter(); np.matmul(a, b, out=c); now = time.perf_counter()
    best = min(best, now - start)
    if now >= end: break
print(best)
"""


def measure_arithmetic(cores: int, seconds: float = SECONDS) -> Arithmetic:
    """FLOP/s of one thread and of one per core, each measured for half of the seconds.

    In processes of their own, as libraries of linear algebra read their number of threads once.

    Raises:
        ClusterError: NumPy multiplies in no process of its own.
    """

    def flop_per_s(threads: int) -> float:
        program = _MULTIPLY.format(size=PRODUCT, seconds=seconds / 2)
        environment = os.environ | dict.fromkeys(_THREADS, str(threads))
        # -P: a file of the current folder that is called numpy.py is not run.
        done = subprocess.run(
            [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        try:
            return 2.0 * PRODUCT**3 / float(done.stdout)
        except ValueError:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ClusterError(f"arithmetic cannot be measured: {reason}") from None

    one = flop_per_s(1)
    return Arithmetic(one, max(one, flop_per_s(cores)) if cores > 1 else one, cores)


def with_arithmetic(cluster: Cluster, measured: Arithmetic) -> Cluster:
    """The cluster with processors that compute as fast as measured, in float32 and whatever else
    has no speed of its own."""
    cores = sum(device.kind == CORE_KIND for device in cluster.devices)
    of_core = min(measured.one_core, measured.all_cores / max(1, cores))
    devices = [
        replace(d, flop_per_s={"default": of_core if d.kind == CORE_KIND else measured.all_cores})
        if d.is_cpu
        else d
        for d in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


def with_bandwidth(cluster: Cluster, measured: Bandwidth) -> Cluster:
    """The cluster with processors as fast as measured; cores share what all of them read. A core
    that copies reads and writes each byte."""
    cores = sum(device.kind == CORE_KIND for device in cluster.devices)
    of_core = min(measured.one_core, measured.all_cores / max(1, cores))
    devices = [
        replace(
            d,
            bytes_per_s=of_core if d.kind == CORE_KIND else measured.all_cores,
            copy_bytes_per_s=measured.one_core / 2,
        )
        if d.is_cpu
        else d
        for d in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))
