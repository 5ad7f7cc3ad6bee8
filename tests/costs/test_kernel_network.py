"""The kernel network: its kernels, its bound, its transfer, and what ships of it."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tiny import plain_graph

from gdp.cluster.presets import device_names, device_preset, presets
from gdp.cluster.types import Device, make_cluster
from gdp.costs.base import roofline
from gdp.costs.default import (
    COPIES,
    FROM_DATASHEETS,
    CrossingCosts,
    resolve_costs,
    shipped_for,
    source_of,
)
from gdp.costs.learned import LearnedCosts
from gdp.costs.measured import network as module
from gdp.costs.measured.costs import (
    ELEMENTWISE_S,
    LIBRARY_S,
    MeasuredCosts,
    covers,
    prompt_launch_s,
)
from gdp.costs.measured.graph import graph_kernels
from gdp.costs.measured.kernels import ARITHMETIC, KINDS, Kernels, descriptor_of, features, floor_s
from gdp.costs.measured.network import VECTOR, KernelNetwork, load_network, shipped_network
from gdp.costs.measured.own import fit_vector
from gdp.graph.fuse import fuse, group_seconds
from gdp.graph.generation import generation_graph, single_step
from gdp.graph.op_graph import WEIGHT_ARITHMETIC, OpDetail, OpGraph
from gdp.graph.request import DECODE, PREFILL, Request
from gdp.graph.source import Source
from pretrain.costs.ship import save_network

H100 = descriptor_of(device_preset("h100"))
INPUTS = 22 + len(KINDS) + 4 + len(ARITHMETIC)


def products(m: list[float], n: float = 4096, k: float = 4096, bits: float = 16) -> Kernels:
    """16-bit products of some numbers of rows with one matrix."""
    rows = np.array(m, dtype=float)
    ones = np.ones(len(m))
    return Kernels(
        kind=np.zeros(len(m), dtype=np.int64), engine=np.ones(len(m), dtype=np.int64),
        arithmetic=np.ones(len(m), dtype=np.int64), stored_bits=bits * ones, block_scaled=0 * ones,
        b=ones, m=rows, n=n * ones, k=k * ones, flop=2 * rows * n * k,
        held_bytes=n * k * bits / 8 * ones, moved_bytes=2 * rows * (n + k),
        numbers=np.zeros(len(m), dtype=np.int64),
    )  # fmt: skip


def random_network(seed: int, width: int = 6) -> KernelNetwork:
    """A network of random weights."""
    rng = np.random.default_rng(seed)
    told = len(H100.descriptor())
    weights = {
        "shown_mean": np.zeros(INPUTS), "shown_scale": np.ones(INPUTS),
        "told_mean": np.zeros(told), "told_scale": np.ones(told),
        "kernel4": rng.normal(size=(width, 1)), "gate4": 0.3 * rng.normal(size=(told, 1)),
        "bias4": rng.normal(size=1) + 2.0, "modes": 0.5 * rng.normal(size=(width, VECTOR)),
    }  # fmt: skip
    for name, inputs in (("1", INPUTS), ("2", width), ("3", width)):
        weights |= {
            "kernel" + name: rng.normal(size=(inputs, width)) / np.sqrt(inputs),
            "bias" + name: rng.normal(size=width), "gate" + name: rng.normal(size=(told, width)),
            "open" + name: rng.normal(size=width),
        }  # fmt: skip
    return KernelNetwork(weights, {})


def seconds_of(network: KernelNetwork, kernels: Kernels, vector: np.ndarray) -> np.ndarray:
    """Seconds on an H100 with a vector."""
    zeros = np.zeros(len(kernels), dtype=np.int64)
    return np.exp(network.log_seconds(kernels, [H100], vector[None], zeros))


def test_kernels_are_costed_some_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, in their order."""
    network, vector = random_network(3), np.linspace(-1.0, 1.0, VECTOR)
    kernels = products([1, 8, 64, 512, 4096, 8192, 3])
    whole = seconds_of(network, kernels, vector)
    monkeypatch.setattr("gdp.costs.measured.network._AT_ONCE", 3)
    assert seconds_of(network, kernels, vector) == pytest.approx(whole, rel=1e-12)


