"""Shapes and types of every value of an ONNX model."""
