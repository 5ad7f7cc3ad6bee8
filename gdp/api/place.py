"""Placing a model freely or for a runtime, by one method or several; predictions of placements."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp.api.answer import answer, compile_once
from gdp.api.ask import ask, require_answerable
from gdp.base.clock import Phases
from gdp.base.errors import ArgumentError, InfeasibleError, MissingExtraError
from gdp.cluster.file import Machine
from gdp.costs.base import CostModel
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.placement.placement import Placed
from gdp.question import solve
from gdp.question.models import HF_PREFIX, Model, spec_of
from gdp.question.question import Question, question_about
from gdp.question.result import Result, with_best_bound
from gdp.sim.objectives import Score
from gdp.sim.traffic import Traffic
from gdp.sim.traffic_text import TrafficLimits, parse_within

if TYPE_CHECKING:
    from gdp.api.traffic.drafting import Draft


def place(
    model: Model,
    cluster: Machine,
    *,
    objective: str = "latency",
    target: str | None = None,
    granularity: str | None = None,
    offload: str | None = None,
    dims: Mapping[str, int] | None = None,
    method: str = "auto",
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    checkpoint: str | Path | None = None,
    constraints: Constraints | None = None,
    traffic: Traffic | str | None = None,
    within: TrafficLimits | float | str | None = None,
    disaggregated: bool = True,
    draft: "Draft | None" = None,
) -> Result:
    """Place the ops of a model on the devices of a cluster.

    The best placement that the method finds, scored by the simulator, with a proven lower bound;
    of those within the share `search.simplicity` of it the one with the fewest transfers and cuts.
    The placement remembers this question, so that `gdp.export`, `run`, `explain`, `report` and
    `simulate` need nothing else.

    Args:
        model: A path or a name as the command line takes it, a graph, or a traced model.
        cluster: A preset such as "cpu+2xt4-pcie4", a TOML file, or a `Cluster`.
        objective: "latency" minimises the makespan of one sample, "throughput" the period of a
            full pipeline; `gdp place --help` lists the others.
        target: Runtime that shall be able to follow the placement, as `--for`: "accelerate",
            "llamacpp", "openvino", "onnxruntime", "pipelining", "tensor-parallel" or "vllm".
            Default: no restriction.
        granularity: Pieces that stay whole: "op", "module" (with weights of their own, or that the
            model's class may not split) or "layer" (elements of a list of layers in addition).
            Default: "op"; for "accelerate" and "pipelining" "module".
        offload: Where accelerate keeps weights that do not fit: "cpu", "disk" (on both) or "none".
            Default: "cpu".
        dims: Sizes of the symbolic dimensions of an ONNX model, by name.
        method: "auto", or one of the methods that `gdp place --help` lists.
        costs: Seconds of each op on each device: a callable `(graph, cluster) -> [N, D]`, or a file
            of `gdp calibrate` or `gdp tune`. Default: what `gdp tune` learned of this machine, on
            top of "shipped": calibrations for devices that they match, the kernel network for
            accelerators, datasheet numbers (roofline) for the others. "datasheet": for all.
        search: Budget, seed and simplicity. Default: five seconds, seed 0, and 2% for fewer cuts
            with method "auto", 0 with another.
        checkpoint: A folder with weights of the policy. Default: the shipped ones.
        constraints: Pins, forbidden devices, ops that stay together. Default: none.
        traffic: Requests that share the engine of an `hf:` model with target "vllm", as `gdp.serve`
            takes them; so are `within` and `disaggregated`. Default: one request, or none.
        within: TTFT and TPOT that 95% of the requests of traffic are to keep; without traffic, for
            objective "energy", seconds that one run may take, or a text such as "50ms". Default: no
            limits.
        disaggregated: Prefill may get GPUs of its own.
        draft: A draft model for speculative decoding, where that is faster: with traffic, or for a
            request (`gdp.Generation`) to a .gguf model.

    Returns:
        The placement with value, bound, memory peaks and notes; of a request to a language model
        also `generation`, its time to the first token, tokens per second and memory; of traffic
        also `traffic`, the latencies and rates that clients see. Times are in seconds.

    Raises:
        InfeasibleError: Nothing fits the memory of the devices under the constraints, or no plan
            was found within the limit.
        ModelError, ClusterError: A file cannot be read.
        ArgumentError: An argument is unknown or contradicts another.

    Example:
        >>> import gdp
        >>> once = gdp.Search(seconds=None, evaluations=50)
        >>> result = gdp.place("onnx:light_squeezenet", "2xt4-pcie4", search=once)
        >>> result.bound_s <= result.value_s
        True
    """
    return placed(
        model, cluster=cluster, objective=objective, target=target, granularity=granularity,
        offload=offload, dims=dims, method=method, costs=costs, search=search,
        checkpoint=checkpoint, constraints=constraints, traffic=traffic, within=within,
        disaggregated=disaggregated, draft=draft,
    )  # fmt: skip


def placed(
    model: Model,
    *,
    traffic: Traffic | str | None = None,
    within: TrafficLimits | float | str | None = None,
    disaggregated: bool = True,
    draft: "Draft | None" = None,
    phases: Phases | None = None,
    **parts: Any,
) -> Result:
    """Place a model; see `place`. `parts` are those of the question, as `ask` takes them, and
    `phases` the seconds of the call so far."""
    phases = phases or Phases()
    spec = spec_of(model)
    if traffic is None:
        within = parse_within(within) if isinstance(within, str) else within
        if isinstance(within, TrafficLimits) or not disaggregated:
            name = "--within first=,token=" if disaggregated else "--no-disaggregation"
            raise ArgumentError(f"{name} is for requests of --traffic to hf: models (--for vllm)")
        parts["within_s"] = math.inf if within is None else within
        if draft is not None:
            from gdp.api.traffic.drafting import drafted

            model = drafted(spec, draft)
        return answer(ask(model, phases=phases, **parts), phases)
    if parts.get("target") != "vllm" or not spec.startswith(HF_PREFIX):
        raise ArgumentError("--traffic is for hf: models --for vllm")
    if isinstance(within, float | int):
        raise ArgumentError("limits of --traffic look like --within first=500ms,token=30ms")
    from gdp.api.traffic.serve import served_plan  # it takes a tenth of a second to import

    plan = served_plan(
        {**parts, "phases": phases}, spec, traffic, within=within, disaggregated=disaggregated,
        draft=draft,
    )  # fmt: skip
    return replace(plan.result, traffic=plan)


def compare(
    model: Model,
    cluster: Machine,
    *,
    objective: str = "latency",
    names: Sequence[str] | None = None,
    costs: CostModel | str | Path | None = None,
    search: Search | None = None,
    checkpoint: str | Path | None = None,
    constraints: Constraints | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Result | str]:
    """Place a model by several methods, each with the same budget.

    Args:
        model: As in `place`.
        cluster: As in `place`.
        objective: As in `place`.
        names: Methods to compare. Default: all.
        costs: As in `place`.
        search: Budget and seed of each method. Its simplicity is ignored: values are compared, and
            none is traded for fewer transfers.
        checkpoint: As in `place`.
        constraints: As in `place`.
        progress: Called with the name of each method before it runs.

    Returns:
        By method, its `Result`, or the reason (a string) why it has none. All results carry the
        best of the bounds, since a bound holds for every placement.

    Raises:
        ModelError, ClusterError, ValueError: As `place` does.
    """
    question = ask(
        model, cluster, objective=objective, costs=costs, search=search, checkpoint=checkpoint,
        constraints=constraints,
    )  # fmt: skip
    return compared(question, names, progress)


def compared(
    question: Question, names: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Result | str]:  # fmt: skip
    """Answers to a question by several methods; see `compare`."""
    search = replace(question.search, simplicity=0.0)
    questions = {
        name: replace(question, method=name, search=search)
        for name in names or solve.methods(question.checkpoint)
    }
    for asked in questions.values():
        require_answerable(asked)
    compile_once("auto", question.objective)
    rows: dict[str, Result | str] = {}
    for name, asked in questions.items():
        if progress is not None:
            progress(name)
        try:
            rows[name] = solve.solve(asked)
        except (InfeasibleError, MissingExtraError) as error:
            rows[name] = str(error)
    return with_best_bound(rows)


def simulate(
    model: Model | None,
    placement: Placed,
    cluster: Machine | None = None,
    *,
    objective: str | None = None,
    costs: CostModel | str | Path | None = None,
) -> Score:
    """Simulate a placement.

    Args:
        model: As in `place`; None for the one that the placement was made for.
        placement: A `Placement`, its file, or a map from op names or module paths to devices, such
            as a `device_map` of accelerate.
        cluster: As in `place`; None for the one that the placement was made for.
        objective: The objective whose value `Score.value_s` gives; None for that of the placement,
            else latency.
        costs: As in `place`; None for those that the placement was made with.

    Returns:
        Makespan and period in seconds, peak bytes of each device, and whether it is feasible.

    Raises:
        PlacementError: The placement is of another model or cluster.
    """
    return solve.simulate(
        *question_about(placement, model, cluster, objective=objective, costs=costs)
    )