def test_of_many_kernels_those_alike_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ships, within 1.5% of each kernel's own answer and 0.1% in the mean, each with its own
    roofline; on two devices apart."""
    network, _ = shipped_network() or pytest.fail("no kernel network ships")
    kernels = products(np.floor(2.0 ** np.random.default_rng(0).uniform(0, 13, 2000)).tolist())
    device = np.arange(2000) % 2
    chips = [descriptor_of(device_preset(name)) for name in ("t4", "h100")]
    given = kernels, chips, np.zeros((2, VECTOR)), device
    exact = network.log_seconds(*given)
    asked: list[int] = []
    honest = module.forward

    def counted(weights, inputs):
        asked.append(len(inputs.shown))
        return honest(weights, inputs)

    monkeypatch.setattr(module, "forward", counted)
    monkeypatch.setattr(module, "_MOST_EXACT", 100)
    off = np.abs(np.expm1(network.log_seconds(*given) - exact))
    assert sum(asked) < 1600
    assert 0 < off.max() < 0.015
    assert off.mean() < 1e-3


def test_the_roofline_of_a_product_by_hand() -> None:
    """8192 rows: 2 * 8192 * 4096**2 FLOP at 989 TFLOP/s; 1 row: 32 MiB of weights at 3.35 TB/s."""
    kernels = products([1, 8192])
    floor = floor_s(kernels, np.full(2, 989e12), np.full(2, 3350e9))
    assert floor[1] == pytest.approx(2 * 8192 * 4096**2 / 989e12)
    assert floor[0] == pytest.approx((2 * 4096**2 + 4 * 4096) / 3350e9)
    shown, log_floor = features(kernels, [H100], np.zeros(2, dtype=np.int64))
    assert shown.shape == (2, INPUTS)
    assert np.exp(log_floor) == pytest.approx(floor)


@pytest.mark.parametrize("seed", range(20))
def test_no_weights_make_a_kernel_faster_than_its_roofline(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kernels = products(list(2.0 ** rng.integers(0, 15, 30)), bits=float(rng.choice([4, 8, 16])))
    floor = floor_s(kernels, np.full(30, H100.flop_per_s[1]), np.full(30, H100.bytes_per_s))
    seconds = seconds_of(random_network(seed), kernels, rng.normal(size=VECTOR))
    assert (seconds >= floor * (1 - 1e-12)).all()


def test_a_vector_is_found_from_thirty_kernels() -> None:
    """Of a device that differs from the descriptor's by a vector; other kernels get better, too."""
    network, truth = random_network(3), np.array([0.4, -0.3, 0.2, 0, 0.5, -0.2, 0.1, -0.4])
    rng = np.random.default_rng(0)
    few, others = (products(list(2.0 ** rng.uniform(0, 14, count))) for count in (30, 200))
    noise = np.exp(0.02 * rng.normal(size=30))
    noise[3] = 4.0  # one that was preempted leads nobody
    vector = fit_vector(network, few, H100, seconds_of(network, few, truth) * noise)
    target = seconds_of(network, others, truth)
    before = np.abs(seconds_of(network, others, np.zeros(VECTOR)) / target - 1).mean()
    after = np.abs(seconds_of(network, others, vector) / target - 1).mean()
    assert before > 0.1
    assert after < before / 3
    assert (fit_vector(network, few.take(np.arange(0)), H100, np.zeros(0)) == 0).all()


def language_graph(dtype: str = "bfloat16") -> OpGraph:
    """A product with 8-bit weights, attention of one token over 512, grouped products, a norm."""
    m, hidden, inner, experts = 8, 1024, 512, 16
    shapes = [
        (((m, hidden), (hidden, hidden)), ((m, hidden),)),
        (((m, 8, 1, 128), (m, 2, 512, 128), (m, 2, 512, 128)), ((m, 8, 1, 128),)),
        (((2 * m, hidden), (experts, hidden, 2 * inner)), ((2 * m, 2 * inner),)),
        (((2 * m, inner), (experts, inner, hidden)), ((2 * m, hidden),)),
        (((m, hidden),), ((m, 1),)),
        (((m,),), ((m,),)),
    ]  # fmt: skip
    attention_bytes = 2 * 2 * m * 2 * 512 * 128 + 2 * 2 * m * 8 * 128
    counted = min(experts, 2 * m)  # experts that the graph counts, not all of which work
    return plain_graph(
        6, [(i, i + 1) for i in range(5)],
        op_types=["linear", "scaled_dot_product_attention", "_grouped_mm", "_grouped_mm", "mean",
                  "sort"],
        flop=[2.0 * m * hidden**2, 4.0 * m * 8 * 512 * 128, 4.0 * 2 * m * hidden * inner,
              2.0 * 2 * m * hidden * inner, 1.0 * m * hidden, 10.0],
        memory_traffic_bytes=[
            hidden**2 + 4.0 * m * hidden, attention_bytes,
            counted * 2 * hidden * inner + 2.0 * 2 * m * (hidden + 2 * inner),
            counted * hidden * inner + 2.0 * 2 * m * (hidden + inner), 2.0 * m * hidden, 64.0,
        ],
        scope=["attend", "attend", "experts", "experts", "norm", "experts"],
        detail=[OpDetail(dtype, *s) for s in shapes],
    )  # fmt: skip


