"""The call `next_trial`: settings of an engine, chosen by files of its own benchmark alone.

A trial is a folder with a placement, and the lines that start the engine and measure it. Results
of the trials so far correct the predictions of all settings; the next trial is the one of most
expected improvement over the best measured one (Jones, Schonlau and Welch, 1998; of log-normal
times), until that is below what a measurement tells apart.
"""

import hashlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gdp.api.measured.learn import learn_runs
from gdp.api.measured.settings import (
    Figures,
    SettingPlan,
    SettingPlans,
    llama_settings,
    request_figures,
    served_settings,
)
from gdp.api.measured.trial_files import (
    PLACEMENT,
    RECORD,
    SCHEMA,
    EngineTrial,
    TrialRecord,
    read_trials,
)
from gdp.api.measured.words import words_of
from gdp.api.run import export_job
from gdp.base.errors import ArgumentError, PlacementError
from gdp.base.files.reading import read_bytes
from gdp.base.files.writing import OverwritePolicy, indented_json, new_contents, write_atomic
from gdp.base.rows import imported
from gdp.base.version import gdp_version
from gdp.cluster.file import Machine, cluster_toml, load_cluster
from gdp.corrections import records
from gdp.corrections.estimate import lessons_of
from gdp.corrections.records import RunRecord
from gdp.corrections.run import Load, MeasurementFileError
from gdp.importers.spec import HF_PREFIX, ModelSpec
from gdp.placement.constraints import Constraints
from gdp.placement.placement import save_placement
from gdp.question.models import is_gguf, spec_of
from gdp.sim.traffic import Traffic
from gdp.sim.traffic_text import NO_LIMITS, TrafficLimits, parse_limits, parse_traffic
from gdp.targets.measured_files import FILE, read_runs
from gdp.targets.table import EXPORTERS, TARGETS

ENGINES = ("vllm", "sglang", "llamacpp")
SPREAD = 0.02
"""Relative difference that measurements tell apart at best."""
OTHER_LOAD = 1.2
"""Factor between the sizes of a measured load and those of a trial beyond which it is another."""


@dataclass(frozen=True)
class Trials:
    """All trials of a folder, what they taught, and the next one."""

    folder: Path
    model: str
    engine: str
    trials: tuple[EngineTrial, ...]  # measured
    next: EngineTrial | None  # None: the best one is found
    spread: float
    learned: tuple[str, ...] = ()  # of all trials, in sentences
    expected_gain: float | None = None  # the largest of those settings that were not tried
    untried: int = 0
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> EngineTrial | None:
        """The best measured trial."""
        return min(self.trials, key=lambda trial: trial.mean.value, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "folder": str(self.folder), "model": self.model, "engine": self.engine,
            "finished": self.next is None, "trials": [one.to_json() for one in self.trials],
            "best": None if self.best is None else self.best.record.trial,
            "next": None if self.next is None else self.next.to_json(),
            "learned": list(self.learned), "spread": self.spread,
            "expected_gain": self.expected_gain, "untried": self.untried,
            "notes": list(self.notes),
        }  # fmt: skip


