"""JAX functions as graphs."""
