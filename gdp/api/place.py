"""Placing a model: freely, or as a runtime can follow; the question stays with the answer."""

from collections.abc import Mapping
from pathlib import Path

from gdp.api.answer import answer
from gdp.api.ask import ask
from gdp.base.clock import Phases
from gdp.cluster.file import Machine
from gdp.costs.base import CostModel
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints
from gdp.question.models import Model
from gdp.question.result import Result


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

    Returns:
        The placement with value, bound, memory peaks and notes; of a request to a language model
        also `generation`, its time to the first token, tokens per second and memory. Times are in
        seconds.

    Raises:
        InfeasibleError: Nothing fits the memory of the devices under the constraints.
        ModelError, ClusterError: A file cannot be read.
        ArgumentError: An argument is unknown or contradicts another.

    Example:
        >>> import gdp
        >>> once = gdp.Search(seconds=None, evaluations=50)
        >>> result = gdp.place("onnx:light_squeezenet", "2xt4-pcie4", search=once)
        >>> result.bound_s <= result.value_s
        True
    """
    phases = Phases()
    question = ask(
        model, cluster, objective=objective, target=target, granularity=granularity,
        offload=offload, dims=dims or {}, method=method, costs=costs, search=search,
        checkpoint=checkpoint, constraints=constraints, phases=phases,
    )  # fmt: skip
    return answer(question, phases)
