"""Steps of serving engines beside measured ones: ML.ENERGY's and LLM-Pilot's rows.

    python -m benchmarks.measured_world mlenergy --rows mlenergy_serving.csv [--data FOLDER]
        [--configs FOLDER] [--every K] [--json FILE] [NAME ...]
    python -m benchmarks.measured_world pilot --rows llm_pilot.csv --configs FOLDER [...]

`mlenergy_serving.csv` has columns model, task, gpu, gpus, tensor, expert, data, batch_mean,
new_tokens_mean, tokens_per_s and itl_ms_median: vLLM 0.11.1 that always runs so many requests. Each
prompt has the mean tokens of its task (634 of lm-arena-chat, 224 of gpqa; ML.ENERGY's post on its
leaderboard 3.0), and each answer those of the column, mean of a model. sourcegraph-fim, of whose
prompts nothing is told, and GPUs that share no layer are left out. `llm_pilot.csv` has columns
model, gpu, gpus, users, prompt_tokens_mean, new_tokens_mean and itl_ms_median: Hugging Face's TGI
of 2023, whose users ask again when they are answered.

A configuration is a file MODEL_config.json, with "--" for "/", of `--configs` or of AIConfigurator
(`serving --help`), as it is. Each row is `gdp place --for vllm --generate` on one GPU, or with all
layers in the layout of the row on several. A pass with as many tokens of prompts as passes have in
the median is compared with the median of the seconds between two tokens; the mean of the same plan
under its clients with their requests over tokens/s. Rows with more requests than caches have room
for are left out, as those of one prompt share caches there.
NAME limits rows to models that contain it, `--every K` to every K-th batch of a model, in order.
"""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import click
import numpy as np

from benchmarks.measured_world.serving import GET, configuration, installed, plan_of
from benchmarks.measured_world.serving_runs import Run
from benchmarks.tables import head
from gdp.base.errors import GdpError
from gdp.cluster.file import load_cluster
from gdp.sim.serving import ServingEngine, in_steady_state, serve
from gdp.sim.traffic import ROUNDS, Arrival, Traffic

PROMPTS = {"lm-arena-chat": 634, "gpqa": 224}
"""Mean tokens of a prompt by task: docs/posts/ml-energy-leaderboard-v3.0.md of ml-energy/blog."""

SPREAD = {"lm-arena-chat": 2.0}
"""Deviation of the logarithm of prompt lengths, by task; 0 elsewhere. Chosen by hand: tokens that
are late by a prompt (`itl_ms_p95` of Llama 3.1 70B on H100) say that five of six prompts have under
450 tokens where the mean is 634. 1.5 to 3 give the same errors, median within 0.1%, mean 0.2%."""
PASSES = 10_001
NO_ROOM = "caches have no room for so many requests of mean lengths, which shared their prompts"
"""Why there is no prediction."""

PILOT_GPUS = {"A100": "a100-40"}
"""Presets of GPUs that LLM-Pilot names otherwise: its A100 have 40 GB."""
COSTS = {"vllm": "vllm-0.11"}
"""Row of the engines of gdp, as of `--costs`, whose steps those of a row are."""


@dataclass(frozen=True)
class Step:
    """A measured engine under so many requests at once."""

    run: Run  # its seconds of a token are the median between two tokens
    mean_s: float  # requests over tokens a second; nan where others wait
    watts: float = math.nan  # of all GPUs
    joules: float = math.nan  # of all GPUs, per token

    @property
    def kinds(self) -> tuple[str, ...]:
        """Groups that errors are told for."""
        run = self.run
        gpus = "one GPU" if run.tensor == 1 else f"{run.tensor} GPUs"
        return "all", gpus, run.model, run.system, f"{_decade(run.batch)} at once"


def _decade(batch: int) -> str:
    """Requests at once, in powers of four."""
    low = 4 ** int(math.log(max(batch, 1), 4) + 1e-9)
    return f"{low} to {4 * low - 1}"


