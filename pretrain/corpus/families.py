"""The families of the corpus, their sizes, and the fixed split by whole families.

The split was fixed before any training. Test families serve for no choice at all; validation
families choose checkpoints and recipes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pretrain.corpus import cnn, other, rnn, transformer

VALIDATION = frozenset({"mixer", "multi_modal", "gru_encoder", "densenet"})
TEST = frozenset(
    {"gnmt", "wavenet", "nasnet", "amoebanet", "diffusion_unet", "swin", "transformer_xl", "dlrm"}
)


@dataclass(frozen=True)
class Variant:
    """One model of one family: a builder, its arguments, and what is traced of it."""

    family: str
    builder: Callable[..., Any]
    kind: str  # "forward", "training" or "microbatched": a training step over several microbatches
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Unique in the corpus."""
        parts = [f"{key}{_text(value)}" for key, value in self.arguments.items()]
        return "-".join([self.family, *parts, self.kind])

    @property
    def split(self) -> str:
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


def variants() -> Iterator[Variant]:
    """Every traced model of the corpus: each size forward and as a training step, small and middle
    sizes also as a step over four microbatches."""
    for family, (builder, sizes) in FAMILIES.items():
        for index, arguments in enumerate(sizes):
            yield Variant(family, builder, "forward", arguments)
            yield Variant(family, builder, "training", arguments)
            # A graph neural network has one graph, which is no batch to divide.
            if index < 2 and family != "gnn" and arguments.get("batch", 4) % 4 == 0:
                yield Variant(family, builder, "microbatched", arguments)
