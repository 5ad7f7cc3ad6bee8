"""vLLM: language models by tensor, pipeline and data parallel sizes."""

from gdp.targets.target import Exporter, Planner, Target

TARGET = Target(
    "vllm",
    exporter=Exporter(
        "a layout of vLLM (untried)", "gdp.targets.vllm.plan:export", "hf", replicates=True,
        splits=True, machines=True, commands="gdp.targets.vllm.plan:commands",
    ),
    planner=Planner(
        "gdp.targets.vllm.plan:plan_vllm", exact=True, searches=False,
        computes="gdp.targets.vllm.plan:vllm_model", replicates=True, divides=True,
        machines=True,
    ),
    scheduler="gdp.targets.vllm.scheduler:VllmScheduler",
    measured=(
        "gdp.targets.vllm.measured:MEASURED_SERVING", "gdp.targets.vllm.measured:MEASURED_OFFLINE",
        "gdp.targets.vllm.measured:BARE",
    ),
    benchmark="gdp.targets.vllm.plan:benchmark",
)  # fmt: skip
