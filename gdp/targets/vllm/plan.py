"""Placing for vLLM: stretches of layers, each on a GPU or divided among several."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gdp.base.errors import ArgumentError, InfeasibleError, ModelError, PlacementError
from gdp.base.units import format_bytes
from gdp.bounds.work import roofline_bound_s
from gdp.cluster.reserve import for_runtime
from gdp.cluster.table import has_bfloat16
from gdp.cluster.types import Cluster
from gdp.costs.offload import resident
from gdp.graph.op_graph import OpGraph
from gdp.importers.spec import ModelSpec
from gdp.methods.chain import layer_row
from gdp.ops.vllm import AT_ONCE, DEFAULTS, SMALL_KINDS, Defaults
from gdp.placement.placement import Placement
from gdp.question import solve
from gdp.question.models import HF_PREFIX, Model
from gdp.question.question import Question
from gdp.question.result import Result
from gdp.sim.objectives import find_objective
from gdp.sim.traffic import Traffic
from gdp.splits.members import why_undivided
from gdp.targets.engine import legal_devices, quantisation_of
from gdp.targets.rows import misfit
from gdp.targets.target import ExportJob, StartCommand
from gdp.targets.vllm.export import (
    VllmOptions,
    by_share,
    export_vllm,
    vllm_options,
    with_one_share,
)
from gdp.targets.vllm.layouts import (
    BOUND_BY,
    PlannedLayout,
    estimates,
    simulated_layouts,
    told_layout,
)
from gdp.targets.vllm.memory import kept_by_device, without_kept
from gdp.targets.vllm.rules import VLLM

ALIKE = 0.95
"""Part of all limits from which the share of all GPUs is not worth a word."""
ONE_AT_A_TIME = (
    "requests are samples here that share no pass; --traffic says what vLLM serves, which computes "
    "many together"
)
"""A line of answers under `--objective throughput`."""


def vllm_model(model: Model, cluster: Cluster) -> Model:
    """A configuration as vLLM computes it: attention fused, prompts in chunks of the tokens that
    `vllm serve` computes at once on the GPUs of a cluster, in a type that all of them compute.
    Other models as they are."""
    cluster, _ = legal_devices(VLLM, model, cluster)
    spec = ModelSpec.of(model)
    if not spec.path.startswith(HF_PREFIX):
        return model
    spec = spec.by_default(**{AT_ONCE: vllm_defaults(cluster).batched_tokens})
    if all(has_bfloat16(cluster.devices[d]) for d in cluster.gpus):
        return spec
    from gdp.importers.huggingface.dtype import loaded_config

    return spec.by_default(dtype=loaded_config(str(spec), has_bfloat16=False).loaded)


def vllm_cluster(question: Question, stages: int = 1) -> Cluster:
    """The devices that hold their weights, each GPU with the memory that vLLM leaves of its share
    for weights, caches and activations of a model in so many stages."""
    machine = with_one_share(for_runtime(resident(question.cluster), "vllm"))
    return without_kept(machine, question, stages)


def stages_of(graph: OpGraph, placement: Placement) -> int:
    """Stages of a placement for vLLM: devices that its weights are placed on."""
    return len(set(placement.device[graph.weight_bytes > 0].tolist()))


def vllm_defaults(cluster: Cluster) -> Defaults:
    """The defaults of `vllm serve` for a cluster: those of the smallest of its GPUs."""
    gpus = [cluster.devices[d] for d in cluster.gpus]
    is_small = not gpus or any(device.kind.startswith(SMALL_KINDS) for device in gpus)
    least_bytes = 0 if is_small else min(device.total_bytes for device in gpus)
    return next(row for row in DEFAULTS if least_bytes >= row.least_bytes)


def plan_vllm(question: Question) -> Result:
    """The best layout of vLLM: of least seconds of a sample, or for throughput of least period,
    over tensor, pipeline and data parallel sizes, whole experts or their columns, and all orders of
    unlike GPUs. Of plans that are equally fast one that spreads evenly: vLLM gives every rank the
    cache that the fullest one has room for.

    Raises:
        InfeasibleError: if nothing fits.
        PlacementError: if the model has no single row of layers.
    """
    constraints = question.constraints
    if question.granularity not in (None, "op") or constraints.together or constraints.whole:
        raise ArgumentError(
            "--for vllm keeps layers whole by itself: leave out --granularity and --together"
        )
    request, longest = question.graph.request, question.graph.growth.longest
    if request is not None and (refusal := beyond(longest, request.held)):
        raise InfeasibleError(refusal)
    cluster = for_runtime(resident(question.cluster), "vllm")
    if cluster.is_cpu.all():
        raise InfeasibleError(
            f"cluster {question.cluster.name!r} has no GPU, and vLLM needs one here"
        )
    cluster, left_out = legal_devices(VLLM, question.model, cluster)
    several = len(cluster.gpus) > 1
    why = why_undivided(question.graph) if several else "one GPU"
    tried = [
        (machine, _layouts(replace(question, cluster=machine), not why))
        for machine in by_share(cluster)
    ]
    fitting = [one for _, layouts in tried for one in layouts if one.plan.score.feasible]
    if not fitting:
        layouts = tried[0][1]
        if layouts:
            reason = str(layouts[0].plan.score)
        else:
            reason = _without_room(_on(question, tried[0][0]))
        raise misfit(question, reason + _of_one_share(question, cluster))
    best = min(fitting, key=lambda one: one.value_s)
    bound = (roofline_bound_s(question.graph, cluster, cluster.gpus), BOUND_BY) if several else None
    row = find_objective(question.objective)
    if several and row.unit != "s":
        bound = 0.0, ""  # seconds bound no other value of divided ops
    machine, layouts = next((own, found) for own, found in tried if best in found)
    question = _on(question, machine, best.degrees.pipeline)
    result = solve.evaluate(question, best.plan.placement, bound)
    alone = row.pipelined and request is not None
    notes = (left_out, ONE_AT_A_TIME if alone else "")
    result = replace(result, notes=(*result.notes, *filter(None, notes)))
    if not several:
        return replace(result, method="vllm")
    fitting = [one for one in layouts if one.plan.score.feasible]
    note = (
        f"layers stay whole on one GPU each: {why}" if why else told_layout(question, best, fitting)
    )
    return replace(
        result, method="vllm", notes=(*result.notes, note),
        candidates=tuple(one.plan.candidate(str(one.degrees)) for one in layouts),
    )  # fmt: skip


def beyond(longest: int, tokens: int) -> str:
    """Why vLLM serves no request of so many tokens, in a sentence; "" where it does. It refuses a
    `--max-model-len` beyond the `longest` context that a model was made for; 0: nothing says it."""
    if not longest or tokens <= longest:
        return ""
    return (
        f"a request of {tokens} tokens is longer than the {longest} that the model was made for, "
        "and vLLM refuses it: ask for fewer tokens, or for a longer context in config.json "
        "(max_position_embeddings)"
    )


def _without_room(question: Question) -> str:
    """Why no layout has room, for a question on the memory that vLLM takes."""
    graph, devices = question.graph, question.cluster.devices
    need_bytes = int(graph.weight_bytes[graph.weight_holders()].sum())
    room_bytes = sum(devices[d].memory_bytes for d in question.cluster.gpus)
    text = f"weights and caches take {format_bytes(need_bytes)}"
    text += f", and vLLM has {format_bytes(room_bytes)} on all GPUs"
    if need_bytes > room_bytes:
        return text
    return f"{text}, but no layout has room on each of them"


def _of_one_share(question: Question, cluster: Cluster) -> str:
    """Reason why GPUs give vLLM less than their limits, and the memory lost; "" if the limits are
    equal.

    Args:
        question: Of a request that does not fit.
        cluster: Its devices with their own limits.
    """
    gpus = [(d, cluster.devices[d]) for d in cluster.gpus]
    given = sum(device.memory_bytes for _, device in gpus)
    taken = {d: with_one_share(cluster).devices[d].memory_bytes for d, _ in gpus}
    shares = [device.memory_bytes / device.total_bytes for _, device in gpus]
    if sum(taken.values()) > ALIKE * given or min(shares) > ALIKE * max(shares):
        return ""
    d, least = min(gpus, key=lambda item: item[1].memory_bytes / item[1].total_bytes)
    share = int(100 * least.memory_bytes / least.total_bytes) / 100
    text = (
        f"; --gpu-memory-utilization is one share for all GPUs: the "
        f"{format_bytes(least.memory_bytes)} of {least.name} make it {share:.2f}, so "
        f"{format_bytes(taken[d])} on each"
    )
    graph, most = question.graph, max(device.memory_bytes for _, device in gpus)
    first = graph.weight_holders()
    caches = int(graph.cache_bytes[first].sum())
    weights = int(graph.weight_bytes[first].sum()) - caches
    need = weights + caches
    verb = "have" if need + _largest(graph) <= given else "have no"
    text += (
        f"; accelerate (--for accelerate) and SGLang take a limit of each card and {verb} room "
        f"for these {format_bytes(need)} in {format_bytes(given)}"
    )
    half = weights // 2 + caches
    if need > most >= half + _largest(graph):
        text += f"; in 8 bits (--quantize fp8) about {format_bytes(half)}, on one GPU alone"
    return text


def _largest(graph: OpGraph) -> int:
    """Bytes of the largest tensor."""
    return int(graph.held_bytes.max(initial=0))


def _on(question: Question, machine: Cluster, stages: int = 1) -> Question:
    """The question on the GPUs of one share, less what vLLM takes inside it for so many stages."""
    parts = machine, question.graph, str(stages)
    make = partial(without_kept, machine, question, stages)
    return replace(question, cluster=question.kept.once("machine", parts, make))


def _layouts(question: Question, known: bool) -> list[PlannedLayout]:
    """The best layouts, simulated; of whole layers alone where divided ones are not known."""
    row, machine = layer_row(question.graph), question.cluster
    block = row.layer.clip(0, row.num_layers - 1)
    most = _on(question, machine, max(1, len(machine.gpus)))
    return simulated_layouts(
        question, estimates(most, block, known),
        lambda stages: _on(question, machine, stages).cluster,
    )  # fmt: skip


def export(job: ExportJob) -> list[Path]:
    """Write the options of vLLM for a placement; see `export_vllm`."""
    return export_vllm(options_of(job), job.output, job.overwrite)


def commands(job: ExportJob) -> list[StartCommand]:
    """`vllm serve` with the options of a placement, for each server and machine."""
    program = ["vllm", "serve", checkpoint_of(job)]
    commands = (options.command() for options in options_of(job).commands)
    return [started(program, own, job.question.role) for own in commands]


def started(program: Sequence[str], own: Mapping[str, Any], role: str) -> StartCommand:
    """A program with the environment and arguments of a command, as a line for a shell."""
    environment = [f"{name}={value}" for name, value in own["environment"].items()]
    line = " ".join([*environment, shlex.join([*program, *own["arguments"]])])
    return StartCommand(line, own.get("machine", ""), role)


def checkpoint_of(job: ExportJob) -> str:
    """The name or folder of a model's checkpoint, as engines take it."""
    path = ModelSpec.of(job.spec).path.removeprefix(HF_PREFIX)
    return str(Path(path).parent) if path.endswith(".json") else path


