"""Graphs of no model: random ones, and networks whose matrix products are cut into tiles.

Random graphs are layered or series-parallel, shapes that no model family has. Tiled networks have
much to send, and every op could be anywhere: a product of a grid of p x r tiles with one of r x q
makes p q r small products and p q sums over r of them. Placing these on few devices is the question
of tensor parallelism, asked of the placer: each weight tile is held where its own op runs and is
sent to every op that multiplies by it. 100 to 500 ops.
"""

from collections.abc import Callable

import numpy as np

from gdp.graph.op_graph import INPUT, OUTPUT, GraphBuilder, OpGraph

BYTES = 4
"""Of one element."""

Grid = list[list[int]]
"""The tensors of a matrix's tiles, row by row."""


class _Tiles:
    """A graph under construction, over square tiles of `side` elements."""

    def __init__(self, side: int) -> None:
        self.side, self.tile_bytes = side, BYTES * side * side
        self.builder = GraphBuilder()

    def op(
        self, kind: str, reads: list[int], *, flop: float = 0.0, size: int = 0, weights: int = 0
    ) -> int:
        """An op that makes one tensor of `size` bytes (a tile, if 0); that tensor."""
        size = size or self.tile_bytes
        moved = sum(self.builder.tensors[t][1] for t in reads) + size + weights
        op = self.builder.add_op(
            f"{kind}_{len(self.builder.op_types)}", kind, reads=reads, flop=flop,
            traffic_bytes=float(moved), weight_bytes=weights,
        )  # fmt: skip
        return self.builder.make_tensor(op, size)

    def input(self, rows: int, columns: int) -> Grid:
        """The tiles of the graph's input, all made by one op on the host."""
        op = self.builder.add_op("input:x", INPUT)
        return [
            [self.builder.make_tensor(op, self.tile_bytes) for _ in range(columns)]
            for _ in range(rows)
        ]

    def parameter(self, rows: int, columns: int) -> Grid:
        """A matrix of weights; each tile is an op that holds it and hands it out."""
        size = self.tile_bytes
        return [[self.op("tile", [], weights=size) for _ in range(columns)] for _ in range(rows)]

    def product(self, a: Grid, b: Grid, *, transposed: bool = False) -> Grid:
        """a b, or a b^T: every small product an op, and one sum for each tile of the result."""
        count = len(b) if transposed else len(b[0])
        made = []
        for row in a:
            line = []
            for j in range(count):
                other = b[j] if transposed else [tiles[j] for tiles in b]
                parts = [
                    self.op("tile_product", [x, y], flop=2.0 * self.side**3)
                    for x, y in zip(row, other, strict=True)
                ]
                line.append(self.each("tile_sum", parts) if len(parts) > 1 else parts[0])
            made.append(line)
        return made

    def each(self, kind: str, reads: list[int]) -> int:
        """A tile made from others, element by element."""
        return self.op(kind, reads, flop=float(len(reads) * self.side**2))

    def map(self, kind: str, *grids: Grid) -> Grid:
        """An element-wise op for each position of some grids."""
        return [
            [self.each(kind, list(tiles)) for tiles in zip(*rows, strict=True)]
            for rows in zip(*grids, strict=True)
        ]

    def softmax(self, grid: Grid) -> Grid:
        """Over rows: a sum of each row of tiles, then every tile over it."""
        made = []
        for row in grid:
            total = self.op(
                "row_sum", row, flop=5.0 * len(row) * self.side**2, size=BYTES * self.side
            )
            made.append([self.op("scale", [x, total], flop=5.0 * self.side**2) for x in row])
        return made

    def graph(self, name: str, result: Grid) -> OpGraph:
        """The graph that ends with a matrix."""
        self.builder.add_op("output:y", OUTPUT, reads=[t for row in result for t in row])
        return self.builder.build(name)


