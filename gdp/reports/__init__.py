"""Pages and traces of placements for people."""
