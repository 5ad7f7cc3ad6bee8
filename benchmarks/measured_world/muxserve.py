"""Several models on one mesh of GPUs: predicted requests/s and TPOT beside MuxServe's runs.

    python -m benchmarks.measured_world muxserve --bench FOLDER [--json FILE]

`FOLDER` holds `muxserve_runs.csv` and `muxserve_profile.csv` (Duan et al. 2024, arXiv 2404.02015,
hao-ai-lab/MuxServe): 16 Llama models on 32 A100-80GB at several loads, each with GPUs of its own
(spatial), with all models of a mesh taking turns on its GPUs (temporal), and with shares of the SMs
(flexsm). Seconds of a pass are those of the measured profile of each model alone, with the engine's
own part: a step takes no less than where the model had GPUs of its own under the least load of the
file, and all else `WORK` times as long. So the rows judge how engines slow each other:
`gdp.box.table.slowdown` with the engines that are busy in the mean, found as a fixed point, and
`gdp.sim.serving` with prompts before decoding, one pass each.

    temporal: passes x slowdown(1 + sum over the others of min(1, requests that run) x their pass
              over the model's own, as iterations of the models of a mesh alternate)
    flexsm:   passes of the profile at the model's shares of SMs, x max(1, SMs that are asked for)

What the rows do not say is assumed: arrivals are Poisson over `SECONDS` / load seconds, of a
request's tokens `OUTPUT` are written, caches of a mesh are divided by demand. The profile of the
30B model is interpolated between 13B and 65B.
"""

import csv
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from gdp.box.table import slowdown
from gdp.sim.scheduling import IterationBatch, Scheduler, chunks_of
from gdp.sim.serving import ServingEngine, served_requests
from gdp.sim.traffic import Arrival, ServedRequest, ServedTraffic, Traffic, summary_of

SECONDS = 45_000.0
"""Seconds of the trace times its load: light models end at 90 s under load 500, 37 under 1200."""
OUTPUT = 0.65
"""Part of a request's tokens that is written."""
PARAMETERS = {"llama-7b": 6.74e9, "llama-13b": 13.0e9, "llama-30b": 32.5e9, "llama-65b": 65.2e9}
CACHE_BYTES = {"llama-7b": 524_288, "llama-13b": 819_200, "llama-30b": 1_597_440,
               "llama-65b": 2_621_440}  # fmt: skip
"""Keys and values of a token: 2 x layers x width x 2 bytes."""
WORK = 1.8
"""Times that prompts, and what a request adds to a step, take in the engine, of 1, 1.4, 1.8, 2.2
and 2.6 the one with the least median error of requests/s on the loads 500, 1200 and 2000."""
USABLE_BYTES = 0.9 * 80e9
ROUNDS = 12
"""Of the fixed point; half of each step is taken."""


class Row(NamedTuple):
    """One model of one mesh in one run."""

    load: int
    sharing: str
    gpus: int
    mesh: str
    llm: str
    model: str
    prefill_sm: int
    decode_sm: int
    requests: int
    requests_per_s: float
    tokens_per_s: float
    tpot_s: float


@dataclass(frozen=True)
class Passes:
    """Seconds of a pass of a model on so many GPUs: step + context x tokens in caches, or tokens
    times a prompt token's."""

    step_s: float
    token_s: float
    context_s: float
    launch_s: float
    sequence_s: float = 0.0  # of each request in a step

    def scaled(self, step: float, token: float) -> "Passes":
        """With steps, and prompt tokens, that take so many times as long."""
        return Passes(
            self.step_s * step, self.token_s * token, self.context_s * step, self.launch_s * token,
            self.sequence_s * step,
        )  # fmt: skip


def rows_of(path: Path) -> list[Row]:
    """The runs of a file."""
    rows = []
    with path.open(newline="") as file:
        for r in csv.DictReader(file):
            prefill, decode = r["sm_percent_prefill_decode"].split("/")
            rows.append(Row(
                int(r["load"]), r["sharing"], int(r["mesh_gpus"]), r["mesh"], r["llm"], r["model"],
                int(prefill), int(decode), int(r["requests"]), float(r["requests_per_s"]),
                float(r["tokens_per_s"]), float(r["tpot_s_mean"]),
            ))  # fmt: skip
    return rows


