"""Does the closed loop pay? Simulated machines whose costs are other ones than are planned with.

    python -m benchmarks.tune simulated [--count 30] [--runs 10] [--evaluations 4000] [--rows FILE]
    python -m benchmarks.tune held-out [MODEL ...]
    python -m benchmarks.tune measured --cluster 2xcpu-core [--runs 10] [MODEL ...]

`simulated`: graphs of test families, 300 to 5,000 ops, on random clusters, both objectives, ample
and tight memory. Costs of the machine differ by op type (0.3 of the log, 0.15 more by kind of
device, 0.1 by op), by single op (0.3), by link (0.4, and slower by 0.35) with a dispatch of
0.4% of all work, or, outside the model, where an op whose inputs come from another device takes 30%
longer. Each way of planning has the same number
of executed placements and, but for search on the machine, the same searches. The oracle is the
lowest seconds of any way, or of a long search on the true costs.
"""

import json
import multiprocessing
import os
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
import numpy as np

import gdp
from benchmarks.policy.instances import problems
from benchmarks.tables import between, geomean, head, line
from gdp.base.cores import usable_cores
from gdp.costs.adapt import (
    Adaptation,
    AdaptedCosts,
    LinkSeconds,
    Piece,
    Run,
    Share,
    base_dispatch_s,
    op_keys,
    piece_shares,
)
from gdp.costs.base import roofline
from gdp.learn.instances import Instance, make
from gdp.learn.tuning import Measurement, Planned, tuning_loop
from gdp.measure.statistics import Estimate
from gdp.methods.base import Assignment, Search
from gdp.methods.portfolio import auto
from gdp.methods.search.local_search import local_search
from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks
from gdp.sim.score import score
from gdp.sim.segments import segments

KINDS = ("types", "ops", "links", "outside")
EVALUATIONS = 4000
"""Of a search from scratch; from the best placement half as many."""
NOISE = 0.02


@dataclass(frozen=True, eq=False)
class World:
    """The costs that are planned with, and the machine."""

    planned: Problem
    real: Problem
    remote: float  # factor of ops whose inputs come from another device
    rng: np.random.Generator
    evaluations: int = EVALUATIONS

    def machine(self, a: Assignment) -> Problem:
        """The true costs of one placement."""
        if self.remote == 1.0:
            return self.real
        source, reader = self.real.graph.edges
        crossed = np.zeros(self.real.num_ops, bool)
        crossed[reader[a.device[source] != a.device[reader]]] = True
        factor = np.where(crossed, self.remote, 1.0)
        return replace(self.real, compute_s=self.real.compute_s * factor[:, None])

    def value_s(self, a: Assignment) -> float:
        """Seconds of the objective without noise; inf where memory overflows."""
        found = score(self.machine(a), a.device, a.rank, a.teams)
        return found.value_s if found.feasible else np.inf

    def measure(self, a: Assignment, *, merged: bool = False) -> Measurement:
        """Execute: noisy seconds of the whole, of every piece (or device) and of every link."""
        real, base = self.machine(a), self.planned
        seconds = real.compute_s[np.arange(real.num_ops), a.device]
        planned = base.compute_s[np.arange(base.num_ops), a.device]
        segment = a.device if merged else segments(real.graph, a.device)
        keys, works = op_keys(base.graph), ~base.graph.is_io
        pieces, shares = [], piece_shares(keys, planned, np.where(works, segment, -1))
        for s in np.unique(segment[works]).tolist():
            ops = np.flatnonzero(works & (segment == s))
            d = int(a.device[ops[0]])
            mine, true = base.cluster.devices[d], real.cluster.devices[d]
            count = len(ops) if mine.dispatch_per == "op" else 1
            own = (*shares.get(s, ()), Share("", 0, "", base_dispatch_s(mine) * count))
            took = float(seconds[ops].sum()) + true.dispatch_s * count
            pieces.append(Piece(mine.name, mine.kind, own, self._noisy(took), False))
        run = Run("m", tuple(pieces), self._links(real, a))
        return Measurement(self._noisy(self.value_s(a)), run, NOISE)

    def _links(self, real: Problem, a: Assignment) -> tuple[LinkSeconds, ...]:
        source, reader = real.graph.edges
        sent = {
            (int(t), int(a.device[i]), int(a.device[j]))
            for t, i, j in zip(real.graph.use_tensor, source, reader, strict=True)
            if a.device[i] != a.device[j]
        }
        total = defaultdict[tuple[int, int], list[float]](lambda: [0.0, 0.0])
        for t, i, j in sorted(sent):
            for k, cluster in enumerate((self.planned.cluster, real.cluster)):
                rate, wait_s = cluster.link_bytes_per_s[i, j], cluster.link_latency_s[i, j]
                total[i, j][k] += float(wait_s + real.sent_bytes[t] / rate)
        names = real.cluster.device_names
        return tuple(
            LinkSeconds(names[i], names[j], p, self._noisy(m)) for (i, j), (p, m) in total.items()
        )

    def _noisy(self, seconds: float) -> float:
        return float(seconds * np.exp(NOISE * self.rng.normal()))


