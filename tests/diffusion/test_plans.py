"""Plans of a small pipeline, with seconds and bytes by hand."""

from dataclasses import replace

import numpy as np
import pytest

from gdp.api.diffusion.parallel import ParallelDegrees, degrees_for, exchange, rank_graph
from gdp.api.diffusion.place import dtype_on, place_pipeline, schemes_of, share_of
from gdp.api.diffusion.pricing import (
    STEP_S,
    Memories,
    PricedComponent,
    PricedWay,
    priced,
    ways_of,
)
from gdp.api.diffusion.quantise import UNPACK_SHARE, quantised
from gdp.base.errors import ArgumentError
from gdp.cluster.types import Cluster, Device
from gdp.graph.op_graph import INPUT, OUTPUT, OpDetail, OpGraph
from gdp.importers.diffusers.pipeline import Component, DiffusionPipeline
from gdp.importers.diffusers.request import MediaRequest
from gdp.question.question import Kept
from tests.tiny import plain_graph

BLOCKS, BLOCK_BYTES, FLOP = 4, 1_000_000, 1e9
RATE = 10e9
"""FLOP/s of the devices, whose memory and links are so fast that they do not count."""


def machine(*rooms: int, link: float = 1e9, host: int = 1 << 40) -> Cluster:
    """A processor and accelerators of so many bytes."""
    devices = [Device("cpu", "cpu", {"default": RATE / 100}, 1e30, host)]
    devices += [
        Device(f"gpu:{i}", "gpu", {"default": RATE}, 1e30, room) for i, room in enumerate(rooms)
    ]
    d = len(devices)
    rates = np.full((d, d), link)
    np.fill_diagonal(rates, np.inf)
    return Cluster("hand", tuple(devices), rates, np.zeros((d, d)), np.arange(d * d).reshape(d, d))


def graph(blocks: int = BLOCKS, heads: int = 0) -> OpGraph:
    """A chain of blocks, each with weights; tensors of 1,000 bytes."""
    n = blocks + 2
    plain = plain_graph(n, [(i, i + 1) for i in range(n - 1)], 1000)
    types = (INPUT, *["linear"] * blocks, OUTPUT)
    detail: list[OpDetail] = [OpDetail()] * n
    if heads:
        shape = (2, heads, 64, 16)
        detail = [OpDetail("bfloat16", (shape,) * 3, (shape,))] * n
        types = (INPUT, *["scaled_dot_product_attention"] * blocks, OUTPUT)
    works = np.array([t not in (INPUT, OUTPUT) for t in types])
    return replace(
        plain, op_types=types, flop=np.where(works, FLOP, 0.0),
        memory_traffic_bytes=np.where(works, 1.0, 0.0),
        weight_bytes=np.where(works, BLOCK_BYTES, 0).astype(np.int64),
        weight_id=np.arange(n), detail=tuple(detail),
        scope=("", *(f"blocks.{i}.linear" for i in range(blocks)), ""),
    )  # fmt: skip


