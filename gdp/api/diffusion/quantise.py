"""A denoiser or encoder whose weights are stored in fewer bits and unpacked before each product.

Storage in 8-bit floats (`enable_layerwise_casting` of diffusers), 4 bits of bitsandbytes and GGUF
alike: weights of blocks take fewer bytes, and each call reads them, writes them in 16 bits, and
multiplies as before.
"""

from dataclasses import replace

import numpy as np

from gdp.api.diffusion.pricing import PricedComponent
from gdp.base.errors import ArgumentError
from gdp.cluster.types import Cluster

BITS = {"fp8": 8.0, "nf4": 4.5, "q8_0": 8.5, "q6_k": 6.5625, "q5_k": 5.5, "q4_k": 4.5}
"""Bits of a weight by scheme, scales included: nf4 has a 32-bit one for each 64 weights, types of
GGUF are those of ggml."""
UNPACK_SHARE = 0.6
"""Of its bandwidth that a device reaches while it unpacks."""


def quantised(own: PricedComponent, scheme: str, cluster: Cluster) -> PricedComponent:
    """A component of 16 bits with the weights of its blocks in a scheme.

    Raises:
        ArgumentError: There is no such scheme.
    """
    if scheme not in BITS:
        raise ArgumentError(
            f"no scheme {scheme!r} to store weights in; there are {', '.join(BITS)}"
        )
    share = BITS[scheme] / 16.0
    part_bytes = own.part_bytes.copy()
    whole = part_bytes[1:].astype(float)
    part_bytes[1:] = np.ceil(whole * share).astype(np.int64)
    part_s = own.part_s.copy()
    for d, device in enumerate(cluster.devices):
        part_s[1:, d] += whole * (share + 1.0) / (UNPACK_SHARE * device.bytes_per_s)
    largest = int(whole.max(initial=0.0))  # unpacked one block at a time, at most
    return replace(
        own, part_s=part_s, part_bytes=part_bytes,
        activation_bytes=own.activation_bytes + largest, scheme=scheme,
    )  # fmt: skip
