"""Tokens per joule of whole systems beside measured ones.

    python -m benchmarks.measured_world systems --rows energy_geerling.csv

`--rows` is a CSV file with columns model, system, runs_on, tokens_per_s, peak_system_watts and
pcie_limited: rates of llama.cpp or Ollama and the peak watts of the system at the wall. Rows count
whose accelerator is a preset, with Llama 3.2 3B and DeepSeek R1 14B (a Qwen2 14B), in Q4_K_M.

Each system is a cluster of the accelerator behind a desktop processor, with `base_watts` of its
class for the rest: 10 W for boards of one chip, 60 W for desktops and workstations, both with a
tenth of the card's or chip's limit for the power supply; none where the preset's watts are those of
a whole machine at the wall. These are assumptions, not fitted. A row that is `pcie_limited` has one
lane of PCIe 3. Issues 35, 36, 39, 40, 45 and 46 of the table's source (cards in a CM5 and in the
265K desktop) ran llama-bench under Vulkan, prompts of 512 tokens and more; the other NVIDIA cards,
and Macs but the M3 Ultra, ran Ollama, and cards in a Pi 5 llama-cli, with a question of one line.

`gdp.place` for llama.cpp predicts the rate of decode; peak watts are the larger mean of prefill and
decode, or those of decode after a question of one line, which a meter does not resolve. Tokens per
joule are the rate over them, as measured. Printed are errors, and the share of pairs of systems
with one model in the measured order: all pairs, those that differ by more than a quarter, and those
without cards of AMD and Intel in a Raspberry Pi (patched drivers); beside it the orders by measured
rate over predicted watts, by predicted rate over measured watts, over TDP, and by TDP alone.
"""

import csv
import itertools
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

import gdp
from benchmarks.measured_world.llama import Size, write_header
from benchmarks.tables import head
from gdp.cluster.file import with_backend
from gdp.cluster.links import pcie_bytes_per_s
from gdp.cluster.presets import cluster_preset, preset_of_model
from gdp.cluster.types import Cluster
from gdp.costs.power import Power
from gdp.question.models import Generation

MODELS = {
    "Llama 3.2:3b": Size(28, 3072, 8192, 24, 8, 128256, tied=True),
    "DeepSeek R1 14b": Size(48, 5120, 13824, 40, 8, 152064),
}
MACHINES = {"Mac Studio (M3 Ultra": "m3-ultra", "M4 Mac mini": "m4"}
"""Presets whose watts are those of the whole machine."""
CHIPS = {"Nvidia Spark": "dgx-spark", "Framework Mainboard (128GB)": "ryzen-ai-max-395"}
BOARDS = re.compile(r"^(Pi |Radxa|Minisforum MS-R1|HiFive)")
VULKAN = re.compile(r"^(Pi |Intel 265K|Framework)")
LINE = re.compile(r"^(Pi 5 |Radxa|System76|Minisforum|HiFive|M4 Mac)")
"""Systems that ran under Vulkan, and those whose prompts were a question of one line."""
PATCHED = re.compile(r"^Pi .*\((AMD|Intel)")
PROMPT, ONE_LINE = 512, 32
BOARD_W, DESKTOP_W, SUPPLY = 10.0, 60.0, 0.1


class System(NamedTuple):
    """A measured system."""

    name: str
    model: str
    rate: float  # tokens per second
    watts: float
    cluster: Cluster


class PredictedSystem(NamedTuple):
    """Its prediction."""

    rate: float
    watts: float
    limit_w: float


def systems(path: Path) -> Iterator[System]:
    """Systems whose accelerator is a preset."""
    with path.open() as file:
        for row in csv.DictReader(file):
            name = row["system"]
            if row["model"] not in MODELS or not row["peak_system_watts"]:
                continue
            limited = row["pcie_limited"] == "yes"
            cluster = _cluster(name, limited) if row["runs_on"] == "GPU" else None
            if cluster is not None:
                rate, watts = float(row["tokens_per_s"]), float(row["peak_system_watts"])
                yield System(name, row["model"], rate, watts, cluster)


