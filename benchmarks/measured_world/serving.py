"""Predictions of serving beside public measurements of one GPU, or of several.

    python -m benchmarks.measured_world serving --rows SPLIT.csv [--data FOLDER] [--every K]
        [--several] [--per-device] [--costs datasheet] [--plans FILE] [--json FILE] [NAME ...]

The measurements, and the configurations of their models, come with NVIDIA's AIConfigurator;
nothing of it is installed by gdp or kept here: `pip install aiconfigurator-core==0.12.0`, or unzip
its wheel, whose folder `aiconfigurator_core` is `--data`. `--rows` is a CSV file with columns id,
mode, split, judged and suspect, which says what may be looked at: rows that are judged and marked
"develop", of one engine (agg) on one GPU, or with `--several` on GPUs that all divide every layer,
which they do in gdp's prediction, too. Of others the id is all that is read. NAME limits rows to
ids that contain it, `--every K` to every K-th model and size (with `--per-device` lengths), in
order: tracing takes some ten seconds of a core for each. `--plans` keeps the seconds of passes in a
file, which another run reads.

Each row is a server that always has B requests, each of a prompt and an answer of so many tokens.
Seconds of its passes are those of `gdp place --traffic ... --for vllm`, whatever engine was
measured, but for its own collectives and its host's part of a step; how passes are chosen, and how
the B clients ask, is that of the public scripts of these measurements (`servers.py`). Where the
caches of B requests have no room, the others wait; no row may be infeasible. Configurations are
those of the package as they are, with `--quantize` where a row's precision is another one,
caches in 8 bits where weights are, unless the model's own configuration or the server said
otherwise. Devices are gdp's presets, else the datasheet numbers of that package. Errors are given
apart for models that were looked at while the set-ups were written, and for the others.

`--per-device` takes all rows, and asks for each model, GPU, engine, precision and lengths of at
least four rows which number of GPUs, layout and number of requests is worth most: tokens a second
of a GPU, of those that keep a limit for the seconds of a token, the median of the measured ones.
"""

import itertools
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

import gdp
from benchmarks.measured_world.per_device import told_per_device
from benchmarks.measured_world.servers import (
    asked_of,
    cache_bits,
    collectives_of,
    host_of,
    set_up,
)
from benchmarks.measured_world.serving_runs import Predicted, Run, measured_runs
from benchmarks.tables import head
from gdp.api.generation import generation_answer
from gdp.api.traffic.plan import engine_of
from gdp.base.errors import InfeasibleError, ModelError
from gdp.cluster.file import load_cluster
from gdp.cluster.presets import device_names
from gdp.cluster.reserve import for_runtime
from gdp.cluster.types import Cluster
from gdp.costs.measured.collectives import collective_s
from gdp.costs.measured.host import ENGINE, HOSTS, host_s
from gdp.graph.request import DECODE
from gdp.placement.placement import Placement, Split, make_placement
from gdp.question import solve
from gdp.question.models import Generation, Model
from gdp.question.models import load as load_model
from gdp.question.models import spec_of as spec_of_model
from gdp.question.question import Question
from gdp.question.result import GenerationAnswer
from gdp.sim.serving import ServingEngine, serve
from gdp.splits.members import held_graphs, known_division
from gdp.splits.sharding import exchanges
from gdp.targets.table import PLANNERS

PACKAGE = "aiconfigurator_core"
GET = (
    "get the measurements with `pip install aiconfigurator-core==0.12.0`, or unzip its wheel and "
    f"give its folder {PACKAGE} as --data"
)
SAME_MODEL = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B-Instruct": "meta-llama/Meta-Llama-3.1-405B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507": "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-235B-A22B-Thinking-2507": "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "Qwen/Qwen3-235B-A22B-FP8",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "Qwen/Qwen3-30B-A3B", "zhipuai/GLM-5": "zai-org/GLM-5",
}  # fmt: skip
"""Models whose configuration lies under another name, in all that takes time and memory alike."""
SCHEMES = {
    "": "", "bf16": "", "bfloat16": "", "fp8": "fp8", "fp4": "nvfp4", "int8": "w8a8",
    "int4": "w4a16", "mxfp4": "mxfp4",
}  # fmt: skip
"""Scheme of `--quantize` by the precision of a row; "" for 16 bits."""
STORED = {
    ("fp8", "fp8"), ("int4", "compressed-tensors"), ("fp4", "mxfp4"), ("mxfp4", "mxfp4"),
    ("", "mxfp4"), ("fp4", "modelopt"),
}  # fmt: skip
"""Precisions that configurations with such a `quant_method` are of already."""


