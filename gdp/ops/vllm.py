"""Defaults of vLLM on which plans stand."""

BATCHED_TOKENS, BATCHED_TOKENS_LARGE = 2048, 8192
"""Tokens that `vllm serve` computes at once (`--max-num-batched-tokens`): on most GPUs, and on
those of at least 70 GiB other than the A100. `EngineArgs.get_batch_defaults` of
`vllm/engine/arg_utils.py`; vllm-project/vllm#17885."""
SEQUENCES, SEQUENCES_LARGE = 256, 1024
"""Requests that `vllm serve` runs at once (`--max-num-seqs`), of the same function and GPUs."""
LARGE_BYTES = 70 << 30
"""Memory from which a GPU counts as large there."""
AT_ONCE = "max_num_batched_tokens"
"""Option of `hf:` models: tokens of one pass of the engine that computes them."""
