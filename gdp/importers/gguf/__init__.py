"""GGUF files as graphs."""
