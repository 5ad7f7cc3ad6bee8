"""SGLang: layouts of language models that are planned for vLLM, as its flags."""

from gdp.targets.target import Exporter, Target

TARGET = Target(
    "sglang",
    exporter=Exporter(
        "a layout of SGLang (untried)", "gdp.targets.sglang.export:export", "hf", replicates=True,
        splits=True, machines=True, commands="gdp.targets.sglang.export:commands",
    ),
    scheduler="gdp.targets.sglang.scheduler:SglangScheduler",
    measured=(
        "gdp.targets.sglang.measured:MEASURED_SERVING",
        "gdp.targets.sglang.measured:MEASURED_BATCH",
        "gdp.targets.sglang.measured:MEASURED_SERVER_BATCH",
    ),
    benchmark="gdp.targets.sglang.export:benchmark",
)  # fmt: skip
