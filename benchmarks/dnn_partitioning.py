"""The public benchmark of Tarnawski et al. 2020 (arXiv 2006.16423), by gdp's exact methods.

    python benchmarks/dnn_partitioning.py FOLDER [--seconds 300] [--only NAME] [--objective O]
                                          [--methods pipeline_dp,exact] [--reference FILE] [--json]

FOLDER is a clone of the authors' repository (msr-fiddle/dnn-partitioning), or any folder with
`throughput*/` and `latency*/` folders of its instances. Every instance is solved for the authors'
max-load; those under `latency` for their single-sample latency too. A reference file (JSON, by
default FOLDER/reference.json where there is one) states the authors' values in ms and seconds.

Each solution is valued by `gdp.methods.host_memory.load`, whose objectives follow the authors'
programs exactly. Each runs in a process of its own, warm: what compilation took is printed apart,
and MB is the peak of the whole process, with in brackets what the solution added. `gap` is (value -
bound) / value with a bound on all placements, contiguous or not; "contiguous optimum" in the last
column means that no contiguous placement is better. "times faster" compares CPU seconds, and only
where both solve the same problem exactly: the authors' program `dp` and `pipeline_dp`.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

METHODS = ("pipeline_dp", "exact")
OBJECTIVES = ("max_load", "block_latency")
# Which of the authors' programs prints the value that a method of ours is compared with.
RIVALS_OF = {
    "pipeline_dp": {"max_load": ("dp", "max_load_dp"), "block_latency": ("dp_split",)},
    "exact": {"max_load": ("localSearch10",), "block_latency": ("greedy",)},
}
BASELINES = (
    "dp", "dpl", "pipeDream", "expert", "scotch", "localSearch10", "oneFpga",
    "greedy", "dp_split", "dpl_split", "expert_split", "scotch_split",
)  # fmt: skip
GRACE_S = 120.0  # beyond the budget, before a process is stopped


def instances(folder: Path, only: str) -> dict[str, Path]:
    """Instance files by name, such as `latency/LayerGraphs/bert24_inference`."""
    found = {}
    for path in sorted(folder.rglob("*.json")):
        parts = path.relative_to(folder).parts
        kinds = [k for k in ("throughput", "latency") if any(p.startswith(k) for p in parts[:-1])]
        graphs = [p for p in parts[:-1] if p.endswith("Graphs")]
        if len(kinds) == 1 and graphs and _is_instance(path):
            inside = parts[parts.index(graphs[-1]) + 1 : -1]
            found["/".join([kinds[0], graphs[-1], *inside, path.stem])] = path
    return {name: path for name, path in found.items() if only in name}


def _is_instance(path: Path) -> bool:
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(document, dict) and {"nodes", "edges", "maxFPGAs"} <= document.keys()


def solve(path: str, objective: str, method: str, seconds: float, seed: int) -> dict[str, Any]:
    """One row, measured in this process."""
    from benchmarks.partitioning_instances import load_dnn_partitioning
    from gdp.methods.base import Search
    from gdp.methods.host_memory import load as host_load
    from gdp.methods.table import METHODS as table

    started_s = time.perf_counter()
    kind = "max_load" if objective == "max_load" else "block_latency"
    values = host_load.values if kind == "max_load" else host_load.block_values
    _warm(table[method], values, kind)
    compiled_s = time.perf_counter() - started_s
    problem = load_dnn_partitioning(path, kind)
    before_mb = _peak_mb()
    started_s, cpu_s = time.perf_counter(), time.process_time()
    answer = table[method](problem, Search(seed=seed, seconds=seconds))
    took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    row: dict[str, Any] = {
        "value_ms": None, "bound_ms": answer.bound_s * 1e3, "bound_by": answer.bound_by,
        "gap": None, "seconds": took_s, "cpu_seconds": cpu_s, "compile_seconds": compiled_s,
        "peak_mb": _peak_mb(), "added_mb": _peak_mb() - before_mb,
        "proven_optimal": answer.proven_optimal, "reason": answer.reason,
    }  # fmt: skip
    if answer.assignment is not None:
        device, rank = answer.assignment.device, answer.assignment.rank
        if kind == "max_load":
            value_s, overflow = host_load.values(problem, device[None])
        else:
            value_s, overflow = host_load.block_values(problem, device[None], rank)
        if overflow[0] or not problem.allowed[range(problem.num_ops), device].all():
            row["reason"] = f"invalid: {overflow[0]} bytes over memory"
        value = float(value_s[0])
        row["value_ms"] = value * 1e3
        row["gap"] = max(0.0, (value - answer.bound_s) / value) if value > 0 else 0.0
    return row


def _warm(method: Any, values: Any, objective: Any) -> None:
    """Compile, by solving two chains of three ops."""
    import numpy as np

    from gdp.cluster.types import Device, make_cluster
    from gdp.graph.op_graph import make_graph
    from gdp.methods.base import Search
    from gdp.problem.problem import make_problem

    graph = make_graph(
        "warm", [f"o{i}" for i in range(6)], ["X"] * 6, [(i, 1) for i in range(6)],
        [(0, 1), (1, 2), (3, 4), (4, 5)], weight_bytes=[1] * 6,
    )  # fmt: skip
    devices = [Device(f"a{i}", "accelerator", {"default": 1.0}, 1.0, 4) for i in range(2)]
    devices.append(Device("c0", "cpu", {"default": 1.0}, 1.0))
    compute_s = np.repeat([[1.0, 1.0, 5.0]], 6, axis=0)
    problem = make_problem(
        graph, make_cluster("warm", devices), compute_s, objective, sent_s=np.full(6, 0.5)
    )
    method(problem, Search(seconds=5.0))
    values(problem, np.zeros((1, 6), dtype=np.int64))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_apart(path: Path, objective: str, method: str, seconds: float, seed: int) -> dict[str, Any]:
    """The row of one instance, measured in a fresh process."""
    task = json.dumps([str(path), objective, method, seconds, seed])
    command = [sys.executable, __file__, "--task", task]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + GRACE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"value_ms": None, "reason": f"stopped after {seconds + GRACE_S:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"value_ms": None, "reason": f"failed: {last}"}
    return json.loads(done.stdout)


def compared(row: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """The row with the authors' values and seconds, and how many times faster ours was."""
    values, seconds = entry.get("values", {}), entry.get("user_seconds", {})
    names = RIVALS_OF[row["method"]][row["objective"]]
    rival = next((name for name in names if name in values or name in seconds), None)
    is_load = row["objective"] == "max_load"
    known = {}
    for name in BASELINES:
        for key in (f"max_load_{name}", name) if is_load else (name,):
            measures_load = key.startswith("max_load_") or row["instance"].startswith("throughput")
            if key in values and measures_load == is_load:
                known[name] = values[key]
    authors_s = seconds.get(rival) if rival is not None else None
    ours_s = row.get("cpu_seconds") if row["method"] == "pipeline_dp" and is_load else None
    return row | {
        "authors_program": rival,
        "authors_ms": values.get(rival) if rival is not None else None,
        "authors_seconds": authors_s,
        "times_faster": authors_s / ours_s if authors_s and ours_s else None,
        "baselines_ms": known,
    }


