"""The call `place_pipeline`: an image or video pipeline on one machine."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gdp.api.diffusion.answer import PipelineAnswer, PipelinePlan, PlacedComponent
from gdp.api.diffusion.choose import HandOver, choose
from gdp.api.diffusion.parallel import HOST, ParallelDegrees, degrees_for, exchange, rank_graph
from gdp.api.diffusion.pricing import (
    Memories,
    PricedComponent,
    card_class,
    priced,
    ways_of,
)
from gdp.api.diffusion.quantise import BITS, quantised
from gdp.base.errors import ArgumentError
from gdp.base.units import format_seconds
from gdp.cluster.file import Machine, load_cluster
from gdp.cluster.machines import machines
from gdp.cluster.reserve import for_runtime
from gdp.cluster.types import Cluster
from gdp.costs.base import CostModel
from gdp.costs.default import resolve_costs
from gdp.costs.power import Power
from gdp.importers.diffusers.pipeline import Component, DiffusionPipeline, load_pipeline
from gdp.importers.diffusers.request import MediaRequest, parse_image, parse_video
from gdp.question.question import Kept

RUNTIME = "accelerate"
"""Target whose reserve of memory PyTorch's is."""
PARALLEL_WAYS = (("whole", "moved", "blocks sent"), ("whole", "moved"))
"""Ways of components, and of denoisers whose tokens several cards divide: their exchanges hook into
the blocks of the denoiser, which so stay whole."""
SLOW = 0.75
"""Share of the FLOP/s in float16 below which bfloat16 is avoided."""
ADVISED, BETTER = ("fp8", "nf4"), 0.9
"""Schemes that are tried for advice, and the share of the seconds below which one is named."""


