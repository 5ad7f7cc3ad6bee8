"""Fits the curves of collectives that ship with gdp to measured ones, and prints their errors.

    python -m pretrain.costs.collectives [-o checkpoints/collectives]

The measurements are those of NCCL, oneCCL and of the all-reduces of vLLM, SGLang and TensorRT-LLM
that come with NVIDIA's AIConfigurator (Apache-2.0; `pip install -e ".[measured]"`), on boxes of 2,
4 and 8 accelerators, and up to 16 GB300. Tensors are of 16 bits; systems with the same links are
merged by the median of each size. A third of the sizes is held out for the errors; what ships is
fitted to all.

No table has one device that sends to another. In each operation of two devices both send as much as
they receive, so that a send takes no longer than the fastest of these: that is its curve.

Beside the curves: two numbers (latency and bandwidth) fitted to the same sizes; rings at the
bandwidth and latency of gdp's presets; and, over a kind of link whose own rows were left out, the
rings that are typical of the others.
"""

from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np
from jaxtyping import Float

from gdp.base import checkpoint
from gdp.cluster.links import NVLINK_LATENCY_S, PCIE_BYTES_PER_S, PCIE_LATENCY_S
from gdp.costs.measured.collectives import (
    LIBRARY,
    OPERATIONS,
    CollectivesMeta,
    Curve,
    MeasuredLink,
    Typical,
)
from pretrain.costs.tables import SYSTEMS, package

LINKS = {
    "nvlink3": MeasuredLink("nvlink", 300e9, ("a100",)),
    "nvlink4": MeasuredLink("nvlink", 450e9, ("h100", "h200")),
    "nvlink5": MeasuredLink("nvlink", 900e9, ("b200", "b300", "gb200", "gb300")),
    "pcie4-l40s": MeasuredLink("pcie", PCIE_BYTES_PER_S["pcie4"], ("l40s",)),
    "pcie5-rtx-pro-6000": MeasuredLink("pcie", PCIE_BYTES_PER_S["pcie5"], ("rtx-pro-6000",)),
    # Eight lanes.
    "pcie5x8-arc-b60": MeasuredLink("pcie", PCIE_BYTES_PER_S["pcie5"] / 2, ("arc-b60",)),
}
OPERATION_OF = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}  # fmt: skip
TABLES = {
    "nccl": (LIBRARY, "nccl_perf", ()), "oneccl": (LIBRARY, "oneccl_perf", ()),
    "vllm": ("vllm", "custom_allreduce_perf", ("vllm_graph", "vllm_eager")),
    "sglang": ("sglang", "custom_allreduce_perf", ("sglang_graph",)),
    "trtllm": ("trtllm", "custom_allreduce_perf", ()),
}  # fmt: skip
"""Engine, table and preferred forms by the folder of a library. Engines replay recorded graphs."""
SOURCE = (
    "collectives of AIConfigurator 0.12 (NVIDIA): NCCL 2.27 and 2.29, oneCCL 2021.15, and the "
    "all-reduces of vLLM, SGLang and TensorRT-LLM"
)
LICENCE = "Apache-2.0"
HELD = 3
"""Every third size is held out."""

SMALL = 512.0
"""Bytes of a message whose seconds are those of starting it."""

Key = tuple[str, str, str, int]  # link, operation, engine, devices


class Samples(NamedTuple):
    """Measured seconds of one operation. Axis: S sizes, increasing."""

    size_bytes: Float[np.ndarray, "S"]
    seconds: Float[np.ndarray, "S"]

    def held(self) -> np.ndarray:
        """True for sizes that are held out."""
        return np.arange(len(self.seconds)) % HELD == 1

    def take(self, which: np.ndarray) -> "Samples":
        """Some of the sizes."""
        return Samples(self.size_bytes[which], self.seconds[which])


def _version(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.replace("rc", ".").split(".") if part.isdigit())


def _table(folder: Path, name: str, forms: tuple[str, ...]) -> Any:
    """The newest table of those with most numbers of devices, as bytes and seconds."""
    import pandas as pd

    tables: dict[str, Any] = {}
    for path in folder.glob(f"*/{name}.parquet"):
        table = pd.read_parquet(path)
        if forms:  # rows without a form are another library's
            own = table.backend.unique().tolist() if "backend" in table else []
            form = next((f for f in forms if f in own), None)
            table = table[table.backend == form] if form else table[:0]
        tables[path.parent.name] = table
    if not tables:
        return pd.DataFrame()
    best = max(tables, key=lambda v: (tables[v].num_gpus.nunique(), _version(v)))
    table = tables[best]
    dtype = next(c for c in ("nccl_dtype", "allreduce_dtype") if c in table)
    table = table[table[dtype] != "int8"]
    return table.assign(size_bytes=2.0 * table.message_size, seconds=table.latency / 1e3)


