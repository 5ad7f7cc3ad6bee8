"""Measured runs of engines: learned from, and what they correct."""
