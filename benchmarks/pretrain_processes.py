"""Pre-training on 1, 2 and 4 processes of this machine: samples a second of each.

    python -m benchmarks.pretrain_processes [--processes 1,2,4] [--updates 12] [--ops 60]
        [--limit 240] [--json]

Every job runs the same recipe of imitation, eight problems an update over random graphs that need
no corpus, on one thread a process; processes find each other over loopback, as `gdp pretrain
--coordinator` on several machines. A sample is one problem of one update. The first quarter of the
updates compiles and is left out. With more processes than cores the rate cannot grow further.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from gdp.sim.batch import num_threads

GRAPHS = 8  # problems of an update
RECIPE = """
name = "processes"
seed = 3
[network]
width = 32
heads = 2
attention_layers = 1
[imitation]
updates = UPDATES
graphs = GRAPHS
[ppo]
updates = 0
[data]
corpus = ""
labels = "LABELS"
max_ops = OPS
random_graphs = 16
[run]
validate_every = 100000
"""


def prepare(folder: Path, updates: int, ops: int) -> Path:
    """The recipe, with labels that one device each makes: their quality does not matter here."""
    from gdp.learn.instances import Instance
    from gdp.learn.labels import LabelStore
    from gdp.learn.problems import load_problems

    problems = load_problems("", random_graphs=16, seed=0, min_ops=30, max_ops=ops)
    store = LabelStore([])
    for name in problems.train:
        problem = problems.get(Instance(graph=name, cluster=3))
        device = problem.allowed.argmax(axis=1)
        store.improve(Instance(name, 3), problem, device, evaluations=1, found_by="first")
    store.save(folder / "labels.jsonl")
    text = RECIPE.replace("UPDATES", str(updates)).replace("GRAPHS", str(GRAPHS))
    recipe = folder / "recipe.toml"
    labels = str(folder / "labels.jsonl")
    recipe.write_text(text.replace("LABELS", labels).replace("OPS", str(ops)))
    return recipe


def rate(recipe: Path, out: Path, processes: int, updates: int, limit_s: float) -> dict[str, Any]:
    """Samples a second of one job, from when its lines of metrics were written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "gdp", "pretrain", str(recipe), "-o", str(out)]
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1"}
    team = []
    for rank in range(processes):
        joined = ["--coordinator", f"127.0.0.1:{port}", "--processes", str(processes),
                  "--process-id", str(rank)]  # fmt: skip
        with (out.parent / f"{out.name}-{rank}.log").open("w") as log:
            team.append(
                subprocess.Popen(
                    command + joined * (processes > 1), env=env, stdout=log, stderr=log
                )
            )
    begin_s, seen = time.monotonic(), {0: time.monotonic()}
    metrics, stopped = out / "metrics.jsonl", False
    try:
        while any(process.poll() is None for process in team):
            if stopped := time.monotonic() - begin_s > limit_s:
                break
            count = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            seen.setdefault(count, time.monotonic())
            time.sleep(0.05)
    finally:
        for process in team:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    steady = {count: at for count, at in seen.items() if count >= max(1, updates // 4)}
    row: dict[str, Any] = {"processes": processes, "updates": max(seen)}
    if len(steady) < 2:
        said = (out.parent / f"{out.name}-0.log").read_text().strip().splitlines()
        return row | {
            "reason": f"stopped after {limit_s:.0f} s" if stopped or not said else said[-1]
        }
    first, last = min(steady), max(steady)
    spent_s = steady[last] - steady[first]
    return row | {"samples_per_s": GRAPHS * (last - first) / spent_s, "seconds": spent_s}


@click.command(help=__doc__)
@click.option("--processes", default="1,2,4", show_default=True)
@click.option("--updates", default=12, show_default=True)
@click.option("--ops", default=60, show_default=True, help="Of the largest graph.")
@click.option("--limit", default=240.0, show_default=True, help="Seconds of each job.")
@click.option("--json", "as_json", is_flag=True)
def main(processes: str, updates: int, ops: int, limit: float, as_json: bool) -> None:
    """Print the table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        recipe = prepare(Path(folder), updates, ops)
        for count in map(int, processes.split(",")):
            rows.append(rate(recipe, Path(folder) / f"run{count}", count, updates, limit))
            if not as_json:
                row = rows[-1]
                said = row.get("reason") or f"{row['samples_per_s']:.2f} samples/s"
                click.echo(f"{count} processes on {num_threads()} cores: {said}")
    if as_json:
        click.echo(json.dumps({"cores": num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
