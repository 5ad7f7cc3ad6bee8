"""Assignments as the split files of the public benchmark, for its own evaluator to judge."""

import json
from pathlib import Path

import numpy as np

from benchmarks.partitioning_instances import ACCELERATOR
from gdp.problem.problem import Problem


def save_split(problem: Problem, device: np.ndarray, path: Path) -> None:
    parts: dict[str, list[dict[str, list[int]]]] = {"fpgas": [], "cpus": []}
    for d, entry in enumerate(problem.cluster.devices):
        nodes = [int(problem.graph.op_names[op]) for op in np.flatnonzero(device == d)]
        parts["fpgas" if entry.kind == ACCELERATOR else "cpus"].append({"nodes": sorted(nodes)})
    path.write_text(json.dumps(parts))
