"""Layers of a decoder divided among devices that compute each op together."""
