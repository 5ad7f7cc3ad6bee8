"""Trains the kernel network on measured kernels.

    python -m pretrain.costs.train [-o FOLDER] [--bench FOLDER] [--rows CACHE.npz]
        [--without PRESET ...]

Layers that lie in the held shapes (`--held`, 0.1 of all) are left out of the training on every
device. Each `--without` first trains a network of a third of the steps that never sees a device.
Errors are printed for both, beside those of a roofline as it is and fitted to as many kernels.
The tables: `pretrain.costs.tables`.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from gdp.costs.measured.kernels import KINDS, DeviceDescriptor, features
from gdp.costs.measured.network import LAYERS, VECTOR, KernelNetwork
from gdp.costs.measured.own import VECTOR_STD, fit_vector
from pretrain.costs.ship import ship
from pretrain.costs.tables import Rows, silicon

HIDDEN = 192
BATCH = 2048
RATE = 3e-3
HUBER = 0.1
"""Log error where the loss turns linear."""
BLUR = 0.3
"""Noise on the scaled descriptors, so that they do not stand for the names of a few devices."""
FEW = 30
"""Kernels of each class of a device that rooflines are fitted to."""
SOME = (30, 300, 3000)
"""Kernels of a device left out."""
UNKNOWN = 0.4
"""Share of training rows that do not know their device's vector, so that descriptors suffice."""


