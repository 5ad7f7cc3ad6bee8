"""vLLM: uneven pipelines of language models."""

from gdp.targets.target import Exporter, Planner, Target

TARGET = Target(
    "vllm",
    exporter=Exporter(
        "an uneven pipeline of vLLM (untried)", "gdp.targets.vllm.plan:export", "hf"
    ),
    planner=Planner(
        "gdp.targets.vllm.plan:plan_vllm", exact=True, searches=False,
        computes="gdp.targets.vllm.plan:vllm_model",
    ),
)  # fmt: skip