def test_kernels_of_a_graph_by_their_shapes() -> None:
    found = graph_kernels(language_graph(), served=True)
    k = found.kernels
    assert [KINDS[i] for i in k.kind[:5]] == [
        "product", "token attention", "experts", "experts", "normalisation",
    ]  # fmt: skip
    assert k.stored_bits[:4].tolist() == [8, 16, 8, 8]
    assert [ARITHMETIC[i] for i in k.arithmetic[:4]] == ["float8", "float16", "float8", "float8"]
    assert (k.b[0], k.m[0], k.n[0], k.k[0]) == (1, 8, 1024, 1024)
    assert (k.b[1], k.m[1], k.n[1], k.k[1]) == (16, 4, 512, 128)
    assert k.held_bytes[1] == 2 * 2 * 8 * 2 * 512 * 128
    traffic = language_graph().memory_traffic_bytes
    assert k.total_bytes[[0, 1, 4]] == pytest.approx(traffic[[0, 1, 4]])
    assert k.held_bytes[3] == pytest.approx(16 * (1 - (15 / 16) ** 16) * 1024 * 512)
    assert k.moved_bytes[3] == 2 * 16 * (1024 + 512)
    assert found.block.tolist() == [-1, -1, 0, 0, -1, 0]
    eager = graph_kernels(language_graph(), served=False)
    assert [ARITHMETIC[i] for i in eager.kernels.arithmetic[:4]] == ["float16"] * 4
    assert (eager.block == -1).all()


def test_a_step_reads_the_weights_that_its_module_holds_for_the_prompt() -> None:
    """Blocks of 128 x 128 numbers have a scale of 4 bytes; ops that are merged with a product move
    more, which leaves no bytes by which scales could be told."""
    m, hidden, inner, experts = 64, 1024, 512, 16
    weight = experts * hidden * inner * (1 + 4 / 128**2)
    detail = OpDetail("bfloat16", ((m, hidden), (experts, hidden, inner)), ((m, inner),))
    moved = weight + 2.0 * m * (hidden + inner)
    graph = plain_graph(
        2, [(0, 1)], op_types=["_grouped_mm"] * 2, flop=[2.0 * m * hidden * inner] * 2,
        memory_traffic_bytes=[moved, 1.02 * moved], scope=["experts", "experts"],
        weight_bytes=[int(weight), 0], detail=[detail] * 2,
    )  # fmt: skip
    apart = graph_kernels(graph, served=True).kernels
    assert apart.block_scaled.tolist() == [1.0, 0.0]
    graph = replace(graph, phase=np.array([PREFILL, DECODE]))
    kernels = graph_kernels(graph, served=True).kernels
    assert kernels.block_scaled.tolist() == [1.0, 1.0]
    assert kernels.held_bytes[1] == kernels.held_bytes[0]


