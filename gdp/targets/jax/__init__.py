"""JAX: executes placements of traced functions in jitted pieces."""