def next_trial(
    model: str | Path,
    cluster: Machine,
    engine: str,
    *,
    traffic: Traffic | str | None = None,
    within: TrafficLimits | str | None = None,
    folder: str | Path | None = None,
    result: str | Path | None = None,
    force: bool = False,
    **parts: Any,
) -> Trials:
    """Learn from the results of all trials so far, and write the next one.

    Args:
        model: A configuration (`hf:`) for vLLM or SGLang; a .gguf file with the tokens of a request
            (`gdp.Generation`, or `?prompt=2048&new=256`) for llama.cpp.
        cluster: As `gdp.place` takes it; it need not be this machine.
        engine: "vllm", "sglang" or "llamacpp", which need not be installed.
        traffic: As `gdp.serve` takes it, of requests of one length, for vLLM and SGLang.
        within: As `gdp.serve` takes it.
        folder: Of the trials; default: tune-NAME in the working directory.
        result: A result file of the last trial, where it is not in its folder.
        force: Write among files that gdp did not write.
        **parts: Further arguments of `gdp.place`, such as constraints.

    Raises:
        ArgumentError: The engine does not serve this, or the folder is of other arguments.
        MeasurementFileError: A result file is cut short, or of another load or model.
        InfeasibleError: Nothing fits.
    """
    asked = _Asked.of(spec_of(model), cluster, engine, traffic, within, parts)
    path = Path(folder if folder is not None else f"tune-{asked.name}")
    trials = read_trials(path, asked.texts())
    if result is not None:
        _take(trials, Path(result), asked)
    trials = [replace(trial, measured=asked.figures(trial, trial.results)) for trial in trials]
    done = tuple(trial for trial in trials if trial.measured)
    learned = [asked.learned(trial, trial.results) for trial in done]
    words = words_of(lessons_of([run for runs in learned for run in runs]))
    step = Trials(path, asked.model, engine, done, None, _spread(done), words, notes=_notes(done))
    if waiting := next((trial for trial in trials if not trial.measured), None):
        record = waiting.record
        return replace(step, next=waiting, expected_gain=record.gain, untried=record.untried)
    return _chosen(step, asked, OverwritePolicy(force=force))


