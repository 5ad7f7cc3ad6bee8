"""Executes placements of PyTorch modules."""