class GatedNetwork(nnx.Module):
    """The layers of `gdp.costs.measured.network`, to be trained."""

    def __init__(self, inputs: int, told: int, devices: int, rngs: nnx.Rngs) -> None:
        sizes = [inputs, HIDDEN, HIDDEN, HIDDEN]
        self.kernels = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes)])
        small = nnx.initializers.normal(0.02)
        self.gates = nnx.List(
            [nnx.Linear(told, HIDDEN, kernel_init=small, rngs=rngs) for _ in LAYERS]
        )
        self.last = nnx.Linear(HIDDEN, 1, kernel_init=small, rngs=rngs)
        self.last_gate = nnx.Linear(told, 1, use_bias=False, kernel_init=small, rngs=rngs)
        self.modes = nnx.Linear(HIDDEN, VECTOR, use_bias=False, kernel_init=small, rngs=rngs)
        self.vectors = nnx.Param(VECTOR_STD * jax.random.normal(rngs.params(), (devices, VECTOR)))

    def __call__(
        self, shown: jax.Array, floor: jax.Array, told: jax.Array, vector: jax.Array
    ) -> jax.Array:
        hidden = shown
        for kernel, gate in zip(self.kernels, self.gates, strict=True):
            hidden = jax.nn.silu(kernel(hidden)) * (1.0 + jnp.tanh(gate(told)))
        above = (self.last(hidden) + self.last_gate(told))[:, 0]
        return floor + jax.nn.softplus(above + (self.modes(hidden) * vector).sum(axis=1))


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Rows as the network reads them."""

    shown: np.ndarray
    floor: np.ndarray
    target: np.ndarray
    device: np.ndarray
    told: np.ndarray  # [D, F] descriptors, scaled
    scales: dict[str, np.ndarray]


def _inputs(rows: Rows, made: list[DeviceDescriptor]) -> _Inputs:
    shown, floor = features(rows.kernels, made, rows.device)
    told = np.array([s.descriptor() for s in made])
    scales = {
        "shown_mean": shown.mean(0), "shown_scale": np.maximum(shown.std(0), 0.05),
        "told_mean": told.mean(0), "told_scale": np.maximum(told.std(0), 0.1),
    }  # fmt: skip
    return _Inputs(
        ((shown - scales["shown_mean"]) / scales["shown_scale"]).astype(np.float32),
        floor.astype(np.float32), np.log(rows.seconds).astype(np.float32), rows.device,
        ((told - scales["told_mean"]) / scales["told_scale"]).astype(np.float32), scales,
    )  # fmt: skip


def _weights(rows: Rows, train: np.ndarray) -> np.ndarray:
    """Chance of each row: tables count by the root of their size."""
    k = rows.kernels
    table = ((rows.device * 16 + k.kind) * 8 + k.engine) * 8 + k.arithmetic
    _, which, counts = np.unique(table[train], return_inverse=True, return_counts=True)
    chance = 1.0 / np.sqrt(counts[which])
    return chance / chance.sum()


def train(
    rows: Rows, made: list[DeviceDescriptor], kept: np.ndarray, steps: int, seed: int
) -> tuple[KernelNetwork, list[tuple[int, float]]]:
    """(network fitted to the kept rows, (step, mean absolute log error on its batches))."""
    data = _inputs(rows, made)
    network = GatedNetwork(data.shown.shape[1], data.told.shape[1], len(made), nnx.Rngs(seed))
    optimiser = nnx.Optimizer(
        network,
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adamw(optax.cosine_onecycle_schedule(steps, RATE, 0.1), weight_decay=1e-4),
        ),
        wrt=nnx.Param,
    )
    told = jnp.asarray(data.told)

    def loss_of(network: GatedNetwork, batch: Any) -> tuple[jax.Array, jax.Array]:
        shown, floor, target, device, knows, noise = batch
        vector = network.vectors[...][device] * knows[:, None]
        off = network(shown, floor, told[device] + noise, vector) - target
        prior = (network.vectors[...] ** 2).sum() / VECTOR_STD**2
        return optax.huber_loss(off, delta=HUBER).mean() / HUBER + 1e-4 * prior, jnp.abs(off).mean()

    @nnx.jit
    def update(network: GatedNetwork, optimiser: nnx.Optimizer, batch: Any) -> jax.Array:
        (_, error), grads = nnx.value_and_grad(loss_of, has_aux=True)(network, batch)
        optimiser.update(network, grads)
        return error

    curve: list[tuple[int, float]] = []
    errors: list[float] = []
    begin = time.monotonic()
    for step, batch in enumerate(_batches(rows, data, np.flatnonzero(kept), steps, seed)):
        errors.append(float(update(network, optimiser, batch)))
        if (step + 1) % 500 == 0 or step + 1 == steps:
            curve.append((step + 1, float(np.mean(errors))))
            click.echo(
                f"{step + 1}: {curve[-1][1]:.4f} ({time.monotonic() - begin:.0f} s)", err=True
            )
            errors = []
    return _exported(network, data.scales, rows, kept), curve


def _batches(
    rows: Rows, data: _Inputs, train: np.ndarray, steps: int, seed: int
) -> Iterator[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(seed)
    chance = _weights(rows, train)
    for start in range(0, steps, 64):
        drawn = rng.choice(train, (min(64, steps - start), BATCH), p=chance)
        for which in drawn:
            knows = (rng.random(BATCH) >= UNKNOWN).astype(np.float32)
            yield (
                data.shown[which], data.floor[which], data.target[which], data.device[which], knows,
                BLUR * rng.standard_normal((BATCH, data.told.shape[1]), dtype=np.float32),
            )  # fmt: skip


def _array(bias: Any) -> np.ndarray:
    return np.asarray(bias[...])


def _exported(
    network: GatedNetwork, scales: dict[str, np.ndarray], rows: Rows, kept: np.ndarray
) -> KernelNetwork:
    weights = {k: v.astype(np.float32) for k, v in scales.items()}
    for name, kernel, gate in zip(LAYERS, network.kernels, network.gates, strict=True):
        weights |= {
            "kernel" + name: kernel.kernel[...], "bias" + name: _array(kernel.bias),
            "gate" + name: gate.kernel[...], "open" + name: _array(gate.bias),
        }  # fmt: skip
    weights |= {
        "kernel4": network.last.kernel[...], "bias4": _array(network.last.bias),
        "gate4": network.last_gate.kernel[...], "modes": network.modes.kernel[...],
    }  # fmt: skip
    known = set(np.unique(rows.device[kept]).tolist())
    vectors = np.asarray(network.vectors[...])
    return KernelNetwork(
        {k: np.asarray(v) for k, v in weights.items()},
        {name: vectors[d] for d, name in enumerate(rows.devices) if d in known},
    )


# Errors.


class Errors(NamedTuple):
    """Mean absolute relative errors of some kernels: of the network, and of what needs none."""

    kernels: int
    network: float
    roofline: float  # plus five microseconds
    fitted: float  # roofline with two efficiencies and a launch, fitted to thirty kernels


def errors(
    network: KernelNetwork,
    rows: Rows,
    made: list[DeviceDescriptor],
    vectors: np.ndarray,
    seed: int = 0,
) -> dict[str, Errors]:
    """Errors by class; "all" counts every kernel."""
    predicted = np.exp(network.log_seconds(rows.kernels, made, vectors, rows.device))
    floor = np.exp(features(rows.kernels, made, rows.device)[1])
    by = (predicted, floor + 5e-6, _fitted_rooflines(rows, made, seed))
    off = [np.abs(x / rows.seconds - 1) for x in by]
    found = {"all": Errors(len(floor), *(float(x.mean()) for x in off))}
    for kind in np.unique(rows.kernels.kind):
        own = rows.kernels.kind == kind
        found[KINDS[kind]] = Errors(int(own.sum()), *(float(x[own].mean()) for x in off))
    return found


def _fitted_rooflines(rows: Rows, made: list[DeviceDescriptor], seed: int) -> np.ndarray:
    """Seconds by max(arithmetic / e, traffic / f) + launch, with e, f and the launch of each device
    and class chosen on a grid for `FEW` of its kernels."""
    rng, seconds = np.random.default_rng(seed), np.empty(len(rows.seconds))
    shares, launches = np.geomspace(0.05, 1.0, 14), np.geomspace(1e-6, 1e-4, 14)
    grid = np.array(np.meshgrid(shares, shares, launches, indexing="ij")).reshape(3, -1)
    for d, silicon_ in enumerate(made):
        for kind in np.unique(rows.kernels.kind[rows.device == d]):
            own = np.flatnonzero((rows.device == d) & (rows.kernels.kind == kind))
            few = rng.permutation(own)[:FEW]

            def by(
                which: np.ndarray, choice: np.ndarray, at: DeviceDescriptor = silicon_
            ) -> np.ndarray:
                peak = np.array(at.flop_per_s)[rows.kernels.arithmetic[which]]
                flop_s = (rows.kernels.flop[which] / peak)[:, None] / choice[0]
                bytes_s = (rows.kernels.total_bytes[which] / at.bytes_per_s)[:, None] / choice[1]
                return np.maximum(flop_s, bytes_s) + choice[2]

            off = np.abs(np.log(by(few, grid) / rows.seconds[few][:, None])).mean(axis=0)
            best = grid[:, [int(off.argmin())]]
            seconds[own] = by(own, best)[:, 0]
    return seconds


def known_vectors(network: KernelNetwork, rows: Rows) -> np.ndarray:
    """[D, V] vectors of the devices; zeros for one that was not measured."""
    return np.array([network.vectors.get(name, np.zeros(VECTOR)) for name in rows.devices])


def told(title: str, found: dict[str, Errors]) -> str:
    """A line for each class."""
    return "\n".join(
        f"{title}: {name}: {e.kernels:,} kernels, {e.network:.1%} off in the mean; roofline + 5 us "
        f"{e.roofline:.1%}, roofline fitted to {FEW} kernels of each class {e.fitted:.1%}"
        for name, e in found.items()
    )


def load_rows(cache: Path | None, bench: Path | None, cap: int) -> Rows:
    """Rows from the cache, else from the tables, and then kept in the cache."""
    from pretrain.costs.cache import read, write
    from pretrain.costs.tables import measured_rows

    if cache is not None and cache.exists():
        return read(cache)
    rows = measured_rows(bench, cap=cap)
    if cache is not None:
        write(cache, rows)
    return rows


def left_out(
    rows: Rows, made: list[DeviceDescriptor], name: str, steps: int, held: float, seed: int
) -> float:
    """Mean error of a network on a device that it never saw; its tables are printed, and errors on
    a third of its layers after some kernels of the others, by a vector and by one factor, in the
    engine that most of its kernels are of."""
    d = rows.devices.index(name)
    network, _ = train(rows, made, ~rows.held_shapes(held) & (rows.device != d), steps, seed)
    own, vectors = rows.take(rows.device == d), known_vectors(network, rows)
    found = errors(network, own, made, vectors)
    click.echo(told(f"{name}, left out", found))
    own = own.take(own.kernels.engine == np.bincount(own.kernels.engine).argmax())
    apart = own.held_shapes(1 / 3)
    first, rest = own.take(~apart), own.take(apart)
    zeros, vector = np.zeros(len(rest.seconds), dtype=np.int64), np.zeros(VECTOR)
    for count in (0, *SOME):
        some = np.random.default_rng(seed).permutation(len(first.seconds))[:count]
        few, seconds = first.kernels.take(some), first.seconds[some]
        by_none = network.log_seconds(few, [made[d]], np.zeros((1, VECTOR)), 0 * some)
        factor = float(np.exp(np.median(np.log(seconds) - by_none))) if count else 1.0
        off = []
        for scale, own_vector in (
            (factor, vector), (1.0, fit_vector(network, few, made[d], seconds))
        ):  # fmt: skip
            logs = network.log_seconds(rest.kernels, [made[d]], own_vector[None], zeros)
            off.append(float(np.abs(scale * np.exp(logs) / rest.seconds - 1).mean()))
        click.echo(f"{name}, {count} kernels of it: {off[1]:.1%} off; by one factor {off[0]:.1%}")
    return found["all"].network


@click.command(help=__doc__)
@click.option("-o", "output", type=click.Path(path_type=Path), help="Folder of the network.")
@click.option("--bench", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rows", "cache", type=click.Path(path_type=Path), help="Cache of the tables.")
@click.option("--cap", type=click.IntRange(100), default=12000, help="Most rows of one table.")
@click.option("--steps", type=click.IntRange(1), default=12000)
@click.option("--held", type=click.FloatRange(0, 0.5), default=0.1, help="Share of layers.")
@click.option(
    "--without", multiple=True, help="Preset that is left out whole, in a run of its own."
)
@click.option("--seed", type=int, default=0)
def main(
    output: Path | None, bench: Path | None, cache: Path | None, cap: int, steps: int, held: float,
    without: tuple[str, ...], seed: int,
) -> None:  # fmt: skip
    if output is not None and not without:
        raise click.UsageError(
            "-o also says how far off a device is that was never seen: --without"
        )
    rows = load_rows(cache, bench, cap)
    made = silicon(rows)
    unseen = [left_out(rows, made, name, steps // 3, held, seed) for name in without]
    kept = ~rows.held_shapes(held)
    network, curve = train(rows, made, kept, steps, seed)
    apart = rows.take(~kept)
    vectors = known_vectors(network, rows)
    click.echo(told("layers unseen", errors(network, apart, made, vectors)))
    of_device: dict[str, float] = {}
    for d, name in enumerate(rows.devices):
        own = apart.take(apart.device == d)
        if len(own.seconds):
            of_device[name] = errors(network, own, made, vectors)["all"].network
            click.echo(f"{name}: {of_device[name]:.1%} off on {len(own.seconds):,} kernels")
    if output is not None:
        settings = {"steps": steps, "held": held, "cap": cap, "seed": seed, "hidden": HIDDEN,
                    "batch": BATCH, "rate": RATE, "blur": BLUR, "unknown": UNKNOWN}  # fmt: skip
        recipe = "".join(f"{key} = {value}\n" for key, value in settings.items())
        recipe += (
            f"# step, mean absolute log error of its batches\ncurve = {[list(c) for c in curve]}\n"
        )
        recipe += f"without = {list(without)}\nleft_out_errors = {[round(x, 4) for x in unseen]}\n"
        mean = float(np.mean(unseen)) if unseen else float("nan")
        ship(network, output, rows, of_device, mean, recipe)


if __name__ == "__main__":
    main()
