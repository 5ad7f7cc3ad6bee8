"""A placement of a JAX function as a folder that runs: the placement and a short program."""

from dataclasses import replace
from pathlib import Path

from gdp.base.files.writing import OWN_FILES_ONLY, OverwritePolicy, new_contents
from gdp.cluster.file import cluster_toml
from gdp.cluster.types import Cluster
from gdp.placement.placement import Placement, QuestionRecord, save_placement
from gdp.targets.target import ExportJob

_RUNNER = '''"""Runs @MODEL@ as placement.json says, checks it and times it.

    python run.py [--cluster CLUSTER] [--measure-seconds S]

The module of the model must be importable: run this where it is, or set PYTHONPATH. Devices of
kinds cpu... are JAX's CPU devices, all others its accelerators; the placement knows its cluster.
"""

import argparse
import json
import os
from pathlib import Path

import gdp

MODEL = "@MODEL@"
PLACEMENT = Path(__file__).resolve().parent / "placement.json"


def main():
    parser = argparse.ArgumentParser(description=f"Run {MODEL} as placed.")
    parser.add_argument("--cluster", help="TOML file or preset, for other speeds")
    parser.add_argument("--measure-seconds", type=float, default=10.0, help="at most")
    options = parser.parse_args()
    placement = gdp.load_placement(PLACEMENT)
    given = options.cluster
    cluster = gdp.Cluster.load(given) if given else placement.question.machine()
    # JAX reads this once, when it starts; the last of equal flags counts.
    cpus = sum(device.is_cpu for device in cluster.devices)
    flag = f"--xla_force_host_platform_device_count={cpus or 1}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    measuring = gdp.Measuring(options.measure_seconds)
    report = gdp.run(MODEL, cluster, placement, measuring=measuring)
    print(json.dumps(report, indent=1))
    return 0 if report["outputs_equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
'''


def export_jax(
    model: str,
    placement: Placement,
    cluster: Cluster,
    output: Path,
    overwrite: OverwritePolicy = OWN_FILES_ONLY,
) -> list[Path]:
    """Write `placement.json` and `run.py`, which traces `model`, a `python:` name, again and
    executes it on devices of the kinds that `cluster` says; returns the paths. See
    `gdp.base.files.writing` for `overwrite`."""
    # Files of costs and models that the question names need not be where this folder goes.
    placement = replace(placement, question=QuestionRecord(cluster=cluster_toml(cluster)))
    with new_contents(output, "export to jax", overwrite) as folder:
        save_placement(placement, folder / "placement.json")
        (folder / "run.py").write_text(_RUNNER.replace("@MODEL@", model))
    return [output / "placement.json", output / "run.py"]


def export(job: ExportJob) -> list[Path]:
    """Write a program that runs a placement; see `export_jax`."""
    _, placement, cluster, output, overwrite = job.plan
    return export_jax(job.spec, placement, cluster, output, overwrite)