def world(planned: Problem, kind: str, seed: int) -> World:
    """A machine whose costs differ from the planned ones in the way that a kind names; of one seed,
    the same machine for all graphs."""
    by_type, by_op = {"ops": (0.15, 0.3), "links": (0.1, 0.05)}.get(kind, (0.3, 0.1))
    graph, cluster = planned.graph, planned.cluster
    rates = [(d.flop_per_s["default"], d.bytes_per_s) for d in cluster.devices]
    kinds = [sorted(set(rates)).index(r) for r in rates]
    log = {
        t: by_type * np.array([_normal(seed, t) + _normal(seed, f"{t} {k}") / 2 for k in kinds])
        for t in set(graph.op_types)
    }
    own = np.array([by_op * _normal(seed, f"{t} {f:.3g}") for t, f in zip(
        graph.op_types, graph.memory_traffic_bytes, strict=True)])  # fmt: skip
    factor = np.exp(np.array([log[t] for t in graph.op_types]) + own[:, None])
    spread_, shift = (0.4, 0.35) if kind == "links" else (0.2, 0.0)
    d = len(kinds)
    pairs = [[f"{min(i, j)} {max(i, j)}" for j in range(d)] for i in range(d)]
    slower = np.exp([[0.0 if i == j else shift + spread_ * _normal(seed, pairs[i][j])
                      for j in range(d)] for i in range(d)])  # fmt: skip
    work_s = planned.compute_s[~graph.is_io].min(axis=1).sum()
    more_s = 0.004 * work_s if kind == "links" else 0.0
    devices = tuple(
        replace(x, dispatch_s=x.dispatch_s + (more_s if x.dispatch_per == "segment" else 0.0))
        for x in cluster.devices
    )
    links = cluster.link_bytes_per_s / slower
    machine = replace(cluster, devices=devices, link_bytes_per_s=links)
    real = replace(planned, cluster=machine, compute_s=planned.compute_s * factor)
    rng = np.random.default_rng(seed)
    return World(planned, real, 1.3 if kind == "outside" else 1.0, rng)


def _normal(seed: int, name: str) -> float:
    return float(np.random.default_rng([seed, zlib.crc32(name.encode())]).normal())


