"""Pre-training of the kernel network of accelerators."""
