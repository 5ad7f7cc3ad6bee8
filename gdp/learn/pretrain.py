"""A run of pre-training: updates, validation, the best policy, checkpoints to resume from."""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from gdp.base import checkpoint
from gdp.base.errors import MissingExtraError
from gdp.base.files.disk_cache import use_xla_cache
from gdp.base.files.reading import Kind, convert, shipped
from gdp.base.files.writing import (
    OverwritePolicy,
    check_folder_writable,
    check_no_source,
    write_manifest,
)
from gdp.learn.instances import Instance, Problems, draw, is_random, load_problems, parse_key
from gdp.learn.labels import Label, LabelStore, load_labels, quick_labels
from gdp.learn.metrics import METRICS, MetricsLog, draw_curve, progress_bar, read_metrics
from gdp.learn.processes import ProcessGroup
from gdp.learn.recipe import Recipe
from gdp.learn.run_state import RunStateStore
from gdp.learn.trainer import Trainer, TrainState
from gdp.policy.model.network import init
from gdp.policy.policy import Policy, load_policy, save_policy
from gdp.policy.propose import propose

log = logging.getLogger(__name__)

CURVE, LABELS = "curve.png", "labels.jsonl"
FEW = 8
"""Problems that are labelled for validation where no label is of a held-out graph."""
SAMPLES = 16
"""Placements drawn beside the greedy one in validation."""
MISFIT = 5.0
"""Largest cost ratio of an instance; also that of placements that do not fit."""


# Validation.


class Quality(NamedTuple):
    """Geometric means over instances of cost / best known."""

    greedy: float
    best: float  # of the greedy placement and the samples
    feasible: float  # share of greedy placements that fit in memory
    greedy_error: float = np.nan  # relative standard error of `greedy`, over instances
    best_error: float = np.nan


class Outcome(NamedTuple):
    """One instance: costs over the best known, `MISFIT` where nothing fits."""

    instance: Instance
    num_ops: int
    greedy: float
    best: float
    fits: bool  # the greedy placement


TIGHT, LARGE = 1.7, 1000
"""Memory over the fair share up to which an instance is tight; ops from which it is large."""


def validation_outcomes(
    policy: Policy, problems: Problems, labels: LabelStore, instances: list[Instance]
) -> list[Outcome]:
    """Greedy decode and the best of some samples, no repair and no search."""
    outcomes = []
    for instance in instances:
        problem = problems.get(instance)
        label = labels.get(instance, problem)
        if label is None:
            continue
        proposals = propose(policy, problem, SAMPLES + 1, seed=0)
        ratio = np.minimum(proposals.value_s / label.value_s, MISFIT)
        greedy, best, fits = float(ratio[0]), float(ratio.min()), bool(proposals.overflow[0] == 0)
        outcomes.append(Outcome(instance, problem.num_ops, greedy, best, fits))
    return outcomes


def quality_of(outcomes: list[Outcome]) -> Quality:
    """Means over instances; not a number where there are none."""
    if not outcomes:
        return Quality(float("nan"), float("nan"), float("nan"))
    _, _, greedy, best, fits = zip(*outcomes, strict=True)
    return Quality(
        float(np.exp(np.mean(np.log(greedy)))),
        float(np.exp(np.mean(np.log(best)))),
        float(np.mean(fits)),
        _error(greedy),
        _error(best),
    )


def _error(ratios: Sequence[float]) -> float:
    """Standard error of the mean logarithm; not a number of fewer than two."""
    if len(ratios) < 2:
        return float("nan")
    return float(np.std(np.log(ratios), ddof=1) / np.sqrt(len(ratios)))


