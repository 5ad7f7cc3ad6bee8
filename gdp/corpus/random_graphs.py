"""Random dataflow graphs: layered, and series-parallel. Shapes that no model family has."""

import numpy as np

from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph


def layered(seed: int, layers: int = 20, width: int = 8, reach: int = 2) -> OpGraph:
    """Layers of ops that read one to three ops of the last `reach` layers, as in Tobita and
    Kasahara's standard task graphs (2002)."""
    rng = np.random.default_rng(seed)
    levels: list[list[int]] = [[0]]
    pairs: list[tuple[int, int]] = []
    count = 1
    for _ in range(layers):
        level = list(range(count, count + int(rng.integers(1, 2 * width))))
        count += len(level)
        near = [op for previous in levels[-reach:] for op in previous]
        for op in level:
            for source in rng.choice(
                near, size=min(len(near), int(rng.integers(1, 4))), replace=False
            ):
                pairs.append((int(source), op))
        levels.append(level)
    return _graph(f"layered-{seed}-{layers}x{width}", rng, count, pairs)


def series_parallel(seed: int, num_ops: int = 200) -> OpGraph:
    """One edge replaced again and again by two in a row or two side by side, until large enough:
    the two-terminal series-parallel graphs of Valdes, Tarjan and Lawler (1982)."""
    rng = np.random.default_rng(seed)
    edges = [(0, 1)]
    count = 2
    while count < num_ops:
        index = int(rng.integers(len(edges)))
        a, b = edges[index]
        if rng.random() < 0.55:
            edges[index] = (a, count)
            edges.append((count, b))
            count += 1
        else:
            for _ in range(int(rng.integers(1, 4))):
                edges.extend([(a, count), (count, b)])
                count += 1
    return _graph(f"series-parallel-{seed}-{num_ops}", rng, count, edges)


def _graph(
    name: str, rng: np.random.Generator, count: int, pairs: list[tuple[int, int]]
) -> OpGraph:
    """The graph with costs drawn so that few ops dominate, as in real networks."""
    flop = 10 ** rng.uniform(6, 9.5, size=count)
    made_bytes = (10 ** rng.uniform(4, 7.3, size=count)).astype(np.int64)
    heavy = rng.random(count) < 0.4
    weight = np.where(heavy, 10 ** rng.uniform(4, 7.5, size=count), 0).astype(np.int64)
    sources = sorted(set(range(count)) - {b for _, b in pairs})
    sinks = sorted(set(range(count)) - {a for a, _ in pairs})
    total = count + 1 + len(sinks)
    tensors = [(op, int(made_bytes[op])) for op in range(count)] + [(count, 600_000)]
    uses = [(a, b) for a, b in pairs] + [(count, op) for op in sources]
    uses += [(op, count + 1 + i) for i, op in enumerate(sinks)]
    traffic = np.zeros(total)
    traffic[:count] = 2.5 * made_bytes + weight
    padding = [0] * (total - count)
    return make_graph(
        name,
        [f"op{i}" for i in range(count)] + ["input:x"] + [f"output:{i}" for i in range(len(sinks))],
        [("dot_general" if h else "add") for h in heavy] + [INPUT] + [OUTPUT] * len(sinks),
        tensors,
        uses,
        flop=np.concatenate([np.where(heavy, flop, flop / 100), padding]),
        memory_traffic_bytes=traffic,
        weight_bytes=np.concatenate([weight, padding]),
    )
