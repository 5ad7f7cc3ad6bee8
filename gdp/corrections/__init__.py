"""Corrections of predicted times by measured runs of an engine.

An engine's own benchmark writes a file of its results. `gdp.targets` has a reader for each form of
it, which returns `MeasuredRun`s; what they say of a stack becomes a correction of its predictions.
"""
