"""vLLM: uneven pipelines of language models."""
