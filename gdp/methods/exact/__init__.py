"""Programs for general solvers."""
