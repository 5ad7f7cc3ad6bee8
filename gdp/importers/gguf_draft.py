"""Small models that draft tokens for a large one in llama.cpp (`--spec-type draft-simple`).

In each pass the small model runs once for each token that it drafts, the large one checks all of
them and one more at once, and the small one reads what was checked in a pass of its own
(`common_speculative_impl_draft_simple` of common/speculative.cpp).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gdp.base.errors import ModelError
from gdp.base.units import whole_number
from gdp.importers.gguf_header import read_vocabulary
from gdp.placement.placement import MOST_DRAFT_TOKENS
from gdp.sim.serving import written_in_a_pass

_MOST_APART, _FIRST_COMPARED = 128, 5
"""Tokens that one vocabulary may have more, and the first that must be alike
(`SPEC_VOCAB_MAX_SIZE_DIFFERENCE`, `SPEC_VOCAB_CHECK_START_TOKEN_ID`)."""


class DraftSpec(NamedTuple):
    """Draft model: its file, draft tokens per pass, and acceptance probability of each token."""

    file: str = ""
    tokens: int = 0
    acceptance: float = 0.0

    def passes(self, new: int) -> int:
        """Mean number of target-model passes that produce `tokens` tokens, at least two; 0 without
        a draft model."""
        if not self.tokens:
            return 0
        return max(2, round(new / written_in_a_pass(self.tokens, self.acceptance)))


NO_DRAFT = DraftSpec()


def draft_of(given: Mapping[str, str]) -> DraftSpec:
    """The draft model of a spec's parameters, with an empty file if they name none; raises
    `ModelError` for invalid values."""
    keys = ("draft", "drafts", "acceptance")
    named = [key for key in keys if key in given]
    if not named:
        return NO_DRAFT
    if len(named) < len(keys) or "new" not in given:
        raise ModelError(
            "a small model drafts for a whole request: give prompt, new, draft=FILE, drafts=4 and "
            "acceptance=0.7"
        )
    tokens = whole_number(given["drafts"])
    try:
        acceptance = float(given["acceptance"])
    except ValueError:
        acceptance = math.nan
    if tokens is None or tokens > MOST_DRAFT_TOKENS or not 0.0 <= acceptance < 1.0:
        raise ModelError(
            f"drafts must be from 1 to {MOST_DRAFT_TOKENS} and acceptance at least 0 and below 1, "
            f"got {given['drafts']!r} and {given['acceptance']!r}"
        )
    return DraftSpec(given["draft"], tokens, acceptance)


def require_one_vocabulary(model: Path, draft: Path) -> None:
    """Raise `ModelError` where llama.cpp does not draft with one file for the other
    (`common_speculative_are_compatible`)."""
    large, small = read_vocabulary(model), read_vocabulary(draft)
    why, both = "", list(zip(large.tokens, small.tokens, strict=False))
    if large.kind != small.kind:
        why = f"they are of kinds {large.kind!r} and {small.kind!r}"
    elif large.adds != small.adds and None not in (*large.adds, *small.adds):
        why = "one adds tokens to a text that the other does not"
    elif any(
        adds and a != b for adds, a, b in zip(large.adds, large.ends, small.ends, strict=True)
    ):
        why = f"the tokens at the ends of a text are {large.ends} and {small.ends}"
    elif abs(large.size - small.size) > _MOST_APART:
        why = f"they have {large.size} and {small.size} tokens"
    elif unlike := [i for i, (a, b) in enumerate(both) if a != b and i >= _FIRST_COMPARED]:
        why = f"token {unlike[0]} differs"
    if why:
        raise ModelError(
            f"llama.cpp drafts with a model of the same vocabulary alone; of {model.name} and "
            f"{draft.name} {why}"
        )
