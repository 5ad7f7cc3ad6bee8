"""LLM-Pilot's contest: the cheapest GPUs that serve 200 users of an LLM that nobody measured.

    python -m benchmarks.measured_world llm-pilot --rows llm_pilot.csv --configs FOLDER

The contest of Lazuka, Anghel and Parnell 2024 (arXiv 2410.02425): choose a profile (GPUs of one
replica) and as many replicas as 200 users need, so that the median TTFT over the tokens of the
prompt is at most 100 ms and the median time between tokens at most 50 ms; prices are theirs. The
measured best is the cheapest profile by the rows, each replica with the most users (1, 2, 4, ...
128) up to which all rows keep both. A choice succeeds where its users of a replica are at most
these; its overspend is its price over the best one's, less one. Score: harmonic mean of the share
of successes and 1 - mean overspend of these. Only profiles with rows are chosen from.

Each LLM is left out once. Passes are of `gdp place --for vllm` on the profile, all layers divided
over its GPUs, and users are simulated in a closed loop with the mean lengths of the model's rows.

    as planned: vLLM of today, which replays recorded graphs
    TGI of 2023: no recorded graphs, so that a step takes what its kernels' launches take on the
        host times a factor, and each request in a step a further time, both times a factor of the
        machines of a kind of GPU; all are fitted to the rows of the *other* LLMs (least median
        error of the time between tokens). It reads prompts first.
        Models without flash attention pad all requests to the longest: each takes as many tokens of
        the caches as others of them did under the most users
    one run: decoding takes the factor that one row of the LLM shows, on all profiles; where its
        users waited for memory, requests take the tokens of caches that they had. The run is that
        of the choice before it; or any of 8 or more users, each as the only one

An answer is off where users wait for memory that no file states: TGI keeps room for the tokens that
a request may write, and the rows tell those that it wrote.
"""

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from benchmarks.measured_world.engines import PILOT_GPUS
from benchmarks.measured_world.muxserve import PromptsFirst
from benchmarks.measured_world.serving import configuration, plan_of
from benchmarks.measured_world.serving_runs import Run
from benchmarks.tables import head
from gdp.base.errors import GdpError
from gdp.cluster.file import load_cluster
from gdp.corrections.passes import Times, scaled
from gdp.sim.serving import ServingEngine, in_steady_state, serve
from gdp.sim.traffic import Arrival, Traffic

USERS, ALL_USERS = tuple(2**k for k in range(8)), 200
FIRST_S, TOKEN_S = 0.100, 0.050
"""Limits: of TTFT for each token of the prompt, and of the time between tokens."""
PRICES = {
    "V100": (3.06, 6.12, 12.24), "A100": (4.096, 8.193, 16.385), "H100": (12.29, 24.58, 49.16),
    "A10": (2.448, 4.896, math.inf), "T4": (2.176, 2.755, 3.912),
}  # fmt: skip
"""Dollars an hour of 1, 2 and 4 GPUs."""
BATCH = 16
"""Requests at once, of whose passes an engine's seconds are."""
LAUNCHES = tuple(np.linspace(0.2, 3.0, 15).tolist())
SEQUENCES_S = tuple(np.linspace(0.0, 2e-3, 21).tolist())
LEAST_USERS, WAITING = 8, 0.5
"""Users of a run that is learned from, and the share of users that run below which others wait."""
PADDED = ("google/flan-ul2", "bigscience/mt0-xxl", "Salesforce/codegen2-16B")
"""Models without flash attention in TGI of 2023."""


class Row(NamedTuple):
    """A measured run; seconds are medians."""

    model: str
    gpu: str
    gpus: int
    users: int
    prompt: float
    median_prompt: float
    new: float
    first_s: float
    per_prompt_s: float  # TTFT for each token of the prompt
    token_s: float
    at_once: float  # requests that run, by Little's law

    @property
    def profile(self) -> tuple[str, int]:
        """GPUs of a replica."""
        return self.gpu, self.gpus

    @property
    def keeps(self) -> bool:
        """True within both limits."""
        return self.per_prompt_s <= FIRST_S and self.token_s <= TOKEN_S