def load(model: Model) -> gdp.OpGraph:
    """The graph of a model; rows of one model and size follow each other."""
    return _loaded(spec_of_model(model))


@lru_cache(maxsize=2)
def _loaded(spec: str) -> gdp.OpGraph:
    return load_model(spec)


class Planned(NamedTuple):
    """A plan for runs that differ in their engine alone."""

    batch: int  # requests that have room at once; 0 where not even one has
    engine: ServingEngine | None = None
    why: str = ""


def configuration(model: str, folders: Iterable[Path]) -> str | None:
    """The file of a model's configuration, the first of the folders that has it."""
    name = SAME_MODEL.get(model, model).replace("/", "--")
    paths = (folder / f"{name}_config.json" for folder in folders)
    return next((str(path) for path in paths if path.is_file()), None)


def spec_of(run: Run, folders: Iterable[Path]) -> str:
    """What a user types for the model of a run: its file as it is, in 4 bits NVIDIA's own where
    there is one, with the scheme of `--quantize` where it is stored otherwise, and the type of
    caches where the server said one (8 bits with weights of 8 or 4 bits, unless it said others).

    Raises:
        ModelError: No folder has the configuration.
    """
    folders = list(folders)
    path = configuration(run.model, folders)
    if run.precision == "fp4":
        fours = configuration(f"nvidia/{run.model.rpartition('/')[2]}-NVFP4", folders)
        # Older ones name their scheme in a file beside the configuration.
        if fours is not None and "quantization_config" in json.loads(Path(fours).read_text()):
            path = fours
    if path is None:
        raise ModelError(f"no configuration of {run.model}: {GET}")
    document = json.loads(Path(path).read_text())
    own_scheme = (document.get("text_config") or document).get("quantization_config")
    method = (own_scheme or document.get("quantization_config") or {}).get("quant_method")
    if run.precision not in SCHEMES:
        raise ModelError(f"no precision {run.precision!r}; there are {', '.join(SCHEMES)}")
    own = (run.precision, method) in STORED
    scheme, cached = "" if own else SCHEMES[run.precision], cache_bits(run)
    narrow = scheme or method == "modelopt"
    cached = 8 if narrow and cached is None else cached
    options = [f"quantize={scheme}"] if scheme else []
    options += ["kv_cache_dtype=fp8"] if cached == 8 else []
    return path + ("?" + "&".join(options) if options else "")


def machine(data: Path, system: str, folder: Path, gpus: int = 1) -> Cluster:
    """A processor and one GPU: gdp's preset, else the numbers of the package. Of several GPUs, the
    preset with the links of such systems."""
    preset = system.partition("_")[0]
    if gpus > 1:
        return load_cluster(f"cpu-server-ddr5+{gpus}x{preset}-nvlink")
    if preset in device_names():
        return load_cluster(f"cpu-server-ddr5+{preset}")
    numbers = {}
    for line in (data / "systems" / f"{system}.yaml").read_text().splitlines():
        key, _, value = line.partition("#")[0].strip().partition(": ")
        numbers.setdefault(key, value.strip())
    flops = numbers["bfloat16_tc_flops"]
    path = folder / f"{system}.toml"
    path.write_text(
        f'name = "{system}"\n[[device]]\nname = "cpu"\npreset = "cpu-server-ddr5"\n'
        f'[[device]]\nname = "{preset}"\nkind = "{preset}"\n'
        f"memory_bytes = {numbers['mem_capacity']}\nbytes_per_s = {float(numbers['mem_bw'])}\n"
        f"flop_per_s = {{ default = 75e12, float16 = {float(flops)}, bfloat16 = {float(flops)}, "
        f"float8 = {float(numbers['fp8_tc_flops'])} }}\ndispatch_s = 4e-6\n"
    )
    return load_cluster(path)


