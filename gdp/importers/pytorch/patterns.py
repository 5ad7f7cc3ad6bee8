"""Patterns of names in configurations: regular expressions, matched in bounded time.

A configuration may come from anywhere, and a backtracking matcher may compare for ever: `(a+)+!`,
or `.?` thirty times in a row. Checkpoints in use hold lookaheads (`re:^(?!.*experts).*$`), which
linear engines such as RE2 refuse, so that the limit is one of seconds: the regex package takes what
Python's `re` takes, and stops in time.
"""

import re
import time
from collections.abc import Iterable
from typing import Any

from gdp.base.errors import ModelError, one_line

LIMIT_S = 5.0
"""CPU seconds that all patterns of a configuration may take; those in use take milliseconds."""
MOST_LETTERS = 1 << 14
"""Of a pattern."""
_NAME = re.compile(r"[\w.-]+")
"""Patterns that are names, with nothing in them to go back to."""


class NamePatterns:
    """The patterns of one configuration, matched as `re.match` does. They share `LIMIT_S`."""

    def __init__(self, where: str) -> None:
        self._where, self._left_s = where, LIMIT_S
        self._compiled: dict[str, Any] = {}
        self._names: dict[Any, tuple[re.Pattern[str] | None, list[str]]] = {}

    def any_matches(self, patterns: Iterable[str], name: str, ending: str = "") -> bool:
        """True where one of the patterns matches, as `matches` says. Checkpoints that list each
        module (Llama 3.1 405B in 8 bits: 511) would take half a million comparisons one by one, so
        that names are compared at once."""
        key = (tuple(patterns), ending)
        if key not in self._names:
            plain = [pattern for pattern in key[0] if _NAME.fullmatch(pattern)]
            others = [pattern for pattern in key[0] if not _NAME.fullmatch(pattern)]
            expression = re.compile(f"(?:{'|'.join(plain)}){ending}") if plain else None
            self._names[key] = expression, others
        expression, others = self._names[key]
        if expression is not None and expression.match(name):
            return True
        return any(self.matches(pattern, name, ending) for pattern in others)

    def matches(self, pattern: str, name: str, ending: str = "") -> bool:
        """True where a pattern, and an ending of our own after it, match a name from its start;
        raises `ModelError` for a text that is no pattern, and where no time is left."""
        import regex

        started_s = time.process_time()
        try:
            compiled = self._compiled.get(pattern + ending) or self._compile(pattern, ending)
            found = compiled.match(name, timeout=max(1e-3, self._left_s)) is not None
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise ModelError(
                f"{self._where}: {_short(pattern)} is no regular expression: {one_line(str(error))}"
            ) from None
        except (TimeoutError, MemoryError):
            found, self._left_s = False, 0.0
        self._left_s -= time.process_time() - started_s
        if self._left_s <= 0:
            raise ModelError(
                f"{self._where}: {_short(pattern)} and what stands beside it take too long to "
                f"compare (over {LIMIT_S:g} s); write patterns without repetitions of repetitions"
            )
        return found

    def _compile(self, pattern: str, ending: str) -> Any:
        import regex

        if len(pattern) > MOST_LETTERS:
            raise ModelError(
                f"{self._where}: {_short(pattern)} has {len(pattern)} characters; a pattern may "
                f"have {MOST_LETTERS}"
            )
        text = f"(?:{pattern}){ending}" if ending else pattern
        re.compile(text)  # as transformers reads it: regex takes more
        return self._compiled.setdefault(pattern + ending, regex.compile(text))


def _short(pattern: str) -> str:
    text = repr(pattern)
    return text if len(text) < 60 else f"{text[:60]}..."
