"""What no placement can beat."""
