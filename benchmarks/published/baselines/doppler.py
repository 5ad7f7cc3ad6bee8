"""DOPPLER: one policy says which op is next, a second one where it goes.

DOPPLER: Dual-Policy Learning for Device Assignment in Asynchronous Dataflow Graphs (ICLR 2026). As
far as recalled: nodes are embedded once per episode by message passing; SEL scores the nodes whose
inputs are placed, from their embeddings and those along their longest paths to entry and exit; PLC
scores the devices for the chosen node from its embedding and what is known of every device (when it
is free, when the inputs are there, what it has to do). First both imitate the critical path
heuristic (longest path to the end first, earliest end), then REINFORCE on the simulator, with the
mean of past rewards as baseline and an entropy bonus. Its third stage, on real devices, is not
here, and neither is its exploration by random choices: the softmax explores. Imitation costs no
evaluation but seconds. Axes: K placements, M nodes, D devices, F features, H width.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.published.baselines.common import (
    Arena,
    Average,
    Found,
    Params,
    Trainer,
    compute_s,
    dense,
    linear,
    log_softmax,
    mlp,
    np_relu,
    one_device_s,
    rewards,
)
from gdp.graph.groups import sum_per_group
from gdp.problem.problem import Problem

WIDTH, ROUNDS, RATE, ENTROPY, SAMPLES, IMITATED = 32, 2, 1e-3, 1e-3, 8, 100
DEVICE_FEATURES = 5


class Episode(NamedTuple):
    """Choices of one placement of all nodes; steps stand for nodes, M of them."""

    ready: np.ndarray  # [M, M]: the nodes that could be next
    node: np.ndarray  # [M]: which was
    feats: np.ndarray  # [M, D, F] of the devices
    device: np.ndarray  # [M]: where it went


def doppler(problem: Problem, evaluations: int, seed: int) -> Found:
    """The best placement met in imitating and in training."""
    arena, rng = Arena(problem, evaluations), np.random.default_rng(seed)
    graph = make_graph(arena)
    params = init(rng, graph.feature.shape[1])
    trainer, average = Trainer(_loss(graph), params, RATE), Average()
    seen = jax.jit(lambda p: _embed(p, graph))
    shown = run(graph, None, None, None)
    teacher = Episode(*(part[None] for part in shown))
    for _ in range(IMITATED):
        trainer.learn(teacher, np.ones(1, np.float32), np.float32(0.0))
    arena.seconds(graph.placement(shown)[None])
    while arena.drawn == 1 or arena.left >= SAMPLES:
        z, select = (np.asarray(x) for x in seen(trainer.params))
        numbers = jax.tree.map(np.asarray, trainer.params["place"])
        episodes = [run(graph, select, (numbers, z), rng) for _ in range(SAMPLES)]
        devices = np.stack([graph.placement(episode) for episode in episodes])
        gain = average.advantage(rewards(arena, arena.seconds(devices)))
        data = Episode(*(np.stack(parts) for parts in zip(*episodes, strict=True)))
        trainer.learn(data, gain, np.float32(ENTROPY))
    return arena.found()


@dataclass(frozen=True)
class Graph:
    """Nodes with their seconds, and what moves between them."""

    feature: np.ndarray  # [M, F]
    allowed: np.ndarray  # [M, D]
    compute_s: np.ndarray  # [M, D]
    near: np.ndarray  # [M, M] mean-normalised adjacency, readers in columns
    paths: np.ndarray  # [2, M, M]: rows average over the longest path to the exit, to the entry
    before: list[list[tuple[int, float]]]  # of each node: (predecessor, bytes)
    bottom_s: np.ndarray  # [M] of the longest path to the end
    latency_s: np.ndarray  # [D, D]
    per_byte_s: np.ndarray  # [D, D]
    unit_s: float

    def placement(self, episode: Episode) -> np.ndarray:
        """The device of every node."""
        device = np.zeros(len(self.feature), dtype=np.int64)
        device[episode.node] = episode.device
        return device


def make_graph(arena: Arena) -> Graph:
    """The part of a problem that the policies see."""
    problem, nodes = arena.problem, arena.nodes
    count, graph = nodes.count, problem.graph
    size = np.zeros((count, count))
    src, dst = (nodes.node_of[end] for end in graph.edges)
    np.add.at(size, (src, dst), problem.sent_bytes[graph.use_tensor])
    np.fill_diagonal(size, 0.0)
    before = [[(int(p), float(size[p, v])) for p in np.flatnonzero(linked[:, v])]
              for linked in [_adjacency(nodes)] for v in range(count)]  # fmt: skip
    seconds = sum_per_group(compute_s(problem), nodes.node_of)
    cluster = problem.cluster
    per_byte_s = 1.0 / cluster.link_bytes_per_s
    off = ~np.eye(problem.num_devices, dtype=bool)
    send = size * per_byte_s[off].mean() + cluster.link_latency_s[off].mean() if off.any() else size
    mean_s = seconds.mean(axis=1)
    linked = _adjacency(nodes)
    bottom_s, to_exit = _longest(mean_s, send, linked)
    top_s, to_entry = _longest(mean_s[::-1], send.T[::-1, ::-1], linked.T[::-1, ::-1])
    unit = max(float(bottom_s.max()), 1e-12)
    levels = np.stack([mean_s, bottom_s, top_s[::-1]], axis=1) / unit
    return Graph(
        np.concatenate([nodes.feature, levels], axis=1).astype(np.float32), nodes.allowed, seconds,
        (linked / np.maximum(linked.sum(axis=1, keepdims=True), 1)).astype(np.float32),
        np.stack([to_exit, to_entry[::-1, ::-1]]).astype(np.float32), before, bottom_s,
        cluster.link_latency_s, per_byte_s, one_device_s(problem),
    )  # fmt: skip


def _adjacency(nodes: Any) -> np.ndarray:
    linked = np.zeros((nodes.count, nodes.count), dtype=bool)
    linked[nodes.src, nodes.dst] = True
    return linked


def _longest(
    own_s: np.ndarray, send_s: np.ndarray, linked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of the longest path from each node on, its nodes averaged). Edges back, which tied
    nodes can make, are left out."""
    count = len(own_s)
    far, path = own_s.astype(float).copy(), np.eye(count)
    for v in range(count - 1, -1, -1):
        after = [u for u in np.flatnonzero(linked[v]) if u > v]
        if after:
            best = max(after, key=lambda u: send_s[v, u] + far[u])
            far[v] += send_s[v, best] + far[best]
            path[v] += path[best]
    return far, path / path.sum(axis=1, keepdims=True)


