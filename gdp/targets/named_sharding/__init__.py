"""Decoders whose ops devices divide, in JAX: a mesh and the sharding of every parameter."""

from gdp.targets.target import Exporter, Target

TARGET = Target(
    "named-sharding",
    exporter=Exporter(
        "shardings of parameters for JAX", "gdp.targets.named_sharding.export:export", "hf",
        splits=True,
    ),
)  # fmt: skip
