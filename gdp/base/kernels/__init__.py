"""Compilation, cache and arguments of kernels."""
