"""Implementations of the commands other than `place`."""