def component(
    name: str = "transformer", role: str = "denoise", passes: int = 10, **more: object
) -> Component:
    own = graph()
    return Component(
        name, role, "Made", BLOCKS * BLOCK_BYTES // 2, BLOCKS * BLOCK_BYTES, own, passes, 1.0, 100,  # pyright: ignore[reportArgumentType]
        tuple((f"blocks.{i}", BLOCK_BYTES) for i in range(BLOCKS)), **more,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


def pipeline() -> DiffusionPipeline:
    """An encoder, a denoiser of ten steps and a decoder, each of 4 MB."""
    parts = (
        component("text_encoder", "encode", 1), component(), component("vae", "decode", 1)
    )  # fmt: skip
    return DiffusionPipeline("made", "PixArtSigmaPipeline", parts, MediaRequest(64, 64), False, ())


def ways(cluster: Cluster, own: Component | None = None) -> dict[str, list[PricedWay]]:
    """Ways of the denoiser by their words, as the second of three phases."""
    cost = priced(own or component(), cluster, "datasheet", Kept())
    found: dict[str, list[PricedWay]] = {}
    for way in ways_of(cost, 1, 3, cluster, Memories.on(cluster)):
        found.setdefault(way.residence, []).append(way)
    return found


def denoiser(cluster: Cluster) -> PricedComponent:
    return priced(component(), cluster, "datasheet", Kept())


def test_whole_takes_its_passes_and_holds_its_weights_in_all_phases() -> None:
    cluster = machine(1 << 30)
    way = next(w for w in ways(cluster)["whole"] if w.devices == (1,))
    own = denoiser(cluster)
    assert way.seconds == pytest.approx(10 * own.call_s(1))
    assert (way.held_bytes[[0, 2], 1] == BLOCKS * BLOCK_BYTES).all()
    assert way.held_bytes[1, 1] >= BLOCKS * BLOCK_BYTES
    assert (way.held_bytes[:, 0] == 0).all()


def test_seconds_of_a_step_hold_the_hosts_part() -> None:
    own = denoiser(machine(1 << 30))
    encoder = priced(component("t", "encode", 1), machine(1 << 30), "datasheet", Kept())
    assert own.call_s(1) - encoder.call_s(1) == pytest.approx(STEP_S)


def test_moved_weights_cross_the_link_once_and_leave() -> None:
    cluster = machine(1 << 30)
    whole = next(w for w in ways(cluster)["whole"] if w.devices == (1,))
    (way,) = ways(cluster)["moved"]
    assert way.seconds - whole.seconds == pytest.approx(BLOCKS * BLOCK_BYTES / 1e9)
    assert (way.held_bytes[[0, 2], 1] == 0).all()
    assert way.held_bytes[1, 1] == whole.held_bytes[1, 1]
    assert (way.held_bytes[:, 0] == BLOCKS * BLOCK_BYTES).all()


@pytest.mark.parametrize("link", [1e6, 1e9])
def test_blocks_are_sent_while_others_compute(link: float) -> None:
    cluster = machine(1 << 30, link=link)
    own = denoiser(cluster)
    (way,) = ways(cluster)["blocks sent"]
    block_s, send_s = own.part_s[1, 1], BLOCK_BYTES / link
    first = own.part_s[0, 1] + send_s
    assert way.seconds == pytest.approx(10 * (first + 3 * max(block_s, send_s) + block_s))
    assert way.held_bytes[1, 1] == 2 * BLOCK_BYTES + own.activation_bytes[1]
    assert way.moved_bytes == 10 * BLOCKS * BLOCK_BYTES


def test_blocks_that_stay_are_not_sent() -> None:
    cluster = machine(1 << 30, link=1e6)
    own = denoiser(cluster)
    for stay, way in enumerate(ways(cluster)["split"], start=1):
        rest = (BLOCKS - stay) * BLOCK_BYTES
        assert way.seconds == pytest.approx(10 * (own.call_s(1) + rest / 1e6))
        assert way.held_bytes[0].tolist() == [rest, stay * BLOCK_BYTES]


def test_split_blocks_pay_the_tensors_between_cards() -> None:
    cluster = machine(1 << 30, 1 << 30)
    own = denoiser(cluster)
    pairs = [w for w in ways(cluster)["split"] if len(w.devices) == 2]
    assert {w.devices for w in pairs} == {(1, 2)}  # cards are interchangeable
    assert {w.blocks for w in pairs} == {(1, 3), (2, 2), (3, 1)}
    for way in pairs:
        crossing = way.seconds / 10 - own.call_s(1)
        assert crossing == pytest.approx(1000 / 1e9, rel=1e-3)  # one tensor
        assert way.held_bytes[0].tolist() == [0, *(n * BLOCK_BYTES for n in way.blocks)]


def test_all_components_stay_where_there_is_room() -> None:
    answer = place_pipeline(pipeline(), machine(1 << 30), costs="datasheet")
    assert answer.plan is not None
    assert [p.way.residence for p in answer.plan.placed] == ["whole"] * 3
    assert answer.seconds == pytest.approx(sum(p.way.seconds for p in answer.plan.placed), rel=1e-6)
    assert answer.advice == ()


def test_components_take_turns_on_a_card_that_holds_one() -> None:
    room = int(1.6 * BLOCKS * BLOCK_BYTES)
    answer = place_pipeline(pipeline(), machine(room), costs="datasheet")
    assert answer.plan is not None
    assert (answer.plan.held_bytes[:, 1] <= answer.cluster.memory_bytes[1]).all()
    assert {p.way.residence for p in answer.plan.placed} & {"moved", "blocks sent", "split"}
    data = answer.to_json()
    assert data["memory"][1]["held_bytes"].keys() == {"text_encoder", "transformer", "vae"}


def test_encoders_go_to_the_small_card() -> None:
    """The denoiser fills the large one; the slow link makes moving dear."""
    size = BLOCKS * BLOCK_BYTES
    cluster = machine(int(1.3 * size), int(2.6 * size), link=1e5)
    answer = place_pipeline(pipeline(), cluster, costs="datasheet")
    assert answer.plan is not None
    on = {p.name: p.way.devices for p in answer.plan.placed}
    assert all(p.way.residence == "whole" for p in answer.plan.placed)
    assert len(set(on.values())) == 2


def test_nothing_fits() -> None:
    answer = place_pipeline(pipeline(), machine(1000, host=2 * BLOCK_BYTES), costs="datasheet")
    assert not answer.feasible
    assert answer.advice
    assert answer.to_json()["feasible"] is False


@pytest.mark.parametrize("scheme", ["fp8", "nf4"])
def test_quantised_blocks_take_their_bits_and_unpack(scheme: str) -> None:
    cluster = machine(1 << 30)
    cluster = replace(
        cluster, devices=tuple(replace(d, bytes_per_s=1e9) for d in cluster.devices)
    )  # fmt: skip
    own = priced(component(), cluster, "datasheet", Kept())
    less = quantised(own, scheme, cluster)
    share = {"fp8": 0.5, "nf4": 4.5 / 16}[scheme]
    assert less.weight_bytes == BLOCKS * int(BLOCK_BYTES * share)
    more_s = BLOCKS * BLOCK_BYTES * (1 + share) / (UNPACK_SHARE * 1e9)
    assert less.call_s(1) - own.call_s(1) == pytest.approx(more_s)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}), ("nf4", {"transformer": "nf4"}),
        ("transformer=fp8,text_encoder=nf4", {"transformer": "fp8", "text_encoder": "nf4"}),
    ],
)  # fmt: skip
def test_schemes(text: str, found: dict[str, str]) -> None:
    assert schemes_of(text, pipeline()) == found


