"""OpenVINO: executes placements of ONNX models by its affinities of ops."""
