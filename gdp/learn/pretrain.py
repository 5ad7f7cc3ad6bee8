"""Pre-training over many graphs: imitation, then PPO, validation, checkpoints to resume from."""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from gdp import checkpoint
from gdp.errors import GdpError, MissingExtraError
from gdp.files.kept import use_xla_cache
from gdp.files.reading import Kind, convert
from gdp.files.writing import (
    OverwritePolicy,
    check_folder_writable,
    check_no_source,
    resolve_after_crash,
    write_atomic,
    write_manifest,
)
from gdp.learn.curve import draw_curve, read_metrics
from gdp.learn.instances import Instance, Problems, draw, is_random, load_problems, parse_key
from gdp.learn.labelling import quick_labels
from gdp.learn.labels import Label, LabelStore, load_labels
from gdp.learn.processes import ProcessGroup
from gdp.learn.recipe import Recipe
from gdp.learn.trainer import Trainer, TrainState
from gdp.policy.model.network import init
from gdp.policy.policy import Policy, load_policy, save_policy
from gdp.policy.propose import propose
from gdp.resources import shipped
from gdp.version import install_command

CURVE = "curve.png"
FEW = 8
"""Problems that are labelled for validation where no label is of a held-out graph."""
MISFIT = 5.0
"""Largest cost ratio of an instance; also that of placements that do not fit."""


class Quality(NamedTuple):
    """Geometric means over instances of cost / best known."""

    greedy: float
    best: float  # of the greedy placement and the samples
    feasible: float  # share of greedy placements that fit in memory


class Outcome(NamedTuple):
    """One instance: costs over the best known, `MISFIT` where nothing fits."""

    instance: Instance
    num_ops: int
    greedy: float
    best: float
    fits: bool  # the greedy placement


TIGHT, LARGE = 1.7, 1000
"""Memory over the fair share up to which an instance is tight; ops from which it is large."""


def outcomes(
    policy: Policy,
    problems: Problems,
    labels: LabelStore,
    instances: list[Instance],
    *,
    samples: int = 16,
    seed: int = 0,
) -> list[Outcome]:
    """Greedy decode and the best of some samples, no repair and no search."""
    made = []
    for instance in instances:
        problem = problems.get(instance)
        label = labels.get(instance, problem)
        if label is None:
            continue
        found = propose(policy, problem, samples + 1, seed)
        cost_s = np.minimum(found.value_s, MISFIT * label.value_s)
        ratio, fits = cost_s / label.value_s, bool(found.overflow[0] == 0)
        made.append(Outcome(instance, problem.num_ops, float(ratio[0]), float(ratio.min()), fits))
    return made


def quality_of(found: list[Outcome]) -> Quality:
    """Means over instances; not a number where there are none."""
    if not found:
        return Quality(float("nan"), float("nan"), float("nan"))
    _, _, greedy, best, fits = zip(*found, strict=True)
    return Quality(
        float(np.exp(np.mean(np.log(greedy)))),
        float(np.exp(np.mean(np.log(best)))),
        float(np.mean(fits)),
    )


def by_regime(found: list[Outcome]) -> dict[str, float]:
    """Greedy and best of the tight, the large and the other instances, where there are any."""
    parts: dict[str, list[Outcome]] = {}
    for one in found:
        tight = 0.0 < one.instance.memory <= TIGHT
        name = "tight" if tight else "large" if one.num_ops >= LARGE else "ample"
        parts.setdefault(name, []).append(one)
    return {
        f"{name}_{field}": value
        for name, part in sorted(parts.items())
        for field, value in quality_of(part)._asdict().items()
        if field != "feasible"
    }


log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PretrainResult:
    """Result of a run."""

    policy: Policy  # averaged weights of the best validation, or the last
    updates: int
    best: Quality
    validated_on: str  # the problems of `best`
    folder: Path
    history: list[dict] = field(default_factory=list)


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
        The best policy by validation, or the last one, with the log.

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
    written = [folder, *(folder / name for name in ("state", "best", "last", "labels.jsonl"))]
    policy = OverwritePolicy(lambda: read, force)
    check_folder_writable(folder, "run", policy)
    check_no_source(written, policy)
    folder.mkdir(parents=True, exist_ok=True)
    write_manifest(folder, "run", {"metrics.jsonl": "", "labels.jsonl": "", CURVE: ""})