def planned(spec: str, cluster: Cluster, run: Run, costs: str | None = None) -> Planned:
    """The plan of `--for vllm` for a run, with as many requests at once as have room."""
    batch, why = run.batch, ""
    while batch:
        try:
            plan = plan_of(spec, cluster, replace(run, batch=batch), costs)
        except InfeasibleError as error:
            graph = load(asked_model(spec, cluster, replace(run, batch=batch)))
            room_ = room(graph, cluster, batch, splits_of(run, cluster))
            why, batch = str(error), min(batch - 1, room_)
            continue
        engine = as_measured(plan.engine, plan.question.graph, cluster, run, batch)
        return Planned(batch, engine, why)
    return Planned(0, why=why)


class RunPlan(NamedTuple):
    """The plan of a run, and what it predicts."""

    question: Question
    placement: Placement
    answer: GenerationAnswer
    engine: ServingEngine


def plan_of(spec: str, cluster: Cluster, run: Run, costs: str | None = None) -> RunPlan:
    """The best plan for a run on one GPU; on several all layers in the layout of the run.

    Raises:
        InfeasibleError: It does not fit.
    """
    request = Generation(spec, prompt=run.prompt, new=run.new, batch=run.batch)
    if run.tensor == 1:
        result = gdp.place(request, cluster, target="vllm", costs=costs)
        question, placement, score = result.question, result.placement, result.score
    else:
        model = asked_model(spec, cluster, run)
        graph = load(model)
        machine = for_runtime(cluster, "vllm")
        question = Question(graph, machine, costs=costs, target="vllm", model=model)
        placement = _layers_on_gpus(graph, cluster, splits_of(run, cluster))
        score = solve.simulate(question, placement)
        if not score.feasible:
            raise InfeasibleError(str(score))
    # As gdp ships, whatever this machine remembers of runs.
    answer = generation_answer(question, placement, score, corrections=False)
    assert answer is not None
    return RunPlan(question, placement, answer, engine_of(answer, question))


def asked_model(spec: str, cluster: Cluster, run: Run) -> Model:
    """The model of a run as vLLM computes it."""
    request = Generation(spec, prompt=run.prompt, new=run.new, batch=run.batch)
    return PLANNERS["vllm"].model(request, cluster)


def as_measured(
    engine: ServingEngine, graph: gdp.OpGraph, cluster: Cluster, run: Run, batch: int
) -> ServingEngine:
    """An engine of a plan for so many requests, with the host and the collectives of a run's."""
    steps = graph.phase == DECODE
    theirs_s, ours_s = (
        float(host_s(graph, HOSTS[name])[steps].sum()) for name in (host_of(run), ENGINE)
    )
    engine = engine._replace(step_s=engine.step_s + (theirs_s - ours_s))
    own, (split, *_) = collectives_of(run), (*splits_of(run, cluster), None)
    if split is None or set(own) == {"vllm"}:
        return engine
    more_s = [0.0, 0.0]  # of a prompt, of a step
    for op, operation, size, parts in exchanges(known_division(graph)):
        phase = bool(graph.phase[op] == DECODE)
        theirs, ours = (
            collective_s(cluster, split.devices, operation, size / parts, name)
            for name in (own[phase], "vllm")
        )
        more_s[phase] += parts * float(theirs - ours)
    return engine._replace(
        token_s=engine.token_s + more_s[0] / (batch * run.prompt),
        step_s=engine.step_s + more_s[1],
    )


def predicted(plan: Planned, run: Run) -> Predicted:
    """A run's requests on the server that it was measured with."""
    if plan.engine is None:
        return Predicted(0, why=plan.why)
    served = serve(asked_of(run), set_up(plan.engine, run))
    return Predicted(plan.batch, served.first_token.mean_s, served.token.mean_s, plan.why)


def splits_of(run: Run, cluster: Cluster) -> tuple[Split, ...]:
    """All GPUs as one split where the run has several."""
    gpus = tuple(d for d, device in enumerate(cluster.devices) if not device.is_cpu)
    return (Split(gpus, run.experts),) if run.tensor > 1 else ()


def _layers_on_gpus(graph: gdp.OpGraph, cluster: Cluster, splits: tuple[Split, ...]) -> Placement:
    gpu = next(d for d, device in enumerate(cluster.devices) if not device.is_cpu)
    return make_placement(graph, cluster, np.where(graph.is_io, cluster.host, gpu), splits=splits)


