"""Placing for torch.distributed.pipelining: a row of stages that begin where calls of modules do.

Of the plans within the share that simplicity may cost, the one that sends the fewest bytes is
answered.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gdp.base.errors import ArgumentError, PlacementError
from gdp.costs.offload import resident
from gdp.methods.chain import LayerCosts
from gdp.methods.intervals import Row, best_rows
from gdp.question import solve
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.targets.modules import modules_kept, torch_boundaries
from gdp.targets.pipelining.export import export_pipelining
from gdp.targets.rows import MEMORY_SHARES, first_feasible, layer_costs
from gdp.targets.target import ExportJob


def plan_pipelining(question: Question) -> Result:
    """The best pipeline of a PyTorch module; see `best_pipeline`. A note says why one device has
    it all."""
    graph = question.graph
    cuts, reason = torch_boundaries(question.model, graph, modules_kept(question))
    result = best_pipeline(question, list(cuts))
    used = np.unique(result.placement.device[~graph.is_io])
    if len(used) == 1 and result.question.cluster.computes.sum() > 1:
        reason = reason or (
            f"of the pipelines over {len(cuts)} places where calls of modules begin none is faster "
            "than one device by more than a cut may cost"
        )
        result = replace(result, notes=(*result.notes, f"all on one device: {reason}"))
    return result


def best_pipeline(question: Question, cuts: Sequence[int]) -> Result:
    """The plan of least period whose stages begin at some of the ops `cuts`: on the accelerators,
    or where there are none on the CPUs.

    Tensors that pass over a stage are charged to both links, so the plan is the best there is where
    none do. Devices of one kind are tried in the cluster's order only.

    Raises:
        InfeasibleError: if nothing fits.
    """
    if question.objective != "throughput":
        raise ArgumentError(
            f"--for pipelining plans pipelines, not {question.objective}: add --objective "
            "throughput"
        )
    if question.constraints.together or question.constraints.whole:
        raise ArgumentError("--for pipelining cuts where modules begin: leave out --together")
    question = replace(question, cluster=resident(question.cluster))
    ops = np.arange(question.graph.num_ops)
    blocks = layer_costs(question, np.searchsorted(np.array(sorted(cuts)), ops, side="right"))
    simplicity = question.simplicity
    rows = (_pipeline_row(blocks, share, simplicity) for share in MEMORY_SHARES)
    plans = (blocks.placement(row, "gdp pipelining") for row in rows)
    reason = "no device holds even one of its pieces"
    return solve.proven(first_feasible(question, plans, reason, "pipelining"))


def _pipeline_row(blocks: LayerCosts, memory_share: float, simplicity: float) -> Row:
    """The row of stages that sends the fewest bytes among those of nearly the least period; empty
    where nothing fits."""
    seconds, link_s, orders = blocks.fitting_s(memory_share), blocks.link_s, blocks.orders
    least_s, _ = blocks.best_of_orders(memory_share, np.maximum)
    if not np.isfinite(least_s):
        return []
    limit_s = least_s * (1 + simplicity) * (1 + 1e-9)
    allowed_links = np.where(link_s <= limit_s, blocks.cut_bytes.astype(float), np.inf)
    allowed = np.where(seconds <= limit_s, 0.0, np.inf)
    plans = best_rows(orders, lambda d: allowed[:, :, d], allowed_links)
    return min(plans, key=lambda plan: plan[0])[1]


def export(job: ExportJob) -> list[Path]:
    """Write split points and a program that runs them; see `export_pipelining`."""
    graph, placement, cluster, output, overwrite = job.plan
    cuts, reason = torch_boundaries(job.question.model, graph, ())
    if not cuts:
        raise PlacementError(f"there is nothing to export: {reason}")
    return export_pipelining(job.spec, graph, placement, cluster, cuts, output, overwrite)
