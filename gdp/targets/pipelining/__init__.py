"""torch.distributed.pipelining: split points of PyTorch modules."""

from gdp.targets.target import Exporter, Planner, Target

TARGET = Target(
    "pipelining",
    exporter=Exporter(
        "split points for torch.distributed.pipelining", "gdp.targets.pipelining.plan:export",
        "traced", machines=True,
    ),
    planner=Planner(
        "gdp.targets.pipelining.plan:plan_pipelining", by_module=True, exact=True, machines=True
    ),
)  # fmt: skip
