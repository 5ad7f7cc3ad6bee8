"""The call `learn_runs`: result files of benchmarks become corrections of their stack."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gdp.api.answer import answer as answer_to
from gdp.api.ask import ask
from gdp.api.generation import generation_answer
from gdp.api.measured.words import words_of
from gdp.api.traffic.plan import engine_of, on_vllm
from gdp.base.errors import ArgumentError, PlacementError
from gdp.base.units import format_bytes, format_seconds
from gdp.cluster.file import Machine
from gdp.corrections import records
from gdp.corrections.estimate import lessons_of
from gdp.corrections.features import EngineStack
from gdp.corrections.passes import Times, residuals, scaled, served_times
from gdp.corrections.process import Lesson, shipped_corrections
from gdp.corrections.records import RunRecord
from gdp.corrections.run import Load, MeasuredRun, MeasurementFileError
from gdp.costs import machine
from gdp.costs.measured.host import HOSTS
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import DECODE, PREFILL
from gdp.importers.spec import ModelSpec
from gdp.placement.placement import Placed, Placement, make_placement
from gdp.question import solve
from gdp.question.corrected import costs_label, has_shipped_costs
from gdp.question.models import Generation, Model, load, spec_of
from gdp.question.passes import engine_name, passes_of, stack_of
from gdp.question.question import Question, question_about
from gdp.question.result import GenerationAnswer
from gdp.sim.traffic import Traffic
from gdp.sim.traffic_text import parse_traffic
from gdp.targets.measured_files import read_runs

FASTEST = 0.9
"""Share of the least possible seconds below which a measured time is refused."""
OTHER_SIZE = 1.3
"""Factor between the sizes of a plan's model and a file's beyond which they are two models."""
MOST_ASKED = 400
"""Requests that are simulated of a run."""
LONGEST_NAME = 100
"""Letters of names in files that are remembered."""
LEAST_SHOWN = 0.05
"""Passes that the times of a run show less teach nothing."""
_SIZE = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)\s?b(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Learned:
    """Lessons of runs about a stack."""

    stack: EngineStack
    runs: tuple[RunRecord, ...]
    known: int  # runs of this stack, these among them
    words: tuple[str, ...]  # what was learned, in sentences
    off_before: float  # mean absolute log error of these runs' times
    off: float  # the same, once they were learned from
    folder: Path | None = None  # that remembers them
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "stack": self.stack.key, "runs": len(self.runs), "known": self.known,
            "learned": list(self.words), "off_before": self.off_before, "off": self.off,
            "loads": [
                {"prompt": r.prompt, "new": r.new, "concurrency": r.concurrency,
                 "measured": r.measured, "predicted": r.predicted} for r in self.runs
            ],
            "remembered_in": None if self.folder is None else str(self.folder),
            "notes": list(self.notes),
        }  # fmt: skip


def learn_runs(
    files: Sequence[str | Path],
    *,
    plan: Placed | None = None,
    model: Model | None = None,
    cluster: Machine | None = None,
    target: str | None = None,
    keep: bool = True,
    **parts: Any,
) -> Learned:
    """Learn from result files of an engine's own benchmark how it runs on a machine.

    The runs are compared with the predictions of the plan that they executed; what they show of the
    stack (engine, version, backend, card, host) corrects all later answers about it, whatever the
    model.

    Args:
        files: Result files, such as of `vllm bench serve --save-result` or `llama-bench -o json`.
        plan: The placement that was executed, or its file.
        model: As `gdp.place` takes it, where there is no plan: the best plan is taken for it.
        cluster: The same.
        target: The same; "vllm", or None for .gguf models.
        keep: Remember it; else only say what would be learned.
        **parts: Further arguments of `gdp.place`, such as costs.

    Raises:
        MeasurementFileError: A file cannot be read, is of another model or engine, has requests
            that failed, or says what the machine cannot do.
        ArgumentError: Neither a plan nor a model with a cluster is given.
    """
    runs = [(str(file), run) for file in files for run in read_runs(file)]
    question, placement = _planned(runs, plan, model, cluster, target, parts)
    engine, version = _engine(runs, question)
    if not has_shipped_costs(question):
        raise ArgumentError(
            "runs correct the costs of gdp itself, and the plan is by others; leave --costs out"
        )
    if engine in HOSTS and engine != engine_name(question):
        # Its answers are by the host's part of its own steps.
        question = replace(question, costs=engine)
    stack = stack_of(question, engine, version)
    label = costs_label(question)
    made, notes = [], dict[str, None]()
    for name, run in runs:
        notes |= dict.fromkeys(run.notes)
        _require_model(name, run, question)
        own = [_record(name, run, one, question, placement, stack, label) for one in run.loads]
        made += [record for record in own if record.passes]
    if not made:
        raise MeasurementFileError(
            f"{runs[0][0]} tells no seconds of a token, nor of the first one, that passes follow "
            "from; measure TTFT and TPOT, as vllm bench serve --save-result does"
        )
    folder = records.remember(made) if keep else None
    known = list({run.subject: run for run in (*records.runs_of(stack, label), *made)}.values())
    before, after, words = _taught(stack, known, made)
    return Learned(stack, tuple(made), len(known), words, before, after, folder, tuple(notes))


def _planned(
    runs: Sequence[tuple[str, MeasuredRun]], plan: Placed | None, model: Model | None,
    cluster: Machine | None, target: str | None, parts: dict[str, Any],
) -> tuple[Question, Placement]:  # fmt: skip
    """The question and placement that the runs executed."""
    if plan is not None:
        question, placement = question_about(plan, model, cluster, costs=parts.get("costs"))
        spec = spec_of(question.model or "")
        if target == "vllm" or spec.startswith("hf:"):
            question = replace(on_vllm(question, placement), target="vllm")
        return question, placement
    if model is None or cluster is None:
        raise ArgumentError(
            "say what ran: --plan PLACEMENT of gdp place, or --model MODEL --cluster CLUSTER "
            "(with --for vllm of a configuration)"
        )
    prompt, new, batch = _sizes(runs[0][1].loads[0])
    asked = Generation(spec_of(model), prompt=prompt, new=new, batch=batch)
    result = answer_to(ask(asked, cluster, target=target, **parts))
    return result.question, result.placement


def _sizes(load: Load) -> tuple[int, int, int]:
    """Prompt, new tokens and sequences side by side of a load, as one request."""
    prompt = max(1, round(load.prompt) + load.context)
    return prompt, max(1, round(load.new)), min(load.concurrency or _arriving(load), 512)


def _arriving(load: Load) -> int:
    """Requests in flight of those that arrive at a rate, by Little's law; all where they come at
    once."""
    if not math.isfinite(load.rate):
        return load.requests
    first_s, token_s = (
        mean if mean is not None else median or 0.0
        for mean, median in (
            (load.ttft_s, load.ttft_median_s), (load.tpot_s, load.tpot_median_s)
        )
    )  # fmt: skip
    return max(1, round(load.rate * (first_s + token_s * max(load.new - 1.0, 0.0))))


def _engine(runs: Sequence[tuple[str, MeasuredRun]], question: Question) -> tuple[str, str]:
    """Engine and version of the runs, which are of one."""
    planned = engine_name(question)
    if not planned:
        raise ArgumentError(
            "the plan is of no engine: gdp learn takes plans of .gguf models, or of hf: models for "
            "vllm or sglang (--for vllm)"
        )
    named = {run.engine for _, run in runs if run.engine}
    if len(named) > 1:
        raise MeasurementFileError(f"the files are of {' and '.join(sorted(named))}: give one each")
    engine = next(iter(named), planned)
    if (engine == "llamacpp") != (planned == "llamacpp"):
        raise MeasurementFileError(
            f"{runs[0][0]} is of {engine}, and the plan is for {planned}; give the plan that ran"
        )
    return engine, next((run.version for _, run in runs if run.version), "")[:LONGEST_NAME]


def _require_model(name: str, run: MeasuredRun, question: Question) -> None:
    """Raise `MeasurementFileError` where a file is of a model of another size than the plan's."""
    graph = question.graph
    held = graph.weight_holders()
    held = held[~graph.is_buffer[held]]
    weights = int((graph.weight_bytes - graph.cache_bytes)[held].sum())
    if run.model_bytes and not 1 / OTHER_SIZE < run.model_bytes / weights < OTHER_SIZE:
        raise MeasurementFileError(
            f"{name} is of {run.model or 'a model'} with {format_bytes(run.model_bytes)} of "
            f"weights, and the plan's model has {format_bytes(weights)}; give the plan that ran"
        )
    own = ModelSpec.of(spec_of(question.model or "")).path
    sizes = [_SIZE.findall(text.rpartition("/")[2]) for text in (run.model, own.rstrip("/"))]
    if all(sizes) and not 1 / OTHER_SIZE < float(sizes[0][0]) / float(sizes[1][0]) < OTHER_SIZE:
        raise MeasurementFileError(
            f"{name} is of {run.model}, and the plan is of {own}; give the plan that ran"
        )


