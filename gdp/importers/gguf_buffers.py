"""Buffers that llama.cpp reserves on every device that computes, beside weights and caches.

`llama_context::sched_reserve` (src/llama-context.cpp) allocates the graph of its worst micro-batch
once: `--ubatch-size` tokens, a full context, and logits of every token that may be an output.

* Logits: `n_outputs_max` rows of the vocabulary in F32 where the head is. It is the whole
  micro-batch in builds from before pull request 23861, and since then in all programs but
  llama-server and llama-cli, which ask for one row a sequence. Measured by others: 3,976 MiB at
  4,096 tokens of a vocabulary of 248,320, of which 3,880 are logits (ik_llama.cpp pull request
  1560).
* Masks: a number for each token of a micro-batch and each cell of the cache, in F16 with flash
  attention, else in F32 (`build_attn_inp_kq_mask` in src/llama-graph.cpp); one for caches of all
  tokens, one for those of windows. Cells are a multiple of 256 (`llama_kv_cache`).
* Scores without flash attention: as many numbers for each head, in F32 (`build_attn_mha`).
"""

CELLS = 256
"""Of which the cells that masks are of are a multiple."""
MASK_BYTES, SCORE_BYTES = 2, 4
"""Of a number of a mask with flash attention, and of masks and scores without."""
WITHOUT_FLASH = frozenset(("grok",))
"""Architectures for which llama.cpp turns flash attention off (`llama_init_from_model`)."""


def mask_bytes(rows: int, cells: int, heads: int = 0) -> int:
    """Bytes of a micro-batch's mask over some cells, and of the scores of all heads without flash
    attention.

    >>> mask_bytes(512, 32768) >> 20, mask_bytes(512, 32768, heads=64) >> 20
    (32, 4160)
    """
    numbers = rows * -(-cells // CELLS) * CELLS
    return numbers * (SCORE_BYTES * (1 + heads) if heads else MASK_BYTES)


def logits_bytes(rows: int, vocabulary: int) -> int:
    """Bytes of the logits of some tokens.

    >>> logits_bytes(4096, 248_320) >> 20
    3880
    """
    return rows * vocabulary * SCORE_BYTES
