"""Facts of presets, and devices whose names resemble others'."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gdp.cluster.file import cluster_of_toml, cluster_toml
from gdp.cluster.presets import cluster_preset, device_preset, presets
from gdp.cluster.reserve import default_reserve
from gdp.cluster.table import compute_capability, has_bfloat16
from gdp.cluster.types import APPLE_KINDS, Device
from gdp.errors import ClusterError

GIB = 2**30
CARDS = ("m4000", "m10", "m40", "m60", "m2000", "m6000", "m6", "m0", "tesla-m4", "m5-mini")


def names_near_apples(seed: int) -> list[str]:
    """Letters, digits and words around those of Apple's chips, none of them one of them."""
    rng = np.random.default_rng(seed)
    parts = ("m", "mx", "gm", ""), ("", "-pro", "-max", "-ultra", "-m", "pro", "-maxq", "-pro-max")
    made = {
        f"{rng.choice(parts[0])}{rng.integers(0, 10 ** rng.integers(1, 5))}{rng.choice(parts[1])}"
        for _ in range(200)
    }
    return sorted(made - APPLE_KINDS)


def test_apples_kinds_are_those_of_the_presets() -> None:
    assert {name for name, entry in presets().items() if entry.maker == "apple"} == APPLE_KINDS
    for name in APPLE_KINDS:
        device = device_preset(name)
        assert device.is_apple
        assert replace(device, unified=None).is_apple


@pytest.mark.parametrize("seed", range(3))
def test_no_other_kind_is_an_apple(seed: int) -> None:
    """Neither its memory nor its machine: a card keeps 1 GiB for itself and needs a processor."""
    for kind in (*CARDS, *names_near_apples(seed)):
        card = Device("x", kind, {"default": 6.8e12}, 288e9, memory_bytes=24 * GIB)
        assert not card.is_unified, kind
        assert default_reserve(card) == GIB, kind
        assert not replace(card, unified=True).is_apple, kind


def test_a_file_says_what_no_name_does() -> None:
    """A Tesla M4 has the name of a Mac, and a Mac may have another name."""
    text = 'host = "a"\n' + "".join(
        f'[[device]]\nname = "{name}"\nkind = "{kind}"\nflop_per_s = 2e12\nbytes_per_s = 88e9\n'
        f"memory_bytes = {4 * GIB}\n{more}\n"
        for name, kind, more in (
            ("a", "m4", "unified = false"), ("b", "m4", ""), ("c", "m9-pro", "unified = true"),
        )
    )  # fmt: skip
    cluster = cluster_of_toml(text, "three")
    again = cluster_of_toml(cluster_toml(cluster), "three")
    assert again.devices == cluster.devices
    assert [d.is_unified for d in again.devices] == [False, True, True]
    assert [d.is_apple for d in again.devices] == [False, True, False]
    assert again.devices[0].reserve_bytes == GIB < again.devices[1].reserve_bytes


CAPABILITIES = {
    "k80": 3.7, "p100": 6.0, "p4": 6.1, "v100": 7.0, "t4": 7.5, "a100": 8.0, "rtx3090": 8.6,
    "l40s": 8.9, "h20": 9.0, "b200": 10.0, "b300": 10.3, "rtx5090": 12.0, "dgx-spark": 12.1,
}  # fmt: skip


def test_every_gpu_of_nvidia_has_its_compute_capability() -> None:
    for name, entry in presets().items():
        device = device_preset(name)
        assert (compute_capability(device) > 0) == (entry.maker == "nvidia"), name
        assert bool(entry.maker) == bool(entry.family) == (not device.is_cpu), name
        bare = Device("x", name, {"default": 1.0}, 1.0)  # as in files of a kind without a preset
        assert compute_capability(bare) == compute_capability(device)
    for name, capability in CAPABILITIES.items():
        assert compute_capability(device_preset(name)) == capability
        assert has_bfloat16(device_preset(name)) == (capability >= 8)


def test_bfloat16_of_other_makers_is_that_of_their_rates() -> None:
    assert has_bfloat16(device_preset("mi300x"))
    assert not has_bfloat16(device_preset("flex-170"))


def test_a_devices_own_capability_precedes_its_kinds(tmp_path: Path) -> None:
    own = replace(device_preset("t4"), compute_capability=8.0)
    assert compute_capability(own) == 8.0
    assert has_bfloat16(own)
    text = cluster_toml(cluster_preset("t4")).replace("= 7.5", "= 8.7")
    assert cluster_of_toml(text, "x").devices[0].compute_capability == 8.7
    with pytest.raises(ClusterError, match="compute_capability must be below 30, "):
        replace(own, compute_capability=86.0)
