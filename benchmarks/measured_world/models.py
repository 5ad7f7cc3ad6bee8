"""Predictions of whole models in PyTorch beside measured ones, in float32 on one GPU.

    python -m benchmarks.measured_world models --labels labels_neusight.csv [--rows CACHE.npz]
        [--unseen STEPS]

`--labels` is a CSV file with columns device, model, phase, variant, architecture, layers, hidden,
ffn, heads, vocab, sequence, batch and e2e_ms: NeuSight's measured models. Rows of inference
without a compiler count, on GPUs that gdp has a preset of. A model is the configuration of its
sizes as transformers computes it, attention op by op, its inputs and outputs on the GPU. Models
whose experts are called by the number of tokens that chose them are not traced, and counted apart.

The default costs have learned single kernels of these GPUs, no model. Beside them stand datasheets
and, with `--rows`, a cache of measured kernels that `pretrain.costs.train --rows` writes: a
roofline with two efficiencies of each GPU, the medians of its kernels that arithmetic and memory
bound; and, with `--unseen`, a network trained for so many steps on the kernels of other devices.
"""

import csv
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np
from jaxtyping import Float

import gdp
from benchmarks.tables import head
from gdp.base.errors import ModelError
from gdp.cluster.presets import cluster_preset, preset_of_model
from gdp.cluster.types import Cluster
from gdp.costs.base import CostModel
from gdp.costs.default import DATASHEET, SHIPPED
from gdp.costs.measured.costs import MeasuredCosts
from gdp.costs.measured.kernels import ARITHMETIC
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import make_placement
from gdp.question.models import load

PRESETS = {
    "P100-PCIE-16GB": "p100-pcie", "V100-PCIE-32GB": "v100-pcie", "A100-PCIE-40GB": "a100-40",
    "P4": "p4", "T4": "t4",
}  # fmt: skip
"""Of devices whose name alone does not tell the preset."""
COLUMNS = {
    "shipped": "costs that ship", "datasheet": "datasheets", "fitted": "roofline, two efficiencies",
    "unseen": "GPU never seen",
}  # fmt: skip
LAUNCHED_S = 1e-4
"""Seconds of a kernel beside which its launch is small."""


@dataclass(frozen=True)
class Label:
    """One measured model."""

    preset: str
    model: str
    sequence: int
    batch: int
    seconds: float
    config: Mapping[str, Any]  # of transformers

    @property
    def sizes(self) -> tuple[str, int, int]:
        """All that a trace depends on."""
        return self.model, self.sequence, self.batch


@dataclass(frozen=True)
class Answer:
    """A measured model and its predicted seconds, by the name of the costs."""

    label: Label
    seconds: Mapping[str, float] = field(default_factory=dict)  # none of a model that is refused
    why: str = ""

    def off(self, costs: str) -> float:
        """Relative error of one prediction."""
        return self.seconds[costs] / self.label.seconds - 1


def _bert(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model_type": "bert", "is_decoder": True, "num_hidden_layers": _n(row, "layers"),
        "hidden_size": _n(row, "hidden"), "intermediate_size": _n(row, "ffn"),
        "num_attention_heads": _n(row, "heads"), "vocab_size": _n(row, "vocab"),
    }  # fmt: skip


def _gpt2(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "n_layer": _n(row, "layers"), "n_embd": _n(row, "hidden"),
        "n_head": _n(row, "heads"), "vocab_size": _n(row, "vocab"),
        "n_positions": _n(row, "sequence"),
    }  # fmt: skip


def _opt(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model_type": "opt", "num_hidden_layers": _n(row, "layers"),
        "hidden_size": _n(row, "hidden"), "word_embed_proj_dim": _n(row, "hidden"),
        "ffn_dim": _n(row, "ffn"), "num_attention_heads": _n(row, "heads"),
        "vocab_size": _n(row, "vocab"), "max_position_embeddings": _n(row, "sequence"),
    }  # fmt: skip


