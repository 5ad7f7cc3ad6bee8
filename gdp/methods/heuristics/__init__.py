"""Quick placements."""
