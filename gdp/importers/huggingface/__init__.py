"""Configurations of transformers as graphs of PyTorch modules."""