def _record(
    name: str, run: MeasuredRun, load: Load, question: Question, placement: Placement,
    stack: EngineStack, label: str,
) -> RunRecord:  # fmt: skip
    """A load as it is remembered: measured times, predicted ones, and the passes between them."""
    at, placed, answer = at_load(question, placement, load)
    measured, is_median = _measured(load, answer.request.batch)
    _require_possible(name, load, at.graph, at, measured)
    predict = predicted_times(at, answer, load, is_median)
    if math.isnan(measured.ttft_s) and (load.tpot_s, load.tpot_median_s) == (None, None):
        predict = _of_whole_requests(predict, load.new)
    found = residuals(predict, measured)
    found = found.under_load() if _is_served(at, load) else found
    plain = predict(0.0, 0.0)
    passes = passes_of(at, answer, placed)
    lessons = [
        Lesson(*one)
        for one in zip(passes, found[:2], found.shown, strict=True)
        if one[2] >= LEAST_SHOWN
    ]
    spec = ModelSpec.of(spec_of(question.model or ""))
    return RunRecord(
        machine.now(), run.tool, stack, Path(spec.path).name,
        (run.format or spec.options.get("quantize", ""))[:LONGEST_NAME], label,
        load.prompt, load.new, float(load.concurrency), _told(measured), _told(plain),
        tuple(lessons),
    )  # fmt: skip


