"""The graphs that the policy is pre-trained over, traced from models of many families.

`python -m pretrain.corpus` makes them; the split into training, validation and test is by whole
families.
"""
