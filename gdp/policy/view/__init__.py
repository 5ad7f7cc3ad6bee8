"""Inputs of the network and of the decoder."""