def test_a_router_in_32_bits_multiplies_in_16_in_an_engine() -> None:
    """It does where products around it do, and not in a model that is in 32 bits."""
    m, k, n = 8, 1024, 16

    def arithmetic(first: str, served: bool) -> list[str]:
        detail = [OpDetail(t, ((m, k), (n, k)), ((m, n),)) for t in (first, "float32")]
        graph = plain_graph(
            2, [], op_types=["linear"] * 2, flop=[2.0 * m * k * n] * 2,
            memory_traffic_bytes=[4.0 * (n * k + m * (k + n))] * 2, detail=detail,
        )  # fmt: skip
        kernels = graph_kernels(graph, served=served).kernels
        return [ARITHMETIC[i] for i in kernels.arithmetic]

    assert arithmetic("bfloat16", served=True) == ["float16", "float16"]
    assert arithmetic("bfloat16", served=False) == ["float16", "float32"]
    assert arithmetic("float32", served=True) == ["float32", "float32"]


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_weights_makes_no_product_larger(bits: int, rows: int) -> None:
    """Two operations for each weight, as graphs of quantised models count them, beside those of
    products that read one input; of a few rows they are as many as the product's own."""
    k, columns = 1024, (256, 512)
    graph = plain_graph(
        3, [(0, 1), (0, 2)], 2 * rows * k, op_types=["mean", "linear", "linear"],
        flop=[0.0, *(2.0 * (rows + 1) * k * n for n in columns)],
        memory_traffic_bytes=[
            4.0 * rows * k, *(bits / 8 * n * k + 2.0 * rows * (n + k) for n in columns)
        ],
        detail=[OpDetail("bfloat16", ((rows, k),), ((rows, k),))]
        + [OpDetail("bfloat16", ((rows, k), (n, k)), ((rows, n),)) for n in columns],
    )  # fmt: skip
    for served in (False, True):
        found = graph_kernels(graph, served=served)
        kernels = found.kernels
        assert kernels.k[1:].tolist() == [k, k]
        assert kernels.m[1:].tolist() == [rows, rows]
        assert kernels.stored_bits[1:].tolist() == [bits, bits]
        assert found.block.tolist() == ([-1, 0, 0] if served else [-1, -1, -1])


@pytest.mark.parametrize(
    ("name", "bits", "scales", "type_"),
    [
        ("rtx3090", 4, 0.0, "float16"), ("h100", 4, 0.0, "float16"), ("b200", 4, 0.0, "float4"),
        ("h100", 8, 4 / 128**2, "float8"), ("a100", 8, 4 / 128**2, "float16"),
        ("a100", 8, 0.0, "int8"),
    ],
)  # fmt: skip
def test_a_prompt_is_multiplied_in_a_type_that_the_device_has(
    name: str, bits: int, scales: float, type_: str
) -> None:
    """A long prompt is no faster than the peak of the type that its weights are unpacked to, and
    with a network that adds next to nothing about as fast."""
    m, n = 8192, 8192
    held = n * n * (bits / 8 + scales)
    graph = plain_graph(
        1, [], op_types=["linear"], flop=[2.0 * m * n * n],
        memory_traffic_bytes=[held + 4.0 * m * n],
        detail=[OpDetail("bfloat16", ((m, n), (n, n)), ((m, n),))],
    )  # fmt: skip
    network = random_network(2)
    bias = network.weights["bias4"] - 50.0 - np.zeros(1)
    still = replace(network, weights={**network.weights, "bias4": bias}, vectors={})
    device = device_preset(name)
    cluster = make_cluster("one", [device])
    (seconds,) = MeasuredCosts(still, served=True)(graph, cluster)[:, 0]
    assert seconds == pytest.approx(2.0 * m * n * n / device.flop_per_s[type_], rel=0.01)


TFLOPS: dict[str, dict[str, float]] = {
    "v100": {"16": 125}, "t4": {"16": 65, "int8": 130}, "a100": {"16": 312, "int8": 624},
    "rtx3090": {"16": 71, "int8": 284}, "rtx4090": {"16": 165.2, "int8": 660.6, "float8": 330.3},
    "h100": {"16": 989, "int8": 1979, "float8": 1979},
    "b200": {"16": 2250, "int8": 4500, "float8": 4500, "float4": 9000},
    "b300": {"16": 2250, "int8": 153.5, "float8": 4500, "float4": 14000},
}  # fmt: skip
"""Dense products by the makers' data sheets, written down again."""
FORMATS = [("weights", 4), ("weights", 8), ("float8", 8), ("int8", 8), ("float8", 4), ("int8", 4),
           ("float4", 4), ("llm.int8", 8)]  # fmt: skip