class Profile:
    """Passes by model, GPUs and share of SMs."""

    def __init__(self, path: Path) -> None:
        table: dict[tuple[str, int, int], list[tuple[float, ...]]] = defaultdict(list)
        with path.open(newline="") as file:
            for r in csv.DictReader(file):
                key = r["model"], int(r["gpus"]), int(r["sm_percent"])
                own = (r["batch"], r["sequence"], r["prefill_ms"], r["decode_ms"])
                table[key].append(tuple(float(x) if x else math.nan for x in own))
        self.known = {key: _fitted(np.array(own)) for key, own in table.items()}

    def passes(self, model: str, gpus: int, sm: int) -> Passes:
        """Passes of a model; of the 30B one between 13B and 65B."""
        sm = min(100, max(30, round(sm / 10) * 10))
        if (model, gpus, sm) in self.known:
            return self.known[model, gpus, sm]
        low, high = PARAMETERS["llama-13b"], PARAMETERS["llama-65b"]
        part = math.log(PARAMETERS[model] / low) / math.log(high / low)
        at = max(gpus, 4)  # 65B was not profiled on fewer
        small, large = self.known["llama-13b", at, sm], self.known["llama-65b", at, sm]
        own = self.known["llama-13b", gpus, sm]
        ratio = [
            (b / a) ** part
            for a, b in (
                (small.step_s, large.step_s), (small.token_s, large.token_s),
                (small.context_s, large.context_s), (small.launch_s, large.launch_s),
                (small.sequence_s, large.sequence_s),
            )
        ]  # fmt: skip
        return Passes(
            own.step_s * ratio[0], own.token_s * ratio[1], own.context_s * ratio[2],
            own.launch_s * ratio[3], own.sequence_s * ratio[4],
        )  # fmt: skip


def _fitted(own: np.ndarray) -> Passes:
    """Least relative squares of steps; the slope of long prompts; the least prompt."""
    batch, sequence, prefill, decode = own[np.isfinite(own).all(axis=1)].T
    terms = np.column_stack([np.ones_like(batch), batch, batch * sequence])
    step, more, context = np.linalg.lstsq(terms / decode[:, None], np.ones_like(decode), None)[0]
    tokens = batch * sequence
    long = (tokens >= 2048) & (tokens <= 16384)
    token = float(np.median(prefill[long] / tokens[long]))
    least = 1e-9
    return Passes(
        step / 1e3, token / 1e3, max(float(context), least) / 1e3, float(prefill.min()) / 1e3,
        max(float(more), least) / 1e3,
    )  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """One model of a mesh."""

    row: Row
    requests_per_s: float
    tpot_s: float


@dataclass(frozen=True)
class Shared:
    """A model of a mesh on its GPUs."""

    row: Row
    on: tuple[int, ...] = ()  # GPUs; (): all of the mesh
    room: float | None = None  # tokens in the caches of a copy; None: by demand
    copies: int = 1

    def meets(self, other: "Shared") -> list[int]:
        """GPUs that both are on; -1 stands for those of a whole mesh."""
        return sorted(set(self.on) & set(other.on)) if self.on and other.on else [-1]


def mesh_of(
    rows: list[Row], profile: Profile, tokens: Mapping[str, float], host_s: Mapping[str, float]
) -> Iterator[Predicted]:
    """Predictions of the models of one mesh, each of which is on all of its GPUs."""
    found = shared_passes([Shared(row) for row in rows], profile, tokens, host_s)
    for row, (_, one) in zip(rows, found, strict=True):
        yield Predicted(row, row.requests / one.seconds, one.token.mean_s)


