"""Executing placements fairly: inputs, turns, statistics, reports."""
