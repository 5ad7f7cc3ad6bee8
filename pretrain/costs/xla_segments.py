"""Does a network read what XLA fuses in a piece of a function? A sum of work against a network.

    python -m pretrain.costs.xla_segments measure PIECES.json.gz    on a quiet machine, minutes
    python -m pretrain.costs.xla_segments compare PIECES.json.gz [--steps N] [--seeds N]

The small models that gdp brings are cut at random places into runs of 3 to 100 equations; each run
is compiled and timed by itself. `compare` leaves families of models out in turn. Rows: rates of
whole functions (as costs that ship are fitted), rates fitted to the pieces of the other families,
and on top of these a factor by a network that reads the piece's amounts of work alone, or by GDP's
encoder: GraphSAGE with maxima over producers and over readers, then attention among the ops of the
piece, a factor for each op. Errors are of seconds: median, mean, and that of the sum over a
function's pieces.

Axes: S pieces, N ops of a batch, P pairs, R kinds of work, F features.
"""

import itertools
import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from gdp.costs.profile import Profile, ProfiledModel, load_profile, save_profile
from gdp.costs.work_rates import PRIOR, fit_rates, work
from gdp.graph.op_graph import OpGraph
from gdp.targets.jax.profile import (
    DeviceRecord,
    _measure,
    cut,
    jax_device,
    quick_profile,
    transfer_overheads,
)
from gdp.targets.jax.program import argument_values
from gdp.targets.jax.small_models import small_models

LEAST, MOST = 3, 100
"""Equations of a piece."""
PIECES = 20
"""Of one function, at most."""
WIDTH, TYPES, LAYERS, HEADS = 64, 64, 3, 4
FOLDS = 4
MOST_OPS = 180


@click.group()
def main() -> None:
    """Pieces of JAX functions: a sum of work against a network."""


@main.command()
@click.argument("path", type=Path)
@click.option("--seconds", default=0.15, help="For the runs of one piece.")
def measure(path: Path, seconds: float) -> None:
    """Cut, compile and time pieces of the small models, and the whole functions."""
    rng, device = np.random.default_rng(0), jax_device("cpu")
    entries, found = list(small_models()), list[ProfiledModel]()
    for family, model in entries:
        values = argument_values(model, 0)
        pieces = []
        for _ in range(4):
            equations = int(np.exp(rng.uniform(np.log(LEAST), np.log(MOST))))
            pieces += cut(model.uncut(), values, f"{model.name}@{equations}", equations)
        chosen = rng.permutation(len(pieces))[:PIECES]
        rows = [_measure(pieces[i], family, device, 3, seconds) for i in sorted(chosen)]
        found += [row for row in rows if row is not None]
        click.echo(f"{model.name}: {len(found)} pieces", err=True)
    whole = quick_profile(entries)
    save_profile(
        Profile(
            device=DeviceRecord("cpu", whole.device.model), runtime="jax", threads=whole.threads,
            level="jit", versions=whole.versions, date=whole.date,
            models=tuple(found) + whole.models, overheads=transfer_overheads(device),
        ), path,
    )  # fmt: skip


class Pieces(NamedTuple):
    """What a network reads of some pieces, one graph beside the other."""

    shown: np.ndarray  # [N, F] logs of work
    kind: np.ndarray  # [N] hashed type
    src: np.ndarray  # [P]
    dst: np.ndarray
    piece: np.ndarray  # [N]
    base_s: np.ndarray  # [N] seconds by rates


def _features(graph: OpGraph) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    amount = work(graph)
    logs = np.log1p(amount * np.array(list(PRIOR.values())) / 1e-7)
    produced = np.bincount(graph.producer, graph.tensor_bytes, graph.num_ops)
    read = np.bincount(graph.use_op, graph.tensor_bytes[graph.use_tensor], graph.num_ops)
    sizes = np.log1p(np.stack([produced, read, graph.weight_bytes], axis=1)) / 4.0
    io = graph.is_io[:, None].astype(float)
    kinds = np.array([zlib.crc32(t.encode()) % TYPES for t in graph.op_types])
    src, dst = graph.edges
    return np.concatenate([logs, sizes, io], axis=1), kinds, np.asarray(src), np.asarray(dst)


