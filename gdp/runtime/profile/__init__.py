"""Measured times of kernels and models."""