def _cluster(name: str, one_lane: bool) -> Cluster | None:
    for part, preset in MACHINES.items():
        if part in name:
            return cluster_preset(preset)
    chip = next((preset for part, preset in CHIPS.items() if part in name), None)
    board = chip is not None or BOARDS.match(name) is not None
    if chip is None:
        card = re.search(r"\((.*?)1?\)", name)  # 1: a footnote
        known = card[1].replace("AMD AI Pro", "AMD Radeon AI Pro") if card else ""
        preset = preset_of_model(known)
        if preset is None:
            return None
        chip = f"cpu-ddr4+{preset}" if board else f"cpu+{preset}"
    cluster = cluster_preset(chip)
    base_w = (BOARD_W if board else DESKTOP_W) + SUPPLY * Power.of(cluster).limit[-1]
    links = cluster.link_bytes_per_s
    if one_lane:
        links = np.where(np.isfinite(links), pcie_bytes_per_s(3, 1), links)
    cluster = replace(cluster, base_watts=float(base_w), link_bytes_per_s=links)
    return with_backend(cluster, "vulkan" if VULKAN.match(name) else None)


def predicted(system: System, folder: Path) -> PredictedSystem:
    """A prompt and an answer of some sentences."""
    one_line = LINE.match(system.name) is not None
    size = MODELS[system.model]
    path = folder / f"{size.layers}.gguf"
    if not path.exists():
        write_header(path, size, "Q4_K_M")
    request = Generation(path, prompt=ONE_LINE if one_line else PROMPT, new=128)
    answer = gdp.place(request, system.cluster, target="llamacpp").of_request()
    assert answer.power is not None, answer.no_power
    power = answer.power
    peak_w = power.decode_w if one_line else max(power.prefill_w, power.decode_w)
    return PredictedSystem(answer.tokens_per_s, peak_w, power.limit_w)


def error_lines(found: list[System], answers: list[PredictedSystem]) -> Iterator[str]:
    """A line for each system, errors, and the share of pairs in order."""
    yield head("model | system | tokens/s | measured | watts | measured | tokens/J | measured", 2)
    for s, a in zip(found, answers, strict=True):
        yield (
            f"| {s.model} | {s.name} | {a.rate:.1f} | {s.rate:.1f} | {a.watts:.0f} | {s.watts:.0f} "
            f"| {a.rate / a.watts:.3f} | {s.rate / s.watts:.3f} |"
        )
    for name, own in {
        "rate": [a.rate / s.rate for s, a in zip(found, answers, strict=True)],
        "watts": [a.watts / s.watts for s, a in zip(found, answers, strict=True)],
        "tokens per joule": [
            a.rate / a.watts * s.watts / s.rate for s, a in zip(found, answers, strict=True)
        ],
    }.items():
        off = np.abs(np.array(own) - 1)
        yield f"{name}: {len(off)} systems; error {np.median(off):.1%}, mean {off.mean():.1%}"
    rows = list(zip(found, answers, strict=True))
    pairs = [(x, y) for x, y in itertools.combinations(rows, 2) if x[0].model == y[0].model]
    orders = {
        "predicted tokens per joule": lambda s, a: a.rate / a.watts,
        "measured rate over predicted watts": lambda s, a: s.rate / a.watts,
        "predicted rate over measured watts": lambda s, a: a.rate / s.watts,
        "predicted rate over TDP": lambda s, a: a.rate / a.limit_w,
        "TDP alone": lambda s, a: 1 / a.limit_w,
    }
    usual = [p for p in pairs if not any(PATCHED.match(row[0].name) for row in p)]
    for name, value in orders.items():
        cells = []
        for own, least in itertools.product((pairs, usual), (0.0, np.log(1.25))):
            gains = [
                (np.log(s.rate / s.watts * t.watts / t.rate), value(s, a) > value(t, b))
                for (s, a), (t, b) in own
            ]
            right = [(gain > 0) == first for gain, first in gains if abs(gain) >= least]
            cells.append(f"{np.mean(right):.0%} of {len(right)}")
        yield (
            f"{name}: {cells[0]} pairs in the measured order, {cells[1]} that differ by a quarter; "
            f"without AMD and Intel in a Raspberry Pi {cells[2]} and {cells[3]}"
        )


@click.command("systems", help=__doc__)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
def main(rows: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="systems-") as root:
        found = list(systems(rows))
        answers = [predicted(system, Path(root)) for system in found]
        click.echo("\n".join(error_lines(found, answers)))