@pytest.mark.parametrize("text", ["nf5", "unet=nf4", "transformer=", "="])
def test_unknown_schemes_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="quantize"):
        schemes_of(text, pipeline())


@pytest.mark.parametrize("request_", [{}, {"image": "64x64", "video": "64x64x9"}])
def test_one_request_is_needed(request_: dict[str, str]) -> None:
    with pytest.raises(ArgumentError, match="either image"):
        place_pipeline("diffusers:none", machine(1 << 30), **request_)  # pyright: ignore[reportArgumentType]


def test_degrees_divide_the_heads() -> None:
    found = degrees_for(graph(heads=6), 4, guided=True)
    assert set(found) == {
        ParallelDegrees(1, 4), ParallelDegrees(2, 2), ParallelDegrees(1, 2, 2),
        ParallelDegrees(2, 1, 2),
    }  # fmt: skip


def test_copies_divide_the_batch() -> None:
    found = degrees_for(graph(heads=2), 4, guided=False, batch=6)
    assert {d.copies for d in found} == {1, 2}  # four copies would have unequal shares
    assert all(d.cards == 4 for d in found)
    assert ParallelDegrees(2, copies=2) in found


def batched(batch: int) -> DiffusionPipeline:
    """The pipeline with parts whose work grows with the batch."""
    own = replace(graph(heads=7), flop=batch * graph().flop)
    parts = tuple(replace(c, graph=own) for c in pipeline().components)
    return replace(pipeline(), components=parts, request=MediaRequest(64, 64, batch=batch))