class Encoder(nnx.Module):
    """GraphSAGE and attention within a piece; the log of a factor for each op."""

    def __init__(self, inputs: int, *, graph: bool, rngs: nnx.Rngs) -> None:
        self.graph = graph
        self.types = nnx.Embed(TYPES, 16, rngs=rngs)
        self.enter = nnx.Linear(inputs + 16 * graph, WIDTH, rngs=rngs)
        self.message = nnx.List([nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.combine = nnx.List([nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(LAYERS + 1)])
        self.query, self.key, self.value = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.hidden = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        small = nnx.initializers.normal(0.01)
        self.out = nnx.Linear(WIDTH, 1, kernel_init=small, rngs=rngs)

    def __call__(self, p: Pieces, count: int) -> jax.Array:
        """Log factors of ops [N]; without the graph, of pieces, given to each of their ops."""
        n = p.shown.shape[0]
        if not self.graph:
            amount = jnp.log1p(jax.ops.segment_sum(jnp.expm1(p.shown), p.piece, count))
            h = jax.nn.silu(self.enter(amount))
            h = jax.nn.silu(self.combine[0](jnp.concatenate([h, h, h], axis=1)))
            h = jax.nn.silu(self.combine[1](jnp.concatenate([h, h, h], axis=1)))
            return self.out(h)[p.piece, 0]
        h = self.enter(jnp.concatenate([p.shown, self.types(jnp.asarray(p.kind))], axis=1))
        for message, combine, norm in zip(self.message, self.combine, self.norms, strict=False):
            normed = norm(h)
            down, up = jnp.split(jax.nn.relu(message(normed)), 2, axis=1)
            into = jnp.maximum(jax.ops.segment_max(down[p.src], p.dst, n), 0.0)
            out_of = jnp.maximum(jax.ops.segment_max(up[p.dst], p.src, n), 0.0)
            h = h + jax.nn.relu(combine(jnp.concatenate([normed, into, out_of], axis=1)))
        normed = self.norms[-1](h)
        q, k, v = (f(normed).reshape(n, HEADS, -1) for f in (self.query, self.key, self.value))
        score = jnp.einsum("nhf,mhf->hnm", q, k) / np.sqrt(WIDTH // HEADS)
        score = jnp.where(p.piece[:, None] == p.piece[None], score, -1e9)
        mixed = jnp.einsum("hnm,mhf->nhf", jax.nn.softmax(score), v).reshape(n, WIDTH)
        return self.out(jax.nn.silu(self.hidden(jnp.concatenate([h, mixed], axis=1))))[:, 0]


def _batch(models: list[ProfiledModel], rates: np.ndarray, pad: tuple[int, int, int]) -> Pieces:
    ops, pairs, count = pad
    parts, shift = [], 0
    for i, model in enumerate(models):
        shown, kind, src, dst = model.features  # pyright: ignore[reportAttributeAccessIssue]
        base = model.amount @ rates  # pyright: ignore[reportAttributeAccessIssue]
        parts.append((shown, kind, src + shift, dst + shift, np.full(len(kind), i), base))
        shift += len(kind)
    made = [np.concatenate(column) for column in zip(*parts, strict=True)]
    fill = (0, 0, ops - 1, ops - 1, count - 1, 0)
    sizes = (ops, ops, pairs, pairs, ops, ops)
    wide = []
    for array, value, size in zip(made, fill, sizes, strict=True):
        spare = np.full((size - len(array), *array.shape[1:]), value, array.dtype)
        wide.append(np.concatenate([array, spare]))
    return Pieces(*wide)


def _trained(
    models: list[ProfiledModel], rates: np.ndarray, call_s: float, graph: bool, steps: int,
    seed: int,
) -> Any:  # fmt: skip
    """A function from pieces to their seconds."""
    rng = np.random.default_rng(seed)
    inputs = models[0].features[0].shape[1]  # pyright: ignore[reportAttributeAccessIssue]
    network = Encoder(inputs, graph=graph, rngs=nnx.Rngs(seed))
    schedule = optax.cosine_onecycle_schedule(steps, 3e-3, 0.1)
    optimiser = nnx.Optimizer(
        network,
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-3)),
        wrt=nnx.Param,
    )
    at_once, ops, pairs = 16, 384, 768

    def seconds(network: Encoder, p: Pieces) -> jax.Array:
        each = p.base_s * jnp.exp(network(p, at_once + 1))
        return jax.ops.segment_sum(each, p.piece, at_once + 1)[:at_once] + call_s

    @nnx.jit
    def step(network: Encoder, optimiser: Any, p: Pieces, target: jax.Array) -> jax.Array:
        def loss(network: Encoder) -> jax.Array:
            return optax.huber_loss(jnp.log(seconds(network, p)), target, delta=0.1).mean()

        value, gradient = nnx.value_and_grad(loss)(network)
        optimiser.update(network, gradient)
        return value

    def chunk(order: np.ndarray) -> tuple[Pieces, list[int]]:
        """As many of the pieces, in order, as fit a batch."""
        taken, total, joined = [], 0, 0
        for i in order:
            n, p = len(models[i].features[1]), len(models[i].features[2])
            if len(taken) == at_once or total + n >= ops or joined + p > pairs:
                break
            taken.append(int(i))
            total, joined = total + n, joined + p
        return _batch([models[i] for i in taken], rates, (ops, pairs, at_once + 1)), taken

    for _ in range(steps):
        p, taken = chunk(rng.permutation(len(models)))
        target = np.zeros(at_once)
        target[: len(taken)] = np.log([models[i].latency_s for i in taken])
        target[len(taken) :] = np.log(call_s)  # padding: its seconds are a call's
        step(network, optimiser, p, jnp.asarray(target))
    predict = nnx.jit(seconds)

    def told(others: list[ProfiledModel]) -> np.ndarray:
        found = []
        for model in others:
            p = _batch([model], rates, (ops, pairs, at_once + 1))
            found.append(float(predict(network, p)[0]))
        return np.array(found)

    return told


@main.command(name="compare")
@click.argument("path", type=Path)
@click.option("--steps", default=1500)
@click.option("--seeds", default=1)
def compare(path: Path, steps: int, seeds: int) -> None:
    """Errors on families left out in turn."""
    profile = load_profile(path)
    call_s = float(profile.overheads.session_s or 0.0)
    whole = [m for m in profile.models if "@" not in m.name]
    pieces = [m for m in profile.models if "@" in m.name and m.graph.num_ops < MOST_OPS]
    for m in pieces:
        object.__setattr__(m, "features", _features(m.graph))
        object.__setattr__(m, "amount", work(m.graph))
    families = sorted({m.family for m in pieces})
    told: dict[str, dict[int, np.ndarray]] = {}
    names = list(PRIOR)
    for fold in range(FOLDS):
        held = set(families[fold::FOLDS])
        out = [i for i, m in enumerate(pieces) if m.family in held]
        train = [m for m in pieces if m.family not in held]
        others = [m for m in whole if m.family not in held]
        by_whole = np.array([fit_rates(others, call_s)[n] for n in names])
        by_pieces = np.array([fit_rates(train, call_s)[n] for n in names])
        rows = {
            "rates of whole functions": lambda m, r=by_whole: m.amount.sum(0) @ r + call_s,
            "rates of pieces": lambda m, r=by_pieces: m.amount.sum(0) @ r + call_s,
        }
        for name, row in rows.items():
            told.setdefault(name, {})[fold] = np.array([row(pieces[i]) for i in out])
        for graph, seed in itertools.product((False, True), range(seeds)):
            name = f"{'graph encoder' if graph else 'amounts alone'}, seed {seed}"
            predict = _trained(train, by_pieces, call_s, graph, steps, seed)
            told.setdefault(name, {})[fold] = predict([pieces[i] for i in out])
            click.echo(f"fold {fold}: {name}", err=True)
    truth = {f: np.array([m.latency_s for m in pieces if m.family in set(families[f::FOLDS])])
             for f in range(FOLDS)}  # fmt: skip
    table = {}
    for name, by_fold in told.items():
        ratio = np.concatenate([by_fold[f] / truth[f] for f in range(FOLDS)])
        off = np.abs(ratio - 1.0)
        table[name] = {
            "median": float(np.median(off)), "mean": float(off.mean()),
            "log": float(np.abs(np.log(ratio)).mean()), "middle": float(np.median(ratio - 1.0)),
        }  # fmt: skip
        click.echo(f"{name:28s} " + "  ".join(f"{k} {v:7.1%}" for k, v in table[name].items()))
    click.echo(json.dumps({"pieces": len(pieces), "families": len(families), "rows": table}))


if __name__ == "__main__":
    main()
