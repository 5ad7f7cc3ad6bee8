"""Networks whose matrix products are cut into tiles: much to send, and every op could be anywhere.

A product of a grid of p x r tiles with one of r x q makes p q r small products and p q sums over r
of them. Placing these on few devices is the question of tensor parallelism, asked of the placer:
each weight tile is held where its own op runs and is sent to whoever multiplies by it. 100 to 500
ops.
"""

from collections.abc import Callable

import numpy as np

from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph

BYTES = 4
"""Of one element."""

Grid = list[list[int]]
"""The tensors of a matrix's tiles, row by row."""


class _Tiles:
    """A graph under construction, over square tiles of `side` elements."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.names: list[str] = []
        self.types: list[str] = []
        self.tensors: list[tuple[int, int]] = []
        self.uses: list[tuple[int, int]] = []
        self.flop: list[float] = []
        self.traffic: list[float] = []
        self.weights: list[int] = []

    @property
    def tile_bytes(self) -> int:
        return BYTES * self.side * self.side

    def op(
        self, kind: str, reads: list[int], *, flop: float = 0.0, size: int = 0, weights: int = 0
    ) -> int:
        """An op that makes one tensor of `size` bytes (a tile, if 0); that tensor."""
        size = size or self.tile_bytes
        op = len(self.names)
        self.names.append(f"{kind}_{op}")
        self.types.append(kind)
        self.flop.append(flop)
        self.traffic.append(float(sum(self.tensors[t][1] for t in reads) + size + weights))
        self.weights.append(weights)
        self.uses += [(t, op) for t in reads]
        self.tensors.append((op, size))
        return len(self.tensors) - 1

    def input(self, rows: int, columns: int) -> Grid:
        """The tiles of the graph's input, all made by one op on the host."""
        op = len(self.names)
        self.names.append("input:x")
        self.types.append(INPUT)
        self.flop.append(0.0)
        self.traffic.append(0.0)
        self.weights.append(0)
        first = len(self.tensors)
        self.tensors += [(op, self.tile_bytes)] * (rows * columns)
        return [[first + i * columns + j for j in range(columns)] for i in range(rows)]

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
        """The same for all tiles of some grids."""
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
        op = len(self.names)
        self.uses += [(t, op) for row in result for t in row]
        return make_graph(
            name,
            [*self.names, "output:y"],
            [*self.types, OUTPUT],
            self.tensors,
            self.uses,
            flop=np.array([*self.flop, 0.0]),
            memory_traffic_bytes=np.array([*self.traffic, 0.0]),
            weight_bytes=np.array([*self.weights, 0]),
        )


def chain(grid: int = 3, products: int = 4, side: int = 1024) -> OpGraph:
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


def mlp(grid: int = 3, layers: int = 4, rows: int = 2, side: int = 1024) -> OpGraph:
    """Dense layers with a function between them, and a way around each pair of layers."""
    t = _Tiles(side)
    x = around = t.input(rows, grid)
    for layer in range(layers):
        x = t.map("relu", t.product(x, t.parameter(grid, grid)))
        if layer % 2:
            x = around = t.map("add", x, around)
    return t.graph(f"tiled-mlp-{grid}-{layers}-{rows}", x)


def gated(
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


def attention(grid: int = 2, layers: int = 2, rows: int = 3, side: int = 1024) -> OpGraph:
    """softmax(Q K^T) V O + x with Q, K and V from x: Vaswani et al. 2017."""
    t = _Tiles(side)
    x = t.input(rows, grid)
    for _ in range(layers):
        q, k, v = (t.product(x, t.parameter(grid, grid)) for _ in range(3))
        mixed = t.product(t.softmax(t.product(q, k, transposed=True)), v)
        x = t.map("add", t.product(mixed, t.parameter(grid, grid)), x)
    return t.graph(f"tiled-attention-{grid}-{layers}-{rows}", x)


Builder = Callable[..., OpGraph]

TILED: dict[str, tuple[Builder, tuple[dict[str, int], ...]]] = {
    "tiled_chain": (
        chain,
        (
            {"grid": 2, "products": 8}, {"grid": 2, "products": 16}, {"grid": 3, "products": 4},
            {"grid": 3, "products": 6, "side": 2048}, {"grid": 3, "products": 9},
            {"grid": 4, "products": 3}, {"grid": 4, "products": 5, "side": 512},
        ),
    ),
    "tiled_mlp": (
        mlp,
        (
            {"grid": 2, "layers": 8}, {"grid": 3, "layers": 4}, {"grid": 3, "layers": 8},
            {"grid": 3, "layers": 8, "rows": 3, "side": 2048}, {"grid": 4, "layers": 3},
            {"grid": 4, "layers": 4, "rows": 4}, {"grid": 5, "layers": 4, "side": 512},
        ),
    ),
    "tiled_gated": (
        gated,
        (
            {"layers": 2}, {"layers": 4, "side": 2048}, {"grid": 3, "layers": 2, "wide": 6},
            {"layers": 2, "rows": 4},
        ),
    ),
    "tiled_attention": (
        attention,
        (
            {"layers": 2, "rows": 2}, {"layers": 3, "rows": 2, "side": 2048}, {"layers": 2},
            {"grid": 3, "layers": 1}, {"grid": 3, "layers": 2, "rows": 2, "side": 512},
            {"layers": 3},
        ),
    ),
}  # fmt: skip
"""By family, the arguments of each graph. `tiled_gated` validates and `tiled_attention` tests."""