def by_regime(outcomes: list[Outcome]) -> dict[str, float]:
    """Greedy and best of the tight, the large and the other instances, where there are any."""
    parts: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        tight = 0.0 < outcome.instance.memory <= TIGHT
        name = "tight" if tight else "large" if outcome.num_ops >= LARGE else "ample"
        parts.setdefault(name, []).append(outcome)
    return {
        f"{name}_{field}": value
        for name, part in sorted(parts.items())
        for field, value in quality_of(part)._asdict().items()
        if field in ("greedy", "best")
    }


# The run.


@dataclass(frozen=True, eq=False)
class PretrainResult:
    """Result of a run; `best/` in its folder has the weights."""

    updates: int
    best: Quality
    validated_on: str  # the problems of `best`
    folder: Path


def pretrain(
    recipe: Recipe,
    folder: str | os.PathLike[str],
    *,
    recipe_text: str = "",
    team: ProcessGroup | None = None,
    threads: int = 1,
    stop_after_s: float | None = None,
    stop: Callable[[], bool] | None = None,
    force: bool = False,
) -> PretrainResult:
    """Run a recipe, or resume it where `folder` holds its checkpoint.

    Args:
        recipe: Settings of the run.
        folder: Gets `state/` (to resume from), `best/` and `last/` (policies), `metrics.jsonl`,
            `labels.jsonl`, and with the extra `plots` `curve.png` and `tensorboard/`.
        recipe_text: TOML text of the recipe, kept in checkpoints.
        team: This process among those that train together; None trains alone.
        threads: Threads of rollouts.
        stop_after_s: Seconds after which the run stops, to be resumed.
        stop: Called after every update; True stops the run.
        force: Write among files that gdp did not write.

    Returns:
        The number of updates, and the quality of the best policy by validation, or the last one.

    Raises:
        TargetError: if the folder holds anything but a run, or an output is an input of the recipe.
    """
    if team is None or team.rank == 0:
        _claim(Path(folder), recipe, force)
    use_xla_cache()
    run = _Run(recipe, Path(folder), recipe_text, team or ProcessGroup(), threads)
    return run.go(stop_after_s, stop)


def _claim(folder: Path, recipe: Recipe, force: bool) -> None:
    """Check that a run may write into the folder, and mark it as its own."""
    read = [Path(name) for name in (recipe.start, recipe.data.labels, recipe.data.corpus) if name]
    written = [folder, *(folder / name for name in ("state", "best", "last", LABELS))]
    policy = OverwritePolicy(lambda: read, force)
    check_folder_writable(folder, "run", policy)
    check_no_source(written, policy)
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, "run", {METRICS: "", LABELS: "", CURVE: ""})


class _State(msgspec.Struct):
    """Progress of a run, written with the arrays of its state."""

    step: int
    phase: int
    recipe: str
    best: float | None
    quality: list[float | None] | None  # null: not finite
    past: dict[str, tuple[float | None, int]]


