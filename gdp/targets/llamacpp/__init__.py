"""llama.cpp: executes placements of GGUF models by its own flags."""

from gdp.targets.target import Exporter, Planner, Runtime, Target


def _devices() -> list[str]:
    import llama_cpp

    return ["CPU", *(["cores lent by RPC"] if llama_cpp.llama_supports_rpc() else [])]


TARGET = Target(
    "llamacpp",
    Runtime(
        "llama.cpp", "llama-cpp-python", "gguf", "gdp.targets.llamacpp.run:run_llamacpp", _devices,
        planner="llamacpp", scout="gdp.targets.llamacpp.plan:even_row",
    ),
    Exporter(
        "flags of llama.cpp", "gdp.targets.llamacpp.flags:export", splits=True, machines=True,
        commands="gdp.targets.llamacpp.flags:commands",
    ),
    Planner(
        "gdp.targets.llamacpp.plan:plan_llamacpp", exact=True, searches=False, divides=True,
        machines=True,
    ),
    measured=(
        "gdp.targets.llamacpp.measured:MEASURED_BENCH",
        "gdp.targets.llamacpp.measured:MEASURED_BATCHED",
        "gdp.targets.llamacpp.measured:MEASURED_ANSWERS",
    ),
    benchmark="gdp.targets.llamacpp.measured:benchmark",
)  # fmt: skip
