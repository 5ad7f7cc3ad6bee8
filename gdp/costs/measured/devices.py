"""A device as the kernel network reads it: its own numbers, and those of its preset."""

from gdp.cluster.presets import presets
from gdp.cluster.types import Device
from gdp.costs.measured.kernels import Silicon

_CACHE_BYTES, _CLOCK_HZ = 3.2e7, 1.9e9
_FLOP_PER_CLOCK = 256.0
"""Of a unit in float32, two for each of 128 lanes, as most GPUs since 2016 have."""


def silicon_of(device: Device) -> Silicon:
    """The silicon of a device; what no preset of its kind tells is estimated from its peaks.

    A type that the device lacks is computed as the next wider one.
    """
    preset = presets().get(device.kind)
    speed = device.flop_per_s
    single = device.speed("float32")
    half = max(speed.get("bfloat16", 0.0), speed.get("float16", 0.0)) or single
    eight = max(speed.get("float8", 0.0), speed.get("int8", 0.0) if half > single else 0.0) or half
    four = speed.get("float4", eight)
    clock = (preset.clock_hz if preset else 0.0) or _CLOCK_HZ
    units = (preset.units if preset else 0.0) or max(1.0, single / clock / _FLOP_PER_CLOCK)
    cache = (preset.cache_bytes if preset else 0.0) or _CACHE_BYTES
    return Silicon((single, half, eight, four), device.bytes_per_s, units, cache, clock)
