"""The table of runtimes: adding one is a folder beside this file and its row here.

The choices of the command line, the rows of `gdp doctor` and the tables of the documentation are
those of this table.
"""

from collections.abc import Mapping

from gdp.targets import (
    hf_accelerate,
    intel_openvino,
    jax,
    llamacpp,
    named_sharding,
    onnxruntime,
    pipelining,
    pytorch,
    sglang,
    tensor_parallel,
    vllm,
)
from gdp.targets.target import Exporter, Planner, Runtime, Target

TARGETS: Mapping[str, Target] = {
    row.name: row
    for row in (
        onnxruntime.TARGET,
        intel_openvino.TARGET,
        jax.TARGET,
        pytorch.TARGET,
        hf_accelerate.TARGET,
        llamacpp.TARGET,
        vllm.TARGET,
        sglang.TARGET,
        pipelining.TARGET,
        tensor_parallel.TARGET,
        named_sharding.TARGET,
    )
}
RUNTIMES: Mapping[str, Runtime] = {k: r.runtime for k, r in TARGETS.items() if r.runtime}
"""By name; of those that execute a model, the first is the default."""
EXPORTERS: Mapping[str, Exporter] = {k: r.exporter for k, r in TARGETS.items() if r.exporter}
PLANNERS: Mapping[str, Planner] = {k: r.planner for k, r in TARGETS.items() if r.planner}
