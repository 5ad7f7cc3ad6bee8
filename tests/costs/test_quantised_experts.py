"""Experts in all stored types, held against their bytes over the bandwidth."""

import numpy as np
import pytest

from gdp.cluster.presets import cluster_preset
from gdp.costs.measured.costs import MeasuredCosts
from gdp.costs.measured.graph import GraphKernels
from gdp.costs.measured.kernels import ARITHMETIC, ENGINES, KINDS, NUMBERS, Kernels
from gdp.costs.measured.network import shipped_network

SCHEMES = {
    "16 bits": ("float16", 16.0, 0.0, "not told"),
    "fp8, blocks": ("float8", 8.0, 1.0, "floats"),
    "fp8, channels": ("float8", 8.0, 0.0, "floats"),
    "int8, channels": ("float8", 8.0, 0.0, "integers"),
    "8 bits, nobody said": ("float8", 8.0, 0.0, "not told"),
    "8 bits, unpacked": ("float8", 8.0, 0.0, "weights alone"),
    "nvfp4": ("float4", 4.0, 0.0, "floats"),
    "4 bits, unpacked": ("float4", 4.0, 0.0, "weights alone"),
}
MIXTURES = {  # experts, of a token, inner width, hidden width: of one device
    "mixture of 397B over 8": (512, 10, 128, 4096), "its experts over 8": (64, 1.25, 1024, 4096),
    "of 235B": (128, 8, 1536, 4096), "of 30B": (128, 8, 768, 2048), "of 671B over 8":
    (256, 8, 256, 7168), "of 47B": (8, 2, 14336, 4096),
}  # fmt: skip
DEVICES = ("a100", "h100", "h200", "b200", "l40s", "rtx4090", "mi300x")
LAUNCHED_S = {"a100": 100e-6}
"""Of a block of experts however few its bytes are, 70 us where nothing is said: 17 to 60 us of one
token in the tables; an A100 unpacks floats of 8 bits, which no table is of."""


def _block(scheme: str, mixture: str, tokens: int) -> Kernels:
    """A block of experts as one kernel, of its first product's shape."""
    arithmetic, bits, scaled, numbers = SCHEMES[scheme]
    experts, each, inner, hidden = MIXTURES[mixture]
    rows = tokens * each
    working = experts * (1 - (1 - 1 / experts) ** max(rows, 1.0))
    held = working * 3 * inner * hidden * bits / 8 * (1 + scaled * 4 / 128**2)
    numbers_of = {
        "kind": KINDS.index("experts"), "engine": ENGINES.index("vllm"),
        "arithmetic": ARITHMETIC.index(arithmetic), "numbers": NUMBERS.index(numbers),
        "stored_bits": bits, "block_scaled": scaled, "b": working, "m": max(rows / working, 1.0),
        "n": float(inner), "k": float(hidden), "flop": 6.0 * rows * inner * hidden,
        "held_bytes": held, "moved_bytes": 6.0 * rows * (inner + hidden),
    }  # fmt: skip
    return Kernels(**{name: np.array([value]) for name, value in numbers_of.items()})


def _seconds(kernels: Kernels, device: str) -> tuple[float, float]:
    """(predicted seconds, bytes over the bandwidth) on a device."""
    shipped = shipped_network()
    assert shipped is not None
    one = cluster_preset(device).devices[0]
    row, alone = np.zeros(1, dtype=np.int64), np.full(1, -1)
    found = GraphKernels(kernels, row, np.ones(1, bool), alone, np.ones(1), np.zeros(1, bool))
    seconds = MeasuredCosts(shipped[0], served=True).kernel_seconds(found, one)
    return float(seconds[0]), float(kernels.total_bytes[0] / one.bytes_per_s)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("device", DEVICES)
def test_experts_take_a_few_times_their_bytes(device: str, scheme: str) -> None:
    """No block is read faster than its bytes, none takes many times as long beside its launch."""
    for mixture in MIXTURES:
        for tokens in (1, 16):
            seconds, least = _seconds(_block(scheme, mixture, tokens), device)
            told = f"{mixture}, {tokens} tokens: {seconds / least:.1f} times the bytes"
            assert seconds > 0.97 * least, told
            assert seconds < 3 * least + LAUNCHED_S.get(device, 70e-6), told


@pytest.mark.parametrize("device", ["h100", "h200", "b200", "l40s", "rtx4090", "mi300x"])
def test_scales_by_channel_are_no_more_work_than_by_block(device: str) -> None:
    for mixture in MIXTURES:
        channels, blocks = (
            _seconds(_block(f"fp8, {name}", mixture, 16), device)[0]
            for name in ("channels", "blocks")
        )
        assert channels <= 1.05 * blocks, mixture
