"""How kernels are compiled, kept and given their arrays."""
