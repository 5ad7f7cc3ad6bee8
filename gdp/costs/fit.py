"""Fits the networks of `gdp.costs.learned` to measured kernels. Needs JAX and optax."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from gdp.costs.features import KernelFeatures, kernel_features
from gdp.costs.kernels import kernel_ids
from gdp.costs.learned import Ensemble, encode
from gdp.costs.profile import ProfiledModel


@dataclass(frozen=True)
class FitConfig:
    """Hyperparameters of the fit."""

    members: int = 8  # each leaves out another share of the families
    hidden: int = 64
    embedding: int = 12  # of lead and member types together
    steps: int = 1500
    batch: int = 1024
    learning_rate: float = 1e-2
    weight_decay: float = 0.3  # chosen, as the rest, on families left out of members
    huber: float = 0.15  # log error where the loss turns linear
    min_rows: int = 8  # lead types with fewer kernels count as never measured
    seed: int = 0

    def __post_init__(self) -> None:
        if self.members < 2:
            raise ValueError(
                f"members must be at least 2 to leave families out, got {self.members}"
            )
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"steps and batch must be positive, got {self.steps}, {self.batch}")


@dataclass(frozen=True, eq=False)
class MeasuredKernels:
    """Kernels with their measured seconds. Axes: K kernels."""

    features: KernelFeatures
    seconds: Float[np.ndarray, "K"]
    family: tuple[str, ...]  # of each kernel


def rows_of(models: Sequence[ProfiledModel]) -> MeasuredKernels:
    """Kernels of profiled models as the runtime executed them."""
    features, seconds = zip(*map(model_rows, models), strict=True)
    family = [m.family for m, times in zip(models, seconds, strict=True) for _ in times]
    return MeasuredKernels(concatenate(features), np.concatenate(seconds), tuple(family))


def model_rows(model: ProfiledModel) -> tuple[KernelFeatures, Float[np.ndarray, "K"]]:
    """Features and seconds of the kernels of one model; layout changes belong to their kernel.

    The profiler slows every kernel a little: the excess of their sum over the latency without the
    profiler is subtracted evenly, a shortfall is distributed in proportion.
    """
    ids = kernel_ids(model)
    total = np.zeros(len(model.kernels))
    excess_s = max(model.kernel_s - model.latency_s, 0.0) / max(len(model.kernels), 1)
    for kernel in model.kernels:
        if kernel.ops:
            total[ids[kernel.ops[0]]] += max(kernel.seconds - excess_s, 0.3 * kernel.seconds)
    # More than this is no overhead but a disturbed measurement.
    total *= min(max(model.latency_s / model.kernel_s, 1.0), 1.05)
    used, dense = np.unique(ids[ids >= 0], return_inverse=True)
    ids = ids.copy()
    ids[ids >= 0] = dense
    return kernel_features(model.graph, ids), total[used]


def concatenate(parts: Sequence[KernelFeatures]) -> KernelFeatures:
    """The kernels of several graphs one after another."""
    return KernelFeatures(
        lead_type=tuple(t for p in parts for t in p.lead_type),
        member_types=tuple(t for p in parts for t in p.member_types),
        size=np.concatenate([p.size for p in parts]),
        other=np.concatenate([p.other for p in parts]),
        lead=np.concatenate([p.lead for p in parts]),
    )


def fit(rows: MeasuredKernels, config: FitConfig | None = None) -> Ensemble:
    """The ensemble for these kernels; each member leaves out some families.

    The same seed gives the same result.
    """
    config = config or FitConfig()
    features = rows.features
    counts = Counter(features.lead_type)
    types = sorted(t for t, count in counts.items() if count >= config.min_rows)
    other_scale = np.maximum(features.other.std(axis=0), 0.1)
    start = Ensemble(tuple(types), features.other.mean(axis=0), other_scale, {})
    terms, other, lead = encode(start, features)
    weight = np.clip(np.sqrt(rows.seconds / 1e-4), 0.3, 4.0) * (lead >= 0)
    rng = np.random.default_rng(config.seed)
    families = sorted(set(rows.family))
    fold_of = dict(zip(families, rng.permutation(len(families)) % config.members, strict=True))
    fold = np.array([fold_of[name] for name in rows.family])
    target = np.log(np.maximum(rows.seconds, 1e-7))
    kept = np.ones((config.members, len(target)), dtype=bool)
    if len(families) >= config.members:
        kept = fold[None] != np.arange(config.members)[:, None]
    layers = _fit_members((terms, other, target), weight * kept, start, config)
    return Ensemble(start.types, start.other_mean, start.other_scale, layers)


def _fit_members(
    train: tuple[np.ndarray, ...],
    weight: Float[np.ndarray, "M K"],
    start: Ensemble,
    config: FitConfig,
) -> dict[str, np.ndarray]:
    """Layers of all networks, fitted at once."""
    import jax
    import jax.numpy as jnp
    import optax

    terms, other, target = (jnp.asarray(x, jnp.float32) for x in train)
    weights = jnp.asarray(weight, jnp.float32)
    plain = len(start.other_mean)
    batch = min(config.batch, len(target))
    # Drawn outside: random numbers inside of a compiled loop take seconds to compile.
    rng = np.random.default_rng([config.seed, 1])
    batches = jnp.asarray(rng.integers(len(target), size=(config.steps, batch), dtype=np.int32))
    drawn = [
        _init(rng, terms.shape[1], plain, other.shape[1], config) for _ in range(config.members)
    ]
    start_params = {name: jnp.stack([d[name] for d in drawn]) for name in drawn[0]}
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.steps)
    optimiser = optax.adamw(schedule, weight_decay=config.weight_decay)

    def loss(params: Any, weight: Any, at: Any) -> Any:
        predicted = network(params, terms[at], other[at], plain)
        error = jnp.abs(predicted - target[at])
        huber = jnp.where(
            error < config.huber, error**2 / (2 * config.huber), error - config.huber / 2
        )
        return jnp.sum(huber * weight[at]) / jnp.maximum(weight[at].sum(), 1e-6)

    def step(carry: Any, at: Any) -> tuple[Any, None]:
        params, state, weight = carry
        updates, state = optimiser.update(jax.grad(loss)(params, weight, at), state, params)
        return (optax.apply_updates(params, updates), state, weight), None

    def member(params: Any, weight: Any) -> Any:
        return jax.lax.scan(step, (params, optimiser.init(params), weight), batches)[0][0]

    params = jax.jit(jax.vmap(member))(start_params, weights)
    return {name: np.asarray(value, np.float32) for name, value in params.items()}


def _init(
    rng: np.random.Generator, terms: int, plain: int, inputs: int, config: FitConfig
) -> dict[str, np.ndarray]:
    """Random layers, with rates near those of the reference device."""
    h, e = config.hidden, config.embedding

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    embed = normal(inputs, e, scale=0.3)
    embed[:plain] = 0.0
    start = np.full(terms, -1.0, np.float32)
    start[:2] = 0.0
    return {
        "embed": embed,
        "b1": normal(plain + e, h, scale=(plain + e) ** -0.5),
        "c1": np.zeros(h, np.float32),
        "b2": normal(h, h, scale=h**-0.5),
        "c2": np.zeros(h, np.float32),
        "b3": normal(h, terms, scale=0.3 * h**-0.5),
        "c3": start,
    }


def network(params: Any, terms: Array, other: Array, plain: int) -> Array:
    """Log seconds by one member: `gdp.costs.learned.forward` in JAX."""
    import jax
    import jax.numpy as jnp

    hidden = jnp.concatenate([other[:, :plain], other @ params["embed"]], axis=1)
    for i in ("1", "2"):
        hidden = jax.nn.elu(hidden @ params["b" + i] + params["c" + i])
    return jax.nn.logsumexp(terms + hidden @ params["b3"] + params["c3"], axis=1)
