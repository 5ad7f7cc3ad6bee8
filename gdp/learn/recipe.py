"""A training run as data: one TOML file, decoded strictly."""

import os
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from gdp.base.errors import GdpError
from gdp.base.files.reading import Kind, decode_toml, read_text, shipped
from gdp.learn.instances import parse_key
from gdp.learn.ppo import ImitationConfig, PpoConfig
from gdp.policy.model.config import NetworkConfig


@dataclass(frozen=True)
class DataConfig:
    """Problems that a run learns from."""

    # Paths are from where the run starts; what is not there may travel with gdp, under this name.
    corpus: str = ""  # folder with a manifest; empty: random graphs only
    labels: str = ""  # file of labels, read at the start
    min_ops: int = 30
    max_ops: int = 1000  # larger graphs are left out
    random_graphs: int = 40  # layered and series-parallel DAGs beside the corpus
    fresh: float = 0.5  # share of problems in PPO that are drawn anew, without a label
    limited: float = 0.3  # share of those with limited memory
    memory: tuple[float, float] = (1.15, 2.5)  # the limit, over the fair share of the footprint
    validation: int = 32  # problems of the validation families
    instances: tuple[str, ...] = ()  # only these problems (keys), for runs on one graph and cluster

    def __post_init__(self) -> None:
        if not 0.0 <= self.fresh <= 1.0:
            raise ValueError(f"fresh must lie in [0, 1], got {self.fresh}")
        if not 0.0 <= self.limited <= 1.0:
            raise ValueError(f"limited must lie in [0, 1], got {self.limited}")
        if not 0.0 < self.memory[0] <= self.memory[1]:
            raise ValueError(f"memory must be two rising factors, got {list(self.memory)}")
        if not 1 <= self.min_ops <= self.max_ops:
            raise ValueError(
                f"min_ops and max_ops must be at least 1 and rise, got {self.min_ops} and "
                f"{self.max_ops}"
            )
        for key in self.instances:
            parse_key(key)


@dataclass(frozen=True)
class RunConfig:
    """Intervals of checkpoints and validation."""

    checkpoint_minutes: float = 5.0
    validate_every: int = 50  # updates


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run."""

    name: str
    seed: int = 0
    network: NetworkConfig = field(default_factory=NetworkConfig)
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    ppo: PpoConfig = field(default_factory=PpoConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)
    start: str = ""  # checkpoint to start from instead of fresh weights


class RecipeError(GdpError):
    """A recipe that is missing or malformed."""


RECIPE_KIND = Kind("recipe", RecipeError, "pretrain/recipes and finetune/recipes travel with gdp")


def parse_recipe(text: str, where: str = "recipe") -> Recipe:
    """A recipe from TOML; unknown keys and values out of range are errors."""
    recipe = decode_toml(text.encode(), RECIPE_KIND, Recipe, where)
    require_moderate(recipe, where)
    return recipe


MOST = (1 << 31) - 1
"""Largest whole number of a recipe: counts, sizes, and seeds of 32 bits."""


def require_moderate(settings: Any, where: str, name: str = "") -> None:
    """Raise `RecipeError` for a whole number that no array can count, in settings or those within
    them."""
    if is_dataclass(settings):
        for entry in fields(settings):
            inner = f"{name}.{entry.name}" if name else entry.name
            require_moderate(getattr(settings, entry.name), where, inner)
    elif isinstance(settings, int) and abs(settings) > MOST:
        raise RECIPE_KIND.exception(
            f"{where} is not a recipe: {name} must lie within 2**31, got {settings:.3g}"
            if abs(settings) < 10**300
            else f"{where} is not a recipe: {name} must lie within 2**31"
        )


def load_recipe(path: str | os.PathLike[str]) -> tuple[Recipe, str]:
    """(recipe, its text) of a TOML file."""
    text = read_text(shipped(path), RECIPE_KIND)
    return parse_recipe(text, str(path)), text