@dataclass(frozen=True)
class _Asked:
    """The arguments of a call, once they are read."""

    model: str
    engine: str
    traffic: Traffic | None  # None: one request
    within: TrafficLimits
    parts: dict[str, Any]

    @classmethod
    def of(
        cls, model: str, cluster: Machine, engine: str, traffic: Traffic | str | None,
        within: TrafficLimits | str | None, parts: dict[str, Any],
    ) -> "_Asked":  # fmt: skip
        """The arguments; raises `ArgumentError` where the engine does not serve this."""
        if engine not in ENGINES:
            raise ArgumentError(f"no engine {engine!r} to tune; there are {', '.join(ENGINES)}")
        spec, is_served = ModelSpec.of(model), engine != "llamacpp"
        if is_served and (traffic is None or not model.startswith(HF_PREFIX)):
            raise ArgumentError(
                f"{engine} is tuned for requests of --traffic to an hf: model; got "
                f"{model!r}{'' if traffic else ' without --traffic'}"
            )
        if not is_served and (traffic is not None or within or not is_gguf(model)):
            raise ArgumentError(
                "llamacpp is tuned for a request (--generate) to a .gguf model, which has no "
                "--traffic and no --within"
            )
        if not is_served and (
            "prompt" not in spec.options or spec.options.get("batch", "1") != "1"
        ):
            raise ArgumentError(
                "llama-bench measures one request at a time: give --generate prompt=2048,new=256"
            )
        limits = parse_limits(within) if isinstance(within, str) else within or NO_LIMITS
        costs = parts.get("costs") or ("sglang" if engine == "sglang" else None)
        target = "vllm" if is_served else "llamacpp"  # SGLang runs plans for vLLM
        parts = {**parts, "cluster": load_cluster(cluster), "target": target, "costs": costs}
        return cls(model, engine, None if traffic is None else _measurable(traffic), limits, parts)

    @property
    def name(self) -> str:
        """The last name of the model, for a folder."""
        path = Path(ModelSpec.of(self.model).path.removeprefix(HF_PREFIX))
        if path.suffix == ".json":
            path = path.parent.resolve()
        return path.name.removesuffix(".gguf") or "model"

    def texts(self) -> dict[str, str]:
        """Arguments that trials of one folder have in common, or their digests."""
        return {
            "model": self.model, "engine": self.engine,
            "cluster": _digest(cluster_toml(self.parts["cluster"]).encode()),
            "traffic": "" if self.traffic is None else _digest(repr(self.traffic).encode()),
            "limits": repr(tuple(self.within)), "costs": str(self.parts["costs"] or ""),
            "constraints": _digest(repr(self.parts.get("constraints") or Constraints()).encode()),
        }  # fmt: skip

    def settings(self) -> SettingPlans:
        """All settings, predicted with all runs so far."""
        if self.traffic is None:
            return llama_settings(self.parts, self.model)
        return served_settings(self.parts, self.model, self.traffic, self.within)

    def learned(self, trial: EngineTrial, files: Sequence[Path]) -> tuple[RunRecord, ...]:
        """Lessons of the result files of a trial, which are remembered; they stay beside the files,
        and are those of the first call ever after."""
        texts = [gdp_version(), *(_digest(read_bytes(path, FILE, unpack=False)) for path in files)]
        path = trial.folder / f"runs-{_digest(' '.join(texts).encode())}.json"
        if path.is_file():
            runs = records.read_runs(path)
            known = {run.subject for run in records.remembered().values()}
            records.remember([run for run in runs if run.subject not in known])
            return runs
        plan = str(trial.folder / PLACEMENT)
        runs = learn_runs(files, plan=plan, costs=self.parts["costs"]).runs
        write_atomic(path, records.exported(runs))
        return runs

    def figures(self, trial: EngineTrial, files: Sequence[Path]) -> tuple[Figures, ...]:
        """Figures of each repetition of a trial; raises `MeasurementFileError` for files of another
        load."""
        loads = [(path, load) for path in files for run in read_runs(path) for load in run.loads]
        if self.traffic is not None:
            return tuple(self._served(path, load, trial) for path, load in loads)
        request = ModelSpec.of(self.model).options
        prompt, new = int(request["prompt"]), int(request["new"])
        firsts = [x.ttft_s for _, x in loads if (x.prompt, x.new, x.context) == (prompt, 0, 0)]
        steps = [x.tpot_s for _, x in loads if (x.prompt, x.new, x.context) == (0, new, prompt)]
        if files and (not firsts or len(firsts) != len(steps)):
            raise MeasurementFileError(
                f"{files[0]} lacks a prompt of {prompt} tokens, or {new} tokens behind it "
                f"(-d {prompt}); run the benchmark of {trial.name} as gdp printed it"
            )
        pairs = zip(firsts, steps, strict=True)
        return tuple(request_figures(new, a or 0.0, b or 0.0) for a, b in pairs)

    def _served(self, path: Path, load: Load, trial: EngineTrial) -> Figures:
        traffic = self.traffic
        assert traffic is not None
        flight = load.concurrency or (load.requests if math.isinf(load.rate) else 0)
        clients = min(traffic.concurrency, len(traffic.requests))
        pairs = (load.prompt, traffic.prompt), (load.new, traffic.new), (flight, clients)
        pairs += () if clients else ((load.rate, traffic.rate),)
        if any(max(a, b) > OTHER_LOAD * min(a, b) for a, b in pairs):
            raise MeasurementFileError(
                f"{path} is of requests of {load.prompt:g} + {load.new:g} tokens, "
                f"{_arriving(flight, load.rate)}, and {trial.name} asks for {traffic.prompt} + "
                f"{traffic.new}, {_arriving(clients, traffic.rate)}; run its benchmark as gdp "
                "printed it"
            )
        first_s = load.ttft_s if load.ttft_s is not None else load.ttft_median_s
        token_s = load.tpot_s if load.tpot_s is not None else load.tpot_median_s
        if first_s is None or (token_s is None and traffic.new > 1):
            raise MeasurementFileError(f"{path} tells no TTFT or no TPOT; measure both")
        token_s, middle = token_s or 0.0, trial.record.predicted[1]
        # Where a file lacks percentiles, these are as far above the means as predicted.
        late = middle.first_p95_s / middle.first_token_s, 1.0
        if middle.token_s:
            late = late[0], middle.token_p95_s / middle.token_s
        p95 = load.ttft_p95_s or first_s * late[0], load.tpot_p95_s or token_s * late[1]
        request_s = first_s + token_s * (traffic.new - 1)
        return Figures(first_s, token_s, request_s, self.within.share(*p95), *p95)


