"""Costs of accelerators, learned from measured kernels of many of them."""
