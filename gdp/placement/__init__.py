"""Placements, and the constraints and device maps that restrict them."""
