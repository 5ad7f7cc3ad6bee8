"""The tables of the policy: `python -m benchmarks.policy.hard VERB`, from the root of a checkout.

    list        draw the test instances (committed; done before training)
    best        search for better values of them, and keep the best (done before training)
    lower       long fine-tunings of them since; kept apart, as `since_s`
    zero-shot   greedy, best of 16, with heuristics; three seeds
    ablate      the same with attention zeroed, and with all gates at one
    finetune    800 evaluations of fine-tuning against annealing and `auto` with the same 800
    guided      annealing with and without the policy's guidance at equal evaluations
    large       the same at equal seconds, on graphs of 2,000 to 15,000 ops
    unseen      clusters of 10 to 16 devices, with speeds and links unlike any of training
    memory      limits at 1.05 of the smallest feasible

All figures are geometric means of seconds over best known as listed before training; lower is
better. Where it says so, also over the lowest found since.
"""

import importlib
import json
import time
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from benchmarks.policy import instances as tests
from benchmarks.policy.instances import Known, geomean, hard, over_lowest, spread
from gdp.cli import options
from gdp.cli.program import run
from gdp.errors import InfeasibleError
from gdp.learn.finetune import FinetuneConfig, finetune
from gdp.learn.instances import draw as draw_instance
from gdp.learn.instances import limit_memory, make
from gdp.learn.validate import MISFIT
from gdp.methods.base import Answer, Assignment, Search
from gdp.methods.portfolio import auto
from gdp.methods.priorities import rate
from gdp.methods.search.local_search import local_search
from gdp.policy.advice import incumbents
from gdp.policy.guided import SHARE, guided_search
from gdp.policy.method import place_with_policy, policy_candidate
from gdp.policy.policy import Policy, default_checkpoint, load_policy
from gdp.policy.propose import propose
from gdp.policy.repair import move_until_fits
from gdp.problem.problem import Problem
from gdp.tasks import Engine, each

SEEDS = (0, 1, 2)
SAMPLES = 16


def show(title: str, table: dict[str, Any]) -> None:
    """One table, and the same as a JSON line for whoever reads it by program."""
    click.echo(title)
    for name, cell in table.items():
        text = f"{cell:.4f}" if isinstance(cell, float) else str(cell)
        click.echo(f"  {name:34s} {text}")
    click.echo(json.dumps({title: table}))


def advised_s(problem: Problem) -> float:
    """The best of the advisers' placements under the policy's priorities, as `gdp place` has it."""
    rated = rate(problem, incumbents(problem))
    return float(np.where(rated.overflow == 0, rated.seconds, np.inf).min())


def zero_shot(policy: Policy, problem: Problem, seed: int) -> tuple[float, float]:
    """(greedy, best of greedy and samples) in seconds, made to fit; inf where that fails."""
    found = propose(policy, problem, SAMPLES + 1, seed)
    seconds = found.value_s
    if np.isinf(seconds[0]):
        mended, _ = move_until_fits(problem, found.device[0], seed=seed)
        seconds[0] = tests.judged(problem, mended[None])[0]
    return float(seconds[0]), float(seconds.min())


def zero_shot_table(policy: Policy, known: list[Known], seeds: tuple[int, ...]) -> dict[str, Any]:
    """Ratios over the non-trivial instances, seed by seed."""
    source = tests.problems()
    rows: list[tuple[float, float, float, float, float]] = []
    misfits = 0
    for entry in known:
        problem = source.get(entry.instance)
        advised = advised_s(problem)
        for seed in seeds:
            greedy, best = zero_shot(policy, problem, seed)
            misfits += np.isinf(best)
            # What could not be made to fit counts as five times the best known.
            greedy = greedy if np.isfinite(greedy) else MISFIT * entry.best_s
            best = best if np.isfinite(best) else MISFIT * entry.best_s
            together = min(best, entry.heuristic_s, advised)
            rows.append((greedy, best, entry.heuristic_s, together, entry.best_s))
    names = ("greedy", f"best of {SAMPLES} and greedy", "best heuristic", "policy and heuristics")
    ratios = {name: geomean([row[k] / row[4] for row in rows]) for k, name in enumerate(names)}
    return {
        "instances": len(known),
        **over_lowest(ratios, known),
        "wins or ties against heuristics": float(
            np.mean([row[1] <= row[2] * (1 + 1e-9) for row in rows])
        ),
        "without a fitting sample": int(misfits),
    }