def place_pipeline(
    model: str | os.PathLike[str] | DiffusionPipeline,
    cluster: Machine,
    *,
    image: str | MediaRequest | None = None,
    video: str | MediaRequest | None = None,
    quantize: str = "",
    costs: CostModel | str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> PipelineAnswer:
    """Place the components of an image or video pipeline: text encoders, the denoiser, the VAE.

    Each component is priced in every way: whole on a device, moved to it while it runs, its blocks
    sent to it one by one, split over cards, or the whole pipeline on several equal cards that
    compute each denoising pass together or make a share of the batch each. The plan with the
    fewest seconds that fits in each phase is found exactly.

    Args:
        model: `hf:DIR` with a `model_index.json`, or `diffusers:NAME`; configurations alone.
        cluster: As `gdp.place` takes it.
        image: Such as "1024x1024,steps=50,guidance=3.5,batch=1".
        video: Such as "1280x720x129,steps=50"; one of both.
        quantize: Storage of weights, "nf4" of the denoiser or "transformer=fp8,text_encoder_2=nf4";
            schemes are those of `gdp.api.diffusion.quantise.BITS`.
        costs: As `gdp.place` takes them.
        progress: Called with each step of the answer.

    Returns:
        A `PipelineAnswer`; without a plan where nothing fits, with advice.

    Raises:
        ModelError: The pipeline is unknown, or its configurations are broken.
        ArgumentError: The request has another form, none is given, or a scheme is unknown.

    Example:
        >>> import gdp
        >>> request = "1024x1024,steps=50"
        >>> answer = gdp.place_pipeline("diffusers:FLUX.1-dev", "cpu+rtx3090+rtx3060",
        ...                             image=request)  # doctest: +SKIP
        >>> answer.item_s  # doctest: +SKIP
    """
    say = progress or (lambda text: None)
    machine = for_runtime(load_cluster(cluster), RUNTIME)
    if isinstance(model, DiffusionPipeline):
        pipeline = model
    else:
        pipeline = load_pipeline(os.fspath(model), _request(image, video), dtype_on(machine))
    say(f"pricing {len(pipeline.components)} components")
    planner = PipelinePlanner(pipeline, machine, costs, schemes_of(quantize, pipeline))
    plans = sorted(planner.plans(), key=lambda plan: plan.seconds)
    best = plans[0] if plans else None
    return PipelineAnswer(
        pipeline, machine, best, tuple(plans[1:]), advice=tuple(advice(planner, best)),
        costs=planner.label, dtype=dtype_on(machine), notes=pipeline.notes,
    )  # fmt: skip


def dtype_on(cluster: Cluster) -> str:
    """Type of weights and activations: bfloat16, and float16 where an accelerator computes the
    other one more slowly, as GPUs before Ampere do."""
    cards = [device for device in cluster.devices if not device.is_cpu]
    slow = any(d.speed("bfloat16") < SLOW * d.speed("float16") for d in cards)
    return "float16" if slow else "bfloat16"


def _request(image: str | MediaRequest | None, video: str | MediaRequest | None) -> MediaRequest:
    """The request of one of both; raises `ArgumentError` for both or none."""
    if (image is None) == (video is None):
        raise ArgumentError(
            'a pipeline needs either image="1024x1024,steps=50" or video="1280x720x129,steps=50"'
        )
    if image is not None:
        return parse_image(image) if isinstance(image, str) else image
    assert video is not None
    return parse_video(video) if isinstance(video, str) else video


@dataclass(frozen=True, eq=False)
class PipelinePlanner:
    """Plans of a pipeline on a machine, with some components stored in fewer bits."""

    pipeline: DiffusionPipeline
    cluster: Cluster
    costs: Any = None
    schemes: Mapping[str, str] = field(default_factory=dict)  # by component
    kept: Kept = field(default_factory=Kept)

    @functools.cached_property
    def label(self) -> str:
        """The cost model of the denoiser, and its source."""
        graph = next(c.graph for c in self.pipeline.components if c.role == "denoise")
        return resolve_costs(self.costs, self.cluster, graph)[1]

    @functools.cached_property
    def alone(self) -> list[PricedComponent]:
        """The components on every device, each by itself."""
        return [self._priced(c, self.cluster) for c in self.pipeline.components]

    def _priced(self, component: Component, cluster: Cluster) -> PricedComponent:
        own = priced(component, cluster, self.costs, self.kept)
        scheme = self.schemes.get(component.name)
        return quantised(own, scheme, cluster) if scheme else own

    def plans(self) -> Iterator[PipelinePlan]:
        """The best plan of each kind that fits: on single cards, and for all degrees on equal
        ones."""
        if (plan := self.on_single_cards()) is not None:
            yield plan
        for cards in _equal_cards(self.cluster):
            for count in range(2, len(cards) + 1):
                yield from self._parallel(cards[:count])

    def on_single_cards(self, schemes: Mapping[str, str] | None = None) -> PipelinePlan | None:
        """The best plan whose components have devices of their own, with further components stored
        in fewer bits."""
        own = [
            quantised(c, schemes[c.component.name], self.cluster)
            if schemes and c.component.name in schemes and not c.scheme else c
            for c in self.alone
        ]  # fmt: skip
        return _best(own, self.cluster, ParallelDegrees(), ())

    def _parallel(self, cards: tuple[int, ...]) -> Iterator[PipelinePlan]:
        """Plans of sequence parallelism: each card has a process with the whole pipeline."""
        part = self.cluster.part((cards[0],))
        card = next(d for d in range(part.num_devices) if d != part.host)
        components = self.pipeline.components
        shares: dict[int, list[PricedComponent | None]] = {}  # of encoders and decoders, by copies
        for degrees in _possible(self.pipeline, len(cards)):
            if degrees.copies not in shares:
                shares[degrees.copies] = [
                    None if c.role == "denoise"
                    else self._priced(share_of(c, degrees.copies, self.pipeline.request), part)
                    for c in components
                ]  # fmt: skip
            ranks = []
            for component, known in zip(components, shares[degrees.copies], strict=True):
                rank = known
                if rank is None:
                    # Where guidance calls the denoiser twice, each half computes one of the calls.
                    by_calls = component.calls > 1 and degrees.guidance > 1
                    own = degrees._replace(guidance=1) if by_calls else degrees
                    calls = component.calls / (degrees.guidance if by_calls else 1)
                    graph = rank_graph(component.graph, own)
                    rank = self._priced(replace(component, graph=graph, calls=calls), part)
                    waits = exchange(component.graph, own, self.cluster, list(cards))
                    own_s = rank.call_s(card)
                    host_s = HOST * rank.launch_s + waits.host_s + rank.step_s
                    rank.part_s[0, card] += max(own_s + waits.card_s, host_s) - own_s
                ranks.append(rank)
            plan = _best(ranks, part, degrees, cards)
            if plan is not None:
                yield plan


def schemes_of(text: str, pipeline: DiffusionPipeline) -> dict[str, str]:
    """Schemes by component: `nf4` of all denoisers, or `transformer=fp8,text_encoder_2=nf4`.

    Raises:
        ArgumentError: There is no such component or scheme.
    """
    names = [c.name for c in pipeline.components]
    denoisers = [c.name for c in pipeline.components if c.role == "denoise"]
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, scheme = part.partition("=")
        chosen, scheme = ([name], scheme) if equals else (denoisers, name)
        if chosen[0] not in names:
            raise ArgumentError(
                f"quantize: {pipeline.name} has no component {name!r}; it has {', '.join(names)}"
            )
        if scheme not in BITS:
            raise ArgumentError(
                f"quantize: no scheme {scheme!r} to store weights in; there are {', '.join(BITS)}"
            )
        found |= dict.fromkeys(chosen, scheme)
    return found


def advice(planner: PipelinePlanner, best: PipelinePlan | None) -> Iterator[str]:
    """Storage in fewer bits that makes a plan possible, or one at least a tenth quicker where
    weights move or blocks are on several devices."""
    whole = best is not None and (
        bool(best.cards) or all(p.way.residence == "whole" for p in best.placed)
    )
    if whole:
        return
    components = planner.pipeline.components
    largest = max(components, key=lambda c: c.weight_bytes * (c.role == "encode"))
    denoisers = [c.name for c in components if c.role == "denoise"]
    least = np.inf if best is None else best.seconds
    for scheme in ADVISED:
        for names in (denoisers, [*denoisers, largest.name]):
            plan = planner.on_single_cards(dict.fromkeys(names, scheme))
            if plan is not None and plan.seconds < BETTER * least:
                least = plan.seconds
                yield (
                    f"--quantize {','.join(f'{name}={scheme}' for name in names)}: "
                    f"{format_seconds(plan.seconds)}"
                )
    request = planner.pipeline.request
    if best is None and not request.tiling:
        yield "tiling in the request: the decoder works tile by tile, in less memory"
    if best is None and least == np.inf:
        yield "a smaller image, fewer frames, or a card with more memory"


def _equal_cards(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Cards of the host's machine of one kind and one size, where there are several."""
    at = machines(cluster)
    groups: dict[Any, list[int]] = {}
    for d, device in enumerate(cluster.devices):
        if at[d] == at[cluster.host] and not device.is_cpu:
            groups.setdefault(card_class(cluster, d), []).append(d)
    yield from (tuple(group) for group in groups.values() if len(group) > 1)


def _possible(pipeline: DiffusionPipeline, cards: int) -> list[ParallelDegrees]:
    """Degrees that divide the denoiser's heads, and copies that divide the batch."""
    graphs = [c.graph for c in pipeline.components if c.role == "denoise"]
    first, *others = (
        degrees_for(g, cards, pipeline.guided, pipeline.request.batch) for g in graphs
    )
    return [d for d in first if all(d in other for other in others)]


def share_of(component: Component, copies: int, request: MediaRequest) -> Component:
    """An encoder or decoder as one of several copies of the pipeline computes it."""
    if copies == 1:
        return component
    size = component.output_bytes // copies
    if component.role == "decode" and request.slicing:  # a call for each sample
        return replace(component, calls=component.calls / copies, output_bytes=size)
    graph = rank_graph(component.graph, ParallelDegrees(copies=copies))
    return replace(component, graph=graph, output_bytes=size)


def _best(
    own: list[PricedComponent], cluster: Cluster, degrees: ParallelDegrees, cards: tuple[int, ...]
) -> PipelinePlan | None:
    """The best way for each component on single devices of a machine; None where nothing fits."""
    memories = Memories.on(cluster)
    room = memories.bytes.copy()
    if cards:  # each of as many processes keeps its own weights in host memory
        host = memories.of[cluster.host]
        room[host] //= len(cards)
    ways = [ways_of(c, i, len(own), cluster, memories) for i, c in enumerate(own)]
    if cards:
        ways = [
            [
                w
                for w in of
                if w.residence
                in PARALLEL_WAYS[c.component.role == "denoise" and degrees.sequence > 1]
            ]
            for c, of in zip(own, ways, strict=True)
        ]
    found = choose(ways, _flows(own, cluster), room)
    if found.ways is None:
        return None
    placed = tuple(
        PlacedComponent(c, ways[i][found.ways[i]]) for i, c in enumerate(own)
    )  # fmt: skip
    held = sum((p.way.held_bytes for p in placed), np.zeros_like(ways[0][0].held_bytes))
    joules = _joules(placed, cluster, found.seconds, max(len(cards), 1))
    return PipelinePlan(
        degrees, cards, cluster, placed, found.seconds, held, sum(map(len, ways)), joules
    )


def _joules(
    placed: Sequence[PlacedComponent], cluster: Cluster, seconds: float, copies: int
) -> float | None:
    """Joules of the accelerators that a plan uses, while the others of them wait, too; None where
    the watts of one are unknown."""
    power, used = Power.of(cluster), {d for p in placed for d in p.way.devices}
    cards = sorted(d for d in used if not cluster.devices[d].is_cpu)
    if any(power.watts[d] == 0 for d in cards) or not cards:
        return None
    worked = sum(
        p.priced.joules(p.way) for p in placed if not cluster.devices[p.way.devices[0]].is_cpu
    )
    joules = worked + float(power.idle[cards].sum()) * seconds
    return copies * min(joules, float(power.limit[cards].sum()) * seconds)


def _flows(own: list[PricedComponent], cluster: Cluster) -> list[HandOver]:
    """Tensors between components: encoders' results to the first denoiser, once; each denoiser's
    latents to the next, and those of the last one to the decoder."""
    roles = [c.component.role for c in own]
    denoisers = [i for i, role in enumerate(roles) if role == "denoise"]
    pairs = [(i, denoisers[0]) for i, role in enumerate(roles) if role == "encode"]
    pairs += list(itertools.pairwise(denoisers))
    pairs += [(denoisers[-1], i) for i, role in enumerate(roles) if role == "decode"]
    flows = []
    for sender, receiver in pairs:
        size = own[sender].component.output_bytes
        seconds = cluster.link_latency_s + size / cluster.link_bytes_per_s
        np.fill_diagonal(seconds, 0.0)
        flows.append(HandOver(sender, receiver, seconds))
    return flows