def test_copies_take_the_seconds_of_their_share() -> None:
    """Four images on four cards take what one takes on one card, and its memory on each."""
    size = 1 << 30
    four = place_pipeline(batched(4), machine(*[size] * 4), costs="datasheet")
    one = place_pipeline(batched(1), machine(size), costs="datasheet")
    assert four.plan is not None
    assert one.plan is not None
    assert four.plan.degrees == ParallelDegrees(copies=4)
    assert four.seconds == pytest.approx(one.seconds, rel=1e-3)
    assert four.item_s == pytest.approx(one.seconds / 4, rel=1e-3)
    held = [plan.held_bytes[:, 1] for plan in (four.plan, one.plan)]
    np.testing.assert_allclose(held[0], held[1], rtol=1e-2)
    assert "4 copies" in four.plan.text


def test_one_image_has_no_copies() -> None:
    answer = place_pipeline(batched(1), machine(*[1 << 30] * 4), costs="datasheet")
    assert answer.plan is not None
    assert all(plan.degrees.copies == 1 for plan in (answer.plan, *answer.others))


def test_a_decoder_that_takes_sample_by_sample_has_fewer_calls() -> None:
    decoder = replace(component("vae", "decode", 1), calls=4.0, output_bytes=400)
    own = share_of(decoder, 2, MediaRequest(64, 64, batch=4, slicing=True))
    assert (own.calls, own.output_bytes) == (2.0, 200)
    assert own.graph is decoder.graph


def test_guidance_of_two_calls_leaves_each_half_one() -> None:
    parts = list(pipeline().components)
    parts[1] = replace(parts[1], calls=2.0, graph=graph(heads=7))
    made = replace(pipeline(), components=tuple(parts), guided=True)
    answer = place_pipeline(made, machine(1 << 30, 1 << 30), costs="datasheet")
    assert answer.plan is not None
    assert answer.plan.degrees == ParallelDegrees(guidance=2)
    (denoiser,) = (p for p in answer.plan.placed if p.role == "denoise")
    assert denoiser.priced.component.calls == 1.0
    assert denoiser.priced.component.graph.flop.sum() == parts[1].graph.flop.sum()


def test_a_rank_computes_its_share_with_all_weights() -> None:
    whole = graph(heads=6)
    rank = rank_graph(whole, ParallelDegrees(2, 2))
    assert rank.flop.sum() == pytest.approx(whole.flop.sum() / 4)
    assert (rank.weight_bytes == whole.weight_bytes).all()
    attention = rank.detail[1]
    assert attention.input_shapes[0] == (2, 3, 32, 16)  # half the heads, half the queries
    assert attention.input_shapes[1] == (2, 3, 64, 16)  # all keys of these heads


def test_exchanges_grow_with_steps_of_the_ring() -> None:
    cluster = machine(*[1 << 30] * 4)
    seconds = [
        exchange(graph(heads=8), degrees, cluster, [1, 2, 3, 4])
        for degrees in (ParallelDegrees(), ParallelDegrees(1, 2), ParallelDegrees(1, 4))
    ]
    assert seconds[0] == (0.0, 0.0)
    assert 0 < seconds[1].host_s < seconds[2].host_s
    halves = exchange(graph(heads=8), ParallelDegrees(1, 1, 2), cluster, [1, 2])
    assert halves == (0.0, 0.0)  # each half is whole by itself


def test_memory_of_a_parallel_plan_is_of_all_cards() -> None:
    """Two equal cards halve the denoising; each holds the pipeline, the host nothing."""
    size = BLOCKS * BLOCK_BYTES
    cluster = machine(4 * size, 4 * size, link=1e12)
    made = pipeline()
    parts = tuple(replace(c, graph=graph(heads=8)) for c in made.components)
    answer = place_pipeline(replace(made, components=parts), cluster, costs="datasheet")
    assert answer.plan is not None
    assert answer.plan.cards == (1, 2)
    assert answer.others[-1].seconds > answer.seconds
    (row,) = answer.memory()
    assert row["devices"] == ["gpu:0", "gpu:1"]
    assert row["held_bytes"]["transformer"] >= 3 * size
    assert answer.to_json()["components"][1]["devices"] == ["gpu:0", "gpu:1"]


@pytest.mark.parametrize(
    ("cluster", "dtype"), [("cpu+t4", "float16"), ("cpu+h100", "bfloat16"), ("m1-max", "bfloat16")]
)
def test_types_that_a_card_computes_slowly_are_avoided(cluster: str, dtype: str) -> None:
    assert dtype_on(Cluster.load(cluster)) == dtype