def searched(
    problem: Problem, start: Assignment | None, seed: int, evaluations: int = EVALUATIONS
) -> Assignment | None:
    """`auto`, or a local search from a placement; None where nothing is found that fits."""
    ticks = in_ticks(problem)
    method, share = (auto, 1) if start is None else (local_search, 2)
    budget = Search(seed=seed, seconds=None, evaluations=evaluations // share, start=start)
    found = method(ticks, budget).assignment
    if found is None or not score(ticks, found.device, found.rank, found.teams).feasible:
        return None
    return found


def _rated_s(problem: Problem, a: Assignment) -> float:
    found = score(problem, a.device, a.rank, a.teams)
    return found.value_s if found.feasible else np.inf


def by_speed(problem: Problem) -> Problem:
    """The problem with a kind for devices of each speed, as real clusters have."""
    rates = [(d.flop_per_s["default"], d.bytes_per_s) for d in problem.cluster.devices]
    devices = tuple(
        replace(d, kind=f"kind{sorted(set(rates)).index(r)}")
        for d, r in zip(problem.cluster.devices, rates, strict=True)
    )
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def adapted(problem: Problem, adaptation: Adaptation) -> Problem:
    """The planned problem with what was learned."""
    costs = AdaptedCosts(roofline, adaptation)
    factor = costs.factors(problem.graph, problem.cluster)
    return replace(
        problem, compute_s=problem.compute_s * factor,
        cluster=costs.with_runtime_overheads(problem.cluster),
    )  # fmt: skip


def _loop(
    own: World, runs: int, plan: Callable[[Adaptation], Problem], *, merged: bool = False,
    refit: bool = True,
) -> list[float]:  # fmt: skip
    """True seconds of the best measured placement after each run."""

    def place(a: Adaptation, start: Assignment | None, seed: int) -> Planned[Assignment]:
        problem = plan(a)
        found = searched(problem, start, seed, own.evaluations) or start
        found = found or searched(own.planned, None, 0, own.evaluations)
        assert found is not None
        return Planned(found, found.device.tobytes(), _rated_s(problem, found))

    best, lowest, curve = np.inf, np.inf, []
    for trial in tuning_loop(
        place, partial(own.measure, merged=merged), runs, patience=None, refit=refit
    ):
        if trial.measured.value_s < lowest:
            lowest, best = trial.measured.value_s, own.value_s(trial.planned.placement)
        curve.append(best)
    return curve + [best] * (runs - len(curve))


def _on_machine(own: World, runs: int) -> list[float]:
    """Local search whose every evaluation is a run: moves single ops of the first plan."""
    rng = np.random.default_rng(0)
    first = searched(own.planned, None, 0, own.evaluations)
    assert first is not None
    best, best_s = first, own.value_s(first)
    curve = [best_s]
    works = np.flatnonzero(~own.planned.graph.is_io)
    for _ in range(runs - 1):
        device = best.device.copy()
        segment = segments(own.planned.graph, device)
        chosen = works[segment[works] == segment[rng.choice(works)]]
        device[chosen] = rng.integers(own.planned.num_devices)
        tried = Assignment(device, best.rank)
        seconds = own.value_s(tried)
        if seconds < best_s:
            best, best_s = tried, seconds
        curve.append(best_s)
    return curve


WAYS: dict[str, Callable[[World, int], list[float]]] = {
    "tune": lambda w, n: _loop(w, n, lambda a: adapted(w.planned, a)),
    "tune, device seconds": lambda w, n: _loop(w, n, lambda a: adapted(w.planned, a), merged=True),
    "no refit": lambda w, n: _loop(w, n, lambda _: w.planned, refit=False),
    "search on the machine": _on_machine,
    "true costs": lambda w, n: _loop(w, n, lambda _: w.real, refit=False),
}


def instances(count: int) -> list[Instance]:
    """Test graphs by turns with objectives, ample and tight memory."""
    names = sorted(problems(300, 5000).test)
    chosen = [names[int(k)] for k in np.linspace(0, len(names) - 1, min(count, len(names)))]
    return [
        Instance(name, i, ("latency", "throughput")[i % 2], 0.0 if i // 2 % 2 else 1.5)
        for i, name in enumerate(chosen)
    ]


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--count", default=30, help="Problems.")
@click.option("--runs", default=10)
@click.option("--evaluations", default=EVALUATIONS, help="Of a search from scratch.")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(KINDS),
    default=KINDS,
    help="Of error, by turns; default: all.",
)
@click.option("--ways", "ways", multiple=True, type=click.Choice(tuple(WAYS)), default=tuple(WAYS))
@click.option("--rows", type=click.Path(dir_okay=False, path_type=Path),
              help="Rows are kept in it; problems in it are not run again.")  # fmt: skip
def simulated(
    count: int, runs: int, evaluations: int, kinds: Sequence[str], ways: Sequence[str],
    rows: Path | None,
) -> None:  # fmt: skip
    """Over the oracle after 1, 3, 10 and 30 runs: geometric mean, and the worst."""
    at = [n for n in (1, 3, 10, 30) if n <= runs]
    ratios: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    done: dict[str, dict[str, list[float]] | None] = {}
    if rows is not None and rows.exists():
        done = dict(json.loads(line) for line in rows.read_text().splitlines())
    for number, instance in enumerate(instances(count)):
        kind = kinds[number // 4 % len(kinds)]  # four combinations of objective and memory each
        key = f"{instance.key} {kind}, {evaluations} evaluations, {runs} runs"
        if key not in done:
            began_s = time.process_time()
            done[key] = _over_oracle(instance, number, kind, runs, evaluations, ways)
            print(f"# {key}: {time.process_time() - began_s:.0f} CPU s", flush=True)
            if rows is not None:
                with rows.open("a") as file:
                    file.write(json.dumps([key, done[key]]) + "\n")
        curves = done[key]
        if curves is None:
            print(f"# {key}: the first plan does not fit, left out", flush=True)
            continue
        for way in ways:
            ratios[kind, way].append([curves[way][n - 1] for n in at])
        print(f"# {key}: " + ", ".join(
            f"{way} {'/'.join(f'{x:.3f}' for x in ratios[kind, way][-1])}"
            for way in ways), flush=True)  # fmt: skip
    _table(ratios, kinds, ways, at)


def _over_oracle(
    instance: Instance, number: int, kind: str, runs: int, evaluations: int, ways: Sequence[str]
) -> dict[str, list[float]] | None:
    """True seconds after each run over the lowest known, of each way; None where the first plan
    does not fit."""
    planned = by_speed(make(instance, problems(300, 5000).graph))
    own = replace(world(planned, kind, number), evaluations=evaluations)
    first = searched(planned, None, 0, evaluations)
    if first is None or not np.isfinite(own.value_s(first)):
        return None
    curves = {way: WAYS[way](own, runs) for way in ways}
    least_s = min(min(curve) for curve in curves.values())
    long = searched(own.real, None, 99)
    if long is not None:
        least_s = min(least_s, own.value_s(long))
    return {way: [s / least_s for s in curve] for way, curve in curves.items()}


def _table(
    ratios: dict[tuple[str, str], list[list[float]]], kinds: Sequence[str], ways: Sequence[str],
    at: Sequence[int],
) -> None:  # fmt: skip
    for kind in (*kinds, "all"):
        print("\n" + head(" | ".join([kind, *(f"{n} runs" for n in at), "problems"])))
        for way in ways:
            own = kinds if kind == "all" else [kind]
            rows = np.array([r for k in own for r in ratios[k, way]])
            if len(rows):
                cells = [f"{geomean(c):.3f} ({c.max():.2f})" for c in rows.T]
                print(line(way, *cells, len(rows)))


LIGHT = tuple(f"onnx:light_{n}" for n in (
    "squeezenet", "shufflenet", "resnet50", "densenet121", "inception_v1", "inception_v2",
    "bvlc_alexnet", "vgg19", "zfnet512",
))  # fmt: skip


TRACED = (
    *(f"python:benchmarks.models:{n}" for n in ("bert", "llama", "mixtral")),
    "python:examples.jax_step:training_step",
)
"""Executed by PyTorch and by JAX."""


@main.command()
@click.argument("models", nargs=-1)
@click.option("--cluster", default="2xcpu-core", show_default=True)
@click.option("--objective", default="throughput", show_default=True)
@click.option("--runs", default=10, show_default=True)
@click.option("--spin", default=0.0, help="Share of core 1 that a spinner takes: unequal devices.")
def measured(models: Sequence[str], cluster: str, objective: str, runs: int, spin: float) -> None:
    """Models on this machine: predictions before and after, and plans beside the baselines.

    Nothing else may run meanwhile. Predictions are made before a placement is run; shipped costs
    make the first.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    print(head("model | off, run 1 | 2 | 3 | last | first plan | no refit | tuned | best baseline"))
    gains, offs = defaultdict[str, list[float]](list), defaultdict[int, list[float]](list)
    with spinning(spin):
        for model in models or (*LIGHT, *TRACED):
            found = {
                refit: gdp.tune(model, cluster, objective=objective, runs=runs, keep=False,
                                refit=refit)
                for refit in (True, False)
            }  # fmt: skip
            tuned, plain = found[True], found[False]
            own = [abs(r.predicted_s / r.measured_s - 1) for r in tuned.rounds]
            for number, off in enumerate(own):
                offs[number].append(off)
            rates = tuned.rates()
            first = rates.get("first plan", rates["tuned plan"])
            base = max((r for n, r in rates.items() if n not in ("first plan", "tuned plan")),
                       key=lambda r: r.value)  # fmt: skip
            other = 1.0 / plain.value_s
            answer = rates[tuned.answer]
            gains["first plan"].append(answer.value / first.value)
            gains["no refit"].append(answer.value / other)
            gains["best baseline"].append(answer.value / base.value)
            cells = [f"{own[k]:.1%}" if k < len(own) else "-" for k in (0, 1, 2)]
            cells += [f"{own[-1]:.1%}", _rate(first), f"{other:.1f}", _rate(answer), _rate(base)]
            print(line(model.rpartition(":")[2], *cells), flush=True)
    print("\nsamples/s of the answer over, geometric mean and lowest: " + ", ".join(
        f"{name} {geomean(own):.3f} ({min(own):.3f})" for name, own in gains.items()))  # fmt: skip
    print("predictions off, mean: " + ", ".join(
        f"run {n + 1} {np.mean(own):.1%} of {len(own)}" for n, own in offs.items()))  # fmt: skip


@main.command("held-out")
@click.argument("models", nargs=-1)
@click.option("--cluster", default="2xcpu-core", show_default=True)
@click.option("--objective", default="throughput", show_default=True)
@click.option("--tuned", default=4, show_default=True, help="So many of the models are tuned.")
@click.option("--runs", default=2, show_default=True, help="Of each tuned model.")
def held_out(models: Sequence[str], cluster: str, objective: str, tuned: int, runs: int) -> None:
    """Predictions of models that were never run here, after the first few were tuned.

    Nothing else may run meanwhile. What is remembered is kept in a folder of its own.
    """
    models = models or LIGHT
    offs = defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GDP_DATA_DIR"] = folder
        for model in models[:tuned]:
            gdp.tune(model, cluster, objective=objective, runs=runs)
        print(head("model | measured /s | shipped costs off | tuned on others off"))
        for model in models[tuned:]:
            placed = gdp.place(model, cluster, objective=objective).placement
            found = gdp.run(model, cluster, placed, objective=objective)
            full = objective == "throughput"
            measured_s = (
                1.0 / found["measured_throughput_per_s"] if full else found["measured_latency_s"]
            )
            for costs in ("shipped", None):
                scored = gdp.simulate(model, placed, cluster, objective=objective, costs=costs)
                off = abs(scored.value_s / measured_s - 1)
                offs["shipped" if costs else "tuned"].append(off)
            last = [f"{offs[name][-1]:.1%}" for name in ("shipped", "tuned")]
            print(line(model, f"{1 / measured_s:.1f}", *last), flush=True)
    print("mean: " + ", ".join(f"{name} {np.mean(own):.1%}" for name, own in offs.items()))


def _rate(found: Estimate) -> str:
    return between(found.value, found.low, found.high)


@contextmanager
def spinning(duty: float) -> Iterator[None]:
    """A process that takes a share of the second core, in turns of 1 ms.

    With the priority of a real-time process where that is allowed, so that the share is exact.
    """
    if not duty:
        yield
        return
    core = usable_cores()[1]
    process = multiprocessing.get_context("spawn").Process(target=_spin, args=(duty, core))
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _spin(duty: float, core: int) -> None:
    os.sched_setaffinity(0, {core})
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except PermissionError:
        print("# no real-time priority: the spinner's share is not exact", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:  # not beyond a benchmark that was killed
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + 0.001 * duty:
            pass
        time.sleep(max(0.0, began_s + 0.001 - time.perf_counter()))


if __name__ == "__main__":
    main()
