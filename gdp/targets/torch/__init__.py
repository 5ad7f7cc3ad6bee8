"""PyTorch: executes placements of modules in pieces."""
