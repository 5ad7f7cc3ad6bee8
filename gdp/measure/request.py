"""A placement to execute, as every runtime takes it, and the report on its execution."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.measure.measuring import Measuring
from gdp.measure.plan import ExecutionPlan, make_plan, replicas_s, roofline_prediction, uncut_s
from gdp.measure.report import PLACED, REPLICAS, SIMPLEST, SINGLE, Row, RunReport, measured_fields
from gdp.placement.placement import Split
from gdp.sim.prediction import Prediction

if TYPE_CHECKING:
    from gdp.measure.compare import Comparison


@dataclass(frozen=True, eq=False)
class RunRequest:
    """A placement to execute and to measure. Axes: N ops."""

    model: Any  # what the runtime executes: a path, or a traced function or module
    graph: OpGraph  # of the model, its symbolic dimensions bound
    cluster: Cluster
    device: Int[np.ndarray, "N"]
    dims: Mapping[str, int] = field(default_factory=dict)  # sizes of symbolic dimensions; ONNX
    objective: str = "latency"
    measuring: Measuring = field(default_factory=Measuring)
    predict: Prediction | None = None  # None: by roofline costs of the fused ops
    rivals: Mapping[str, Prediction] = field(default_factory=dict)  # placements measured in turn
    baselines: bool = True  # measure the uncut model as well
    splits: tuple[Split, ...] = ()  # devices that compute each op together
    uncut: Prediction | None = None  # of the undivided ops, where there are splits

    @cached_property
    def prediction(self) -> Prediction:
        """The placed problem that predicts times."""
        return self.predict or roofline_prediction(
            self.graph, self.cluster, self.device, self.objective
        )

    @cached_property
    def plan(self) -> ExecutionPlan:
        """The segments of the placement."""
        return make_plan(self.prediction, self.objective)

    @property
    def rival_plans(self) -> dict[str, ExecutionPlan]:
        """The segments of the rivals, by their names."""
        return {name: make_plan(rival, self.objective) for name, rival in self.rivals.items()}

    def report(
        self, plan: ExecutionPlan, rows: Mapping[str, Row], comparison: "Comparison",
        single: int | None = None, **execution: Any,
    ) -> RunReport:  # fmt: skip
        """The report on the measured runs.

        Args:
            plan: Segments that were executed.
            rows: The placement, the baselines and the rivals, by name.
            comparison: Outputs beside those of the uncut model.
            single: Device of the single-device baseline; None for the host.
            **execution: Further fields of `RunReport`.
        """
        baselines = {k: row for k, row in rows.items() if k in SIMPLEST and k != PLACED}
        expected: dict[str, tuple[float, float] | None] = {}
        if SINGLE in baselines:
            on = self.cluster.host if single is None else single
            expected[SINGLE] = uncut_s(self.prediction, self.objective, on)
        if REPLICAS in baselines:
            expected[REPLICAS] = replicas_s(self.prediction, self.objective)
        return RunReport(
            **measured_fields(
                self.objective, (plan.latency_s, plan.period_s), rows[PLACED], baselines,
                self.measuring, expected, {name: rows[name] for name in self.rivals},
            ),
            model=self.graph.name, **comparison.report_fields(), **execution,
        )  # fmt: skip
