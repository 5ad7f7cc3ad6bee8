"""Objectives of Tarnawski et al. 2020, whose devices meet in host memory: evaluators and programs.

Their rows in `gdp.sim.objectives.OBJECTIVES` name all that is here; no other room knows them.
"""
