"""The families of the corpus, their sizes, and the fixed split by whole families.

The split was fixed before any training. Test families serve for no choice at all; validation
families choose checkpoints and recipes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pretrain.corpus import cnn, other, rnn, transformer
from pretrain.corpus.synthetic import TILED, layered, series_parallel

VALIDATION = frozenset({"mixer", "multi_modal", "gru_encoder", "densenet", "tiled_gated"})
TEST = frozenset(
    {
        "gnmt", "wavenet", "nasnet", "amoebanet", "diffusion_unet", "swin", "transformer_xl",
        "dlrm", "tiled_attention",
    }
)  # fmt: skip
FEW = 4
"""Microbatches of the smaller steps."""
LARGE_LAYERED = ((100, 50), (200, 50), (160, 120), (500, 80), (300, 200))
"""(layers, width) of the largest random graphs."""
LARGE_SERIES_PARALLEL = (10_000, 20_000, 40_000, 80_000, 130_000)
"""Ops of the largest before fusion, which leaves about half."""


@dataclass(frozen=True)
class CorpusGraph:
    """A graph of one family that can be made: a builder and its arguments."""

    family: str
    builder: Callable[..., Any]
    kind: str
    """"forward", "training" or "microbatched" (a training step over several microbatches) of a
    model; "random" or "tiled" where the builder returns the graph itself."""
    arguments: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1

    @property
    def is_traced(self) -> bool:
        """True for models, whose builders return a function and its batch."""
        return self.kind not in ("random", "tiled")

    @property
    def name(self) -> str:
        """Unique in the corpus."""
        parts = [f"{key}{_text(value)}" for key, value in self.arguments.items()]
        if self.is_traced:
            count = "" if self.microbatches in (1, FEW) else str(self.microbatches)
            parts.append(self.kind + count)
        return "-".join([self.family, *parts])

    @property
    def split(self) -> Literal["train", "validation", "test"]:
        """train, validation or test."""
        if self.family in TEST:
            return "test"
        return "validation" if self.family in VALIDATION else "train"


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _nasnet(**arguments: Any) -> Any:
    return cnn.nas_cells(**arguments)


def _amoebanet(**arguments: Any) -> Any:
    return cnn.nas_cells(amoeba=True, **arguments)


def _llama(**arguments: Any) -> Any:
    return transformer.decoder(llama=True, **arguments)


# (builder, argument sets): depth, width and batch vary; the last sets are the largest.
FAMILIES: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
    "mlp": (other.mlp, [
        {"layers": 4, "features": 512}, {"layers": 8}, {"layers": 16, "features": 2048},
        {"layers": 32, "batch": 64}, {"layers": 64, "features": 4096, "batch": 32},
    ]),
    "vgg": (cnn.vgg, [
        {"depth": 11, "batch": 4}, {"depth": 13, "width": 32}, {"depth": 16}, {"depth": 19},
        {"depth": 16, "batch": 1}, {"depth": 19, "batch": 32},
    ]),
    "resnet": (cnn.resnet, [
        {"depth": 18}, {"depth": 18, "batch": 1}, {"depth": 34, "batch": 16}, {"depth": 50},
        {"depth": 50, "batch": 32}, {"depth": 101}, {"depth": 152, "batch": 4},
    ]),
    "inception": (cnn.inception, [
        {"blocks": 3}, {"blocks": 6, "batch": 1}, {"blocks": 9}, {"blocks": 9, "batch": 32},
        {"blocks": 12, "width": 48}, {"blocks": 15, "batch": 4},
    ]),
    "densenet": (cnn.densenet, [
        {"counts": (3, 6, 6)}, {"counts": (6, 12, 12), "batch": 1}, {"counts": (6, 12, 24, 16)},
        {"counts": (6, 12, 32, 32), "batch": 4},
    ]),
    "mobilenet": (cnn.mobilenet, [
        {"width": 8}, {"batch": 1}, {"batch": 32}, {"width": 24, "repeat": 2}, {"repeat": 3},
    ]),
    "efficientnet": (cnn.efficientnet, [
        {"width": 8}, {"batch": 1}, {"batch": 32}, {"width": 24, "repeat": 2}, {"repeat": 3},
    ]),
    "unet": (cnn.unet, [
        {"depth": 2}, {"depth": 3, "batch": 1}, {"depth": 4}, {"depth": 4, "width": 64},
        {"depth": 5, "batch": 2, "image": 256},
    ]),
    "nasnet": (_nasnet, [
        {"cells": 3}, {"cells": 6}, {"cells": 9, "width": 48}, {"cells": 12, "batch": 32},
        {"cells": 18, "width": 44, "batch": 16},
    ]),
    "amoebanet": (_amoebanet, [
        {"cells": 3, "batch": 32}, {"cells": 6, "width": 64}, {"cells": 9}, {"cells": 18},
    ]),
    "rnnlm": (rnn.rnnlm, [
        {"layers": 1, "steps": 8}, {"layers": 2}, {"layers": 2, "hidden": 1024, "batch": 64},
        {"layers": 3, "steps": 24}, {"layers": 4, "steps": 32}, {"layers": 8, "steps": 32},
        {"layers": 4, "steps": 64, "hidden": 2048},
    ]),
    "gnmt": (rnn.gnmt, [
        {"layers": 2, "steps": 6}, {"layers": 2}, {"layers": 4}, {"layers": 4, "hidden": 1024},
        {"layers": 8, "steps": 20},
    ]),
    "gru_encoder": (rnn.gru_encoder, [
        {"layers": 1, "steps": 10}, {"layers": 2}, {"layers": 3, "hidden": 768},
        {"layers": 5, "steps": 24},
    ]),
    "wavenet": (rnn.wavenet, [
        {"stacks": 1, "layers": 6}, {"stacks": 2}, {"stacks": 3, "layers": 10, "channels": 128},
        {"stacks": 4, "layers": 9, "batch": 8},
    ]),
    "state_space": (rnn.state_space, [
        {"layers": 2, "steps": 128}, {"layers": 4, "features": 256}, {"layers": 6},
        {"layers": 12, "features": 768}, {"layers": 24, "batch": 1},
    ]),
    "encoder": (transformer.encoder, [
        {"layers": 2}, {"layers": 4, "batch": 32}, {"layers": 6},
        {"layers": 12, "features": 768, "heads": 12}, {"layers": 12, "batch": 1},
        {"layers": 24, "features": 1024, "heads": 16},
    ]),
    "gpt": (transformer.decoder, [
        {"layers": 2}, {"layers": 4, "features": 256, "heads": 4}, {"layers": 6},
        {"layers": 12, "features": 768, "heads": 12}, {"layers": 24, "features": 1024, "heads": 16},
        {"layers": 48, "features": 1600, "heads": 25, "batch": 2},
    ]),
    "llama": (_llama, [
        {"layers": 2, "batch": 4}, {"layers": 4}, {"layers": 8, "features": 1024, "heads": 16},
        {"layers": 16, "features": 2048, "heads": 16, "batch": 4},
        {"layers": 32, "features": 4096, "heads": 32, "batch": 1},
    ]),
    "t5": (transformer.encoder_decoder, [
        {"layers": 2}, {"layers": 4}, {"layers": 6, "batch": 32},
        {"layers": 12, "features": 768, "heads": 12},
    ]),
    "transformer_xl": (transformer.transformer_xl, [
        {"layers": 2}, {"layers": 4, "segments": 3}, {"layers": 6},
        {"layers": 12, "features": 410, "heads": 10},
    ]),
    "moe": (transformer.mixture_of_experts, [
        {"layers": 2, "experts": 4}, {"layers": 4}, {"layers": 4, "experts": 16, "batch": 16},
        {"layers": 8, "experts": 8, "features": 1024, "heads": 16},
        {"layers": 12, "experts": 32, "batch": 16},
    ]),
    "vit": (transformer.vit, [
        {"layers": 2}, {"layers": 6}, {"layers": 6, "batch": 64},
        {"layers": 12, "features": 768, "heads": 12}, {"layers": 24, "features": 1024, "heads": 16},
    ]),
    "mixer": (transformer.mixer, [
        {"layers": 4}, {"layers": 8}, {"layers": 12, "features": 768, "batch": 32},
        {"layers": 24, "features": 1024},
    ]),
    "swin": (transformer.swin, [
        {"counts": (2, 2)}, {"counts": (2, 2, 2, 2)}, {"counts": (2, 2, 6, 2)},
        {"counts": (2, 2, 18, 2), "features": 128},
    ]),
    "dit": (transformer.dit, [
        {"layers": 2}, {"layers": 6}, {"layers": 12, "features": 768, "heads": 12},
        {"layers": 28, "features": 1152, "heads": 16, "batch": 2},
    ]),
    "dlrm": (other.dlrm, [
        {"tables": 4}, {"tables": 8, "batch": 512}, {"tables": 16}, {"tables": 26, "features": 128},
    ]),
    "two_tower": (other.two_tower, [
        {"layers": 2}, {"layers": 4, "batch": 2048}, {"layers": 8, "features": 512},
        {"layers": 6, "tables": 12},
    ]),
    "multi_modal": (other.multi_modal, [
        {"layers": 2}, {"layers": 4}, {"layers": 6, "features": 512, "heads": 8},
        {"layers": 12, "features": 768, "heads": 12, "batch": 4},
    ]),
    "gnn": (other.gnn, [
        {"layers": 2}, {"layers": 4, "heads": 2}, {"layers": 6}, {"layers": 8, "heads": 8},
        {"layers": 16, "nodes": 65536, "edges": 524288},
    ]),
    "diffusion_unet": (other.diffusion_unet, [
        {"levels": 2, "repeat": 1}, {"levels": 3}, {"levels": 3, "width": 128, "batch": 8},
        {"levels": 4, "width": 160, "image": 64, "batch": 1},
    ]),
}  # fmt: skip


# Training steps of thousands to tens of thousands of ops, most over many microbatches as pipelines
# run them: (family, microbatches, arguments).
LARGE: list[tuple[str, int, dict[str, Any]]] = [
    ("mlp", 32, {"layers": 64, "features": 4096, "batch": 512}),
    ("inception", 8, {"blocks": 15, "batch": 32}),
    ("densenet", 8, {"counts": (6, 12, 32, 32), "batch": 32}),
    ("mobilenet", 8, {"repeat": 4, "batch": 32}),
    ("efficientnet", 16, {"repeat": 3, "batch": 64}),
    ("unet", 32, {"depth": 5, "batch": 32, "image": 256}),
    ("nasnet", 8, {"cells": 18, "width": 44, "batch": 32}),
    ("amoebanet", 16, {"cells": 18, "batch": 32}),
    ("rnnlm", 1, {"layers": 8, "steps": 64}),
    ("rnnlm", 8, {"layers": 4, "steps": 32}),
    ("gnmt", 1, {"layers": 8, "steps": 40}),
    ("gru_encoder", 8, {"layers": 5, "steps": 24}),
    ("wavenet", 16, {"stacks": 8, "layers": 10, "channels": 128, "batch": 32}),
    ("state_space", 8, {"layers": 24, "batch": 16}),
    ("encoder", 32, {"layers": 24, "features": 1024, "heads": 16, "batch": 32}),
    ("gpt", 16, {"layers": 12, "features": 768, "heads": 12, "batch": 32}),
    ("gpt", 16, {"layers": 24, "features": 1024, "heads": 16, "batch": 32}),
    ("gpt", 16, {"layers": 48, "features": 1600, "heads": 25, "batch": 32}),
    ("gpt", 8, {"layers": 96, "features": 4096, "heads": 32, "batch": 16}),
    ("llama", 16, {"layers": 32, "features": 4096, "heads": 32, "batch": 16}),
    ("t5", 16, {"layers": 12, "features": 768, "heads": 12, "batch": 32}),
    ("transformer_xl", 4, {"layers": 18, "features": 1024, "heads": 16, "segments": 3}),
    ("vit", 16, {"layers": 24, "features": 1024, "heads": 16, "batch": 64}),
    ("mixer", 16, {"layers": 24, "features": 1024, "batch": 64}),
    ("swin", 16, {"counts": (2, 2, 18, 2), "features": 128, "batch": 32}),
    ("dit", 8, {"layers": 28, "features": 1152, "heads": 16, "batch": 16}),
    ("multi_modal", 8, {"layers": 12, "features": 768, "heads": 12, "batch": 32}),
    ("gnn", 1, {"layers": 16, "heads": 16}),
    ("diffusion_unet", 8, {"levels": 4, "width": 160, "image": 64, "batch": 16}),
]

TINY = frozenset({
    "dlrm-tables4-forward", "encoder-layers2-forward", "gpt-layers2-forward",
    "mixer-layers4-forward", "mlp-layers16-features2048-forward", "mlp-layers4-features512-forward",
    "mlp-layers4-features512-training", "mlp-layers8-forward", "rnnlm-layers1-steps8-forward",
    "state_space-layers2-steps128-forward", "two_tower-layers2-forward", "unet-depth2-forward",
    "vgg-depth11-batch4-forward", "vgg-depth13-width32-forward", "vgg-depth16-batch1-forward",
    "vgg-depth16-forward", "vgg-depth19-batch32-forward", "vgg-depth19-forward",
    "vit-layers2-forward", "wavenet-stacks1-layers6-forward",
})  # fmt: skip
"""Left out: fewer than 30 ops after fusion, nothing to decide."""


def models() -> Iterator[CorpusGraph]:
    """Every traced model of the corpus: each size forward and as a training step, small and middle
    sizes also as a step over four microbatches; then the large ones."""
    for family, (builder, sizes) in FAMILIES.items():
        for index, arguments in enumerate(sizes):
            graphs = [CorpusGraph(family, builder, k, arguments) for k in ("forward", "training")]
            # A graph neural network has one graph, which is no batch to divide.
            if index < 2 and family != "gnn" and arguments.get("batch", FEW) % FEW == 0:
                graphs.append(CorpusGraph(family, builder, "microbatched", arguments, FEW))
            yield from (graph for graph in graphs if graph.name not in TINY)
    for family, count, arguments in LARGE:
        kind = "microbatched" if count > 1 else "training"
        yield CorpusGraph(family, FAMILIES[family][0], kind, arguments, count)


def synthetic_graphs() -> Iterator[tuple[int, CorpusGraph]]:
    """(size class, graph) of the random and the tiled graphs."""
    for seed in range(1, 30):
        layers, width, reach = 6 + 3 * seed, 3 + seed % 9, 1 + seed % 3
        yield from _random_pair(seed // 2, seed, layers, width, reach, int(50 * 1.17**seed))
    for index, (layers, width) in enumerate(LARGE_LAYERED):
        num_ops = LARGE_SERIES_PARALLEL[index]
        yield from _random_pair(15 + index, 30 + index, layers, width, 1 + index % 3, num_ops)
    for family, (builder, sizes) in TILED.items():
        for index, arguments in enumerate(sizes):
            yield index, CorpusGraph(family, builder, "tiled", arguments)


def _random_pair(
    size: int, seed: int, layers: int, width: int, reach: int, num_ops: int
) -> Iterator[tuple[int, CorpusGraph]]:
    arguments = {"seed": seed, "layers": layers, "width": width, "reach": reach}
    yield size, CorpusGraph("random_layered", layered, "random", arguments)
    arguments = {"seed": seed, "num_ops": num_ops}
    yield size, CorpusGraph("series_parallel", series_parallel, "random", arguments)


def corpus_graphs() -> Iterator[CorpusGraph]:
    """All graphs of the corpus, the small sizes of every family first."""
    by_size: dict[int, list[CorpusGraph]] = {}
    position: dict[str, int] = {}
    for model in models():
        size = position[model.family] = position.get(model.family, -1) + 1
        by_size.setdefault(size, []).append(model)
    for size, graph in synthetic_graphs():
        by_size.setdefault(size, []).append(graph)
    for size in sorted(by_size):
        yield from by_size[size]