def _measurable(traffic: Traffic | str) -> Traffic:
    """Traffic as the clients of a benchmark send it: all begin at once."""
    traffic = parse_traffic(traffic) if isinstance(traffic, str) else traffic
    one_length = len({(request.prompt, request.new) for request in traffic.requests}) == 1
    if not one_length or not (traffic.concurrency or traffic.rate):
        raise ArgumentError(
            "a benchmark sends requests of one length, at one rate or so many at once: give "
            "--traffic such as concurrency=32,prompt=2048,new=256"
        )
    return replace(traffic, together=traffic.concurrency > 0)


def _arriving(flight: float, rate: float) -> str:
    return f"{flight:g} at once" if flight else f"{rate:g} a second"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _notes(trials: Sequence[EngineTrial]) -> tuple[str, ...]:
    """Remarks of the readers on result files."""
    notes = [
        f"{trial.name}: {note}"
        for trial in trials
        for path in trial.results
        for run in read_runs(path)
        for note in run.notes
    ]
    return tuple(dict.fromkeys(notes))


def _take(trials: Sequence[EngineTrial], result: Path, asked: _Asked) -> None:
    """Copy a result file to the last trial, once nothing refuses it."""
    if not trials:
        raise ArgumentError("there is no trial yet: leave out --result, and run the first one")
    data, trial = read_bytes(result, FILE), trials[-1]
    for one in trials:
        if any(read_bytes(path, FILE) == data for path in one.results):
            raise MeasurementFileError(
                f"{result} is the result of {one.name} already; give that of {trial.name}, or "
                "leave out --result"
            )
    asked.figures(trial, [result])
    asked.learned(trial, [result])
    count = len(trial.results)
    write_atomic(trial.result if not count else trial.folder / f"result-{count + 1}.json", data)


def _spread(trials: Sequence[EngineTrial]) -> float:
    """The relative deviation of repeated measurements, at least `SPREAD`."""
    logs = [[math.log(one.request_s) for one in trial.measured] for trial in trials]
    variances = [statistics.variance(own) for own in logs if len(own) > 1]
    return max(SPREAD, math.sqrt(statistics.fmean(variances)) if variances else 0.0)


def _chosen(step: Trials, asked: _Asked, policy: OverwritePolicy) -> Trials:
    """The next trial, which is written: first the best of the predictions, then the one of most
    expected improvement."""
    found, best = asked.settings(), step.best
    notes = [*step.notes, *found.left_out]
    tried = {trial.record.setting: trial.mean for trial in step.trials}
    rows = [row for row in found.rows if row.setting not in tried]
    gains = dict.fromkeys((row.setting for row in rows), None)
    if best is not None:
        known = [(row, tried[row.setting]) for row in found.rows if row.setting in tried]
        gains = {row.setting: row.gain(best.mean, known, step.spread) for row in rows}
        rows.sort(key=lambda row: -gains[row.setting])
    for k, row in enumerate(rows):
        gain = gains[row.setting]
        step = replace(step, untried=len(rows) - k, expected_gain=gain, notes=tuple(notes))
        if gain is not None and gain < step.spread:
            return step
        try:
            return replace(step, next=_written(step, asked, row, policy))
        except PlacementError as error:
            notes.append(f"{row.layout}, {row.setting.text}: {error}")
    if best is None:
        raise PlacementError(notes[-1])
    return replace(step, untried=0, expected_gain=None, notes=tuple(notes))


def _written(step: Trials, asked: _Asked, row: SettingPlan, policy: OverwritePolicy) -> EngineTrial:
    """The folder of a trial."""
    number = len(step.trials) + 1
    folder = step.folder / f"trial-{number}"
    job, exporter = export_job(row.result), EXPORTERS[asked.engine]
    assert job is not None
    start = imported(exporter.commands)(job)
    measure = imported(TARGETS[asked.engine].benchmark)
    benchmark = measure(job, asked.traffic, folder / "result.json")
    record = TrialRecord(
        SCHEMA, asked.texts(), number, row.setting, row.layout, row.predicted, step.expected_gain,
        step.untried, start, benchmark,
    )  # fmt: skip
    with new_contents(folder, "trial", policy) as made:
        save_placement(row.result.placement, made / PLACEMENT)
        (made / RECORD).write_bytes(indented_json(record) + b"\n")
    return EngineTrial(record, folder)