def _told(times: Times) -> dict[str, float]:
    return {k: v for k, v in times._asdict().items() if math.isfinite(v)}


def _measured(load: Load, batch: int) -> tuple[Times, bool]:
    """Times of a load, `batch` of whose requests have room, and whether they are medians: means
    where both are told."""
    is_median = load.ttft_s is None and load.tpot_s is None
    own = (load.ttft_median_s, load.tpot_median_s) if is_median else (load.ttft_s, load.tpot_s)
    times = Times(*(math.nan if t is None else t for t in own))
    at_once = load.rate == math.inf and load.requests <= batch
    flight = load.concurrency or (load.requests if at_once else 0)
    if math.isnan(times.tpot_s) and load.tokens_per_s and flight and load.new > 1:
        # Little's law: each of the requests writes its share of all tokens.
        life_s = flight * load.new / load.tokens_per_s
        first_s = 0.0 if math.isnan(times.ttft_s) else times.ttft_s
        times = times._replace(tpot_s=max(life_s - first_s, 1e-9) / max(load.new - 1, 1))
    return times, is_median


def _of_whole_requests(
    predict: Callable[[float, float], Times], new: float
) -> Callable[[float, float], Times]:
    """Predictions of seconds of a token that are those of whole requests, prompts included."""

    def whole(prefill: float, decode: float) -> Times:
        times = predict(prefill, decode)
        return times._replace(tpot_s=times.tpot_s + times.ttft_s / max(new - 1, 1))

    return whole


