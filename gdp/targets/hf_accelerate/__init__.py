"""accelerate: device maps of PyTorch modules, with offloading."""

from gdp.targets.target import Exporter, Planner, Target

TARGET = Target(
    "accelerate",
    exporter=Exporter(
        "device maps for accelerate (with offloading)",
        "gdp.targets.hf_accelerate.device_map:export",
        offloads=True,
    ),
    planner=Planner(
        "gdp.targets.hf_accelerate.plan:plan_accelerate", by_module=True, offloads=True
    ),
)