def run(
    graph: Graph,
    select: np.ndarray | None,
    place: tuple[Params, np.ndarray] | None,
    rng: np.random.Generator | None,
) -> Episode:
    """Place all nodes: by SEL's scores, PLC's weights and the embeddings, or by the heuristic."""
    count, devices = graph.allowed.shape
    free, finish = np.zeros(devices), np.zeros(count)
    at = np.zeros(count, dtype=np.int64)
    done, load = np.zeros(count, dtype=bool), np.zeros(devices)
    missing = np.array([len(before) for before in graph.before])
    after: list[list[int]] = [[] for _ in range(count)]
    for v, before in enumerate(graph.before):
        for p, _ in before:
            after[p].append(v)
    rows = []
    for _ in range(count):
        ready = ~done & (missing == 0)
        if not ready.any():  # tied nodes can wait for each other
            ready = ~done
        score = graph.bottom_s if select is None else select
        v = _pick(score, ready, rng)
        data_s = np.zeros(devices)
        for p, size in graph.before[v]:
            if done[p]:
                sent = graph.latency_s[at[p]] + size * graph.per_byte_s[at[p]]
                data_s = np.maximum(data_s, finish[p] + sent)
        start_s = np.maximum(data_s, free)
        end_s = start_s + graph.compute_s[v]
        feats = np.stack([end_s, start_s, data_s, load, graph.compute_s[v]], axis=1)
        feats = feats - np.array([[end_s.min(), start_s.min(), data_s.min(), load.min(), 0.0]])
        feats = (feats / graph.unit_s * np.sqrt(count)).astype(np.float32)
        if place is None:
            d = int(np.where(graph.allowed[v], end_s, np.inf).argmin())
        else:
            d = _pick(_device_scores(*place, v, feats, np_relu), graph.allowed[v], rng)
        at[v], finish[v], free[d], done[v] = d, end_s[d], end_s[d], True
        load[d] += graph.compute_s[v, d]
        missing[after[v]] -= 1
        rows.append((ready, v, feats, d))
    ready, node, feats, device = zip(*rows, strict=True)
    return Episode(np.stack(ready), np.array(node), np.stack(feats), np.array(device))


