"""Several models on one box: priced options, the value of a packing, and its search."""