def report(row: dict[str, Any]) -> None:
    """Print one row of the table."""

    def text(key: str, form: str) -> str:
        return "-" if row.get(key) is None else format(row[key], form)

    reason = row.get("reason", "")
    if row.get("proven_optimal"):
        said = "optimal"
    elif reason.startswith("no contiguous pipeline is better"):
        said = "contiguous optimum"
    else:
        said = reason or row.get("bound_by", "")
    baselines = ", ".join(f"{k} {v:.3f}" for k, v in row["baselines_ms"].items())
    memory = "-" if row.get("peak_mb") is None else f"{row['peak_mb']:.0f} ({row['added_mb']:.0f})"
    click.echo(
        f"| {row['instance']} | {row['objective']} | {row['method']} | {text('value_ms', '.6f')} | "
        f"{text('bound_ms', '.6f')} | {text('gap', '.2%')} | {text('seconds', '.3f')} | {memory} | "
        f"{text('compile_seconds', '.1f')} | {row['authors_program'] or '-'} "
        f"{text('authors_ms', '.6f')} | {text('authors_seconds', '.2f')} | "
        f"{text('times_faster', '.1f')} | {baselines or '-'} | {said} |"
    )


@click.command()
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--seconds", default=300.0, show_default=True, help="Budget of each solution.")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", default="", help="Instances whose name contains this.")
@click.option("--objective", type=click.Choice([*OBJECTIVES, "both"]), default="both")
@click.option("--methods", default=",".join(METHODS), show_default=True)
@click.option("--reference", type=click.Path(exists=True, dir_okay=False))
@click.option("--json", "as_json", is_flag=True)
@click.option("--task", hidden=True)
def main(
    folder: str | None, seconds: float, seed: int, only: str, objective: str, methods: str,
    reference: str | None, as_json: bool, task: str | None,
) -> None:  # fmt: skip
    """Print the table."""
    if task is not None:
        click.echo(json.dumps(solve(*json.loads(task))))
        return
    if folder is None:
        raise click.UsageError("give the FOLDER with the instances")
    found = instances(Path(folder), only)
    if not found:
        raise click.UsageError(f"no instance in {folder} has a name with {only!r}")
    stated = Path(reference) if reference else Path(folder) / "reference.json"
    known = json.loads(stated.read_bytes()) if stated.exists() else {}
    wanted = methods.split(",")
    if unknown := [m for m in wanted if m not in RIVALS_OF]:
        raise click.UsageError(f"no method {unknown[0]!r}; there are {', '.join(RIVALS_OF)}")
    rows = []
    if not as_json:
        click.echo(
            "| instance | objective | method | value ms | bound ms | gap | seconds | MB (added) | "
            "compile s | authors' ms | s | times faster | baselines ms | |"
        )
        click.echo("|" + " --- |" * 3 + " ---: |" * 6 + " --- |" + " ---: |" * 2 + " --- |" * 2)
    for name, path in found.items():
        kinds = OBJECTIVES if name.startswith("latency") else OBJECTIVES[:1]
        for kind in [k for k in kinds if objective in (k, "both")]:
            for method in wanted:
                row = {"instance": name, "objective": kind, "method": method}
                row |= run_apart(path, kind, method, seconds, seed)
                row = compared(row, known.get(f"{name}.json", {}))
                rows.append(row)
                if not as_json:
                    report(row)
    if as_json:
        click.echo(json.dumps({"seconds": seconds, "seed": seed, "rows": rows}))


if __name__ == "__main__":
    main()
