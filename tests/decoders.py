"""Small decoders with all that tells how they can be divided, made by hand.

Every layer is attention with a norm, then a feed-forward layer or experts; numbers are such that
shares can be counted by hand.
"""

from dataclasses import dataclass

from gdp.graph.generation import generation_graph
from gdp.graph.op_graph import INPUT, OUTPUT, GraphBuilder, OpDetail, OpGraph
from gdp.graph.request import Request

ITEM = 2
"""Bytes of a number: all are in bfloat16."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder."""

    layers: int = 2
    hidden: int = 64
    heads: int = 8
    keys: int = 4  # heads of keys
    head: int = 16
    inner: int = 96  # columns of a feed-forward layer, or of an expert
    vocabulary: int = 128
    experts: int = 0  # 0: a feed-forward layer
    chosen: int = 2  # experts of a token
    latent: int = 0  # width from which keys and values are made; 0: from the hidden state
    norm_of_all: bool = False  # a norm over all queries, not of each head


class _Decoder:
    """One phase of a decoder under construction."""

    def __init__(self, sizes: Sizes, tokens: int, cached: int) -> None:
        self.sizes, self.tokens, self.cached, self.builder = sizes, tokens, cached, GraphBuilder()

    def op(
        self, kind: str, reads: list[int], shape: tuple[int, ...], scope: str, *,
        name: str = "", weight: tuple[int, ...] = (), shapes: tuple[tuple[int, ...], ...] = (),
        flop: float = 0.0, cache: int = 0, item: int = ITEM,
    ) -> int:  # fmt: skip
        """An op that moves what it reads and makes; its output."""
        held = ITEM * _size(weight) if weight else 0
        made = item * _size(shape)
        read = sum(self.builder.tensors[t][1] for t in reads)
        detail = OpDetail(
            "bfloat16", (*shapes, weight) if weight and kind != "embedding" else shapes or (shape,),
            (shape,), {},
        )  # fmt: skip
        op = self.builder.add_op(
            f"{scope}/{name or kind}", kind, reads=reads, flop=flop or float(_size(shape)),
            traffic_bytes=read + made + held + cache, weight_bytes=held + cache, scope=scope,
            cache_bytes=cache, detail=detail,
        )  # fmt: skip
        return self.builder.make_tensor(op, made)

    def linear(self, x: int, rows: int, columns: int, scope: str) -> int:
        """x times a weight."""
        t = self.tokens
        return self.op(
            "linear", [x], (1, t, columns), scope, weight=(columns, rows),
            shapes=((1, t, rows),), flop=2.0 * t * rows * columns,
        )  # fmt: skip

    def norm(self, x: int, width: int, scope: str) -> int:
        """A root mean square norm, op by op."""
        shape = (1, self.tokens, width)
        square = self.op("pow", [x], shape, scope, shapes=(shape,))
        mean = self.op("mean", [square], (1, self.tokens, 1), scope, shapes=(shape,))
        root = self.op("rsqrt", [mean], (1, self.tokens, 1), scope)
        return self.op("mul", [x, root], shape, scope)

    def attention(self, x: int, at: str) -> int:
        """Queries, keys, values, attention and what is behind it."""
        s, t = self.sizes, self.tokens
        source, width = x, s.hidden
        if s.latent:
            source = self.norm(
                self.linear(x, s.hidden, s.latent, f"{at}.kv_a"), s.latent, f"{at}.n"
            )
            width = s.latent
        q = self.linear(x, s.hidden, s.heads * s.head, f"{at}.q")
        if s.norm_of_all:
            q = self.norm(q, s.heads * s.head, f"{at}.q_norm")
        k, v = (self.linear(source, width, s.keys * s.head, f"{at}.{part}") for part in "kv")
        seen = t + self.cached
        keys = (1, s.keys, seen, s.head)
        mixed = self.op(
            "scaled_dot_product_attention", [q, k, v], (1, s.heads, t, s.head), at,
            shapes=((1, s.heads, t, s.head), keys, keys), flop=4.0 * t * seen * s.heads * s.head,
            cache=2 * ITEM * s.keys * s.head * self.cached,
        )  # fmt: skip
        return self.linear(mixed, s.heads * s.head, s.hidden, f"{at}.o")

    def feed_forward(self, x: int, at: str) -> int:
        """Gate, up and down."""
        s = self.sizes
        gate = self.linear(x, s.hidden, s.inner, f"{at}.gate")
        act = self.op("silu", [gate], (1, self.tokens, s.inner), f"{at}.act")
        up = self.linear(x, s.hidden, s.inner, f"{at}.up")
        both = self.op("mul", [act, up], (1, self.tokens, s.inner), at)
        return self.linear(both, s.inner, s.hidden, f"{at}.down")

    def mixture(self, x: int, at: str) -> int:
        """A router, and experts of which each token has some."""
        s, rows = self.sizes, self.tokens * self.sizes.chosen
        scores = self.linear(x, s.hidden, s.experts, f"{at}.router")
        best = self.op("topk", [scores], (self.tokens, s.chosen), f"{at}.router")
        inside = f"{at}.experts"
        mine = self.op("index", [x, best], (rows, s.hidden), inside)
        ends = self.op("cumsum", [best], (s.experts,), inside)

        def grouped(x: int, k: int, n: int, name: str) -> int:
            return self.op(
                "_grouped_mm", [x, ends], (rows, n), inside, name=name, weight=(s.experts, k, n),
                shapes=((rows, k),), flop=2.0 * rows * k * n,
            )  # fmt: skip

        both = grouped(mine, s.hidden, 2 * s.inner, "gate_up")
        act = self.op("silu", [both], (rows, s.inner), f"{inside}.act")
        down = grouped(act, s.inner, s.hidden, "down")
        return self.op("sum", [down], (self.tokens, s.hidden), inside)

    def build(self) -> OpGraph:
        """The graph of the phase."""
        s = self.sizes
        ids = self.builder.make_tensor(self.builder.add_op("ids", INPUT), 8 * self.tokens)
        x = self.op(
            "embedding", [ids], (1, self.tokens, s.hidden), "m.embed",
            weight=(s.vocabulary, s.hidden), shapes=((s.vocabulary, s.hidden), (1, self.tokens)),
        )  # fmt: skip
        for i in range(s.layers):
            at, shape = f"m.layers.{i}", (1, self.tokens, s.hidden)
            mixed = self.attention(self.norm(x, s.hidden, f"{at}.norm"), f"{at}.attn")
            x = self.op("add", [x, mixed], shape, at, name="add")
            layer = self.mixture if s.experts else self.feed_forward
            made = layer(self.norm(x, s.hidden, f"{at}.norm_2"), f"{at}.mlp")
            x = self.op("add", [x, made], shape, at, name="add_2")
        logits = self.linear(self.norm(x, s.hidden, "m.norm"), s.hidden, s.vocabulary, "head")
        self.builder.add_op("y", OUTPUT, reads=[logits])
        return self.builder.build("decoder")


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def decoder(sizes: Sizes = Sizes(), prompt: int = 8, new: int = 4) -> OpGraph:
    """The graph of a request to a decoder."""
    mean = prompt + max(1, new // 2)
    step = _Decoder(sizes, 1, mean).build()
    return generation_graph(
        "decoder", _Decoder(sizes, prompt, 0).build(), step, Request(prompt, new),
        (prompt + new) / mean,
    )  # fmt: skip
