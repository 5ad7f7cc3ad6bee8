"""Joules per token of serving engines beside measured ones.

    python -m benchmarks.measured_world energy --rows mlenergy_serving.csv [--data FOLDER]
        [--configs FOLDER] [--every K] [-o ROWS.jsonl] [NAME ...]

Rows of ML.ENERGY as `mlenergy --help` says, with its columns joules_per_token and watts: of the GPUs
alone, as NVML counts them.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measured_world.engines import Step
from benchmarks.measured_world.passes import asked_of
from benchmarks.measured_world.serving import RunPlan, plan_of
from gdp.base.errors import GdpError
from gdp.costs.power import Power, work_seconds
from gdp.question.prepare import once_of, prepare_placement


def work_of(plan: RunPlan) -> list[list[float]]:
    """Ops of one GPU in classes: (1 for decode, how many, seconds of each, of its FLOP at the peak,
    of its bytes at the bandwidth)."""
    once = once_of(plan.question)
    question = replace(plan.question, graph=once, objective="latency")
    problem, placed = prepare_placement(question, plan.placement)
    ops = np.flatnonzero(~problem.graph.is_io)
    device = placed.device[ops]
    decode = np.zeros(problem.num_ops, dtype=bool)
    decode[problem.origin.group_of[plan.question.graph.repeats > 1]] = True
    parts = [problem.compute_s, *work_seconds(problem.graph, problem.cluster)]
    rows = np.column_stack([decode[ops], *(part[ops, device] for part in parts)])
    rows = np.array([[float(f"{x:.4g}") for x in row] for row in rows])
    classes, counts = np.unique(rows, axis=0, return_counts=True)
    return np.column_stack([classes[:, :1], counts, classes[:, 1:]]).tolist()


def row_of(step: Step, data: Path, folders: list[Path]) -> dict[str, Any]:
    """A measured row with its prediction, or why there is none."""
    row = {
        "run": asdict(step.run),
        "mean_s": step.mean_s,
        "watts": step.watts,
        "joules": step.joules,
    }
    try:
        cluster, spec, costs = asked_of("mlenergy", step.run, data, folders, data)
        plan = plan_of(spec, cluster, step.run, costs)
    except GdpError as error:
        return row | {"why": str(error)}
    answer = plan.answer
    gpu = next(d for d, device in enumerate(cluster.devices) if not device.is_cpu)
    power = Power.of(cluster)
    return row | {
        "first_s": answer.first_token_s, "token_s": answer.token_s,
        "told_watts": answer.watts, "told_joules": answer.joules_per_token,
        "power": [float(part[gpu]) for part in power], "work": work_of(plan),
    }  # fmt: skip
