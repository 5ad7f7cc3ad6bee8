"""Builders of the models that cost models are calibrated on; placing a model needs none of it."""
