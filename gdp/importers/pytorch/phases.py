"""Phases of a model of transformers as programs: traced block by block where that can be, and kept.

A program has its weights as they are in the configuration's type. How they are stored is put upon
it, so that another scheme traces nothing.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from gdp.base.errors import GdpError
from gdp.importers.program import Results, Traced, build
from gdp.importers.pytorch.caches import on_meta
from gdp.importers.pytorch.cut import UncuttableError
from gdp.importers.pytorch.model import TorchModel, states_held, weights_by_path
from gdp.importers.pytorch.quantised import apply_stored
from gdp.importers.pytorch.repeated import Listed, Traces, repeated, whole
from gdp.importers.pytorch.sizes import (
    Sizes,
    UnscalableError,
    scaled,
    sizes_traced,
    with_growth,
)
from gdp.importers.pytorch.trace_cache import cache_program, find_program, keeps_traces

LOG = logging.getLogger(__name__)


@lru_cache(maxsize=6)
def _read_once(key: str) -> Listed:
    """A kept program, which scaling leaves as it is: three of a prompt and three of a step serve
    every batch.

    Raises:
        LookupError: None is kept.
    """
    listed = find_program(key)
    if listed is None:
        raise LookupError(key)
    return listed


@dataclass(frozen=True)
class Scaling:
    """A phase of a model whose programs of all sizes follow from those of three."""

    sizes: Sizes
    key_at: Callable[[Sizes], str]  # digest of the program of other sizes
    # Of a step: tokens of the prompt and the new ones, and those that the model was made for.
    grows: tuple[int, int] | None = None
    phase_at: "Callable[[Sizes], Phase] | None" = None  # None where nothing can be traced

    def program(self, *, make: bool) -> Listed | None:
        """The program by those of other sizes, which are traced where they are not kept and `make`
        says so; None where they do not give it."""
        traced = sizes_traced(self.sizes.tokens)
        programs = list[Listed]()
        for sizes in traced:
            try:
                programs.append(_read_once(self.key_at(sizes)))
            except LookupError:
                if not make or self.phase_at is None:
                    return None
                programs.append(self.phase_at(sizes).program())
        try:
            listed = scaled(programs, traced, self.sizes) if traced else None
            if listed is None or self.grows is None:
                return listed
            return with_growth(listed, programs, self.sizes.batch, *self.grows)
        except UnscalableError as error:
            LOG.info("traced at %s: %s", self.sizes, error)
            return None


@dataclass(frozen=True, eq=False)
class Phase(TorchModel):
    """A model with the inputs of one phase: it reads a prompt, or takes a step of decoding.

    Where `again` makes it, `module` may be the model alone until then.
    """

    again: Callable[[], "Phase"] | None = None  # makes it from the model as it stands
    program_key: str = ""  # digest of all that its program depends on
    scaling: "Scaling | None" = None  # where programs of other sizes may give its own
    cache_bytes: Mapping[str, int] = field(default_factory=dict)  # of each state that a step reads
    full_bytes: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # by context

    def made(self) -> "Phase":
        """The phase with its module and inputs."""
        return self if self.again is None else self.again()

    @property
    def model(self) -> Any:
        """The model without wrappers, made or not."""
        return self.unwrapped if self.prefix else self.module

    def program(self) -> Listed:
        """The ops with dense weights: kept, scaled from other sizes, repeated from a cut model, or
        traced whole."""
        scaling = self.scaling
        listed = find_program(self.program_key)
        if listed is None and scaling is not None and keeps_traces():
            listed = scaling.program(make=scaling.sizes.batch > 1)
        if listed is None:
            listed = self._repeated() or whole(self.made().traces())
            cache_program(self.program_key, listed)
        return listed

    def graph_of(self, listed: Listed) -> Traced:
        """The graph of a program, with its weights as the options store them."""
        if stored := self.options.get("stored"):
            apply_stored(listed, listed.paths, stored)
        return Traced(
            build(self.label, listed, Results(state=listed.state), "torch"),
            tuple(sorted(listed.estimated)),
            tuple(dict.fromkeys((*self.options.get("assumed", ()), *listed.assumptions))),
            listed.parameters,
        )

    def traces(self) -> Traces:
        """The phase traced with its model unchanged."""
        listing, results, program = self.listed_as_traced()
        held = states_held(listing, program, self.options.get("held", ()), self.name)
        states = [*zip(self.cache_bytes, held, strict=True)] if self.cache_bytes else []
        if self.full_bytes:
            listing.cache_at = {
                value.weight[0]: tuple(sizes[path] for sizes in self.full_bytes.values())
                for path, value in states
                if value.weight is not None
            }
        return Traces(
            listing, list(results.state), weights_by_path(listing, program, self.prefix), states,
            tuple(self.full_bytes),
        )  # fmt: skip

    def run(self) -> None:
        """Run on the meta device, where nothing is computed."""
        import torch
        from torch.utils._pytree import tree_map

        inputs = tree_map(leaf_on_meta, dict(self.kwargs))
        with torch.no_grad(), torch.device("meta"), on_meta():
            self.module(*self.args, **inputs)

    def _repeated(self) -> Listed | None:
        """The program by repetition; None where the model must be traced whole."""
        if not all(p.is_meta for p in self.model.parameters()):
            return None
        try:
            return repeated(self.model, lambda: self.made().run, lambda: self.made().traces())
        except UncuttableError as error:
            LOG.info("%s is traced whole: %s", self.label, error)
        except GdpError:
            return None  # tracing the whole says it better
        except Exception as error:  # code of others, which a cut model may lead astray
            LOG.info("%s is traced whole: %s: %s", self.label, type(error).__name__, error)
        return None


def leaf_on_meta(leaf: Any) -> Any:
    """A leaf without its numbers, where it is a tensor."""
    return leaf.to("meta") if hasattr(leaf, "untyped_storage") else leaf
