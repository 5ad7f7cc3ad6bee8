"""What HSDAG is made of and how it learns: our defaults, and the published settings."""

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class HsdagConfig:
    """The network and its training. `published()` is the paper's, as far as it says."""

    width: int = 64
    gnn_layers: int = 2
    passes: int = 1  # of parsing at most, each over the groups of the one before
    least_groups: int = 2  # a pass that would leave fewer is not taken
    max_devices: int = 8
    output_shape: bool = True  # the features of the paper's ablation
    node_id: bool = True
    structure: bool = True  # in- and out-degree, fractal dimension
    steps: int = 5  # of the state between two updates: each parses anew
    samples: int = 4  # placements drawn per step
    epochs: int = 4  # optimiser steps per update
    rate: float = 5e-4
    discount: float = 1.0  # gamma of equation 14: weight of a reward, per step
    advantage: Literal["centred", "published"] = "centred"
    entropy: float = 0.3

    def __post_init__(self) -> None:
        for name in ("width", "gnn_layers", "passes", "least_groups", "steps", "samples", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.discount <= 1.0:
            raise ValueError(f"discount must lie in (0, 1], got {self.discount}")
        if self.advantage == "centred" and self.steps * self.samples < 2:
            raise ValueError("steps x samples must be at least 2 to have a baseline")


def published(**changes: Any) -> HsdagConfig:
    """The settings of the paper's table 6, and no baseline (equation 14).

    The discount is not in the paper; 0.95 is that of the code its authors released.
    """
    config = HsdagConfig(
        width=128, passes=1, steps=20, samples=1, epochs=4, rate=1e-4, discount=0.95,
        advantage="published", entropy=0.0,
    )  # fmt: skip
    return replace(config, **changes)