class _Run:
    """One process's part in a run."""

    def __init__(
        self, recipe: Recipe, folder: Path, text: str, team: ProcessGroup, threads: int
    ) -> None:
        self.began = time.monotonic()
        self.recipe, self.folder, self.text, self.team = recipe, folder, text, team
        self.store = RunStateStore(folder / "state", team.rank)
        data = recipe.data
        self.problems = load_problems(
            data.corpus,
            random_graphs=data.random_graphs,
            min_ops=data.min_ops,
            max_ops=data.max_ops,
        )
        self.problems.train.sort()
        self.labels = self._labels()
        train, validation = set(self.problems.train), set(self.problems.validation)
        labelled = self.labels.instances()
        self.held = [i for i in labelled if i.graph in validation][: data.validation]
        count = len({self.problems.family(i.graph) for i in self.held})
        families = "1 family" if count == 1 else f"{count} families"
        self.validated_on = f"{len(self.held)} problems of {families} held out"
        self.held_labels = self.labels

        def is_learned_from(graph: str) -> bool:
            # Labels of random graphs serve beyond the recipe whose sizes they were drawn for.
            random = data.random_graphs > 0 and is_random(graph)
            return (graph in train or random) and graph not in validation

        usable = [label for label in self.labels.all() if is_learned_from(label.instance.graph)]
        if not self.held and team.rank == 0:
            self._hold_some()
        self.trainer = Trainer(recipe, self.problems, LabelStore(usable), team, threads)
        self.best: float = np.inf
        self.best_quality: Quality | None = None

    def go(self, stop_after_s: float | None, stop: Callable[[], bool] | None) -> PretrainResult:
        """Update until the last step, the time limit or `stop`; return the trained state."""
        state = self._start()
        saved = time.monotonic()
        log_metrics = None
        if self.team.rank == 0:
            log_metrics = MetricsLog(self.folder, int(state.step))
        with progress_bar(self.trainer.total, int(state.step)) as draw:
            while int(state.step) < self.trainer.total:
                at, clock, cpu = int(state.step), time.monotonic(), time.process_time()
                state, numbers = self.trainer.update(state)
                numbers |= {
                    "phase": 0 if self.trainer.imitates(at) else 1,
                    "wall_s": round(time.monotonic() - clock, 3),
                    "cpu_s": round(time.process_time() - cpu, 3),
                }
                if (at + 1) % self.recipe.run.validate_every == 0 or at + 1 == self.trainer.total:
                    numbers |= self._validate(state)
                if log_metrics is not None:
                    log_metrics(at, numbers)
                shown = ("cross_entropy", "sample_ratio", "val_greedy", "val_best")
                draw(at + 1, json.dumps({k: round(numbers[k], 3) for k in shown if k in numbers}))
                over = stop_after_s is not None and time.monotonic() - self.began > stop_after_s
                over = over or (stop is not None and stop())
                due = time.monotonic() - saved > 60 * self.recipe.run.checkpoint_minutes
                # Clocks differ, so the first process says what all do.
                agreed = self.team.agree(int(over) + 2 * int(due))
                if agreed & 1:
                    break
                if agreed & 2:
                    self._save(state)
                    saved = time.monotonic()
        self._save(state)
        quality = self.best_quality
        if quality is None:  # stopped before the first validation: the next one is better
            quality = self._quality(state)[0]
            self._ship(state, "best", quality)
        if self.team.rank == 0:
            try:
                draw_curve(read_metrics(self.folder / METRICS), self.folder / CURVE)
            except MissingExtraError as error:
                log.info("no picture: %s", error)
        return PretrainResult(int(state.step), quality, self.validated_on, self.folder)

    def _hold_some(self) -> None:
        """Label a few problems for validation, where no label is of a held-out graph.

        They are of the recipe's only problems, of graphs held out, or else of those to learn from,
        and the same ones at each start.
        """
        data, held_out = self.recipe.data, self.problems.validation
        if data.instances:
            todo = [parse_key(key) for key in data.instances][:FEW]
        else:
            rng = np.random.default_rng([self.recipe.seed, 9])
            graphs = held_out or self.problems.train
            chosen = [graphs[int(k)] for k in rng.permutation(len(graphs))[:FEW]]
            todo = [
                draw(rng, [name], limited=data.limited, memory=data.memory)
                for name in chosen[: data.validation]
            ]
        self.held, self.held_labels = quick_labels(self.problems, todo, self.recipe.seed)
        what = "held out" if held_out and not data.instances else "that were also learned from"
        self.validated_on = f"{len(self.held)} problems {what}"

    def _labels(self) -> LabelStore:
        """The run's own labels where it resumes, the recipe's otherwise."""
        if (self.folder / LABELS).exists():
            return load_labels(self.folder / LABELS)
        shared = self.recipe.data.labels
        return load_labels(shipped(shared)) if shared else LabelStore([])

    def _start(self) -> TrainState:
        network = self.recipe.network
        if self.recipe.start:
            start = load_policy(shipped(self.recipe.start))
            if start.config != network:
                raise checkpoint.CheckpointError(
                    f"checkpoint {self.recipe.start!r} has another network than the recipe; copy "
                    "its [network] table"
                )
            params = start.params
        else:
            params = init(network, self.recipe.seed)
        state = self.trainer.fresh(params)
        found = self.store.meta()
        if found is None:
            return state
        where = f"checkpoint {str(self.folder / 'state')!r}"
        kind = Kind("state of a training run", checkpoint.CheckpointError)
        meta = convert(found, kind, _State, where)
        if meta.recipe != repr(self.recipe):
            raise checkpoint.CheckpointError(
                f"{str(self.folder)!r} holds a run of another recipe; give a new folder"
            )
        self.best = np.inf if meta.best is None else meta.best
        if meta.quality is not None:
            # JSON has neither infinity nor what is no number.
            missing = (*[np.inf] * 3, np.nan, np.nan)
            pairs = zip(meta.quality, missing, strict=False)  # earlier runs have no errors
            self.best_quality = Quality(*(y if x is None else x for x, y in pairs))
        self.trainer.past = {
            key: (mean, count) for key, (mean, count) in meta.past.items() if mean is not None
        }
        if meta.phase == 1:
            state = state._replace(optimiser=self.trainer.transforms[1].init(state.params))
        log.info("resuming at update %d", meta.step)
        return TrainState(*self.store.tree(state))

    def _save(self, state: TrainState) -> None:
        at = int(state.step)
        self._share_labels()
        if self.team.rank == 0:
            improved = self.trainer.labels
            labels = [improved.get(label.instance) or label for label in self.labels.all()]
            LabelStore(labels).save(self.folder / LABELS)
        meta = {
            "step": at,
            # At the border between phases the optimiser is still the first phase's.
            "phase": 0 if at <= self.recipe.imitation.updates else 1,
            "recipe": repr(self.recipe),
            "best": None if np.isinf(self.best) else self.best,
            "quality": self.best_quality,
            "past": self.trainer.past,
        }
        with self.team.together():
            self.store.save(at, state, meta)
        self._ship(state, "last", None)

    def _share_labels(self) -> None:
        """Every process gets the labels that the others have improved, resumed or not."""
        encoded = msgspec.json.encode(self.trainer.labels.all())
        for labels in self.team.gather(encoded):
            self.trainer.labels.merge(msgspec.json.decode(labels, type=list[Label]))

    def _validate(self, state: TrainState) -> dict[str, float]:
        """Numbers of the first process; all of them write the policy where it is the best yet."""
        quality, parts = self._quality(state)
        value = np.sqrt(quality.greedy * quality.best)
        better = np.isfinite(value) and value < self.best
        if self.team.agree(int(better)):
            self.best, self.best_quality = float(value), quality
            self._ship(state, "best", quality)
        return {f"val_{name}": float(x) for name, x in quality._asdict().items()} | parts

    def _quality(self, state: TrainState) -> tuple[Quality, dict[str, float]]:
        """(quality on the held-out problems, the same by regime); nothing but in process 0."""
        if self.team.rank > 0:
            return Quality(np.nan, np.nan, np.nan), {}
        policy = Policy(self.recipe.network, state.averaged, self.recipe.name)
        outcomes = validation_outcomes(policy, self.problems, self.held_labels, self.held)
        parts = {f"val_{key}": value for key, value in by_regime(outcomes).items()}
        return quality_of(outcomes), parts

    def _ship(self, state: TrainState, name: str, quality: Quality | None) -> None:
        numbers = {} if quality is None else quality._asdict()
        numbers = {key: x for key, x in numbers.items() if not np.isnan(x)}
        validation = {"validation": numbers} if numbers else {}
        with self.team.together():
            save_policy(
                Policy(self.recipe.network, state.averaged, self.recipe.name),
                self.folder / name, recipe=self.text, force=True,
                updates=int(state.step), **validation,
            )  # fmt: skip
