"""Training of the kernel network, on made-up kernels of two devices."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_kernel_network import products

from gdp.cluster.presets import device_preset
from gdp.costs.measured.kernels import Kernels, descriptor_of, floor_s
from pretrain.costs import cache
from pretrain.costs import train as training
from pretrain.costs.tables import NEUSIGHT, SYSTEMS, Rows, _neusight_dims
from pretrain.costs.train import (
    GatedNetwork,
    _exported,
    _inputs,
    errors,
    known_vectors,
    train,
)

DEVICES = ("h100", "t4")


def made_up(count: int = 2000) -> Rows:
    """Products at 60% of the bandwidth or 70% of the peak, and a launch of 4 us."""
    rng, parts, seconds = np.random.default_rng(0), [], []
    for name in DEVICES:
        silicon = descriptor_of(device_preset(name))
        sizes = 2.0 ** rng.integers(0, 13, count), 2.0 ** rng.integers(7, 13, count)
        own = Kernels.concatenate([products([m], n) for m, n in zip(*sizes, strict=True)])
        peak = np.full(count, 0.7 * silicon.flop_per_s[1])
        seconds.append(floor_s(own, peak, np.full(count, 0.6 * silicon.bytes_per_s)) + 4e-6)
        parts.append(own)
    kernels = Kernels.concatenate(parts)
    shape = (kernels.n * 7).astype(np.int64) * 61
    return Rows(kernels, np.concatenate(seconds), np.repeat([0, 1], count), DEVICES, shape)


@pytest.mark.slow
def test_training_learns_and_the_same_seed_gives_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "BATCH", 256)
    rows = made_up()
    made = [descriptor_of(device_preset(name)) for name in DEVICES]
    kept = np.ones(len(rows.seconds), dtype=bool)
    (network, curve), (again, _) = (train(rows, made, kept, 150, 1) for _ in range(2))
    assert set(network.vectors) == set(DEVICES)
    for name, array in network.weights.items():
        np.testing.assert_array_equal(array, again.weights[name])
    found = errors(network, rows, made, known_vectors(network, rows))["all"]
    assert found.network < 0.15 < found.roofline
    assert curve[-1][0] == 150
    cache.write(tmp_path / "rows.npz", rows)
    same = cache.read(tmp_path / "rows.npz")
    assert same.devices == DEVICES
    np.testing.assert_array_equal(same.kernels.flop, rows.kernels.flop)


def test_numpy_says_what_the_trained_module_says() -> None:
    rows = made_up(50)
    made = [descriptor_of(device_preset(name)) for name in DEVICES]
    data = _inputs(rows, made)
    module = GatedNetwork(data.shown.shape[1], data.told.shape[1], 2, nnx.Rngs(0))
    for gate in module.gates:
        gate.kernel[...] = 20 * gate.kernel[...]
    module.modes.kernel[...] = 20 * module.modes.kernel[...]
    vectors = np.asarray(module.vectors[...])[rows.device]
    told = data.told[rows.device]
    said = module(*map(jnp.asarray, (data.shown, data.floor, told, vectors)))
    network = _exported(module, data.scales, rows, np.ones(len(rows.seconds), dtype=bool))
    again = network.log_seconds(rows.kernels, made, known_vectors(network, rows), rows.device)
    np.testing.assert_allclose(again, said, atol=1e-4)


def test_a_device_that_is_left_out_has_no_vector() -> None:
    rows = made_up(200)
    made = [descriptor_of(device_preset(name)) for name in DEVICES]
    network, _ = train(rows, made, rows.device == 0, 2, 0)
    assert set(network.vectors) == {"h100"}
    assert (known_vectors(network, rows)[1] == 0).all()


def test_sizes_of_neusights_kernels_by_hand() -> None:
    """A convolution of 10 images of 8 x 8, padded by 1: 8 x 8 positions out; a product; a sum."""
    kind, conv = _neusight_dims("conv", np.array([[10.0, 3, 16, 3, 8, 1, 1]]))
    assert (kind, conv["m"][0], conv["n"][0], conv["k"][0]) == ("convolution", 640, 16, 27)
    assert conv["flop"][0] == 2 * 640 * 16 * 27
    kind, linear = _neusight_dims("linear", np.array([[2.0, 4, 8, 16]]))
    assert (kind, linear["m"][0], linear["held"][0]) == ("product", 8, 4 * 8 * 16)
    kind, added = _neusight_dims("add", np.array([[5.0, 7]]))
    assert (kind, added["moved"][0]) == ("elementwise", 4 * 3 * 35)


def test_every_measured_device_has_a_preset_with_units() -> None:
    for name in {*SYSTEMS.values(), *NEUSIGHT.values()}:
        assert descriptor_of(device_preset(name)).units >= 10
