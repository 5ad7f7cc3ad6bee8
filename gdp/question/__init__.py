"""A question about a model and a machine, its problem, and its answer."""
