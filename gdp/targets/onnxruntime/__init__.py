"""ONNX Runtime: executes any placement of an ONNX model in sub-models."""