@dataclass(frozen=True)
class HostOf2023:
    """Host of an engine without recorded graphs."""

    launches: float = 0.0  # times the seconds of the launches of one pass
    sequence_s: float = 0.0  # of each request in a step
    reserved: float = 0.0  # tokens of the caches that a request takes; 0: those of the request
    slower: Mapping[str, float] = field(default_factory=dict)  # times, of the machines of a GPU

    def on(self, engine: ServingEngine, row: Row) -> ServingEngine:
        """An engine with this host, for requests as those of a row."""
        times = self.slower.get(row.gpu, 1.0)
        # What a request costs in each step, as a part of its caches' seconds.
        more_s = times * self.sequence_s / (row.prompt + row.new / 2)
        launch_s = times * self.launches * engine.launch_s
        most = int(engine.cache_tokens / self.reserved) if self.reserved else None
        return engine._replace(
            step_s=max(engine.step_s, launch_s), launch_s=launch_s,
            context_s=engine.context_s + more_s, scheduler=PromptsFirst(),
            requests_at_once=engine.requests_at_once if most is None else max(1, most),
        )  # fmt: skip


Engines = Mapping[tuple[str, str, int], ServingEngine]
Change = Callable[[Row, ServingEngine], ServingEngine]


def rows_of(path: Path) -> list[Row]:
    """The rows of a file."""
    with path.open(newline="") as file:
        return [
            Row(
                r["model"], r["gpu"], int(r["gpus"]), int(r["users"]),
                float(r["prompt_tokens_mean"]), float(r["prompt_tokens_median"]),
                float(r["new_tokens_mean"]),
                float(r["ttft_ms_median"]) / 1e3,
                float(r["ttft_ms_per_prompt_token_median"]) / 1e3,
                float(r["itl_ms_median"]) / 1e3,
                float(r["tokens_per_s"]) * float(r["itl_ms_mean"]) / 1e3,
            )
            for r in csv.DictReader(file)
        ]  # fmt: skip


def engines_of(rows: Iterable[Row], configs: Path) -> dict[tuple[str, str, int], ServingEngine]:
    """The engine of each model on each profile; of none where the plan has no room."""
    found = {}
    for model, gpu, gpus in dict.fromkeys((row.model, *row.profile) for row in rows):
        spec, kind = configuration(model, [configs]), PILOT_GPUS.get(gpu, gpu.lower())
        if spec is None:
            raise click.UsageError(f"--configs has no configuration of {model}")
        own = [row for row in rows if row.model == model]
        prompt, new = (
            round(float(np.mean([getattr(r, n) for r in own]))) for n in ("prompt", "new")
        )
        run = Run("pilot", model, kind, "tgi", "", prompt, new, BATCH, math.nan, 1.0, gpus)
        cluster = load_cluster(
            f"cpu-server-ddr5+{gpus}x{kind}" if gpus > 1 else f"cpu-server-ddr5+{kind}"
        )
        try:
            found[model, gpu, gpus] = plan_of(spec, cluster, run).engine
        except GdpError as error:
            click.echo(f"{model} on {gpus} {gpu}: {error}")
    return found


def times_of(engine: ServingEngine, row: Row, users: int) -> Times:
    """Median TTFT of users that ask again, with requests of the mean lengths of a row, and seconds
    of a step of those that run in the mean: most times between tokens have no prompt in them."""
    prompt, new = max(1, round(row.prompt)), max(2, round(row.new))
    traffic = Traffic((Arrival(0.0, prompt, new),) * max(20, 6 * users), users)
    served = serve(in_steady_state(traffic, engine), engine)
    running = max(1, round(served.running))
    return Times(
        served.first_token.median_s, engine.pass_s(0, running, running * (prompt + new / 2))
    )