CONFIGS: Mapping[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {
    "BertLMHeadModel": _bert, "GPT2LMHeadModel": _gpt2, "OPTForCausalLM": _opt,
}  # fmt: skip
"""Configuration of a row, by its architecture."""


def _n(row: Mapping[str, str], name: str) -> int:
    return int(float(row[name]))


def labels(path: Path) -> list[Label]:
    """The measured models that are asked, those of one trace after each other."""
    found = []
    with path.open() as file:
        for row in csv.DictReader(file):
            preset = PRESETS.get(row["device"]) or preset_of_model(row["device"])
            if preset is None or (row["phase"], row["variant"]) != ("inference", ""):
                continue
            known = CONFIGS.get(row["architecture"])
            config = {} if known is None else known(row) | {
                "architectures": [row["architecture"]], "dtype": "float32",
                "attn_implementation": "eager",
            }  # fmt: skip
            found.append(
                Label(
                    preset, row["model"], _n(row, "sequence"), _n(row, "batch"),
                    float(row["e2e_ms"]) / 1e3, config,
                )
            )  # fmt: skip
    return sorted(found, key=lambda label: (label.sizes, label.preset))


@cache
def _on_one(preset: str) -> Cluster:
    """The GPU alone, which holds inputs and outputs."""
    return cluster_preset(preset)


def seconds(graph: OpGraph, preset: str, costs: CostModel | str) -> float:
    """Seconds of one run of a graph on one device."""
    cluster = _on_one(preset)
    placement = make_placement(graph, cluster, np.zeros(graph.num_ops, dtype=np.int64))
    return gdp.simulate(graph, placement, cluster, costs=costs).latency_s


@dataclass(frozen=True)
class FittedRoofline:
    """The roofline at a share of the peak and a share of the bandwidth."""

    arithmetic: float
    memory: float

    def __call__(self, graph: OpGraph, cluster: Cluster) -> Float[np.ndarray, "N D"]:
        speed = (
            np.array([[d.speed(x.dtype) for d in cluster.devices] for x in graph.detail])
            * self.arithmetic
        )
        rate = np.array([d.bytes_per_s for d in cluster.devices]) * self.memory
        found = np.maximum(graph.flop[:, None] / speed, graph.memory_traffic_bytes[:, None] / rate)
        found[graph.is_io] = 0.0
        return found


def fitted(rows: Any, device: int, silicon: Any) -> FittedRoofline:
    """Medians of the shares of the peak and of the bandwidth that kernels of a device reach, in
    float32, each of those that it bounds; O(K)."""
    own = (rows.device == device) & (rows.kernels.arithmetic == ARITHMETIC.index("float32"))
    own &= rows.seconds > LAUNCHED_S
    flop_s = rows.kernels.flop[own] / silicon.flop_per_s[0]
    bytes_s = rows.kernels.total_bytes[own] / silicon.bytes_per_s
    bound = flop_s > bytes_s
    return FittedRoofline(
        float(np.median((flop_s / rows.seconds[own])[bound])),
        float(np.median((bytes_s / rows.seconds[own])[~bound])),
    )


def more_costs(cached: Path | None, presets: list[str], steps: int) -> dict[str, dict[str, Any]]:
    """Costs that need the measured kernels, by their name and the preset."""
    if cached is None:
        return {}
    from pretrain.costs.cache import read
    from pretrain.costs.tables import silicon
    from pretrain.costs.train import train

    rows = read(cached)
    made, own = silicon(rows), [name for name in presets if name in rows.devices]
    index = {name: rows.devices.index(name) for name in own}
    more: dict[str, dict[str, Any]] = {
        "fitted": {name: fitted(rows, d, made[d]) for name, d in index.items()}
    }
    if steps:
        more["unseen"] = {
            name: MeasuredCosts(train(rows, made, rows.device != d, steps, 0)[0], eager=True)
            for name, d in index.items()
        }
    return more


def answers(asked: list[Label], more: Mapping[str, Mapping[str, Any]]) -> Iterator[Answer]:
    """Predictions of the measured models, or why one is refused."""
    graphs: dict[tuple[str, int, int], OpGraph | str] = {}
    with tempfile.TemporaryDirectory(prefix="measured-models-") as root:
        for label in asked:
            if label.sizes not in graphs:
                graphs[label.sizes] = _traced(Path(root), label)
            graph = graphs[label.sizes]
            if isinstance(graph, str):
                yield Answer(label, why=graph)
                continue
            costs = {SHIPPED: SHIPPED, DATASHEET: DATASHEET}
            costs |= {name: own[label.preset] for name, own in more.items() if label.preset in own}
            yield Answer(
                label, {name: seconds(graph, label.preset, own) for name, own in costs.items()}
            )


def _traced(root: Path, label: Label) -> OpGraph | str:
    if not label.config:
        return "its experts are called by the tokens that chose them"
    folder = root / label.model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(label.config)))
    try:
        return load(f"hf:{folder}?batch={label.batch}&sequence={label.sequence}")
    except ModelError as error:
        return str(error)


def told(found: list[Answer]) -> Iterator[str]:
    """A line for each model, then errors by costs."""
    names = [name for name in COLUMNS if any(name in answer.seconds for answer in found)]
    yield head("model | GPU | tokens | measured ms | " + " | ".join(COLUMNS[n] for n in names), 2)
    for answer in found:
        label = answer.label
        cells = [
            f"{1e3 * answer.seconds[n]:.1f} ({answer.off(n):+.0%})" if n in answer.seconds else "-"
            for n in names
        ]
        yield (
            f"| {label.model} | {label.preset} | {label.batch} x {label.sequence} | "
            f"{1e3 * label.seconds:.1f} | {' | '.join(cells)} |"
        )
    yield ""
    answered = [answer for answer in found if answer.seconds]
    groups = {"all": answered} | {
        name: [a for a in answered if name in (a.label.preset, a.label.model)]
        for name in sorted({a.label.preset for a in answered} | {a.label.model for a in answered})
    }
    yield head("models | | " + " | ".join(f"{COLUMNS[n]}: median, mean, worst" for n in names))
    for group, own in groups.items():
        yield f"| {group} | {len(own)} | {' | '.join(_errors(own, name) for name in names)} |"
    for answer in found:
        if answer.why:
            yield f"{answer.label.model} on {answer.label.preset}: not answered, {answer.why}"


def _errors(own: list[Answer], costs: str) -> str:
    off = np.abs([answer.off(costs) for answer in own if costs in answer.seconds])
    return f"{np.median(off):.1%}, {off.mean():.1%}, {off.max():.0%}" if len(off) else "-"


@click.command("models", help=__doc__)
@click.option(
    "--labels", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True
)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--unseen", type=click.IntRange(0), default=0, help="Steps of each training.")
def main(path: Path, rows: Path | None, unseen: int) -> None:
    if unseen and rows is None:
        raise click.UsageError("--unseen needs --rows, the kernels to train on")
    asked = labels(path)
    more = more_costs(rows, sorted({label.preset for label in asked}), unseen)
    found = []
    for answer in answers(asked, more):
        found.append(answer)
        click.echo(f"{answer.label.sizes} on {answer.label.preset}", err=True)
    click.echo("\n".join(told(found)))
