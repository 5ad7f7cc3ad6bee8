"""Lower bounds that no placement can beat."""
