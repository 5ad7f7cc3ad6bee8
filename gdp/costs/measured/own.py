"""Measured kernels of a user's own card, and the kernel network fitted to them.

Of a card the network reads a descriptor and a vector, the weights of learned modes. Kernels of a
card give it a vector of its own, with a term for each class of kernels and weights of the units of
the last layer: a maximum a posteriori, so that few kernels move it little. They are kept in the
user's data folder, a file for each card.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from jaxtyping import Float

from gdp.base.files.reading import Kind, read_json
from gdp.base.files.writing import indented_json, write_atomic
from gdp.cluster.types import Device
from gdp.costs.machine import data_folder
from gdp.costs.measured.kernels import (
    ARITHMETIC,
    ENGINES,
    KINDS,
    DeviceDescriptor,
    Kernels,
    descriptor_of,
    features,
)
from gdp.costs.measured.network import VECTOR, Inputs, KernelNetwork, factors
from gdp.costs.profile import ProfileError

VECTOR_STD, CLASS_STD, UNIT_STD = 1.0, 0.5, 0.1
"""Prior deviations of the weights of modes, of the term of a class, and of the weight of a unit.
Chosen by hand on L40S and H100, each left out of the training."""
KERNEL_STD = 0.35
"""Deviation of the log seconds of one kernel of a new card from the network."""
STEPS = 20
MOST_KERNELS = 5000
"""Newest kernels of a card that are kept."""
LEAST_KERNELS, FOLDS = 10, 5
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_FILE = Kind("file of measured kernels", ProfileError)
_Size = Annotated[float, msgspec.Meta(ge=1, le=1e12)]


class KernelRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured kernel; b, m, n and k by class as `gdp.costs.measured.kernels` has them."""

    kind: Literal[
        "product", "batched product", "prompt attention", "token attention", "normalisation",
        "softmax", "elementwise",
    ]  # fmt: skip
    b: _Size
    m: _Size
    n: _Size
    k: _Size
    dtype: Literal["float32", "float16", "bfloat16", "float8"]
    seconds: Annotated[float, msgspec.Meta(ge=1e-7, le=3600)]

    @property
    def shape(self) -> tuple[str, float, float, float, float, str]:
        """All but its seconds."""
        return self.kind, self.b, self.m, self.n, self.k, self.dtype


class CardKernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured kernels of a card, as they are kept and exchanged."""

    card: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,99}\Z")]  # kind of device
    date: Annotated[str, msgspec.Meta(max_length=100)]
    kernels: Annotated[tuple[KernelRow, ...], msgspec.Meta(min_length=1, max_length=MOST_KERNELS)]


def kernels_of(rows: Sequence[KernelRow]) -> Kernels:
    """Work and traffic of kernels. Products read their weights; a whole prompt attends to itself
    causally; `k` of rows without products is the number of tensors that they read."""
    kind = np.array([KINDS.index(row.kind) for row in rows], dtype=np.int64)
    b, m, n, k = np.array([(row.b, row.m, row.n, row.k) for row in rows], float).reshape(-1, 4).T
    item = np.array([ITEM_BYTES[row.dtype] for row in rows], float)
    made = np.maximum(item, 2.0)  # products in 8 bits write 16
    names = [{"bfloat16": "float16"}.get(row.dtype, row.dtype) for row in rows]
    arithmetic = np.array([ARITHMETIC.index(name) for name in names], dtype=np.int64)
    of = [kind == KINDS.index(name) for name in KINDS]
    product, batched, _, prompt, token, _, _, _, simple = of
    multiplies, attends = product | batched, prompt | token
    seen = np.where(prompt, (n + 1) / 2, n)
    flop = np.select(
        [multiplies, attends, simple], [2 * b * m * n * k, 4 * b * m * seen * k, m * n], 5 * m * n
    )
    held = np.select([product, attends], [n * k * item, 2 * b * n * k * item], 0.0)
    moved = np.select(
        [product, batched, attends],
        [m * (k * item + n * made), b * ((m + n) * k * item + m * n * made), 4.0 * b * m * k],
        (k + 1) * m * n * item,
    )
    precise = arithmetic == ARITHMETIC.index("float32")
    # As of graphs (`graph_kernels`): all in 16 bits or fewer is taken for an engine's.
    engine = np.where(precise, ENGINES.index("torch"), ENGINES.index("vllm"))
    zeros = np.zeros(len(rows))
    return Kernels(
        kind, engine, arithmetic, 8 * item, zeros, b, m, n, k, flop, held, moved,
        zeros.astype(np.int64),
    )  # fmt: skip


def fit_vector(
    network: KernelNetwork,
    kernels: Kernels,
    silicon: DeviceDescriptor,
    seconds: Float[np.ndarray, "K"],
) -> Float[np.ndarray, "W"]:
    """Vector of a card in whole (`factors`): a maximum a posteriori.

    Gauss-Newton steps on log seconds with the prior of independent N(0, std^2) for its entries;
    each is halved until the objective falls.
    """
    shown, floor = features(kernels, [silicon], np.zeros(len(kernels), dtype=np.int64))
    of = np.zeros(len(kernels), dtype=np.int64)
    inputs = Inputs(shown, floor, of, silicon.descriptor()[None], np.zeros((1, VECTOR)))
    above, modes = factors(network.weights, inputs, whole=True)
    std = np.full(modes.shape[1], UNIT_STD)
    std[:VECTOR], std[VECTOR : VECTOR + len(KINDS)] = VECTOR_STD, CLASS_STD
    vector = np.zeros(len(std))
    target = np.log(seconds) - floor

    def residual(vector: np.ndarray) -> np.ndarray:
        return np.logaddexp(0.0, above + modes @ vector) - target

    def objective(vector: np.ndarray) -> float:
        # Beyond two deviations the loss is linear: one kernel that was preempted leads nobody.
        off, ends = np.abs(residual(vector)) / KERNEL_STD, 2.0
        loss = np.where(off < ends, off**2, 2 * ends * off - ends**2)
        return float(loss.sum() + ((vector / std) ** 2).sum())

    best = objective(vector)
    for _ in range(STEPS):
        off = residual(vector)
        slope = modes / (1.0 + np.exp(-(above + modes @ vector)))[:, None]
        weight = 1.0 / np.maximum(1.0, np.abs(off) / (2 * KERNEL_STD)) / KERNEL_STD**2
        left = slope.T @ (weight[:, None] * slope) + np.diag(std**-2)
        move = np.linalg.solve(left, -slope.T @ (weight * off) - vector / std**2)
        while np.abs(move).max() > 1e-6 and objective(vector + move) >= best:
            move = move / 2
        if np.abs(move).max() <= 1e-6:
            break
        vector = vector + move
        best = objective(vector)
    return vector


def held_out_error(
    network: KernelNetwork, kernels: Kernels, silicon: DeviceDescriptor, seconds: np.ndarray
) -> tuple[float, float]:
    """Mean relative error on kernels by the network without the card's vector, and by vectors that
    were fitted to the kernels of other layers (every fifth n, k of a class)."""
    layer = np.unique(
        np.column_stack([kernels.kind, kernels.n, kernels.k]), axis=0, return_inverse=True
    )[1]
    fold = np.random.default_rng(0).permutation(int(layer.max()) + 1)[layer] % FOLDS
    zeros = np.zeros(len(kernels), dtype=np.int64)
    predicted = np.empty((2, len(kernels)))
    for part in range(FOLDS):
        own = fold == part
        vector = fit_vector(network, kernels.take(~own), silicon, seconds[~own])
        for i, one in enumerate((np.zeros(VECTOR), vector)):
            logs = network.log_seconds(kernels.take(own), [silicon], one[None], zeros[own])
            predicted[i, own] = np.exp(logs)
    before, after = np.abs(predicted / seconds - 1).mean(axis=1)
    return float(before), float(after)


# Memory of them.


def _folder() -> Path | None:
    folder = data_folder()
    return None if folder is None else folder.parent / "kernels"


def remember(cards: Sequence[CardKernels]) -> Path:
    """Keep kernels of cards beside those that are known, instead of those of equal shapes; raises
    `OSError` where they cannot be written."""
    folder = _folder()
    if folder is None:
        raise OSError("there is no home folder: set GDP_DATA_DIR to a folder of your own")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for card in cards:
        known = remembered().get(card.card)
        rows = {row.shape: row for row in (known.kernels if known else ())}
        for row in card.kernels:
            rows.pop(row.shape, None)
            rows[row.shape] = row
        kept = msgspec.structs.replace(card, kernels=(*rows.values(),)[-MOST_KERNELS:])
        write_atomic(folder / f"{card.card}.json", indented_json(kept))
    return folder


def remembered() -> dict[str, CardKernels]:
    """The cards with kernels of their own. A damaged file is left out."""
    folder = _folder()
    files = sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else []
    stats = ((path, path.stat()) for path in files)
    return _read(tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats))


@functools.lru_cache(maxsize=4)
def _read(files: tuple[tuple[Path, int, int], ...]) -> dict[str, CardKernels]:
    found = dict[str, CardKernels]()
    for path, *_ in files:
        try:
            card = read_json(os.fspath(path), _FILE, CardKernels)
        except (ProfileError, OSError):
            continue
        found[card.card] = card
    return found


def forget(cards: Sequence[str] | None = None) -> int:
    """Delete the kernels of these cards, or of all; returns how many there were."""
    folder, count = _folder(), 0
    for name, card in remembered().items():
        if folder is not None and (cards is None or name in cards):
            (folder / f"{name}.json").unlink(missing_ok=True)
            count += len(card.kernels)
    return count


def with_own_cards(
    network: KernelNetwork, devices: Sequence[Device]
) -> tuple[KernelNetwork, dict[str, str]]:
    """The network with the vectors of devices whose kernels are remembered, and a line on each kind
    of them."""
    known, vectors, lines = remembered(), dict(network.vectors), dict[str, str]()
    for device in {x.kind: x for x in devices if x.kind in known and not x.is_cpu}.values():
        card = known[device.kind]
        vectors[device.kind], error = _fitted(network, card, descriptor_of(device))
        lines[device.kind] = (
            f"{device.kind}: learned from {len(card.kernels):,} measured kernels of your own, "
            f"{error:.0%} off on layers left out"
        )
    return (replace(network, vectors=vectors) if lines else network), lines


@functools.lru_cache(maxsize=16)
def _fitted(
    network: KernelNetwork, card: CardKernels, silicon: DeviceDescriptor
) -> tuple[Float[np.ndarray, "W"], float]:
    """(vector of a card, its error on layers that are left out)."""
    kernels, seconds = kernels_of(card.kernels), np.array([row.seconds for row in card.kernels])
    error = held_out_error(network, kernels, silicon, seconds)[1]
    return fit_vector(network, kernels, silicon, seconds), error
