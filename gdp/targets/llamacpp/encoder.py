"""Devices for llama.cpp's image encoder (`--mmproj`), which computes beside the blocks."""

from collections.abc import Sequence

from gdp.cluster.machines import machine_of
from gdp.constraints import allowed_mask
from gdp.costs.op_offload import LENT
from gdp.question import Question
from gdp.result import Result
from gdp.targets.llamacpp.flags import Slots
from gdp.units import format_seconds


def homes_of_encoder(question: Question, slots: Slots) -> list[int]:
    """Devices of the host's machine that may have the image encoder: the processor, each GPU."""
    cluster, graph = question.cluster, question.graph
    allowed = allowed_mask(question.constraints, graph, cluster)
    here = machine_of(cluster, cluster.host)
    return [
        d for d, device in enumerate(cluster.devices)
        if (not device.is_cpu or d == cluster.host) and machine_of(cluster, d) == here
        and not device.kind.startswith(LENT) and allowed[slots.projector, d].all()
    ]  # fmt: skip


def told(best: Result, found: Sequence[Result], slots: Slots) -> str:
    """The device of the image encoder, in a sentence, beside the other ones."""
    op = int(slots.projector[0])

    def name(result: Result) -> str:
        return result.placement.device_names[int(result.placement.device[op])]

    others = ", ".join(
        f"{format_seconds(result.value_s)} on {name(result)}"
        for result in found if result is not best
    )  # fmt: skip
    beside = others and f" (with it the plan takes {others})"
    return f"the image encoder is on {name(best)}{beside}"
