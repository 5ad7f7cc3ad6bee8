"""Errors, units, files, the terminal, worker processes and compiled kernels."""
