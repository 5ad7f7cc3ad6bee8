"""Defaults of vLLM on which plans stand."""

from typing import NamedTuple


class Defaults(NamedTuple):
    """Defaults of `vllm serve` on GPUs of at least some memory."""

    least_bytes: int
    batched_tokens: int  # computed at once (`--max-num-batched-tokens`)
    sequences: int  # requests that run at once (`--max-num-seqs`)


DEFAULTS = (
    Defaults(160 << 30, 16384, 1024),
    Defaults(70 << 30, 8192, 1024),
    Defaults(0, 2048, 256),
)
"""By memory, the largest first: `EngineArgs.get_batch_defaults` of `vllm/engine/arg_utils.py`
(vLLM 0.33; vllm-project/vllm#17885)."""


def sequences_of(batched_tokens: int) -> int:
    """Default maximum number of concurrent requests at a token budget.

    >>> [sequences_of(n) for n in (64, 2048, 8192, 16384)]
    [64, 256, 1024, 1024]
    """
    row = next((row for row in DEFAULTS if batched_tokens >= row.batched_tokens), DEFAULTS[-1])
    return min(row.sequences, batched_tokens)


SMALL_KINDS = ("a100", "dgx-spark")
"""Kinds of GPUs, by how they begin, that have the last of these whatever their memory: the A100 by
name, the GB10 by its compute capability (12.1)."""
AT_ONCE = "max_num_batched_tokens"
"""Option of `hf:` models: tokens of one pass of the engine that computes them."""
