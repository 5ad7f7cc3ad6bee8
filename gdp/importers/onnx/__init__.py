"""ONNX models as graphs."""