def room(graph: gdp.OpGraph, cluster: Cluster, batch: int, splits: tuple[Split, ...] = ()) -> int:
    """Requests that have room on the GPUs beside weights and tensors, which are those of a pass."""
    cluster = for_runtime(cluster, "vllm")
    placement = _layers_on_gpus(graph, cluster, splits)
    gpu = next(d for d, device in enumerate(cluster.devices) if not device.is_cpu)
    peak = int(gdp.simulate(graph, placement, cluster).peak_bytes[gpu])
    cache = int(held_graphs(graph, placement)[gpu].cache_bytes.sum())
    free = cluster.devices[gpu].memory_bytes - (peak - cache)
    return max(0, int(free // max(cache / batch, 1)))


def told(runs: list[Run], answers: list[Predicted]) -> Iterator[str]:
    """A line for each run, then errors."""
    yield head(
        "model | GPU | layout | engine | weights | prompt | new | batch | at once | token ms | "
        "measured | error | first ms | measured | error",
        left=5,
    )
    for run, answer in zip(runs, answers, strict=True):
        sizes = f"{run.precision or '16'} | {run.prompt} | {run.new} | {run.batch}"
        yield (
            f"| {run.model.rpartition('/')[2]} | {run.system} | {run.layout} | {run.engine} | "
            f"{sizes} | "
            f"{answer.batch or 'none fits'} | {1e3 * answer.token_s:.2f} | {1e3 * run.token_s:.2f} "
            f"| {answer.token_s / run.token_s - 1:+.0%} | {1e3 * answer.first_s:.0f} | "
            f"{1e3 * run.first_s:.0f} | {answer.first_s / run.first_s - 1:+.0%} |"
        )
    yield from errors_by_kind(runs, answers)
    waiting = sum(0 < answer.batch < run.batch for run, answer in zip(runs, answers, strict=True))
    yield f"{waiting} runs have no room for all requests at once"
    if any(run.tensor > 1 for run in runs):
        yield layouts_in_order(runs, answers)
    yield f"infeasible: {sum(not answer.batch for answer in answers)}"


def errors_by_kind(runs: list[Run], answers: list[Predicted]) -> Iterator[str]:
    """A line of errors for all runs, and for those of each model, GPU, engine, layout, lengths."""
    yield ""
    names = ("looked_at", "model", "system", "engine", "layout", "lengths")
    kinds = [sorted({getattr(r, name) for r in runs}) for name in names]
    for kind in ("all", *(kind for group in kinds for kind in group)):
        pairs = [
            (r, a)
            for r, a in zip(runs, answers, strict=True)
            if kind in ("all", *(getattr(r, name) for name in names)) and a.batch
        ]
        yield (
            f"{kind}: {len(pairs)} runs; token: {errors(pairs, 'token_s')}; first token: "
            f"{errors(pairs, 'first_s')}"
        )


def layouts_in_order(runs: list[Run], answers: list[Predicted]) -> str:
    """Of layouts of one server and load whose seconds of a token differ by 5%, the share of pairs
    in the right order, and the loss of the fastest by prediction."""
    servers: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for run, answer in zip(runs, answers, strict=True):
        if answer.batch:
            key = (*run.sizes, run.system, run.precision, run.engine)
            servers[key].append((run.token_s, answer.token_s))
    pairs = [
        (a[0] < b[0]) == (a[1] < b[1])
        for rows in servers.values()
        for a, b in itertools.combinations(rows, 2)
        if abs(math.log(a[0] / b[0])) > math.log(1.05)
    ]
    several = [rows for rows in servers.values() if len(rows) > 1]
    lost = [min(rows, key=lambda r: r[1])[0] / min(rows)[0] - 1 for rows in several]
    if not pairs:
        return "no layouts of one server to compare"
    return (
        f"{sum(pairs) / len(pairs):.0%} of {len(pairs)} pairs of layouts in the right order; the "
        f"fastest by prediction loses {sum(lost) / len(lost):.1%} in the mean of {len(lost)} loads"
    )


def errors(pairs: list[tuple[Run, Predicted]], field: str) -> str:
    """Median and mean absolute error, and the median of predicted over measured."""
    ratios = np.array([getattr(a, field) / getattr(r, field) for r, a in pairs])
    if not len(ratios):
        return "none"
    off = np.abs(ratios - 1)
    return (
        f"off by {np.median(off):.1%} in the median, {off.mean():.1%} in the mean, predicted over "
        f"measured {np.median(ratios):.2f}"
    )


def installed() -> Path | None:
    """Folder of the measurements, where their package is installed."""
    spec = find_spec(PACKAGE)
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


@click.command("serving", help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--every", type=click.IntRange(1), default=1, help="Of the questions, in order.")
@click.option("--costs", help='Of `gdp place`: "datasheet", or a file; the default is the shipped.')
@click.option("--several", is_flag=True, help="Rows of several GPUs that divide every layer.")
@click.option("--per-device", is_flag=True, help="All rows; which is worth most a GPU.")
@click.option(
    "--plans", "kept_in", type=click.Path(dir_okay=False, path_type=Path),
    help="File of plans that were made before, and of those that are made now.",
)  # fmt: skip
@click.option("--json", "path", type=click.Path(path_type=Path), help="File of all runs.")
def main(
    names: tuple[str, ...], rows: Path, data: Path | None, every: int, costs: str | None,
    several: bool, per_device: bool, kept_in: Path | None, path: Path | None,
) -> None:  # fmt: skip
    data = data or installed()
    if data is None or not (data / "systems" / "silicon_sample.csv").is_file():
        raise click.UsageError(GET)
    runs = measured_runs(data, rows, names, None if per_device else several)
    # Runs of one model and size follow each other: a trace serves all of them.
    runs.sort(key=lambda run: (run.sizes, run.precision, run.system, run.engine))
    sizes = {run: run.sizes[:3] if per_device else run.sizes for run in runs}
    kept = list(dict.fromkeys(sizes.values()))[::every]
    runs = [run for run in runs if sizes[run] in kept]
    answers = list(_answers(runs, data, costs, kept_in))
    if path is not None:
        both = [{**asdict(r), "predicted": asdict(a)} for r, a in zip(runs, answers, strict=True)]
        path.write_text(json.dumps(both, indent=1) + "\n")
    lines = told(runs, answers)
    if per_device:
        lines = itertools.chain(told_per_device(runs, answers), errors_by_kind(runs, answers))
    click.echo("\n".join(lines))
    if not all(answer.batch for answer in answers):
        raise SystemExit(1)


def _answers(
    runs: list[Run], data: Path, costs: str | None, kept_in: Path | None
) -> Iterator[Predicted]:
    """Predictions of runs, a plan for all that differ in their engine alone."""
    plans = kept(kept_in)
    with tempfile.TemporaryDirectory(prefix="measured-world-") as root:
        for run in runs:
            cluster = machine(data, run.system, Path(root), run.tensor)
            plan = planned_or_kept(plans, kept_in, run, cluster, data, costs)
            answer = predicted(plan, run)
            click.echo(f"{run.name}: {1e3 * answer.token_s:.2f} ms", err=True)
            yield answer


def planned_or_kept(
    plans: dict[str, Planned], kept_in: Path | None, run: Run, cluster: Cluster, data: Path,
    costs: str | None,
) -> Planned:  # fmt: skip
    """The plan of a run, from those that are known, or made now and added to them."""
    key = json.dumps([*run.question, costs])
    if key not in plans:
        spec = spec_of(run, [data / "model_configs"])
        plans[key] = planned(spec, cluster, run, costs)
        _keep(kept_in, key, plans[key])
    return plans[key]


def kept(path: Path | None) -> dict[str, Planned]:
    """Plans of a file, by their question."""
    plans: dict[str, Planned] = {}
    if path is not None and path.is_file():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            engine = row["engine"] and ServingEngine(**row["engine"])
            plans[json.dumps(row["question"])] = Planned(row["batch"], engine, row["why"])
    return plans


def _keep(path: Path | None, key: str, plan: Planned) -> None:
    """Append a plan to the file; how passes are chosen is set by the run, not kept."""
    if path is None:
        return
    engine = plan.engine and plan.engine._asdict()
    if engine:
        del engine["scheduler"]
    row = {"question": json.loads(key), "batch": plan.batch, "engine": engine, "why": plan.why}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