def require_one_server(job: ExportJob) -> VllmOptions:
    """Options of a placement with one server, which a benchmark asks.

    Raises:
        PlacementError: It has several, each with its own port.
    """
    options = options_of(job)
    if (count := len(options.servers)) > 1:
        raise PlacementError(
            f"its copies are {count} servers, and a benchmark asks one; measure them behind a "
            "balancer of your own, and learn from the file by gdp learn"
        )
    return options


def benchmark(job: ExportJob, traffic: Traffic | None, file: Path) -> str:
    """`vllm bench serve` with random prompts under a traffic; see `Target.benchmark`."""
    require_one_server(job)
    if traffic is None:
        raise ArgumentError("vllm bench serve sends the requests of --traffic: give it")
    sent = (
        ["--max-concurrency", str(traffic.concurrency)]
        if traffic.concurrency
        else ["--request-rate", f"{traffic.rate:g}"]
    )
    # Answers of a fixed length, and the percentiles that limits hold for.
    return shlex.join([
        "vllm", "bench", "serve", "--backend", "vllm", "--model", checkpoint_of(job),
        "--dataset-name", "random", "--random-input-len", str(traffic.prompt),
        "--random-output-len", str(traffic.new), "--num-prompts", str(len(traffic.requests)),
        *sent, "--ignore-eos", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "95",
        "--save-result", "--result-dir", str(file.parent), "--result-filename", file.name,
    ])  # fmt: skip