def measured() -> dict[Key, Samples]:
    """Samples of every link, operation, engine and number of devices, those of sends derived."""
    import pandas as pd

    of_device = {device: name for name, link in LINKS.items() for device in link.devices}
    frames = []
    for system, preset in SYSTEMS.items():
        for library, (engine, name, forms) in TABLES.items():
            table = _table(package() / "data" / system / "comm" / library, name, forms)
            if len(table):
                frames.append(table.assign(link=of_device[preset], engine=engine, system=system))
    whole = pd.concat(frames)
    keys = ["link", "op_name", "engine", "num_gpus"]
    each = whole.groupby([*keys, "size_bytes", "system"]).seconds.median()
    merged = each.groupby(level=[*keys, "size_bytes"]).median()
    found: dict[Key, Samples] = {}
    for key, own in merged.groupby(level=keys):
        link, operation, engine, count = key
        sizes = own.index.get_level_values("size_bytes").to_numpy(float)
        name = OPERATION_OF[str(operation)]
        found[str(link), name, str(engine), int(count)] = Samples(sizes, own.to_numpy(float))
    for link in LINKS:
        found[link, "send", LIBRARY, 2] = _sends(found, link)
    return found


def _sends(found: dict[Key, Samples], link: str) -> Samples:
    """Least seconds in which two devices exchanged so many bytes, each way."""
    least: dict[float, float] = {}
    for (own, operation, engine, count), samples in found.items():
        if (own, engine, count) == (link, LIBRARY, 2):
            sent = OPERATIONS[operation].share(2) * samples.size_bytes
            for size, seconds in zip(sent.tolist(), samples.seconds.tolist(), strict=True):
                least[size] = min(seconds, least.get(size, np.inf))
    sizes = sorted(least)
    return Samples(np.array(sizes), np.array([least[size] for size in sizes]))


# Fits.


def fit_curve(samples: Samples, *, plain: bool = False) -> Curve:
    """The curve of least log errors, outliers counted less; plain ones have no middle term."""
    from scipy.optimize import least_squares

    size, seconds = samples
    logs = np.log(seconds)

    def curve(x: np.ndarray) -> Curve:
        latency, rate, *middle = np.exp(x).tolist()
        return Curve(latency, rate, *(middle or (0.0, 1.0)))

    ends = [logs[0], np.log(size[-1] / seconds[-1])]
    starts, margin = [ends], np.log([[0.5, 0.1], [2.0, 10.0]])
    limits = np.array(ends) + margin
    if not plain:
        parts = [(part, knee) for part in (0.3, 3.0) for knee in (3e4, 1e6, 1e7)]
        starts = [[*ends, logs[0] + np.log(part), np.log(knee)] for part, knee in parts]
        # Beyond these sizes the middle term is latency, or bandwidth.
        knees = np.log([4096.0, size[-1] / 16])
        extras = [np.log(1e-9), logs[-1]]
        limits = np.column_stack([limits, extras, knees])
    fits = [
        least_squares(
            lambda x: np.log(curve(x).seconds(size)) - logs, x, bounds=tuple(limits),
            loss="soft_l1", f_scale=0.1,
        )
        for x in starts
    ]  # fmt: skip
    return curve(min(fits, key=lambda fit: fit.cost).x)


def typical_rings(curves: dict[Key, Curve]) -> Typical:
    """Start and step of the libraries' rings by least squares of the logarithms of their seconds
    for `SMALL` bytes, and geometric means of their shares of the datasheet's bandwidth."""
    from scipy.optimize import least_squares

    rows = [(key, c) for key, c in curves.items() if key[2] == LIBRARY and key[1] != "send"]
    steps = np.array([OPERATIONS[key[1]].steps(key[3]) for key, _ in rows], dtype=float)
    small = np.log([float(curve.seconds(np.array([SMALL]))[0]) for _, curve in rows])

    def misses(x: np.ndarray) -> np.ndarray:
        return np.log(np.exp(x[0]) + np.exp(x[1]) * steps) - small

    start_s, step_s = np.exp(least_squares(misses, np.log([5e-6, 1e-6])).x).tolist()
    shares: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (name, operation, _, count), curve in rows:
        link = LINKS[name]
        sent_per_s = OPERATIONS[operation].share(count) * curve.bytes_per_s
        shares[link.family][count].append(min(1.0, sent_per_s / link.bytes_per_s))
    efficiency = {
        family: tuple(
            (count, round(_geometric_mean(own), 4)) for count, own in sorted(counts.items())
        )
        for family, counts in sorted(shares.items())
    }
    sends: dict[str, list[float]] = defaultdict(list)
    for (name, operation, *_), curve in curves.items():
        if operation == "send":
            sends[LINKS[name].family].append(curve.bytes_per_s / LINKS[name].bytes_per_s)
    whole = {family: round(min(1.0, _geometric_mean(own)), 4) for family, own in sends.items()}
    return Typical(start_s, step_s, efficiency, whole)