def at_load(
    question: Question, placement: Placement, load_: Load
) -> tuple[Question, Placement, GenerationAnswer]:
    """The plan's layout with the sizes of a load: its question, placement, and answer before
    anything was learned. As many sequences as have room run side by side.

    Raises:
        MeasurementFileError: The layout is of no request, or has other ops at these sizes.
    """
    prompt, new, batch = _sizes(load_)
    spec = ModelSpec.of(question.model)
    while True:
        own = spec.having(prompt=prompt, new=new, batch=batch, context=None, requests=None)
        graph = load(own)
        if graph.op_names != question.graph.op_names:
            raise MeasurementFileError(
                f"the plan has other ops with {prompt} + {new} tokens; place it with these"
            )
        at = replace(question, graph=graph, model=own)
        placed = make_placement(
            graph, question.cluster, placement.device, placement.rank,
            made_by=placement.made_by, teams=placement.teams, splits=placement.splits,
        )  # fmt: skip
        score = solve.simulate(at, placed)
        if score.feasible or batch == 1:
            break
        batch = max(1, batch // 2)
    answer = generation_answer(at, placed, score, corrections=False)
    if answer is None:
        raise PlacementError("the plan is of no request: place it with --generate PROMPT,NEW")
    return at, placed, answer


def predicted_times(
    question: Question, answer: GenerationAnswer, load: Load, is_median: bool
) -> Callable[[float, float], Times]:
    """Times of a load by residuals of its passes: through the simulator of its traffic where many
    requests share an engine, else of one batch."""
    if not _is_served(question, load):
        per_token_s = answer.token_s * answer.request.steps / answer.request.new
        first_s = answer.first_token_s
        if load.context:
            first_s *= load.prompt / (load.prompt + load.context)

        def of_batch(prefill: float, decode: float) -> Times:
            return Times(first_s * math.exp(prefill), per_token_s * math.exp(decode))

        return of_batch
    engine, traffic = engine_of(answer, question), traffic_of(load)

    def under_load(prefill: float, decode: float) -> Times:
        return served_times(scaled(engine, prefill, decode), traffic, is_median)

    return under_load


def _is_served(question: Question, load: Load) -> bool:
    """True for requests that share an engine; else they are one batch."""
    return engine_name(question) != "llamacpp" and not load.together


def traffic_of(load: Load) -> Traffic:
    """The requests of a load, as a benchmark's client sends them: all clients begin at once."""
    prompt, new = max(1, round(load.prompt)), max(1, round(load.new))
    count = min(max(load.requests, load.concurrency, 1), max(MOST_ASKED, load.concurrency))
    rate = load.rate if math.isfinite(load.rate) else 0.0
    how = f"concurrency={load.concurrency},start=together" if load.concurrency else f"rate={rate:g}"
    if not load.concurrency and not rate:
        how = f"concurrency={count},start=together"
    return parse_traffic(f"{how},prompt={prompt},new={new},requests={count}")


def _require_possible(
    name: str, load: Load, graph: OpGraph, question: Question, measured: Times
) -> None:
    """Raise `MeasurementFileError` where a run is faster than the machine's datasheet allows: all
    its devices together read the bytes of a step, and compute the FLOP of a prompt."""
    devices = question.cluster.devices
    moved = float(graph.memory_traffic_bytes[graph.phase == DECODE].sum())
    least_s = moved / sum(device.bytes_per_s for device in devices)
    if measured.tpot_s < FASTEST * least_s * _share(load, question):
        raise MeasurementFileError(
            f"{name}: {format_seconds(measured.tpot_s)} for a token is less than "
            f"{format_seconds(least_s)}, in which the devices of the plan read "
            f"{format_bytes(round(moved))}; the run had another model, format or machine"
        )
    batch = graph.request.batch if graph.request is not None else 1
    flop = float(graph.flop[graph.phase == PREFILL].sum()) / batch
    flop *= load.prompt / max(load.prompt + load.context, 1)
    peak = sum(max(device.flop_per_s.values()) for device in devices)
    if measured.ttft_s < FASTEST * flop / peak:
        raise MeasurementFileError(
            f"{name}: {format_seconds(measured.ttft_s)} to the first token is less than "
            f"{format_seconds(flop / peak)}, in which the devices of the plan compute "
            f"{flop / 1e12:.3g} TFLOP; the prompts were cached (--no-enable-prefix-caching, other "
            "prompts), or the run had another model or machine"
        )


def _share(load: Load, question: Question) -> float:
    """Share of a step's bytes that is read for certain: weights, where fewer requests ran."""
    graph = question.graph
    held = (graph.weight_bytes - graph.cache_bytes)[graph.weight_holders()].sum()
    moved = graph.memory_traffic_bytes[graph.phase == DECODE].sum()
    return 1.0 if load.concurrency == 1 else min(1.0, 0.5 * float(held) / max(float(moved), 1.0))


def _taught(
    stack: EngineStack, known: Sequence[RunRecord], made: Sequence[RunRecord]
) -> tuple[float, float, tuple[str, ...]]:
    """(error before, error after, what was learned) of the runs that were made now."""
    lessons = lessons_of(made)
    before = float(np.mean([abs(x.residual) for x in lessons])) if lessons else 0.0
    found = shipped_corrections()
    if found is None or not lessons:
        return before, before, words_of(lessons)
    process, _ = found
    rows = process.residuals([x.asked for x in lessons], lessons_of(known))
    after = float(np.mean([abs(x.residual - r.mean) for x, r in zip(lessons, rows, strict=True)]))
    return before, after, words_of(lessons)