@pytest.mark.parametrize("card", TFLOPS)
@pytest.mark.parametrize(("told", "bits"), FORMATS)
def test_a_prompt_is_multiplied_as_its_scheme_says_and_the_card_can(
    card: str, told: str, bits: int
) -> None:
    """By hand: what activations are cast to where the card multiplies such numbers, else 16 bits.
    No prompt beats that peak, also by the shipped network."""
    m = n = 8192
    graph = plain_graph(
        1, [], op_types=["linear"], flop=[2.0 * m * n * n],
        memory_traffic_bytes=[n * n * bits / 8 + 4.0 * m * n],
        detail=[OpDetail("float16", ((m, n), (n, n)), ((m, n),), {WEIGHT_ARITHMETIC: told})],
    )  # fmt: skip
    peak = TFLOPS[card].get(told.removeprefix("llm."), TFLOPS[card]["16"]) * 1e12
    network = random_network(2)
    bias = network.weights["bias4"] - 50.0 - np.zeros(1)
    still = replace(network, weights={**network.weights, "bias4": bias}, vectors={})
    cluster = make_cluster("one", [device_preset(card)])
    (seconds,) = MeasuredCosts(still, served=True)(graph, cluster)[:, 0]
    assert seconds == pytest.approx(2.0 * m * n * n / peak, rel=0.01)
    found = shipped_network()
    assert found is not None
    shipped = found[0]
    (seconds,) = MeasuredCosts(shipped, served=True)(graph, cluster)[:, 0]
    assert seconds > 2.0 * m * n * n / peak
    # PyTorch's own code multiplies 16 bits, but for LLM.int8.
    (seconds,) = MeasuredCosts(shipped, eager=True)(graph, cluster)[:, 0]
    assert seconds > 2.0 * m * n * n / (peak if told == "llm.int8" else TFLOPS[card]["16"] * 1e12)


@pytest.mark.parametrize("m", [1, 64, 4096])
def test_weights_of_four_bits_reach_the_share_of_the_roofline_that_dense_ones_do(m: int) -> None:
    n, device = 4096, device_preset("rtx3090")

    def told(bits: int) -> tuple[float, float]:
        moved = n * n * bits / 8 + 4.0 * m * n
        graph = plain_graph(
            1, [], op_types=["linear"], flop=[2.0 * m * n * n], memory_traffic_bytes=[moved],
            detail=[OpDetail("bfloat16", ((m, n), (n, n)), ((m, n),))],
        )  # fmt: skip
        costs = MeasuredCosts(random_network(3), served=True)
        floor_s = max(2.0 * m * n * n / device.speed("float16"), moved / device.bytes_per_s)
        return float(costs(graph, make_cluster("one", [device]))[0, 0]), floor_s

    (packed_s, packed_floor_s), (dense_s, dense_floor_s) = told(4), told(16)
    assert packed_s / packed_floor_s == pytest.approx(dense_s / dense_floor_s)
    assert packed_s > packed_floor_s


def test_a_block_of_experts_is_one_kernel_of_an_engine() -> None:
    """Its products share the seconds of a whole block by their FLOPs; sorting is inside. Its 8 bits
    with a scale a channel take no longer than with one for each block of a weight."""
    network, device = random_network(1), device_preset("h100")
    cluster = make_cluster("one", [device_preset("cpu"), device])
    graph = language_graph()
    served = MeasuredCosts(network, served=True)
    found = graph_kernels(graph, served=True)
    seconds = served(graph, cluster)[:, 1]
    whole = found.kernels.take(np.array([3]))
    both = [
        np.array([getattr(found.kernels, name)[2:4].sum()])
        for name in ("flop", "held_bytes", "moved_bytes")
    ]
    whole = replace(whole, n=whole.k, k=whole.n, flop=both[0], held_bytes=both[1],
                    moved_bytes=both[2])  # fmt: skip
    by_block = replace(whole, block_scaled=np.ones(1))
    least = min(seconds_of(network, own, np.zeros(VECTOR))[0] for own in (whole, by_block))
    assert seconds[2:4].sum() == pytest.approx(least)
    assert seconds[2] == pytest.approx(2 * seconds[3])
    assert seconds[5] == 0
    assert [d.dispatch_s for d in served.with_runtime_overheads(cluster).devices] == [
        cluster.devices[0].dispatch_s, 0.0,
    ]  # fmt: skip