def shared_passes(
    models: list[Shared], profile: Profile, tokens: Mapping[str, float],
    host_s: Mapping[str, float],
) -> list[tuple[list[ServedRequest], ServedTraffic]]:  # fmt: skip
    """Requests of the models of one mesh as they are served, and their summary.

    Args:
        models: Its models.
        profile: Passes alone.
        tokens: Tokens of a request of each model.
        host_s: Least seconds of a step by model.
    """
    rows = [one.row for one in models]
    sms = np.array([row.decode_sm / 100 for row in rows])
    weights = sum(2 * PARAMETERS[row.model] for row in rows)
    need = [row.requests * tokens[row.llm] * CACHE_BYTES[row.model] for row in rows]
    # [K, J] by GPU: on which other models are, too; an engine waits for its slowest GPU.
    gpus = [sorted({g for other in models for g in one.meets(other)}) for one in models]
    meets = [
        np.array([[g in one.meets(other) for other in models] for g in own], dtype=float)
        for one, own in zip(models, gpus, strict=True)
    ]
    active, served = np.zeros(len(rows)), list[tuple[list[ServedRequest], ServedTraffic]]()
    pass_s = np.ones(len(rows))
    for _ in range(ROUNDS):
        served, before_s = [], pass_s.copy()
        for k, row in enumerate(rows):
            others = np.where(np.arange(len(rows)) == k, 0.0, active)
            step, prompts = (
                profile.passes(row.model, row.gpus, sm) for sm in (row.decode_sm, row.prefill_sm)
            )
            passes = replace(step, token_s=prompts.token_s, launch_s=prompts.launch_s)
            if row.sharing == "flexsm":
                slow = max(1.0, sms[k] + float((meets[k] @ (others * sms)).max()))
            else:
                # Iterations alternate: a model waits for one of each other, however long that is.
                waits = float((meets[k] @ (others * before_s / before_s[k])).max())
                slow = float(slowdown(np.ones(1), np.array([1.0 + waits])))
            passes = passes.scaled(WORK, WORK)
            passes = replace(passes, step_s=max(step.step_s, host_s.get(row.model, 0.0)))
            passes = passes.scaled(slow, slow)
            room = max(0.0, row.gpus * USABLE_BYTES - weights) * need[k] / sum(need)
            own = models[k].room
            held = room / CACHE_BYTES[row.model] if own is None else own
            served.append(_serve(models[k], passes, tokens[row.llm], held))
            pass_s[k] = served[-1][1].token.mean_s / slow
        running = [
            min(1.0, one.running / m.copies) for m, (_, one) in zip(models, served, strict=True)
        ]
        active = (active + np.array(running)) / 2
    return served


def _serve(
    model: Shared, passes: Passes, tokens: float, room: float
) -> tuple[list[ServedRequest], ServedTraffic]:
    """The requests of a model on its engine, or dealt to its copies."""
    row = model.row
    rng = np.random.default_rng(0)
    new = max(2, round(OUTPUT * tokens))
    prompt = max(1, round(tokens) - new)
    at = np.sort(rng.uniform(0.0, SECONDS / row.load, row.requests)).tolist()
    requests = tuple(Arrival(t, prompt, new) for t in at)
    # What a request costs in each step, as a part of its caches' seconds.
    context_s = passes.context_s + passes.sequence_s / (prompt + new / 2)
    engine = ServingEngine(
        passes.step_s, passes.token_s, context_s, 2048, 256, max(room, prompt + new + 1.0),
        copies=model.copies, launch_s=passes.launch_s, scheduler=PromptsFirst(),
    )  # fmt: skip
    rows, _ = served_requests(Traffic(requests), engine)
    return rows, summary_of(rows, 0.0)


@dataclass(frozen=True)
class PromptsFirst(Scheduler):
    """Prompts alone while there are any, whole: vLLM of early 2024."""

    def next_batch(
        self, queue: Iterable[int], running: int, room: int, deferred: int
    ) -> IterationBatch:
        """The work of the next iteration."""
        del running, deferred
        chunks = chunks_of(queue, room)
        return IterationBatch(chunks, decodes=not chunks)


