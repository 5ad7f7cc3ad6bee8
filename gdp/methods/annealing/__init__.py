"""Simulated annealing of one placement: what repair and local search are made of."""
