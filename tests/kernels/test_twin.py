"""Plain functions and their compiled twins: equal answers."""

import numpy as np
import pytest
from tiny import random_devices, random_problem

from gdp.graph import fuse
from gdp.sim import segments


def test_fusion_and_coarse_groups_are_those_of_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        graph = random_problem(seed, num_devices=2, num_ops=10 + 3 * seed).graph
        plain = fuse.fuse(graph).group_of, fuse.coarsen(graph, 4).group_of
        with monkeypatch.context() as patch:
            patch.setattr(fuse, "PLAIN_OPS", -1)
            twin = fuse.fuse(graph).group_of, fuse.coarsen(graph, 4).group_of
        assert all(map(np.array_equal, plain, twin))


def test_segments_are_those_of_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        problem = random_problem(seed, num_devices=1 + seed % 4, num_ops=5 + seed)
        device = random_devices(problem, seed)[0]
        plain = segments.segments(problem.graph, device)
        with monkeypatch.context() as patch:
            patch.setattr(segments, "PLAIN_OPS", -1)
            assert np.array_equal(plain, segments.segments(problem.graph, device))