def mlenergy_steps(path: Path, wanted: Iterable[str] = ()) -> list[Step]:
    """The rows of ML.ENERGY whose prompts are told, of GPUs that divide every layer."""
    names, rows = list(wanted), []
    with path.open() as file:
        for row in csv.DictReader(file):
            known = row["task"] in PROMPTS and row["data"] == "1"
            if known and (not names or any(name in row["model"] for name in names)):
                rows.append(row)
    lengths = defaultdict[tuple[str, str], list[float]](list)
    for row in rows:
        lengths[row["model"], row["task"]].append(float(row["new_tokens_mean"]))
    return [
        Step(
            Run(
                row["task"], row["model"], row["gpu"].lower(), "vllm", "",
                PROMPTS[row["task"]], round(mean(lengths[row["model"], row["task"]])),
                max(1, round(float(row["batch_mean"]))), math.nan,
                float(row["itl_ms_median"]) / 1e3, int(row["gpus"]), int(row["expert"]) > 1,
            ),
            float(row["batch_mean"]) / float(row["tokens_per_s"]),
            float(row.get("watts") or math.nan), float(row.get("joules_per_token") or math.nan),
        )
        for row in rows
    ]  # fmt: skip


def pilot_steps(path: Path, wanted: Iterable[str] = ()) -> list[Step]:
    """The rows of LLM-Pilot; users of whom some wait are as many requests as run by Little's law:
    tokens a second times the seconds between two tokens."""
    names, found = list(wanted), []
    with path.open() as file:
        for row in csv.DictReader(file):
            if names and not any(name in row["model"] for name in names):
                continue
            token_s = float(row["itl_ms_median"]) / 1e3
            at_once = max(1, round(float(row["tokens_per_s"]) * float(row["itl_ms_mean"]) / 1e3))
            prompt, new = (
                max(2, round(float(row[name])))
                for name in ("prompt_tokens_mean", "new_tokens_mean")
            )
            # Users ask the same, so that lengths that differ by chance are one length.
            run = Run(
                "pilot", row["model"], PILOT_GPUS.get(row["gpu"], row["gpu"].lower()), "tgi", "",
                16 * round(prompt / 16), 4 * max(1, round(new / 4)),
                min(at_once, int(row["users"])), math.nan, token_s, int(row["gpus"]),
            )  # fmt: skip
            found.append(Step(run, math.nan))
    return found


@dataclass(frozen=True)
class Told:
    """Predicted seconds of a step, and of a token under clients; why where there are none."""

    step_s: float = math.nan
    mean_s: float = math.nan
    why: str = ""


def has_room(engine: ServingEngine, run: Run) -> bool:
    """True where caches hold so many requests of mean lengths. ML.ENERGY sends its prompts again
    for many requests, which share caches then."""
    return run.batch * (run.prompt + run.new / 2) <= engine.cache_tokens


def median_pass_s(engine: ServingEngine, run: Run) -> float:
    """Median seconds between two tokens where so many requests always run: those that begin in one
    pass are Poisson distributed, their prompts spread as `SPREAD` has it."""
    begin, spread = run.batch / run.new, SPREAD.get(run.name, 0.0)
    rng = np.random.default_rng(0)
    count = rng.poisson(begin, PASSES)
    of_pass = np.repeat(np.arange(PASSES), count)
    lengths = run.prompt * np.exp(spread * rng.standard_normal(len(of_pass)) - spread**2 / 2)
    prompts = float(np.median(np.bincount(of_pass, lengths, PASSES)))
    tokens = round(max(0.0, min(prompts, engine.tokens_at_once - run.batch)))
    seconds = engine.pass_s(tokens, run.batch, run.batch * (run.prompt + run.new / 2))
    return max(seconds, engine.launch_s) if tokens else seconds


def predicted(step: Step, spec: str) -> Told:
    """A step of the plan for as many requests at once as ran."""
    run = step.run
    gpus = f"{run.tensor}x{run.system}-nvlink" if run.tensor > 1 else run.system
    if run.engine == "tgi" and run.tensor > 1:
        gpus = f"{run.tensor}x{run.system}"
    try:
        cluster = load_cluster(f"cpu-server-ddr5+{gpus}")
        engine = plan_of(spec, cluster, run, COSTS.get(run.engine)).engine
    except GdpError as error:
        return Told(why=str(error))
    if not has_room(engine, run):
        return Told(why=NO_ROOM)
    count = run.batch
    traffic = Traffic((Arrival(0.0, run.prompt, run.new),) * (ROUNDS * count), count)
    served = serve(in_steady_state(traffic, engine), engine)
    return Told(median_pass_s(engine, run), served.token.mean_s)