def host_of(rows: Iterable[Row], engines: Engines, padded: bool) -> HostOf2023:
    """The host with the least median error of the time between tokens on some rows, by closed form:
    one step of the requests that ran; of a padded model also the room that others of them took."""
    pairs = [(r, engines[r.model, *r.profile]) for r in rows if (r.model, *r.profile) in engines]
    measured = np.array([row.token_s for row, _ in pairs])

    def ratios(host: HostOf2023) -> np.ndarray:
        return measured / np.array([step_of(row, host.on(engine, row)) for row, engine in pairs])

    def error(host: HostOf2023) -> float:
        return float(np.median(np.abs(1 / ratios(host) - 1)))

    best = min((HostOf2023(a, q) for a in LAUNCHES for q in SEQUENCES_S), key=error)
    gpus = np.array([row.gpu for row, _ in pairs])
    over = ratios(best)
    slower = {str(gpu): float(np.median(over[gpus == gpu])) for gpu in np.unique(gpus)}
    taken = [reserved_by(row, engine) for row, engine in pairs if row.model in PADDED]
    taken = [tokens for tokens in taken if tokens]
    return replace(
        best, slower=slower, reserved=float(np.median(taken)) if taken and padded else 0.0
    )


def step_of(row: Row, engine: ServingEngine) -> float:
    """Seconds of a step of as many requests as ran."""
    return engine.pass_s(0, round(row.at_once), row.at_once * (row.prompt + row.new / 2))


def reserved_by(row: Row, engine: ServingEngine) -> float:
    """Tokens of the caches that each request of a row took whose users waited for memory; 0 of one
    whose users did not."""
    return engine.cache_tokens / row.at_once if row.at_once < WAITING * row.users else 0.0


class Choice(NamedTuple):
    """A profile and its replicas."""

    profile: tuple[str, int]
    users: int  # of a replica, at most
    price: float

    def __str__(self) -> str:
        return f"{self.replicas} x {self.profile[1]} {self.profile[0]}"

    @property
    def replicas(self) -> int:
        """Replicas for all users."""
        return math.ceil(ALL_USERS / self.users)


def cheapest(most: Mapping[tuple[str, int], int]) -> Choice | None:
    """The cheapest profile with so many users of a replica at most, 0 for none."""
    choices = [
        Choice(p, n, math.ceil(ALL_USERS / n) * PRICES[p[0]][int(math.log2(p[1]))])
        for p, n in most.items()
        if n
    ]
    return min(choices, key=lambda c: c.price, default=None)


def most_users(keeps: Callable[[int], bool], users: Iterable[int]) -> int:
    """Users up to which all keep the limits."""
    most = 0
    for n in users:
        if not keeps(n):
            break
        most = n
    return most


def measured_most(rows: Iterable[Row]) -> dict[tuple[str, int], int]:
    """Most users of a replica of each profile by rows of one model."""
    by: dict[tuple[str, int], dict[int, Row]] = {}
    for row in rows:
        by.setdefault(row.profile, {})[row.users] = row
    return {p: most_users(lambda n, own=own: own[n].keeps, sorted(own)) for p, own in by.items()}


def predicted_most(rows: list[Row], change: Change, engines: Engines) -> dict[tuple[str, int], int]:
    """The same by predictions."""
    found = {}
    for row in {row.profile: row for row in rows}.values():
        engine = engines.get((row.model, *row.profile))
        if engine is None:
            continue
        own = change(row, engine)

        def keeps(n: int, row: Row = row, own: ServingEngine = own) -> bool:
            times = times_of(own, row, n)
            return times.ttft_s / row.median_prompt <= FIRST_S and times.tpot_s <= TOKEN_S

        found[row.profile] = most_users(keeps, USERS)
    return found


def outcome(rows: list[Row], choice: Choice | None) -> tuple[bool, float]:
    """(success of a choice, its overspend)."""
    most, best = measured_most(rows), cheapest(measured_most(rows))
    if choice is None or best is None:
        return False, math.nan
    needs = math.ceil(ALL_USERS / choice.replicas)
    return needs <= most.get(choice.profile, 0), choice.price / best.price - 1


def score(outcomes: Iterable[tuple[bool, float]]) -> tuple[float, float, float]:
    """(S, O, S/O) of outcomes.

    >>> score([(True, 0.25), (False, -0.5)])
    (0.5, 0.25, 0.6)
    """
    known = list(outcomes)
    success = float(np.mean([good for good, _ in known]))
    spent = [over for good, over in known if good]
    over = float(np.mean(spent)) if spent else 0.0
    rest = max(0.0, 1 - over)
    return success, over, 2 * success * rest / (success + rest) if success + rest else 0.0