def test_an_engine_launches_all_kernels_of_a_block_of_experts() -> None:
    """A product, attention and a norm; experts are two products and four smaller kernels, though
    their first op is a small one. Scales by blocks add a kernel before each product."""
    graph = language_graph()
    plain_s = 3 * LIBRARY_S + 2 * LIBRARY_S + 4 * ELEMENTWISE_S
    assert prompt_launch_s(graph) == pytest.approx(plain_s)
    scales = np.zeros(graph.num_ops)
    scales[[0, 2, 3]] = [1024**2, 2 * 16 * 1024 * 512, 16 * 1024 * 512]
    scaled = replace(graph, memory_traffic_bytes=graph.memory_traffic_bytes + 4 / 128**2 * scales)
    assert prompt_launch_s(scaled) == pytest.approx(plain_s + 3 * LIBRARY_S)


def test_products_of_one_input_are_one_product_of_an_engine() -> None:
    """Queries of 1,024 columns and keys of 256, of 8 rows of 1,024: 1,280 columns that read the
    input once. An output product reads another tensor and stays alone."""
    m, k, columns = 8, 1024, (1024, 256)
    graph = plain_graph(
        4, [(0, 1), (0, 2), (1, 3)], 2 * m * k, op_types=["mean", *["linear"] * 3],
        flop=[0.0, *(2.0 * m * k * n for n in (*columns, k))],
        memory_traffic_bytes=[4.0 * m * k, *(2.0 * (n * k + m * (n + k)) for n in (*columns, k))],
        detail=[OpDetail("bfloat16", ((m, k),), ((m, k),))]
        + [OpDetail("bfloat16", ((m, k), (n, k)), ((m, n),)) for n in (*columns, k)],
    )  # fmt: skip
    assert graph_kernels(graph, served=True).block.tolist() == [-1, 0, 0, -1]
    network, cluster = random_network(4), make_cluster("one", [device_preset("h100")])
    seconds = MeasuredCosts(network, served=True)(graph, cluster)[:, 0]
    whole = products([m], n=1280, k=k)
    assert seconds[1:3].sum() == pytest.approx(seconds_of(network, whole, np.zeros(VECTOR))[0])
    assert seconds[1] == pytest.approx(4 * seconds[2])


def test_a_launch_and_its_kernel_overlap_where_ops_are_launched_one_by_one() -> None:
    network, device = random_network(1), device_preset("h100")
    cluster = make_cluster("one", [device_preset("cpu"), device])
    graph, eager = language_graph(), MeasuredCosts(network)
    own = eager(graph, cluster)[:, 1] + device.dispatch_s
    found = graph_kernels(graph, served=False)
    kernel = eager.kernel_seconds(found, device)
    assert own[found.known] == pytest.approx(np.maximum(kernel, device.dispatch_s)[found.known])
    assert eager.with_runtime_overheads(cluster) is cluster


def test_what_a_graph_merges_is_a_kernel_for_each_op_of_an_eager_runtime() -> None:
    """A product, a view and two elementwise ops of 16 MiB are one fused op: with its dispatch it
    takes what its three kernels take alone, each at least its launch. A tiny op takes a launch,
    which PyTorch is slower to make than the device is to take."""
    shape, tiny = (2048, 2048), (2, 2)
    big = OpDetail("float32", (shape,), (shape,))
    graph = plain_graph(
        5, [(0, 1), (1, 2), (2, 3), (3, 4)], [4 * 2048**2] * 3 + [16],
        op_types=["mm", "view", "gelu", "mul", "mul"], flop=[2.0 * 2048**3, 0, 4e7, 4e6, 4],
        memory_traffic_bytes=[12.0 * 2048**2, 0, 8.0 * 2048**2, 8.0 * 2048**2, 32],
        detail=[OpDetail("float32", (shape, shape), (shape,)), big, big, big,
                OpDetail("float32", (tiny,), (tiny,))],
    )  # fmt: skip
    network, device = random_network(1), device_preset("a100")
    cluster = make_cluster("one", [device])
    fused = fuse(graph)
    assert fused.graph.num_ops == 1
    alone = MeasuredCosts(network)(graph, cluster)[:, 0] + device.dispatch_s
    assert alone[4] == device.dispatch_s < alone[[0, 2, 3]].min()
    eager = MeasuredCosts(network, eager=True)
    assert eager.reads_unfused
    seconds = group_seconds(fused, eager(graph, cluster))[0, 0] + device.dispatch_s
    assert alone[[2, 3]].min() > ELEMENTWISE_S > device.dispatch_s
    assert alone[0] > LIBRARY_S
    assert seconds == pytest.approx(alone[[0, 2, 3]].sum() + ELEMENTWISE_S)


