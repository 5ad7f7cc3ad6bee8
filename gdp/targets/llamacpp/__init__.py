"""llama.cpp: executes placements of GGUF models by its own flags."""