def told(steps: list[Step], answers: list[Told]) -> Iterator[str]:
    """A line for each row, then errors of groups of rows, and what was not answered."""
    yield head(
        "model | GPU | GPUs | at once | step ms | measured | error | mean ms | measured | error",
        left=2,
    )
    for step, answer in zip(steps, answers, strict=True):
        if not answer.why:
            run = step.run
            yield (
                f"| {run.model.rpartition('/')[2]} | {run.system} | {run.layout} | {run.batch} | "
                f"{_cells(answer.step_s, run.token_s)} | {_cells(answer.mean_s, step.mean_s)} |"
            )
    yield ""
    yield head("rows | | step: median error, mean | over measured | mean token: median, mean", 1)
    groups = defaultdict[str, list[tuple[Step, Told]]](list)
    for step, answer in zip(steps, answers, strict=True):
        for kind in step.kinds if not answer.why else ():
            groups[kind].append((step, answer))
    for kind, rows in groups.items():
        ratios = [a.step_s / s.run.token_s for s, a in rows]
        means = [abs(a.mean_s / s.mean_s - 1) for s, a in rows if not math.isnan(s.mean_s)]
        off = [abs(ratio - 1) for ratio in ratios]
        other = f"{median(means):.1%}, {mean(means):.1%}" if means else "-"
        yield (
            f"| {kind} | {len(rows)} | {median(off):.1%}, {mean(off):.1%} | {median(ratios):.2f} | "
            f"{other} |"
        )
    refused = {(s.run.model, a.why) for s, a in zip(steps, answers, strict=True) if a.why}
    for model, why in sorted(refused):
        yield f"{model}: not answered, {why}"


def _cells(seconds: float, measured_s: float) -> str:
    if math.isnan(measured_s):
        return f"{1e3 * seconds:.2f} | - | -"
    return f"{1e3 * seconds:.2f} | {1e3 * measured_s:.2f} | {seconds / measured_s - 1:+.0%}"


def scored(steps: list[Step], folders: list[Path], every: int, path: Path | None) -> Iterator[str]:
    """The lines of a benchmark; a trace serves all rows of one model and batch."""
    kept = list(dict.fromkeys(sorted(step.run.sizes for step in steps)))[::every]
    steps = [step for step in steps if step.run.sizes in kept]
    steps.sort(key=lambda step: (step.run.sizes, step.run.system, step.run.tensor))
    answers = []
    for step in steps:
        spec = configuration(step.run.model, folders)
        answers.append(
            Told(why="no configuration: give one in --configs")
            if spec is None
            else predicted(step, spec)
        )
        click.echo(f"{step.run.model} {step.run.batch}: {1e3 * answers[-1].step_s:.2f}", err=True)
    if path is not None:
        both = [{**asdict(s), "told": asdict(a)} for s, a in zip(steps, answers, strict=True)]
        path.write_text(json.dumps(both, indent=1) + "\n")
    yield from told(steps, answers)


_ROWS = click.option(
    "--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True
)
_OPTIONS = (
    click.argument("names", nargs=-1),
    _ROWS,
    click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path)),
    click.option("--configs", type=click.Path(exists=True, file_okay=False, path_type=Path)),
    click.option("--every", type=click.IntRange(1), default=1, help="Of the traces, in order."),
    click.option("--json", "path", type=click.Path(path_type=Path), help="File of all rows."),
)


def _command(name: str, steps: Callable[[Path, Iterable[str]], list[Step]]) -> click.Command:
    """A command of the rows that a function reads."""

    def run(
        names: tuple[str, ...], rows: Path, data: Path | None, configs: Path | None, every: int,
        path: Path | None,
    ) -> None:  # fmt: skip
        data = data or installed()
        folders = [*([configs] if configs else []), *([data / "model_configs"] if data else [])]
        if not folders:
            raise click.UsageError(f"--configs is missing; or {GET}")
        click.echo("\n".join(scored(steps(rows, names), folders, every, path)))

    for option in reversed(_OPTIONS):
        run = option(run)
    return click.command(name, help=__doc__)(run)


mlenergy, pilot = _command("mlenergy", mlenergy_steps), _command("pilot", pilot_steps)
