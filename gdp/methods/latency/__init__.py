"""Latencies where memory is tight, by a mixed-integer program of one region after another."""