def after_run(run: Row, host: HostOf2023, engine: ServingEngine) -> tuple[float, HostOf2023]:
    """(log factor of decoding that a run shows, the host with the room that its requests took)."""
    reserved = reserved_by(run, engine) or host.reserved
    step_s = step_of(run, host.on(engine, run))
    return math.log(run.token_s / step_s), replace(host, reserved=reserved)


def errors(rows: list[Row], change: Change, engines: Engines) -> tuple[float, float]:
    """Median relative errors of TTFT and of the time between tokens."""
    off = []
    for row in rows:
        if (engine := engines.get((row.model, *row.profile))) is not None:
            times = times_of(change(row, engine), row, row.users)
            off.append((abs(times.ttft_s / row.first_s - 1), abs(times.tpot_s / row.token_s - 1)))
    first, token = np.median(np.array(off), axis=0) if off else (math.nan, math.nan)
    return float(first), float(token)


class Outcome(NamedTuple):
    """A choice for one LLM, its outcome, and median errors of TTFT and time between tokens."""

    choice: Choice | None
    kept: bool
    overspend: float
    first_off: float
    token_off: float


def chosen(
    rows: list[Row], change: Change, engines: Engines, without: Row | None = None
) -> Outcome:
    """The choice by some engines, and errors on all rows but one."""
    choice = cheapest(predicted_most(rows, change, engines))
    off = errors([row for row in rows if row != without], change, engines)
    return Outcome(choice, *outcome(rows, choice), *off)


def contest(rows: list[Row], model: str, engines: Engines) -> dict[str, list[Outcome]]:
    """Choices for one LLM: by plans, with a host fitted to the others, and after single runs."""
    own, others = ([r for r in rows if (r.model == model) is same] for same in (True, False))
    host = host_of(others, engines, model in PADDED)

    def after(run: Row) -> Outcome:
        factor, known = after_run(run, host, engines[model, *run.profile])
        change: Change = lambda row, engine: scaled(known.on(engine, row), 0.0, factor)  # noqa: E731
        return chosen(own, change, engines, run)

    first = chosen(own, lambda row, engine: host.on(engine, row), engines)
    runs = {row: after(row) for row in own if row.users >= LEAST_USERS
            and (model, *row.profile) in engines}  # fmt: skip
    at = first.choice
    next_to_measure = [
        one for row, one in runs.items()
        if at is not None and row.profile == at.profile and row.users == at.users
    ]  # fmt: skip
    return {
        "as planned": [chosen(own, lambda _, engine: engine, engines)], "TGI of 2023": [first],
        "one run of its choice": next_to_measure or [first], "any one run": list(runs.values()),
    }  # fmt: skip


@click.command("llm-pilot", help=__doc__)
@click.option(
    "--rows", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True
)
@click.option(
    "--configs", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True
)
def main(path: Path, configs: Path) -> None:
    """Print choices and scores with each LLM left out."""
    rows = rows_of(path)
    engines = engines_of(rows, configs)
    totals: dict[str, list[Outcome]] = {}
    click.echo(head("LLM | by | choice | dollars an hour | kept | TTFT off | TPOT off", left=2))
    for model in dict.fromkeys(row.model for row in rows):
        best = cheapest(measured_most(row for row in rows if row.model == model))
        name = model.rpartition("/")[2]
        click.echo(f"| {name} | rows | {best} | {best.price if best else math.nan:.2f} | | | |")
        for by, found in contest(rows, model, engines).items():
            totals.setdefault(by, []).extend(found)
            choice = found[0].choice if len(found) == 1 else None
            text, price = (str(choice), f"{choice.price:.2f}") if choice else ("", "")
            kept, first, token = (
                np.array([getattr(one, n) for one in found])
                for n in ("kept", "first_off", "token_off")
            )
            click.echo(f"| {name} | {by} ({len(found)}) | {text} | {price} | {kept.mean():.0%} | "
                       f"{np.median(first):.0%} | {np.median(token):.0%} |")  # fmt: skip
    for by, found in totals.items():
        success, over, both = score((one.kept, one.overspend) for one in found)
        click.echo(f"{by}: S {success:.2f}, O {over:.2f}, S/O {both:.3f}")
