"""What people look at: the page of a placement, its trace, and why an op is where it is."""