def _pick(score: np.ndarray, may: np.ndarray, rng: np.random.Generator | None) -> int:
    """The largest score of those that may, or a draw from their softmax."""
    noise = 0.0 if rng is None else rng.gumbel(size=score.shape)
    return int(np.where(may, score + noise, -np.inf).argmax())


def init(rng: np.random.Generator, features: int) -> Params:
    """Fresh weights."""
    rounds = [(dense(rng, 3 * WIDTH, WIDTH), dense(rng, WIDTH, WIDTH, 0.5)) for _ in range(ROUNDS)]
    return {
        "enter": dense(rng, features, WIDTH),
        "rounds": rounds,
        "select": (dense(rng, 3 * WIDTH, WIDTH), dense(rng, WIDTH, 1, 0.1)),
        "place": {
            "node": dense(rng, WIDTH, WIDTH),
            "device": dense(rng, DEVICE_FEATURES, WIDTH),
            "out": dense(rng, WIDTH, 1, 0.1),
        },
    }


def _embed(params: Params, graph: Graph) -> tuple[Any, Any]:
    """(embeddings [M, H], SEL's scores [M])."""
    z = jnp.tanh(linear(params["enter"], graph.feature))
    for layers in params["rounds"]:
        z = z + mlp(layers, jnp.concatenate([z, graph.near @ z, graph.near.T @ z], axis=1))
    seen = jnp.concatenate([z, graph.paths[0] @ z, graph.paths[1] @ z], axis=1)
    return z, mlp(params["select"], seen)[:, 0]


def _device_scores(params: Params, z: Any, v: Any, feats: Any, relu: Any) -> Any:
    """PLC's scores [D] for one node."""
    hidden = relu(linear(params["node"], z[v])[None] + linear(params["device"], feats))
    return linear(params["out"], hidden)[:, 0]


def _loss(graph: Graph) -> Any:
    """Minus the mean of advantage x (log p of every choice, SEL's and PLC's), and the bonus."""

    def of_one(params: Params, z: Any, select: Any, episode: Episode) -> tuple[Any, Any]:
        first = log_softmax(select[None], episode.ready)
        chosen = jnp.take_along_axis(first, episode.node[:, None], axis=1).sum()
        scores = jax.vmap(lambda v, f: _device_scores(params["place"], z, v, f, jax.nn.relu))(
            episode.node, episode.feats
        )
        may = jnp.asarray(graph.allowed)[episode.node]
        second = log_softmax(scores, may)
        placed = jnp.take_along_axis(second, episode.device[:, None], axis=1).sum()
        return chosen + placed, -jnp.where(may, jnp.exp(second) * second, 0.0).sum()

    def loss(params: Params, episodes: Episode, gain: Any, entropy: Any) -> Any:
        z, select = _embed(params, graph)
        logp, spread = jax.vmap(lambda e: of_one(params, z, select, e))(episodes)
        return -(gain * logp).mean() - entropy * spread.mean()

    return loss
