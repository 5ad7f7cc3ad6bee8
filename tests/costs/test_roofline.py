"""Costs by hand: the datasheet's roofline, transfer between devices, and what a profile adds."""

import numpy as np
from tiny import plain_graph

from gdp.cluster.types import Device, make_cluster
from gdp.costs.base import roofline
from gdp.costs.calibrate import fit_transfer
from gdp.costs.features import kernel_features, transfer_design
from gdp.costs.fit import model_rows
from gdp.costs.profile import Kernel, ProfiledModel
from gdp.graph.op_graph import INPUT, OpGraph


def chain(flop: list[float], sizes: list[int]) -> OpGraph:
    """Ops in a row, each reading what the one before makes."""
    n = len(flop)
    return plain_graph(n, [(i, i + 1) for i in range(n - 1)], sizes, flop=flop)


def test_an_op_takes_the_slower_of_arithmetic_and_traffic() -> None:
    """o1: 100 FLOP at 10/s or 50 bytes at 50/s; o2: 1 FLOP or 30 bytes; an input is free.

    The second device is 100 times as fast with half the bandwidth, and runs no `Rare`.
    """
    graph = plain_graph(
        3,
        [(0, 1), (1, 2)],
        [30, 20, 10],
        op_types=[INPUT, "Op", "Rare"],
        flop=[9.0, 100.0, 1.0],
        memory_traffic_bytes=[30, 50, 30],
    )
    devices = [
        Device("slow", "x", {"default": 10.0}, 50.0),
        Device("fast", "y", {"default": 1000.0}, 25.0, supported=frozenset({"Op"})),
    ]
    wanted = [[0.0, np.inf], [10.0, 2.0], [0.6, np.inf]]
    np.testing.assert_allclose(roofline(graph, make_cluster("two", devices)), wanted)


def test_measurements_move_a_transfer_from_the_datasheet_to_what_they_say() -> None:
    """Twenty kernels that all took three times as long as the datasheets foretell."""
    graph = chain([10.0 ** (3 + i % 7) for i in range(20)], [10 ** (1 + i % 5) for i in range(20)])
    features = kernel_features(graph, np.arange(20))
    known_s = np.full(20, 1e-3)
    design = transfer_design(features, known_s)
    found = np.exp(design @ fit_transfer(features, known_s, 3.0 * known_s))
    np.testing.assert_allclose(found, 3.0, rtol=0.15)
    none = np.exp(design @ fit_transfer(features, known_s, known_s))
    np.testing.assert_allclose(none, 1.0, rtol=1e-6)


def test_what_the_profiler_adds_is_taken_off_every_kernel() -> None:
    """Kernels of 4 and 6 ms in a run of 8 ms without the profiler: 1 ms less each, 3 and 5 ms."""
    graph = chain([1.0, 1.0], [8, 8])
    kernels = (Kernel("k0", "Op", (0,), 4e-3, 0.0), Kernel("k1", "Op", (1,), 6e-3, 0.0))
    model = ProfiledModel("m", "f", graph, 8e-3, kernels, runs=1, rounds=1)
    _, seconds = model_rows(model)
    np.testing.assert_allclose(np.sort(seconds), [3e-3, 5e-3])