class _State(msgspec.Struct):
    """Keys of `meta.json` that `_Run._save` adds."""

    step: int
    phase: int
    recipe: str
    best: float | None
    quality: tuple[float | None, float | None, float | None] | None  # null: not finite
    past: dict[str, tuple[float | None, int]]


class _Run:
    """One process's part in a run."""

    def __init__(
        self, recipe: Recipe, folder: Path, text: str, team: ProcessGroup, threads: int
    ) -> None:
        self.recipe, self.folder, self.text, self.team = recipe, folder, text, team
        data = recipe.data
        self.problems = load_problems(
            data.corpus,
            random_graphs=data.random_graphs,
            min_ops=data.min_ops,
            max_ops=data.max_ops,
        )
        self.labels = self._labels()
        known = self.labels.instances()
        validation = set(self.problems.validation)
        self.held = [i for i in known if i.graph in validation][: data.validation]
        count = len({self.problems.family(i.graph) for i in self.held})
        families = "1 family" if count == 1 else f"{count} families"
        self.validated_on = f"{len(self.held)} problems of {families} held out"
        self.held_labels = self.labels
        usable = set(data.graphs or self.problems.train)
        self.problems.train = sorted(usable)
        # Labels of random graphs serve beyond the recipe whose sizes they were drawn for.
        random = not data.graphs and data.random_graphs > 0
        learnt = [
            i for i in known
            if (i.graph in usable or (random and is_random(i.graph))) and i.graph not in validation
        ]  # fmt: skip
        if not self.held and team.rank == 0:
            self._hold_some()
        self.trainer = Trainer(recipe, self.problems, _only(self.labels, learnt), team, threads)
        self.best: float = np.inf
        self.best_quality: Quality | None = None

    def go(self, stop_after_s: float | None, stop: Callable[[], bool] | None) -> PretrainResult:
        """Update until the last step, the time limit or `stop`; what was learned so far."""
        state = self._start()
        begin, saved = time.monotonic(), time.monotonic()
        say = sinks(self.folder, int(state.step)) if self.team.rank == 0 else []
        history = []
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
                for sink in say:
                    sink(at, numbers)
                history.append({"step": at, **numbers})
                draw(at + 1, _summary(numbers))
                over = stop_after_s is not None and time.monotonic() - begin > stop_after_s
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
            self._draw()
        return PretrainResult(
            self._result(state), int(state.step), quality, self.validated_on, self.folder, history
        )

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

    def _draw(self) -> None:
        try:
            draw_curve(read_metrics(self.folder / "metrics.jsonl"), self.folder / CURVE)
        except MissingExtraError as error:
            log.info("no picture: %s", error)

    def _labels(self) -> LabelStore:
        """The run's own labels where it resumes, the recipe's otherwise."""
        own = self.folder / "labels.jsonl"
        if own.exists():
            return load_labels(own)
        shared = self.recipe.data.labels
        return load_labels(shipped(shared)) if shared else LabelStore([])

    def _start(self) -> TrainState:
        network = self.recipe.network
        if self.recipe.start:
            found = load_policy(self.recipe.start)
            if found.config != network:
                raise checkpoint.CheckpointError(
                    f"checkpoint {self.recipe.start!r} has another network than the recipe; copy "
                    "its [network] table"
                )
            params = found.params
        else:
            params = init(network, self.recipe.seed)
        state = self.trainer.fresh(params)
        if not (resolve_after_crash(self.folder / "state") / "meta.json").exists():
            return state
        where = f"checkpoint {str(self.folder / 'state')!r}"
        kind = Kind("state of a training run", checkpoint.CheckpointError)
        meta = convert(checkpoint.read_meta(self.folder / "state"), kind, _State, where)
        # Older runs name a setting that is gone and was off.
        if meta.recipe.replace(", clip_whole=False", "") != repr(self.recipe):
            raise checkpoint.CheckpointError(
                f"{str(self.folder)!r} holds a run of another recipe; give a new folder"
            )
        self.best = np.inf if meta.best is None else meta.best
        if meta.quality is not None:
            self.best_quality = Quality(*(np.inf if x is None else x for x in meta.quality))
        self.trainer.past = {
            key: (mean, count) for key, (mean, count) in meta.past.items() if mean is not None
        }
        if meta.phase == 1:
            state = state._replace(optimiser=self.trainer.transforms[1].init(state.params))
        log.info("resuming at update %d", meta.step)
        return TrainState(*checkpoint.load(self.folder / "state", state))

    def _save(self, state: TrainState) -> None:
        at = int(state.step)
        self._share_labels()
        if self.team.rank == 0:
            merged = _merge(self.labels, self.trainer.labels)
            merged.save(self.folder / "labels.jsonl")
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
            # Forced: `_claim` has asked, and hours of work shall not end here.
            checkpoint.save(self.folder / "state", state, recipe=self.text, force=True, meta=meta)
        self._ship(state, "last", None)

    def _share_labels(self) -> None:
        """Every process gets the labels that the others have improved, resumed or not."""
        own = msgspec.json.encode(self.trainer.labels.all())
        for said in self.team.gather(own):
            self.trainer.labels.merge(msgspec.json.decode(said, type=list[Label]))

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
        results = outcomes(policy, self.problems, self.held_labels, self.held)
        parts = {f"val_{key}": value for key, value in by_regime(results).items()}
        return quality_of(results), parts

    def _ship(self, state: TrainState, name: str, quality: Quality | None) -> None:
        said = {} if quality is None else {"validation": quality._asdict()}
        with self.team.together():
            save_policy(
                Policy(self.recipe.network, state.averaged, self.recipe.name),
                self.folder / name, recipe=self.text, force=True,
                updates=int(state.step), **said,
            )  # fmt: skip

    def _result(self, state: TrainState) -> Policy:
        if (resolve_after_crash(self.folder / "best") / "meta.json").exists():
            return load_policy(self.folder / "best")
        return Policy(self.recipe.network, state.averaged, self.recipe.name)