def options_of(job: ExportJob) -> VllmOptions:
    """The layout of a placement as options of vLLM; see `vllm_options`."""
    from gdp.importers.huggingface.check import check_config
    from gdp.importers.huggingface.spec import config_file, parse_config_spec

    peak_bytes = solve.simulate(job.question, job.placement).peak_bytes
    config = check_config(config_file(job.spec))
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    machine = for_runtime(job.question.cluster, "vllm")
    stages = stages_of(job.question.graph, job.placement)
    peak_bytes = peak_bytes + kept_by_device(job.question, machine, stages)
    spec, draft = parse_config_spec(job.spec), job.question.draft
    other_words = False
    if draft is not None:
        own, other = _words(job.spec), _words(draft.model)
        other_words = None not in (own, other) and own != other
    options = vllm_options(job.question.graph, job.placement, machine, peak_bytes, longest)
    return replace(
        options, quantize="" if spec.quantize == "none" else spec.quantize,
        at_once=spec.max_num_batched_tokens, role=job.question.role, draft=draft, dtype=spec.dtype,
        kind=quantisation_of(job.spec), kv_cache_dtype=spec.kv_cache_dtype, other_words=other_words,
    )  # fmt: skip


def _words(model: str) -> int | None:
    """Words of the vocabulary of a model; None where its configuration is not at hand."""
    from gdp.importers.huggingface.check import check_config
    from gdp.importers.huggingface.spec import config_file

    spec = model if model.startswith(HF_PREFIX) else f"{HF_PREFIX}{model}"
    try:
        config = check_config(config_file(spec))
    except ModelError:
        return None
    words = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return words if isinstance(words, int) else None
