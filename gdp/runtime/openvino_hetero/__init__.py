"""Executes placements of ONNX models with OpenVINO."""
