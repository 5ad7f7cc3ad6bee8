"""How a policy is adapted to one problem: the settings of `finetune`, and of its recipes."""

from dataclasses import dataclass
from typing import Literal

Freedom = Literal["gates_first", "gates", "all"]
"""What may change: gates then all weights, gates alone, or all weights from the start."""


@dataclass(frozen=True)
class FinetuneConfig:
    """How a policy is adapted to one problem."""

    updates: int = 50  # at most
    seconds: float | None = None  # after which no round or update begins; None: no limit
    evaluations: int = (
        800  # of placements not judged before, at most: simulations, or measured runs
    )
    samples: int = 16  # placements per update
    screen: int = 8  # samples per one that is run, with a measured reward: the simulator picks
    gaps: float = 0.0  # share of them that is the best placement with a gap decoded again
    explore: float = 0.5  # share of the evaluations that tries other gates first (simulated)
    portfolio: bool = True  # start from what `auto` finds with as many evaluations (simulated)
    search: float = 0.4  # share of the evaluations for a local search at the end (simulated)
    epochs: int = 3  # optimiser steps per update
    gate_updates: int = 3  # updates in which only gates change
    freedom: Freedom = "gates_first"
    rate: float = 1e-3
    rate_end: float = 2e-4
    clip: float = 0.2
    entropy: float = 3e-4
    hottest: float = 4.0  # temperature of samples, at most; 1 unless too few of them are new
    imitate: float = 0.3  # weight of the best placement so far, followed as a label

    def __post_init__(self) -> None:
        if self.samples < 3:
            raise ValueError(f"samples must be at least 3, got {self.samples}")
        if self.evaluations < 1:
            raise ValueError(f"evaluations must be at least 1, got {self.evaluations}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")
        if self.updates < 1:
            raise ValueError(f"updates must be at least 1, got {self.updates}")
        if self.hottest < 1.0:
            raise ValueError(f"hottest must be at least 1, got {self.hottest}")
        if self.screen < 1:
            raise ValueError(f"screen must be at least 1, got {self.screen}")
        if not 0.0 <= self.gaps < 1.0:
            raise ValueError(f"gaps must lie in [0, 1), got {self.gaps}")
        if min(self.explore, self.search) < 0.0 or self.explore + self.search > 1.0:
            raise ValueError(
                "explore and search must be at least 0 and at most 1 together, got "
                f"{self.explore} and {self.search}"
            )
