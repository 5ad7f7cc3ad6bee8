"""Operators of ONNX, JAX and PyTorch: one row each, with its costs, its class and its shapes."""
