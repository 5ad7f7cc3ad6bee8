"""A placement of a JAX function as a folder that runs: the placement and a short program."""

from pathlib import Path

from gdp.files.writing import OWN_FILES_ONLY, OverwritePolicy, new_contents
from gdp.placement import Placement, save_placement

_RUNNER = '''"""Runs @MODEL@ as placement.json says, checks it and times it.

    python run.py [--cluster CLUSTER] [--measure-seconds S]

The module of the model must be importable: run this where it is, or set PYTHONPATH. Without a
cluster, devices named cpu... or core... are JAX's CPU devices, all others its accelerators.
"""

import argparse
import json
import os
from pathlib import Path

MODEL = "@MODEL@"
PLACEMENT = Path(__file__).resolve().parent / "placement.json"


def is_cpu(name):
    return name.startswith(("cpu", "core"))


def named_cluster(names):
    from gdp import Device, make_cluster

    kinds = ["cpu" if is_cpu(name) else "accelerator" for name in names]
    speed = {"default": 1e12}  # decides only how the placement is cut
    return make_cluster("placement", [Device(n, k, speed, 1e11) for n, k in zip(names, kinds)])


def main():
    parser = argparse.ArgumentParser(description=f"Run {MODEL} as placed.")
    parser.add_argument("--cluster", help="TOML file or preset, for predicted times")
    parser.add_argument("--measure-seconds", type=float, default=10.0, help="at most")
    options = parser.parse_args()
    names = json.loads(PLACEMENT.read_text())["devices"]
    # JAX reads this once, when it starts; the last of equal flags counts.
    flag = f"--xla_force_host_platform_device_count={sum(map(is_cpu, names)) or 1}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    import gdp

    cluster = gdp.Cluster.load(options.cluster) if options.cluster else named_cluster(names)
    measuring = gdp.Measuring(options.measure_seconds)
    report = gdp.run(MODEL, cluster, gdp.load_placement(PLACEMENT), measuring=measuring)
    if not options.cluster:
        report = {k: v for k, v in report.items() if not k.startswith("predicted")}
    print(json.dumps(report, indent=1))
    return 0 if report["outputs_equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
'''


def export_jax(
    model: str,
    placement: Placement,
    output: Path,
    overwrite: OverwritePolicy = OWN_FILES_ONLY,
) -> list[Path]:
    """Write `placement.json` and `run.py`, which traces `model`, a `python:` name, again and
    executes it; returns the paths. See `gdp.files.writing` for `overwrite`."""
    with new_contents(output, "export to jax", overwrite) as folder:
        save_placement(placement, folder / "placement.json")
        (folder / "run.py").write_text(_RUNNER.replace("@MODEL@", model))
    return [output / "placement.json", output / "run.py"]
