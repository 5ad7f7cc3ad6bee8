"""Pipelines by dynamic programming over down-sets."""
