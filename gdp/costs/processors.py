"""Costs of processors that were not measured, by those of a core that was.

The learned costs of a core are a sum over arithmetic, traffic and launches (`gdp.costs.learned`),
each at a rate of its own. On another processor arithmetic takes the ratio of both devices' FLOP/s,
traffic that of their bandwidths, and a launch what it took. Nothing is fitted: the descriptor of a
processor is its datasheet, or what `gdp devices` measures in a second and a half.
"""

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from gdp.cluster.presets import device_preset
from gdp.cluster.types import Cluster, Device
from gdp.costs.learned import Calibration, KernelNetworks, LearnedCosts
from gdp.graph.op_graph import OpGraph

ERROR = 0.14
"""Mean error of whole models on two cores as one device, by one core's costs: `python
benchmarks/costs.py transfer data/profiles/cpu-2-cores-avx2.json.gz`; its roofline is 31% off."""


def with_processors(
    calibrations: Sequence[Calibration], cluster: Cluster, graph: OpGraph | None
) -> tuple[Calibration, ...]:
    """The calibrations, with one for every processor of a cluster that none of them is of; as given
    where none knows the ops of the graph."""
    own, known = list(calibrations), LearnedCosts(tuple(calibrations))
    core = next((c for c in calibrations if isinstance(c.predictor, KernelNetworks)), None)
    if core is None or graph is None or not core.predictor.covers(graph):
        return tuple(own)
    for device in cluster.devices:
        if device.is_cpu and known.of(device) is None:
            own.append(transferred(core, device))
            known = LearnedCosts(tuple(own))
    return tuple(own)


def transferred(core: Calibration, device: Device) -> Calibration:
    """The calibration of a core as one of another processor, scaled by their speeds."""
    reference = device_preset(core.device.kind)
    networks = replace(
        core.networks,
        arithmetic=device.speed("float32") / reference.speed("float32"),
        traffic=device.bytes_per_s / reference.bytes_per_s,
    )
    return replace(
        core, device=structs.replace(core.device, kind=device.kind, model=device.model),
        predictor=networks, mean_error=None, measured_on=core.device.model,
        speeds=(device.speed("float32"), device.bytes_per_s),
    )  # fmt: skip