def zeroed(params: Any, names: tuple[str, ...]) -> Any:
    """The weights with every leaf under one of the names at zero."""

    def cut(path: tuple, leaf: Any) -> Any:
        found = {str(getattr(key, "key", key)) for key in path}
        return np.zeros_like(leaf) if found & set(names) else leaf

    return jax.tree_util.tree_map_with_path(cut, params)


def start_of(problem: Problem) -> Assignment:
    """The best heuristic's assignment."""
    found = [
        (tests.value(problem, answer.assignment), name, answer.assignment)
        for name, answer in tests.heuristic_answers(problem).items()
        if answer.assignment is not None
    ]
    return min(found, key=lambda entry: entry[:2])[2]


@click.group(help=__doc__)
def main() -> None:
    """The benchmark's verbs."""


CHECKPOINT = click.option("--checkpoint", type=Path, default=None, help="Default: the shipped.")
COUNT = click.option("--count", default=12, show_default=True, help="Instances.")


def loaded(checkpoint: Path | None) -> Policy:
    """The policy under test."""
    return load_policy(default_checkpoint() if checkpoint is None else checkpoint)


@main.command("list")
def draw() -> None:
    """Draw the instances; refuses to draw over a list that is there."""
    if tests.LIST.exists():
        raise SystemExit(f"{tests.LIST} is there; the list is fixed")
    known = tests.draw_list(tests.problems())
    tests.save(known)
    click.echo(f"{len(known)} instances in {tests.LIST}")


def _searched(task: tuple[Known, int, int]) -> Known:
    """After the heuristics and a search; as it was where nothing fits."""
    entry, evaluations, seed = task
    try:
        return tests.searched(entry, tests.problems().get(entry.instance), evaluations, seed)
    except InfeasibleError:
        return entry


def _lowered(task: tuple[Known, Path | None, int, int]) -> Known:
    """An instance after one long fine-tuning."""
    entry, checkpoint, evaluations, seed = task
    config = FinetuneConfig(
        updates=evaluations, evaluations=evaluations, explore=0.5, search=0.5, portfolio=False
    )
    found = finetune(
        tests.problems().get(entry.instance), loaded(checkpoint), config=config, seed=seed
    )
    return replace(entry, since_s=min(entry.since_s, found.value_s))


@main.command()
@click.option("--evaluations", default=100_000, show_default=True)
@click.option("--seconds", default=1e9, help="Stop after so long; run again to go on.")
@click.option("--seed", default=0)
@options.engine
def best(evaluations: int, seconds: float, seed: int, engine: Engine) -> None:
    """Search every instance that has not been searched as long; better values are kept."""
    known, begin = tests.load(), time.monotonic()
    short = [k for k, entry in enumerate(known) if entry.evaluations < evaluations]
    tasks = ((known[k], evaluations, seed) for k in short)
    in_time = takewhile(lambda _: time.monotonic() - begin <= seconds, tasks)
    for number, entry in each(_searched, in_time, engine):
        known[short[number]] = entry
        tests.save(known)
    done = sum(entry.evaluations >= evaluations for entry in known)
    click.echo(f"{done} of {len(known)} searched with {evaluations} evaluations")


@main.command()
@CHECKPOINT
@click.option("--evaluations", default=12_800, show_default=True, help="Of each fine-tuning.")
@click.option("--seed", default=0, show_default=True)
@options.engine
def lower(checkpoint: Path | None, evaluations: int, seed: int, engine: Engine) -> None:
    """Values below the listed ones, from long fine-tunings without a gradient (half exploration,
    half guided search) and from training from scratch."""
    known, scratch = tests.load(), tests.from_scratch()
    wanted = [k for k, entry in enumerate(known) if hard([entry])]
    tasks = [(known[k], checkpoint, evaluations, seed) for k in wanted]
    for number, entry in each(_lowered, tasks, engine):
        since_s = min(entry.since_s, scratch.get(entry.instance.key, np.inf))
        known[wanted[number]] = replace(entry, since_s=since_s)
        tests.save(known)
    ratios = [entry.lowest_s / entry.best_s for entry in hard(known)]
    table = {"mean": geomean(ratios), "lowest": min(ratios), "lower": sum(r < 1 for r in ratios)}
    show("lowest since / listed", table | {"instances": len(ratios)})


