"""Requests to language models: how many tokens they read and write, and the phases of ops."""

from typing import NamedTuple

SINGLE, PREFILL, DECODE = range(3)
"""Phases of ops: of a graph that has one phase alone, the prompt of a request, its decode steps."""
PHASES = ("single", "prefill", "decode")
"""Their names."""


class Request(NamedTuple):
    """Tokens of one request, and what computes it."""

    prompt: int  # that are read
    new: int  # that are written
    batch: int = 1  # sequences side by side
    requests: int = 0  # in flight at once, each with a cache of its own; 0: unspecified
    context: int = 0  # tokens that caches are reserved for; 0: those of prompt and new
    passes: int = 0  # decode steps that write the new tokens, where these are drafted; 0: one each
    is_served: bool = False  # by an engine, which replays recorded graphs of kernels
    is_draft: bool = False  # its tokens are drafts: its steps lie within those of a large model
    pass_tokens: int = 0  # most tokens of one pass of the engine; 0: unspecified

    @property
    def held(self) -> int:
        """Tokens of one sequence that caches are reserved for."""
        return self.context or self.prompt + self.new

    @property
    def steps(self) -> int:
        """Decode steps behind the prompt."""
        return self.passes or self.new

    def sizes(self) -> dict[str, int]:
        """Its sizes by name; of those behind the batch the ones that were given."""
        names = ("requests", "context", "passes")
        given = {name: getattr(self, name) for name in names if getattr(self, name)}
        return {"prompt": self.prompt, "new": self.new, "batch": self.batch} | given


class CacheGrowth(NamedTuple):
    """Contexts at which ops say the bytes of their caches (`CACHE_AT`), linear between them and
    behind the last."""

    tokens: tuple[int, ...] = ()  # of one sequence, ascending; the first is prompt + new
    longest: int = 0  # maximum context of the model; 0 if unknown

    @property
    def is_known(self) -> bool:
        """True where bytes of caches at other contexts follow."""
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return len(self.tokens) > 1 and all(a < b for a, b in pairs)


UNKNOWN_GROWTH = CacheGrowth()
"""Of graphs that say bytes of caches at one context alone."""