def tiled_chain(grid: int = 3, products: int = 4, side: int = 1024) -> OpGraph:
    """x A1 A2 ... + x B1 B2 ...: two chains of products whose results are added."""
    t = _Tiles(side)
    x = t.input(grid, grid)
    ends = []
    for half in (products - products // 2, products // 2):
        y = x
        for _ in range(half):
            y = t.product(y, t.parameter(grid, grid))
        ends.append(y)
    return t.graph(f"tiled-chain-{grid}-{products}", t.map("add", *ends))


def tiled_mlp(grid: int = 3, layers: int = 4, rows: int = 2, side: int = 1024) -> OpGraph:
    """Dense layers with a function between them, and a way around each pair of layers."""
    t = _Tiles(side)
    x = around = t.input(rows, grid)
    for layer in range(layers):
        x = t.map("relu", t.product(x, t.parameter(grid, grid)))
        if layer % 2:
            x = around = t.map("add", x, around)
    return t.graph(f"tiled-mlp-{grid}-{layers}-{rows}", x)


def tiled_gated(
    grid: int = 2, layers: int = 2, rows: int = 2, wide: int = 4, side: int = 1024
) -> OpGraph:
    """Gated linear units: (silu(x A) * x B) C + x, as in Shazeer 2020, arXiv 2002.05202."""
    t = _Tiles(side)
    x = t.input(rows, grid)
    for _ in range(layers):
        gate = t.map("silu", t.product(x, t.parameter(grid, wide)))
        up = t.map("mul", gate, t.product(x, t.parameter(grid, wide)))
        x = t.map("add", t.product(up, t.parameter(wide, grid)), x)
    return t.graph(f"tiled-gated-{grid}-{layers}-{rows}-{wide}", x)


def tiled_attention(grid: int = 2, layers: int = 2, rows: int = 3, side: int = 1024) -> OpGraph:
    """softmax(Q K^T) V O + x with Q, K and V from x: Vaswani et al. 2017."""
    t = _Tiles(side)
    x = t.input(rows, grid)
    for _ in range(layers):
        q, k, v = (t.product(x, t.parameter(grid, grid)) for _ in range(3))
        mixed = t.product(t.softmax(t.product(q, k, transposed=True)), v)
        x = t.map("add", t.product(mixed, t.parameter(grid, grid)), x)
    return t.graph(f"tiled-attention-{grid}-{layers}-{rows}", x)


TILED: dict[str, tuple[Callable[..., OpGraph], tuple[dict[str, int], ...]]] = {
    "tiled_chain": (
        tiled_chain,
        (
            {"grid": 2, "products": 8}, {"grid": 2, "products": 16}, {"grid": 3, "products": 4},
            {"grid": 3, "products": 6, "side": 2048}, {"grid": 3, "products": 9},
            {"grid": 4, "products": 3}, {"grid": 4, "products": 5, "side": 512},
        ),
    ),
    "tiled_mlp": (
        tiled_mlp,
        (
            {"grid": 2, "layers": 8}, {"grid": 3, "layers": 4}, {"grid": 3, "layers": 8},
            {"grid": 3, "layers": 8, "rows": 3, "side": 2048}, {"grid": 4, "layers": 3},
            {"grid": 4, "layers": 4, "rows": 4}, {"grid": 5, "layers": 4, "side": 512},
        ),
    ),
    "tiled_gated": (
        tiled_gated,
        (
            {"layers": 2}, {"layers": 4, "side": 2048}, {"grid": 3, "layers": 2, "wide": 6},
            {"layers": 2, "rows": 4},
        ),
    ),
    "tiled_attention": (
        tiled_attention,
        (
            {"layers": 2, "rows": 2}, {"layers": 3, "rows": 2, "side": 2048}, {"layers": 2},
            {"grid": 3, "layers": 1}, {"grid": 3, "layers": 2, "rows": 2, "side": 512},
            {"layers": 3},
        ),
    ),
}  # fmt: skip
"""By family, the arguments of each graph. `tiled_gated` validates and `tiled_attention` tests."""


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
    reads: list[list[int]] = [[] for _ in range(count)]
    for a, b in [*pairs, *((count, op) for op in sources)]:
        reads[b].append(a)
    builder = GraphBuilder()
    for op in range(count):
        builder.add_op(
            f"op{op}", "dot_general" if heavy[op] else "add", reads=reads[op],
            flop=flop[op] if heavy[op] else flop[op] / 100,
            traffic_bytes=2.5 * made_bytes[op] + weight[op], weight_bytes=int(weight[op]),
        )  # fmt: skip
        builder.make_tensor(op, int(made_bytes[op]))
    builder.make_tensor(builder.add_op("input:x", INPUT), 600_000)
    for i, op in enumerate(sinks):
        builder.add_op(f"output:{i}", OUTPUT, reads=[op])
    return builder.build(name)