def host_seconds(
    rows: list[Row], profile: Profile, tokens: Mapping[str, float]
) -> dict[str, float]:
    """Least seconds of a step by model, so that models with GPUs of their own have their TPOT under
    the least load, in the median."""
    least = min(row.load for row in rows)
    steps: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.sharing == "spatial" and row.load == least:
            (alone,) = mesh_of([row], profile, tokens, {})
            step_s = profile.passes(row.model, row.gpus, row.decode_sm).step_s
            steps[row.model].append(step_s + row.tpot_s - alone.tpot_s)
    return {model: float(np.median(own)) for model, own in steps.items()}


def predictions(rows: list[Row], profile: Profile) -> list[Predicted]:
    """Predictions of all rows, mesh by mesh. A mesh of the same models appears once a run; its
    models are those with its number."""
    tokens = {r.llm: r.tokens_per_s / r.requests_per_s for r in rows if r.sharing == "spatial"}
    meshes: dict[tuple[int, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        meshes[row.load, row.sharing, row.mesh].append(row)
    host_s = host_seconds(rows, profile, tokens)
    return [one for own in meshes.values() for one in mesh_of(own, profile, tokens, host_s)]


def best_of_three(predicted: list[Predicted]) -> tuple[int, int]:
    """(meshes whose best way of sharing is predicted, meshes): by requests/s of all models of a
    mesh that several share, under temporal, flexsm, and with GPUs of their own."""
    by = {(p.row.load, p.row.sharing, p.row.llm): p for p in predicted}
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    for p in predicted:
        if p.row.sharing == "flexsm":
            groups[p.row.load, p.row.mesh].append(p.row.llm)
    right = count = 0
    for (load, _), llms in groups.items():
        ways = ("spatial", "temporal", "flexsm")
        if len(llms) < 2:
            continue
        told, measured = (
            [sum(value(by[load, way, llm]) for llm in llms) for way in ways]
            for value in (lambda p: p.requests_per_s, lambda p: p.row.requests_per_s)
        )
        count += 1
        right += int(np.argmax(told)) == int(np.argmax(measured))
    return right, count


def summary(predicted: list[Predicted]) -> list[str]:
    """Median errors by way of sharing and load."""
    lines = ["load  sharing   rows  requests/s  within 15%  TPOT   within 20%"]
    kinds = sorted({(p.row.load, p.row.sharing) for p in predicted})
    for load, sharing in [*kinds, (0, "all shared"), (0, "all")]:
        own = [
            p for p in predicted
            if (p.row.load, p.row.sharing) == (load, sharing) or sharing == "all"
            or (sharing == "all shared" and p.row.sharing != "spatial")
        ]  # fmt: skip
        rate = np.array([abs(p.requests_per_s / p.row.requests_per_s - 1) for p in own])
        tpot = np.array([abs(p.tpot_s / p.row.tpot_s - 1) for p in own])
        lines.append(
            f"{load or '':<5} {sharing:10}{len(own):4}  {np.median(rate):10.1%}"
            f"  {(rate < 0.15).mean():10.0%}  {np.median(tpot):5.1%}  {(tpot < 0.2).mean():9.0%}"
        )
    right, count = best_of_three(predicted)
    lines.append(f"best of three ways of sharing, by mesh: {right} of {count}")
    return lines


@click.command("muxserve", help=__doc__)
@click.option(
    "--bench", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="File of all rows.")
def main(bench: Path, path: Path | None) -> None:
    """Print errors of requests/s and TPOT."""
    rows = rows_of(bench / "muxserve_runs.csv")
    predicted = predictions(rows, Profile(bench / "muxserve_profile.csv"))
    click.echo("\n".join(summary(predicted)))
    if path is not None:
        lines = [
            json.dumps(p.row._asdict() | {
                "predicted_requests_per_s": p.requests_per_s, "predicted_tpot_s": p.tpot_s
            })
            for p in predicted
        ]  # fmt: skip
        path.write_text("\n".join(lines) + "\n")
