"""Shares of a device that kernels of llama.cpp reach: of its bandwidth by kind of memory, of its
arithmetic by backend and maker; and their launches.

Every number is of rows of llama-bench that carry the device's name, fitted by the mean absolute log
error with equal weight for each device; `docs/benchmarks/llamacpp.md` has rows and errors, also
those of a device that was left out. What `gdp tune` learns of a machine comes on top.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from gdp.cluster.table import compute_capability, presets
from gdp.cluster.types import Device

DP4A_CAPABILITIES = 6.1, 7.5
"""NVIDIA's compute capabilities with products of integers: 6.1, and from 7.5 on tensor cores for
them. Between them prompts are unpacked (`ggml_cuda_should_use_mmq` of ggml-cuda/mmq.cu)."""
_DEFAULTS = {"nvidia": "cuda", "amd": "rocm", "intel": "sycl", "apple": "metal"}
"""Backend of a GPU that names none, by its maker."""
_HBM = re.compile(r"(p100|v100|a100|a30|h100|h200|h20|g?b200|g?b300|mi\d+|gaudi|tpu)(?![0-9])")


class Memory(StrEnum):
    """Kinds of memory whose bandwidth mat-vec kernels reach in unlike shares."""

    GDDR = "gddr"
    HBM = "hbm"
    SHARED = "shared"  # LPDDR that a GPU shares with its processor
    APPLE = "apple"
    MAIN = "main"  # of a processor


READ: Mapping[Memory, float] = {
    Memory.GDDR: 0.93, Memory.HBM: 0.60, Memory.SHARED: 0.75, Memory.APPLE: 0.85, Memory.MAIN: 0.62,
}  # fmt: skip
"""Share of a datasheet's bandwidth at which large arrays are read. GDDR: 84 rows of 12 cards of May
2024, 4.8% off in the median, 5.8% on a card that was left out. HBM: 17 rows of H100, V100 and A30;
each alone gives 0.60. Shared: Strix Halo under ROCm 0.75, Vulkan 0.70, GB10 0.80. Apple: 24 models
on M3 Pro, M4 Pro and M5 Max of 2026, 12% off in the mean. Main memory: experts of three mixtures in
4 to 8 bits beside a laptop's RTX 4070, whose RAM is not stated and taken as the preset's; measured
bandwidth instead of a datasheet's counts by `READ_MEASURED`."""
READ_MEASURED = 0.78
"""Of what a processor reads by `gdp devices`: Q5_K of a mixture came at 26.5 of 34 GB/s (i5-10400
beside an RX 6700 XT)."""
INTEL_READ = 0.70
"""Of that of GDDR, by SYCL and Vulkan on an Arc B70 (31 rows without SYCL's bfloat16)."""
DOTS = 0.085
"""Share of a processor's float32 peak at which packed weights meet one token: unpacking, integer
products of 8 bits in three instructions of AVX2 and scales. Of i7-5820K 8.9%, i5-10400 8.6 and 7.3%
(Q5_K, Q4_K), i7-7700K 8%, by peaks of 32 FLOP a clock and core."""
VNNI = 2.0
"""More with instructions that multiply and add in one, as processors with DDR5 have
(`mul_sum_us8_pairs_float` of ggml-cpu/arch/x86/quants.c)."""


class Reach(NamedTuple):
    """Shares of the peak of 16 bits that are reached on prompts."""

    products: float
    experts: float  # few tokens for each
    attention: float  # flash attention over keys of a context