def _only(labels: LabelStore, instances: list[Instance]) -> LabelStore:
    found = [labels.get(instance) for instance in instances]
    return LabelStore([label for label in found if label is not None])


def _merge(base: LabelStore, better: LabelStore) -> LabelStore:
    """All labels of `base`, those in `better` in its version; order kept."""
    merged = []
    for instance in base.instances():
        label = better.get(instance) or base.get(instance)
        assert label is not None
        merged.append(label)
    return LabelStore(merged)


def _summary(numbers: dict) -> str:
    shown = ("cross_entropy", "sample_ratio", "val_greedy", "val_best")
    return json.dumps({k: round(numbers[k], 3) for k in shown if k in numbers})


# Metrics of a run: JSON lines, TensorBoard where it is installed, a progress bar


Sink = Callable[[int, dict[str, Any]], None]
"""Takes the step and its numbers."""


class JsonLines:
    """Appends one object per call.

    On resume, lines from the checkpoint's step on are dropped, and a last line that a killed run
    left unfinished. Raises `GdpError` where another line is no object with a step.
    """

    def __init__(self, path: Path, from_step: int) -> None:
        self._path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        write_atomic(
            path,
            [line for at, line in enumerate(lines, 1) if _step(line, path, at) < from_step],
        )

    def __call__(self, step: int, numbers: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")


def _step(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise GdpError(
            f"{path}, line {number}: is not a line of metrics; remove it to go on"
        ) from None


class TensorBoard:
    """Scalars in TensorBoard's format, through tensorboardX (extra `plots`)."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), flush_secs=30)

    def __call__(self, step: int, numbers: dict[str, Any]) -> None:
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)


def sinks(folder: Path, from_step: int) -> list[Sink]:
    """JSON lines always; TensorBoard where it is installed."""
    found: list[Sink] = [JsonLines(folder / "metrics.jsonl", from_step)]
    try:
        found.append(TensorBoard(folder / "tensorboard"))
    except ImportError:
        log.info("no TensorBoard files: %s", install_command("plots"))
    return found


@contextlib.contextmanager
def progress_bar(total: int, done: int, name: str = "training") -> Iterator[Any]:
    """A function (step, text) that draws a bar; it does nothing away from a terminal."""
    if not sys.stderr.isatty():
        yield lambda step, text: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda step, text: bar.update(task, completed=step, description=text)