@main.command("zero-shot")
@CHECKPOINT
@click.option("--count", default=1000, help="Instances at most.")
def zero_shot_verb(checkpoint: Path | None, count: int) -> None:
    """Greedy and samples against heuristics, instances that one device wins apart."""
    known, policy = spread(tests.load(), count), loaded(checkpoint)
    show("zero-shot", zero_shot_table(policy, hard(known), SEEDS))
    trivial = [entry for entry in known if np.isfinite(entry.best_s) and entry.is_trivial]
    if trivial:
        show("zero-shot, one device is best", zero_shot_table(policy, trivial, SEEDS[:1]))


@main.command()
@CHECKPOINT
@click.option("--count", default=1000, help="Instances at most.")
def ablate(checkpoint: Path | None, count: int) -> None:
    """The same weights without attention, and without gates."""
    policy, known = loaded(checkpoint), hard(spread(tests.load(), count))
    for block in policy.params.get("attention", {}).values():
        if "strength" in block:
            click.echo(f"residual strengths of attention: {np.asarray(block['strength'])}")
    variants = {
        "as trained": policy.params,
        "attention zeroed": zeroed(policy.params, ("strength",)),
        "gates at one": zeroed(policy.params, ("conditioning",)),
    }
    for name, params in variants.items():
        show(name, zero_shot_table(replace(policy, params=params), known, SEEDS[:1]))


@main.command("finetune")
@CHECKPOINT
@COUNT
@click.option("--freedom", type=click.Choice(["gates_first", "gates", "all"]), default=None)
@click.option("--explore/--no-explore", default=True, help="Without: what its share was before.")
def finetune_verb(checkpoint: Path | None, count: int, freedom: str | None, explore: bool) -> None:
    """800 evaluations each: fine-tuning, annealing from the best heuristic, `auto`, and both.

    `auto` is that of `gdp place`, `after auto` what `gdp finetune` does: 800 of it, then its own.
    """
    policy, source = loaded(checkpoint), tests.problems()
    config = FinetuneConfig(portfolio=False)
    if not explore:
        config = replace(config, explore=0.0, search=0.85)
    if freedom is not None:
        config = replace(config, freedom=freedom)  # type: ignore[arg-type]
    known = spread(hard(tests.load()), count)
    budget = Search(seconds=None, evaluations=800)
    extra = [("policy", policy_candidate(policy))]
    reached: dict[str, list[float]] = {}
    for entry in known:
        problem = source.get(entry.instance)
        start = start_of(problem)
        found = {
            "fine-tuned": finetune(problem, policy, config=config).value_s,
            "annealing": answered_s(problem, local_search(problem, replace(budget, start=start))),
            "auto": answered_s(problem, auto(problem, budget, extra)),
            "after auto": finetune(problem, policy, config=replace(config, portfolio=True)).value_s,
        }
        for name, seconds in found.items():
            ratio = min(seconds, MISFIT * entry.best_s) / entry.best_s
            reached.setdefault(name, []).append(ratio)
    means = over_lowest({name: geomean(ratios) for name, ratios in reached.items()}, known)
    worse = {
        f"{name} worse than auto": sum(
            mine > plain * (1 + 1e-9)
            for mine, plain in zip(reached[name], reached["auto"], strict=True)
        )
        for name in ("fine-tuned", "after auto")
    }
    show("800 evaluations", means | worse | {"instances": len(known)})


def answered_s(problem: Problem, answer: Answer) -> float:
    """The value of an answer in seconds; inf where there is none."""
    return np.inf if answer.assignment is None else tests.value(problem, answer.assignment)


def guided_table(
    policy: Policy, problems: list[Problem], search: Search, known_s: list[float] | None
) -> dict[str, Any]:
    """Ratios to best known (or to the better of the two) with and without guidance; seconds."""
    reached: dict[str, list[float]] = {"guided": [], "unguided": []}
    spent = dict.fromkeys(reached, 0.0)
    for problem in problems:
        start = start_of(problem)
        for name, found in reached.items():
            begin = time.perf_counter()
            share = SHARE if name == "guided" else 0.0
            answer = guided_search(problem, policy, replace(search, start=start), share=share)
            spent[name] += time.perf_counter() - begin
            seconds = tests.value(problem, start)
            if answer.assignment is not None:
                seconds = min(seconds, tests.value(problem, answer.assignment))
            found.append(seconds)
    if known_s is None:
        known_s = [min(pair) for pair in zip(*reached.values(), strict=True)]
    ratios = {
        name: [a / b for a, b in zip(found, known_s, strict=True)]
        for name, found in reached.items()
    }
    table: dict[str, Any] = {name: geomean(found) for name, found in ratios.items()}
    pairs = list(zip(*ratios.values(), strict=True))
    table["guided better"] = float(np.mean([a < b * (1 - 1e-9) for a, b in pairs]))
    table["guided worse"] = float(np.mean([a > b * (1 + 1e-9) for a, b in pairs]))
    return table | {f"{k}, s": v for k, v in spent.items()} | {"instances": len(pairs)}


