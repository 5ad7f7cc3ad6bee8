"""The machine that runs it."""
