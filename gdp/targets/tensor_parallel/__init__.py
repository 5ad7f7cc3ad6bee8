"""Decoders whose ops devices divide, in PyTorch: heads, columns and the vocabulary by shares."""

from gdp.targets.target import Exporter, Planner, Target

TARGET = Target(
    "tensor-parallel",
    exporter=Exporter(
        "ops divided in PyTorch", "gdp.targets.tensor_parallel.export:export", "hf", splits=True,
        machines=True,
    ),
    planner=Planner(
        "gdp.targets.tensor_parallel.plan:plan_tensor_parallel", exact=True, searches=False,
        divides=True, machines=True,
    ),
)  # fmt: skip
