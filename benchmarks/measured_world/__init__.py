"""Predictions of accelerators beside public measurements, a command for each kind of them."""