def test_devices_beside_an_eager_gpu_run_op_by_op_too() -> None:
    """By hand: a product and an activation of 512 x 512 read and write memory, each called by
    PyTorch, whose host is slower than a dispatch."""
    graph = plain_graph(
        2, [(0, 1)], 4 * 512**2, op_types=["mm", "relu"], flop=[2.0 * 512**3, 512.0**2],
        memory_traffic_bytes=[12.0 * 512**2, 8.0 * 512**2],
        detail=[OpDetail("float32", ((512, 512), (512, 512)), ((512, 512),)),
                OpDetail("float32", ((512, 512),), ((512, 512),))],
    )  # fmt: skip
    cluster = make_cluster("two", [device_preset("cpu"), device_preset("a100")])
    fused, cpu = fuse(graph), cluster.devices[0]
    assert fused.graph.num_ops == 1
    seconds = group_seconds(fused, MeasuredCosts(random_network(1), eager=True)(graph, cluster))
    by_hand = 2 * 512**3 / cpu.speed("float32") + 8 * 512**2 / cpu.bytes_per_s
    assert cpu.dispatch_s < ELEMENTWISE_S
    assert seconds[0, 0] + cpu.dispatch_s == pytest.approx(by_hand + LIBRARY_S + ELEMENTWISE_S)


@pytest.mark.parametrize(("source", "eager"), [("torch", True), ("jax", False), ("onnx", False)])
def test_models_of_pytorch_run_eagerly(source: Source, eager: bool) -> None:
    graph = replace(language_graph(), source=source)
    model, _ = resolve_costs("shipped", make_cluster("one", [device_preset("h100")]), graph)
    assert isinstance(model, MeasuredCosts)
    assert (model.eager, model.served) == (eager, False)


def test_a_checkpoint_gives_the_network_back(tmp_path) -> None:
    _, meta = shipped_network() or pytest.fail("no kernel network ships")
    network = KernelNetwork(random_network(2).weights, {"h100": np.arange(8.0)})
    save_network(tmp_path / "net", network, meta, "recipe")
    loaded, told = load_network(tmp_path / "net")
    kernels = products([1, 64, 4096])
    np.testing.assert_array_equal(
        seconds_of(loaded, kernels, loaded.vectors["h100"]),
        seconds_of(network, kernels, network.vectors["h100"]),
    )
    assert told.devices == meta.devices


# What ships.


def test_presets_say_what_was_measured() -> None:
    known = [name for name in device_names() if covers(device_preset(name))]
    assert {"h100", "rtx3090", "mi300x"} <= set(known)
    assert not {"cpu", "cpu-core", "m2-max"} & set(known)
    found = shipped_network() or pytest.fail("no kernel network ships")
    families = {presets()[kind].family for kind in found[1].devices}
    graph = language_graph()
    for name, words in (("h100", "measured kernels"), ("rtx4090", "other accelerators")):
        cluster = make_cluster("one", [device_preset("cpu"), device_preset(name)])
        model, label = resolve_costs(None, cluster, graph)
        assert isinstance(model, CrossingCosts)
        assert isinstance(model.base, MeasuredCosts)
        assert label.startswith(f"{name}: learned from")
        assert label.endswith(COPIES)
        assert words in label
        plain, told = resolve_costs("datasheet", cluster, graph)
        assert told == f"roofline from datasheets (cpu, {name})"
        assert (plain(graph, cluster) == roofline(graph, cluster)).all()
    for name, entry in presets().items():
        device = device_preset(name)
        _, answer = resolve_costs(None, make_cluster("one", [device]), graph)
        measured = entry.family in families and entry.units > 0
        if entry.maker:
            assert ("learned from" in source_of(device)) == measured, name
        if entry.maker and not measured:
            assert (source_of(device), answer) == (FROM_DATASHEETS, f"{FROM_DATASHEETS} ({name})")


