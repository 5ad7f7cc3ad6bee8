"""PyTorch modules as graphs."""