def _geometric_mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


# Errors.


def datasheet_s(key: Key, size: Float[np.ndarray, "S"]) -> Float[np.ndarray, "S"]:
    """Seconds of a ring at the latency and bandwidth of gdp's presets."""
    link, op = LINKS[key[0]], OPERATIONS[key[1]]
    latency_s = NVLINK_LATENCY_S if link.family == "nvlink" else PCIE_LATENCY_S
    return op.steps(key[3]) * latency_s + op.share(key[3]) * size / link.bytes_per_s


def ring_s(
    typical: Typical, key: Key, size: Float[np.ndarray, "S"]
) -> Float[np.ndarray, "S"]:  # fmt: skip
    """Seconds of a typical ring over a kind of link."""
    link = LINKS[key[0]]
    speed = link.bytes_per_s * typical.share_of_peak(link.family, key[1], key[3])
    return typical.ring_s(OPERATIONS[key[1]], key[3], size / speed)


def off(predicted: np.ndarray, samples: Samples) -> np.ndarray:
    """Relative errors."""
    return np.abs(predicted / samples.seconds - 1)


def report(found: dict[Key, Samples]) -> dict[str, tuple[float, float]]:
    """Print the tables of errors; mean and worst of the curves, by operation and engine."""
    own: dict[str, list[list[np.ndarray]]] = defaultdict(list)
    without: dict[str, list[list[np.ndarray]]] = defaultdict(list)
    for key, samples in found.items():
        kept, held = samples.take(~samples.held()), samples.take(samples.held())
        label = key[1] if key[2] == LIBRARY else f"{key[1]} {key[2]}"
        forms = (fit_curve(kept), fit_curve(kept, plain=True))
        tried = [off(form.seconds(held.size_bytes), held) for form in forms]
        own[label].append([*tried, off(datasheet_s(key, held.size_bytes), held)])
    curves = {key: fit_curve(samples) for key, samples in found.items()}
    for name in LINKS:
        typical = typical_rings({key: c for key, c in curves.items() if key[0] != name})
        for key, samples in found.items():
            if key[0] == name and key[2] == LIBRARY:
                sizes = samples.size_bytes
                tried = [ring_s(typical, key, sizes), datasheet_s(key, sizes)]
                without[name].append([off(predicted, samples) for predicted in tried])
    click.echo("sizes held out: mean (worst) of the curve, of two numbers, of the datasheet's ring")
    errors = {label: _echoed(label, parts) for label, parts in own.items()}
    click.echo("links left out: mean (worst) of typical rings, of the datasheet's")
    for name, parts in without.items():
        _echoed(name, parts)
    return errors


def _echoed(label: str, parts: list[list[np.ndarray]]) -> tuple[float, float]:
    """Mean and worst of the first column of errors, all of which are printed."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    text = "  ".join(f"{c.mean():7.1%} ({c.max():.0%})" for c in columns)
    click.echo(f"{label:22}{len(columns[0]):5}  {text}")
    return round(float(columns[0].mean()), 4), round(float(columns[0].max()), 4)


def save(folder: Path, meta: CollectivesMeta, curves: np.ndarray, recipe: str) -> str:
    """Write curves [K, 4], in the order of `meta.curves`, as a checkpoint; its SHA-256 (hex)."""
    return checkpoint.save(
        folder, {"curves": curves}, recipe=recipe, meta=msgspec.to_builtins(meta),
        kind="curves of collectives", force=True,
    )  # fmt: skip


@click.command(help=__doc__)
@click.option("-o", "output", type=click.Path(path_type=Path), help="Folder of the curves.")
def main(output: Path | None) -> None:
    found = measured()
    errors = report(found)
    curves = {key: fit_curve(samples) for key, samples in found.items()}
    typical = typical_rings(curves)
    click.echo(f"typical: {typical}")
    if output is not None:
        meta = CollectivesMeta(
            LINKS, tuple(curves), typical, errors, SOURCE, LICENCE, date.today().isoformat()
        )
        recipe = (
            'command = "python -m pretrain.costs.collectives -o checkpoints/collectives"\n'
            f'tables = "aiconfigurator-core 0.12.0"\nheld = {HELD}\n'
        )
        save(output, meta, np.array(list(curves.values())), recipe)


if __name__ == "__main__":
    main()
