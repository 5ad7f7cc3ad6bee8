"""One question, and what is derived from it."""
