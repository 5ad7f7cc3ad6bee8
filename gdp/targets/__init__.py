"""Runtimes that execute placements, a folder each, and the table of them."""