@pytest.mark.parametrize("name", ["a100", "h100", "l40s", "rtx4090", "v100", "mi300x"])
def test_twice_the_rows_never_take_less_time(name: str) -> None:
    """What ships, on products of all sizes, but for a tenth and a microsecond: kernels of one
    row are others than those of eight."""
    network, _ = shipped_network() or pytest.fail("no kernel network ships")
    silicon = descriptor_of(device_preset(name))
    vector = network.vectors.get(name, np.zeros(VECTOR))[None]
    for n, k in ((128, 4096), (1024, 1024), (4096, 4096), (14336, 4096), (8192, 28672)):
        kernels = products([2.0**i for i in range(16)], n, k)
        zeros = np.zeros(16, dtype=np.int64)
        seconds = np.exp(network.log_seconds(kernels, [silicon], vector, zeros))
        assert (seconds[1:] >= 0.9 * seconds[:-1] - 1e-6).all(), (n, k)


@pytest.mark.parametrize(
    ("name", "dtype", "learned"),
    [("v100", "bfloat16", False), ("v100", "float16", True), ("a100", "bfloat16", True),
     ("a100", "float64", False), ("mi100", "bfloat16", False), ("a100", "float32", True)],
)  # fmt: skip
def test_no_type_is_faster_than_the_device_computes_it(
    name: str, dtype: str, learned: bool
) -> None:
    """A product of 8192 x 8192 x 8192 in a type that the device emulates keeps its roofline."""
    n = 8192
    graph = plain_graph(
        1, [], op_types=["mm"], flop=[2.0 * n**3], memory_traffic_bytes=[12.0 * n**2],
        detail=[OpDetail(dtype, ((n, n), (n, n)), ((n, n),))],
    )  # fmt: skip
    device = device_preset(name)
    cluster = make_cluster("one", [device])
    seconds = MeasuredCosts(random_network(1))(graph, cluster)[0, 0] + device.dispatch_s
    assert seconds >= 2.0 * n**3 / device.speed(dtype)
    assert (seconds > 1.0001 * roofline(graph, cluster)[0, 0]) == learned


def test_a_calibration_of_the_device_goes_before_the_network() -> None:
    """And others of the cluster keep the network."""
    rates = shipped_for("cpu-core")
    own = replace(rates, device=msgspec.structs.replace(rates.device, kind="h100", model=""))
    base = LearnedCosts((own,), any_model=True)
    cluster = make_cluster("two", [device_preset("h100"), device_preset("a100")])
    model = MeasuredCosts(random_network(1), base)
    assert [model.predicts(device) for device in cluster.devices] == [False, True]


def test_an_unknown_accelerator_keeps_its_datasheet() -> None:
    device = Device("x", "brand-new", {"default": 1e13, "float16": 1e14}, 1e12)
    cluster = make_cluster("one", [device_preset("cpu"), device])
    _, label = resolve_costs(None, cluster, language_graph())
    assert label == f"roofline from datasheets (cpu, brand-new); {COPIES}"
    assert descriptor_of(device).units == pytest.approx(1e13 / 1.9e9 / 256)


def test_the_phases_of_an_engines_request_have_blocks_of_their_own() -> None:
    """Also where the steps are asked to run once, as for the seconds of one token."""
    phase = language_graph()
    ends = plain_graph(
        8, [(0, 1), *((i + 1, i + 2) for i in range(6))],
        op_types=["Input", *phase.op_types, "Output"],
        flop=[0, *phase.flop, 0], memory_traffic_bytes=[0, *phase.memory_traffic_bytes, 0],
        scope=["", *phase.scope, ""], detail=[OpDetail(), *phase.detail, OpDetail()],
    )  # fmt: skip
    request = generation_graph("request", ends, ends, Request(prompt=8, new=4))
    assert request.request is not None
    assert not request.request.is_served
    request = replace(request, request=request.request._replace(is_served=True))
    for graph in (request, single_step(request)):
        block = graph_kernels(graph, served=True).block
        assert graph.phase[block >= 0].tolist() == [PREFILL] * 3 + [DECODE] * 3
        assert len(set(block[block >= 0].tolist())) == 2
    cluster = make_cluster("one", [device_preset("cpu"), device_preset("h100")])
    model, _ = resolve_costs(None, cluster, request)
    np.testing.assert_allclose(model(request, cluster), model(single_step(request), cluster))