_RDNA = Reach(0.35, 0.07, 0.08)
REACHED: Mapping[tuple[str, str], Reach] = {
    ("rocm", "amd"): _RDNA,
    ("vulkan", "amd"): Reach(0.25, 0.08, 0.10),
    ("vulkan", "intel"): Reach(0.14, 0.03, 0.015),
    ("vulkan", "nvidia"): Reach(0.25, 0.08, 0.10),
    ("sycl", "intel"): Reach(0.35, 0.04, 0.02),
    ("metal", "apple"): Reach(0.60, 0.10, 0.10),
}
"""By backend and maker; CUDA's products are those of the network of kernels. ROCm: R9700 and Strix
Halo, 50 rows, 21% off in the median, 43 and 49% on the one that was left out. Vulkan: the same two,
35 rows, 15%; Arc B70, 17 rows, 14%; of NVIDIA's one row of an RTX PRO 6000 agrees with AMD's. SYCL:
B70, 17 rows, 6%. Metal: three chips, 27 rows, 16%, 27 to 31% on a chip left out; of its experts and
attention no row tells, AMD's are assumed."""
BFLOAT16_AS_FLOAT32 = 0.5
"""Share of the float32 peak at which bfloat16 is multiplied where a backend widens it: SYCL, and
Vulkan on drivers without cooperative matrices of it (`coopmat_bf16_support` of ggml-vulkan.cpp).
Strix Halo 0.4, B70 0.55 (Vulkan) and 0.64 (SYCL)."""
_LAUNCH_S = {"vulkan": 5e-6, "metal": 7e-6}
_VULKAN_INTEL_S, _METAL_M1_S = 20e-6, 16e-6
"""Least seconds of a kernel where they are not the device's launch: barriers of one command buffer.
Fitted with the shares of `READ`; of M1 and M1 Max on builds of May 2024, whose GPUs unpack slowly
for their bandwidth."""


def maker_of(device: Device) -> str:
    """Maker of a device's kind; "" where no preset tells it."""
    preset = presets().get(device.kind)
    return preset.maker if preset else ""


def backend_of(device: Device) -> str:
    """Backend of llama.cpp that computes on a GPU: the one that the machine's file names, else the
    usual one of its maker."""
    return device.backend or _DEFAULTS.get(maker_of(device), "cuda")


def memory_of(device: Device) -> Memory:
    """Kind of a device's memory."""
    if device.is_cpu:
        return Memory.MAIN
    if maker_of(device) == "apple":
        return Memory.APPLE
    if device.is_unified:
        return Memory.SHARED
    return Memory.HBM if _HBM.match(device.kind) else Memory.GDDR


def read_bytes_per_s(device: Device) -> float:
    """Bandwidth that kernels reach on large arrays. Of several sockets a processor has one's: pages
    lie where the file was read to, unless `--numa` spreads them. Llama 3.1 8B in 4 bits on two Xeon
    5218 made 4 tokens/s, on one of them 8 (Mozilla-Ocho/llamafile#765; llama.cpp's #1437)."""
    share = READ[memory_of(device)]
    if device.is_cpu and device.copy_bytes_per_s:
        share = READ_MEASURED
    elif maker_of(device) == "intel" and not device.is_cpu:
        share *= INTEL_READ
    return share * device.bytes_per_s / device.sockets


def launch_s(device: Device) -> float:
    """Least seconds of a kernel on a GPU."""
    preset, backend = presets().get(device.kind), backend_of(device)
    if preset is None or device.dispatch_s != preset.dispatch_s:
        return device.dispatch_s  # described by hand, or measured
    if backend == "vulkan" and maker_of(device) == "intel":
        return _VULKAN_INTEL_S
    if backend == "metal" and re.match(r"m1\b", device.kind):
        return _METAL_M1_S
    return _LAUNCH_S.get(backend, device.dispatch_s)


def reach_of(device: Device) -> Reach | None:
    """Shares of the peak on prompts; None for CUDA, whose kernels the network knows."""
    backend = backend_of(device)
    return None if backend == "cuda" else REACHED.get((backend, maker_of(device)), _RDNA)


def widens_bfloat16(device: Device) -> bool:
    """True where products of bfloat16 are computed in float32."""
    backend = backend_of(device)
    return backend == "sycl" or (backend == "vulkan" and maker_of(device) != "nvidia")


def multiplies_integers(device: Device) -> bool:
    """True where packed weights meet prompts as integers."""
    backend, capability = backend_of(device), compute_capability(device)
    if backend == "rocm":
        return True
    if backend != "cuda":
        return False
    exact, least = DP4A_CAPABILITIES
    return "int8" in device.flop_per_s or capability == exact or capability >= least


def dots_per_s(device: Device) -> float:
    """FLOP/s of a processor of packed weights with one token."""
    old = device.kind in ("cpu-ddr4", "cpu-server", "cpu-core")
    return DOTS * (1.0 if old else VNNI) * device.speed("float32")