@main.command()
@CHECKPOINT
@COUNT
@click.option("--evaluations", default=800, show_default=True)
def guided(checkpoint: Path | None, count: int, evaluations: int) -> None:
    """Equal evaluations from the best heuristic; seconds beside."""
    source, policy = tests.problems(), loaded(checkpoint)
    known = spread(hard(tests.load()), count)
    posed = [source.get(entry.instance) for entry in known]
    for seed in SEEDS:
        search = Search(seed=seed, seconds=None, evaluations=evaluations)
        table = guided_table(policy, posed, search, [entry.best_s for entry in known])
        show(f"{evaluations} evaluations, seed {seed}", table)


@main.command()
@CHECKPOINT
@click.option("--count", default=8, show_default=True, help="Instances.")
@click.option("--seconds", default=10.0, show_default=True, help="Of each search.")
def large(checkpoint: Path | None, count: int, seconds: float) -> None:
    """Equal seconds from the best heuristic on large graphs of the test families."""
    source, policy = tests.problems(2000, 15_000), loaded(checkpoint)
    rng = np.random.default_rng(7)
    drawn = [draw_instance(rng, [name]) for name in sorted(source.test)]
    posed = [source.get(entry.instance) for entry in spread([Known(x) for x in drawn], count)]
    posed = [p for p in posed if np.isfinite(tests.with_heuristics(Known(drawn[0]), p).heuristic_s)]
    for problem in posed:  # compiled before the clock runs, for coarse graphs too
        warm = Search(seconds=None, evaluations=50, start=start_of(problem))
        guided_search(problem, policy, warm)
    show(f"{seconds:g} s each", guided_table(policy, posed, Search(seconds=seconds), None))


@main.command()
@CHECKPOINT
@click.option("--count", default=24, show_default=True, help="Instances.")
@click.option("--evaluations", default=10_000, show_default=True, help="Of the search beside.")
def unseen(checkpoint: Path | None, count: int, evaluations: int) -> None:
    """More devices, other speeds and other links than any of training."""
    policy, source = loaded(checkpoint), tests.problems()
    ratios: list[float] = []
    trivial = 0
    for k, entry in enumerate(spread(hard(tests.load()), count)):
        instance = type(entry.instance)(graph=entry.instance.graph, cluster=0)
        cluster = tests.unseen_cluster(k % 3, source.graph(entry.instance.graph))
        problem = make(instance, source.graph, cluster)
        answer = local_search(problem, Search(seconds=None, evaluations=evaluations))
        greedy, best_s = zero_shot(policy, problem, 0)
        known = tests.with_heuristics(Known(instance), problem)
        least = min(best_s, known.best_s)
        if answer.assignment is not None:
            least = min(least, tests.value(problem, answer.assignment))
        if least < known.single_s * (1 - 1e-9):
            ratios.append(greedy / least)
        else:
            trivial += 1
    table = {"greedy": geomean(ratios), "instances": len(ratios), "one device is best": trivial}
    show("unseen clusters", table)


@main.command()
@CHECKPOINT
@COUNT
def memory(checkpoint: Path | None, count: int) -> None:
    """How often the policy's answer fits when memory is 1.05 of the smallest limit known to."""
    source = tests.problems()
    fits, asked = 0, 0
    for entry in spread(hard(tests.load()), count):
        free = source.get(tests.without_limit(entry))
        share = tests.smallest_share(free)
        if share is None:
            continue
        answer = place_with_policy(limit_memory(free, 1.05 * share), checkpoint, Search())
        asked += 1
        fits += answer.assignment is not None
    show("memory at 1.05 of the smallest feasible", {"feasible": fits / max(asked, 1), "of": asked})


if __name__ == "__main__":
    run(importlib.import_module("benchmarks.policy.hard").main)  # tasks travel by that name
