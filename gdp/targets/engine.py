"""Rules of serving engines: what an engine refuses is no candidate of a plan.

A row of rules is a minimum and the file of the engine's own package that names it; the tables are
`gdp/targets/vllm/rules.py` and `gdp/targets/sglang/rules.py`, and `benchmarks/engine_rules.py`
holds them against an unpacked package.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gdp.base.errors import InfeasibleError
from gdp.cluster.table import compute_capability
from gdp.cluster.types import Cluster, Device
from gdp.importers.huggingface.spec import PREFIX
from gdp.importers.pytorch.quantised_check import GROUPED
from gdp.question.models import Model, spec_of


class Needs(NamedTuple):
    """Minimum NVIDIA compute capability of a feature, and the source file that requires it."""

    capability: float
    file: str


@dataclass(frozen=True)
class EngineRules:
    """The rules of one version of an engine."""

    name: str
    version: str
    least: Needs
    methods: Mapping[str, Needs]  # by kind of quantisation, see `kind_of`
    plugins: Mapping[str, str]  # packages that add methods which it has no more
    one_stage: frozenset[str]  # architectures that it does not run as a pipeline
    one_stage_file: str
    padding: int = 64  # the vocabulary is divided in multiples of it

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def kind_of(quantisation: Mapping[str, Any] | None) -> str:
    """Kind of a `quantization_config`: its method; where modules are in groups, with type and bits
    of weights and activations of the first, such as "compressed-tensors float4/16"; "" for none.

    >>> kind_of({"quant_method": "awq", "bits": 4})
    'awq'
    """
    if not quantisation:
        return ""
    method = str(quantisation.get("quant_method"))
    groups = quantisation.get("config_groups")
    if method not in GROUPED or not isinstance(groups, Mapping) or not groups:
        return method
    group = next(iter(groups.values()))
    weights, cast = (group.get(key) or {} for key in ("weights", "input_activations"))
    made = f"{weights.get('type', 'int')}{weights.get('num_bits') or 8}"
    if made == "float4" and weights.get("strategy") != "tensor_group":
        made = "mxfp4"
    return f"{method} {made}/{cast.get('num_bits') or 16}"


def quantisation_of(model: Model | None) -> str:
    """Kind of quantisation of the weights that a model is planned with; "" where there is none."""
    spec = spec_of(model) if model is not None else ""
    if not spec.startswith(PREFIX):
        return ""
    from gdp.importers.huggingface.dtype import loaded_config
    from gdp.importers.pytorch.quantised import quantization_of

    read = loaded_config(spec)
    return kind_of(quantization_of(read.document, read.spec.quantize, str(read.path)))


def architectures_of(model: Model | None) -> tuple[str, ...]:
    """Architectures that the configuration of a model names."""
    spec = spec_of(model) if model is not None else ""
    if not spec.startswith(PREFIX):
        return ()
    from gdp.importers.huggingface.dtype import loaded_config

    return tuple(loaded_config(spec).document.get("architectures") or ())


def unknown_method(engine: EngineRules, kind: str) -> str:
    """Why an engine reads no weights of a kind of quantisation, in a sentence; "" where it does."""
    method = kind.partition(" ")[0]
    known = {own.partition(" ")[0] for own in engine.methods} | set(engine.plugins)
    if not kind or method in known:
        return ""
    return (
        f"{engine} has no quantisation {method!r}; its methods that gdp plans are "
        f"{', '.join(sorted(known))}"
    )


def why_not_on(engine: EngineRules, kind: str, device: Device) -> str:
    """Why an engine does not compute weights of a kind of quantisation on a device, in a sentence;
    "" where it does, or where the device's compute capability is not known."""
    capability = compute_capability(device)
    needs = engine.methods.get(kind) or engine.methods.get(kind.partition(" ")[0])
    for what, row in (("GPUs", engine.least), (f"weights in {kind}", needs)):
        if row is not None and 0 < capability < row.capability:
            return (
                f"{device.kind} has compute capability {capability:.1f}, and {engine} needs "
                f"{row.capability:.1f} for {what} ({row.file})"
            )
    return ""


def legal_devices(
    engine: EngineRules, model: Model | None, cluster: Cluster
) -> tuple[Cluster, str]:
    """The cluster in which GPUs that an engine refuses for a model compute nothing, and a note of
    those that are left out; "" where there are none.

    Raises:
        InfeasibleError: The engine knows no such weights, or runs on none of the GPUs.
    """
    kind = quantisation_of(model)
    if why := unknown_method(engine, kind):
        raise InfeasibleError(f"{why}: serve other weights, or with another runtime")
    reasons = {
        d: why_not_on(engine, kind, device) for d, device in enumerate(cluster.devices)
        if not device.is_cpu
    }  # fmt: skip
    refused = {d: why for d, why in reasons.items() if why}
    if not refused:
        return cluster, ""
    reason = "; ".join(dict.fromkeys(refused.values()))
    if len(refused) == len(reasons):
        raise InfeasibleError(
            f"{reason}; use other weights or newer GPUs, or a GGUF file with --for llamacpp"
        )
    idle = np.isin(np.arange(cluster.num_devices), list(refused))
    return cluster.idling(idle), f"left out: {reason}"


def runs_stages(engine: EngineRules, model: Model | None) -> bool:
    """False for architectures that an engine does not run as a pipeline."""
    return engine.one_stage.isdisjoint(architectures_of(model))
