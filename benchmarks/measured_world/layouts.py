"""Which layout of llama.cpp is the fastest, beside what llama-bench measured on one machine.

    python -m benchmarks.measured_world layouts --rows llama_bench.csv [--errors]

`--rows` is the file of `benchmarks.measured_world llama`, with columns split_mode, tensor_split,
n_cpu_moe, ngl and source besides. Groups of rows of one model, quantisation, engine, test, lengths
and source, in which a machine is used in several ways; rows of models of `SIZES` count:

- several: one card or several alike (of each number the fastest row; engine llama.cpp),
- unlike: cards of several kinds, or one of them,
- experts: of a mixture some on the processor, or blocks on it, micro-batches of several sizes.

Told are pairs that differ by more than 5%, those of them whose predictions differ by 3%, and the
loss of the row that is predicted best over the fastest; beside datasheets and two rules. `--ngl N`
has the last N blocks and the output on cards; of those the first `n_cpu_moe` keep their experts on
the processor. Prompts of whole layers on several cards go through them as a pipeline. What a
boundary between cards takes is of four rows of A40 and RTX 6000 Ada. With `--errors` are told how
far off tokens/s of every row with a processor in it, or with several cards, are. A processor is
that of `PROCESSORS` where a row says it, else the preset.
"""

import csv
import itertools
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import click
import numpy as np

from benchmarks.measured_world.llama import (
    LEFT_OUT,
    build_of,
    costs_of,
    kind_of,
    preset_of,
    size_of,
    write_header,
)
from benchmarks.tables import geomean, head
from gdp.api.generation import generation_answer
from gdp.base.errors import ClusterError, GdpError
from gdp.cluster.file import with_backend
from gdp.cluster.presets import cluster_preset, device_preset
from gdp.cluster.types import BACKENDS, Cluster, Device, make_cluster
from gdp.costs.default import DATASHEET
from gdp.costs.llamacpp import NEWEST, Build
from gdp.costs.offload import OpOffloadCosts
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement, Split, make_placement
from gdp.question.models import load
from gdp.question.prepare import prepare_placement
from gdp.question.question import Question
from gdp.targets.llamacpp.flags import slots_of
from gdp.targets.llamacpp.pipeline import saved_s

PROCESSORS = {
    "i5-10400": Device("cpu", "cpu-ddr4", {"default": 0.77e12}, 34e9, copy_bytes_per_s=7e9),
    "i7-5820K": Device("cpu", "cpu-ddr4", {"default": 0.63e12}, 68.3e9),
    "i7-7700K": Device("cpu", "cpu-ddr4", {"default": 0.56e12}, 38.4e9),
    "i9-10900X": Device("cpu", "cpu-ddr4", {"default": 1.12e12}, 102e9),
    "7700X": Device("cpu", "cpu", {"default": 1.15e12}, 76.8e9),
    "EPYC 9534": Device("cpu", "cpu-server-ddr5", {"default": 7.3e12}, 460.8e9),
    "Sapphire Rapids": device_preset("cpu-server-ddr5", "cpu"),
}
"""Processors that notes of rows name: 32 FLOP a clock for each core at its clock under load, and
memory of the speed that is told, or the fastest that its maker allows; of the i5-10400 what it
reads."""
PLAIN = device_preset("cpu")
"""The processor of rows that name none."""
UNEQUAL = 0.05
"""Log of the rates of two rows that differ."""
TIED = 0.03
"""Log of two predictions that tell no row from the other."""
OF_MODEL = ("model", "quantisation", "engine", "test", "prompt_or_gen_tokens", "depth_tokens")
LAYOUT = ("devices", "kind", "split_mode", "tensor_split", "n_cpu_moe", "override_tensor",
          "n_ubatch", "ngl")  # fmt: skip

Row = Mapping[str, str]
Groups = list[list[Row]]


@dataclass(frozen=True)
class Machine:
    """Cards of a row in their order, beside a processor; a processor alone has none."""

    cards: tuple[str, ...]
    processor: Device = PLAIN
    backend: str | None = None

    @classmethod
    def of(cls, devices: str) -> "Machine":
        """From a name such as "2 x RTX 3090" or "RTX 3090 + RTX 3060 12GB"."""
        cards: list[str] = []
        for part in devices.split(" + "):
            many = re.match(r"(\d+) x (.+)", part)
            cards += [many[2]] * int(many[1]) if many else [part]
        return cls(tuple(cards))

    @classmethod
    def of_row(cls, row: Row) -> "Machine":
        """The machine of a row, with the processor and the backend that it names."""
        told = f"{row['devices']} {row['note']}"
        named = next((d for name, d in PROCESSORS.items() if name in told), PLAIN)
        backend = row["backend"].split(",")[0].lower()
        cards = () if row["kind"] == "cpu" else cls.of(row["devices"]).cards
        return cls(cards, named, backend if backend in BACKENDS else None)

    def cluster(self) -> Cluster | None:
        """The machine; None for a card of which nothing is known."""
        if not self.cards:
            return make_cluster("box", [self.processor])
        presets = [preset_of(card) for card in self.cards]
        if not all(presets):
            return None
        alone = cluster_preset(str(presets[0]))
        if alone.devices[0].is_unified:
            found = alone if len(self.cards) == 1 else None
        else:
            found = cluster_preset(f"cpu+{'+'.join(map(str, presets))}-pcie4")
            found = replace(found, devices=(self.processor, *found.devices[1:]))
        try:
            return None if found is None else with_backend(found, self.backend)
        except ClusterError:  # a backend of another maker
            return None


@dataclass(frozen=True)
class Asker:
    """Predictions of rows, by models whose headers lie in a folder."""

    folder: Path
    known: dict[tuple, tuple[float, float, float]] = field(default_factory=dict)

    def rate(self, row: Row, datasheets: bool = False) -> float:
        """Predicted tokens/s; nan where a row says too little, or its model or card is unknown."""
        size, kind = size_of(row["model"]), kind_of(row["quantisation"])
        if size is None or kind is None or row["test"] not in ("pp", "tg"):
            return np.nan
        path = self.folder / f"{re.sub('[ /].*', '', row['model'])} {size.layers} {kind}.gguf"
        if not path.exists():
            write_header(path, size, kind)
        depth, tokens = int(row["depth_tokens"] or 0), int(row["prompt_or_gen_tokens"] or 128)
        if row["test"] == "tg":
            return 1.0 / self._seconds(row, str(path), (max(depth, 1), tokens), datasheets)[1]
        whole_s, _, waits = self._seconds(row, str(path), (depth + tokens, 1), datasheets)
        before_s = self._seconds(row, str(path), (depth, 1), datasheets)[0] if depth else 0.0
        count = -(-tokens // int(row["n_ubatch"] or 512))
        return tokens / (whole_s - before_s) / (1.0 - waits * (count - 1) / count)

    def _seconds(
        self, row: Row, path: str, lengths: tuple[int, int], datasheets: bool
    ) -> tuple[float, float, float]:
        """Seconds of a prompt, its micro-batches one after the other, and of a token after it; the
        share of the former in which the slowest card waits."""
        build = None if datasheets else _build(row)
        machine = Machine.of_row(row)
        machine_key = (machine.cards, machine.processor.bytes_per_s, machine.backend)
        key = (
            path, *lengths, int(row["n_ubatch"] or 512), build,
            *(row[k] for k in ("split_mode", "tensor_split", "n_cpu_moe", "ngl")), machine_key,
        )  # fmt: skip
        if key not in self.known:
            graph = _graph(*map(str, key[:4]))
            self.known[key] = _seconds(graph, machine.cluster(), row, build)
        return self.known[key]


def _build(row: Row) -> Build:
    """The kernels of a row; tensor splits and servers have flash attention."""
    build = build_of(row)
    return NEWEST if row["split_mode"] == "tensor" or "server" in row["engine"] else build


@cache
def _graph(path: str, prompt: str, new: str, ubatch: str) -> OpGraph:
    return load(f"{path}?prompt={prompt}&new={new}&ubatch={ubatch}")


def _seconds(
    graph: OpGraph, cluster: Cluster | None, row: Row, build: Build | None
) -> tuple[float, float, float]:
    """Seconds to the first token, and of each one after it, and the share of the former in which
    the slowest card waits; nan where gdp knows too little."""
    placement = None if cluster is None else placed(graph, cluster, row)
    if cluster is None or placement is None:
        return np.nan, np.nan, np.nan
    costs = DATASHEET if build is None else OpOffloadCosts(costs_of(build))
    question = Question(graph, cluster, costs=costs)
    try:
        predicted = prepare_placement(question, placement)
    except GdpError:  # a split that leaves a card without heads
        return np.nan, np.nan, np.nan
    answer = generation_answer(question, placement, predicted.score())
    assert answer is not None
    count = int(graph.chunks.max())
    pipelined_s = saved_s(predicted)
    whole_s = answer.first_token_s + pipelined_s  # micro-batches one after the other
    return whole_s, answer.token_s, pipelined_s * count / max(count - 1, 1) / whole_s


def placed(graph: OpGraph, cluster: Cluster, row: Row) -> Placement | None:
    """Where a row has its layers and experts; None for modes that gdp does not plan."""
    slots = slots_of(graph)
    device = np.zeros(graph.num_ops, dtype=np.int64)
    count, cards = (
        len(slots.layers),
        cluster.num_devices - sum(device.is_cpu for device in cluster.devices),
    )
    first = cluster.num_devices - cards
    ngl = int(float(row["ngl"])) if row["ngl"] not in ("", "all") else count
    held = min(ngl if ngl >= 0 else count, count)
    if row["split_mode"] == "tensor":
        parts = tuple(int(float(x)) for x in re.findall(r"[\d.]+", row["tensor_split"]))
        shares = parts if len(parts) == cards and len(set(parts)) > 1 else ()
        device[~graph.is_io] = first
        device[slots.embedding] = cluster.host
        split = Split(tuple(range(first, cluster.num_devices)), shares=shares)
        return make_placement(graph, cluster, device, splits=(split,))
    if row["split_mode"] not in ("", "layer", "none"):
        return None
    where = first + _cards_of_slots(held, cluster, first, row["tensor_split"])
    experts_away = int(_away(row))
    for k, slot in enumerate(range(count - held, count)):
        device[slots.layers[slot]] = where[k]
        device[slots.experts[slot]] = where[k] if k >= experts_away else cluster.host
    device[graph.is_io] = cluster.host
    return make_placement(graph, cluster, device)


def _cards_of_slots(held: int, cluster: Cluster, first: int, told: str) -> np.ndarray:
    """The card of each slot, counted from the first: in proportion to memory, as told, or most on
    the first card that has room."""
    memory = cluster.memory_bytes[first:].astype(float)
    parts = [float(x) for x in re.findall(r"[\d.]+", told)] if "/" in told else []
    shares = np.array(parts) if len(parts) == len(memory) else memory
    if "most on" in told:
        shares = np.array([memory[0], *(0.6 * memory[1:])])
    ends = np.cumsum(shares) / shares.sum()
    at = np.searchsorted(ends, np.arange(held) / max(held, 1), side="right")
    return np.minimum(at, len(memory) - 1)


def several(rows: Sequence[Row]) -> Groups:
    """One card or several alike: of each number the fastest row."""
    groups: dict[tuple[str, ...], dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if " + " in row["devices"] or row["kind"] not in ("gpu", "gpu-multi"):
            continue
        if row["engine"] != "llama.cpp" or row["test"] not in ("pp", "tg"):
            continue
        card = re.sub(r"^\d+ x ", "", row["devices"])
        key = (card, row["backend"], row["source"].split(":")[0], *(row[k] for k in OF_MODEL))
        own, number = groups[key], len(Machine.of(row["devices"]).cards)
        if number not in own or _measured(row) > _measured(own[number]):
            own[number] = row
    return [list(own.values()) for own in groups.values()]


def layouts(rows: Sequence[Row], unlike: bool) -> Groups:
    """Ways to use unlike cards, or cards with a processor: of each way the fastest row."""
    mixed = {row["source"] for row in rows if " + " in row["devices"]}
    groups: dict[tuple[str, ...], dict[tuple[str, ...], Row]] = defaultdict(dict)
    for row in rows:
        if re.search("software fault|op-offload|4 threads", row["note"]):
            continue
        if (row["source"] in mixed) == unlike:
            own = groups[(row["source"], *(row[k] for k in OF_MODEL))]
            way = tuple(row[k] for k in LAYOUT)
            if way not in own or _measured(row) > _measured(own[way]):
                own[way] = row
    wanted = " + " if unlike else "cpu"
    return [
        list(own.values()) for own in groups.values()
        if any(wanted in row["devices" if unlike else "kind"] for row in own.values())
        and _of_one_machine(list(own.values()))
    ]  # fmt: skip


def _of_one_machine(rows: Sequence[Row]) -> bool:
    """True where all cards are among those of the row that has most of them."""
    cards = [Counter(Machine.of(row["devices"]).cards) for row in rows]
    largest = max(cards, key=Counter.total)
    return all(own <= largest for own in cards)


def _away(row: Row) -> float:
    """Blocks whose experts are on the processor; all where another tool chose them."""
    return float(row["n_cpu_moe"]) if re.fullmatch(r"[\d.]+", row["n_cpu_moe"]) else 0.0


def _measured(row: Row) -> float:
    return float(row["tokens_per_s"])


@dataclass(frozen=True)
class Ranked:
    """Pairs told rightly, of all and of those that are told apart, and losses of the rows that are
    predicted best."""

    right: int
    pairs: int
    lost: tuple[float, ...]
    apart_right: int = 0
    apart: int = 0

    def __str__(self) -> str:
        if not self.pairs:
            return "-"
        worst = f"{np.mean(self.lost):.1%}, {max(self.lost):.0%}"
        return f"{self.right / self.pairs:.0%} of {self.pairs}; {worst}"

    @property
    def told_apart(self) -> str:
        """Those of the pairs whose predictions differ."""
        return f"{self.apart_right / self.apart:.0%} of {self.apart}" if self.apart else "-"


def ranked(groups: Sequence[Sequence[Row]], rate: Callable[[Row], float]) -> Ranked:
    """How well a rate orders the rows of each group; of equal rates no pair is told."""
    right = pairs = apart_right = apart = 0
    lost: list[float] = []
    for rows in groups:
        scored = [(rate(row), _measured(row)) for row in rows]
        if len(scored) < 2:
            continue
        fastest = max(measured for _, measured in scored)
        lost.append(1 - max(scored, key=lambda pair: pair[0])[1] / fastest)
        for (mine, my), (other, its) in itertools.combinations(scored, 2):
            if abs(np.log(my / its)) > UNEQUAL and mine != other:
                is_right = (my > its) == (mine > other)
                pairs, right = pairs + 1, right + is_right
                if min(mine, other) > 0 and abs(np.log(mine / other)) > TIED:
                    apart, apart_right = apart + 1, apart_right + is_right
    return Ranked(right, pairs, tuple(lost), apart_right, apart)


def fewest_first(row: Row) -> float:
    """Rule: few cards; of experts few on the processor for tokens, large micro-batches for
    prompts."""
    away = _away(row)
    if row["test"] == "tg":
        return -away * 1e5 - len(Machine.of(row["devices"]).cards)
    return float(row["n_ubatch"] or 512) * 1e3 - away - len(Machine.of(row["devices"]).cards)


def most_first(row: Row) -> float:
    """Rule: many cards, or many experts on the processor."""
    return _away(row) * 1e5 + len(Machine.of(row["devices"]).cards)


QUESTIONS: Mapping[str, Callable[[Sequence[Row]], Groups]] = {
    "several": several, "unlike": lambda rows: layouts(rows, True),
    "experts": lambda rows: layouts(rows, False),
}  # fmt: skip


def line_of(name: str, rows: Sequence[Row], asker: Asker) -> str:
    """Pairs that are told rightly, mean and worst loss, of one question."""
    groups = [group for group in QUESTIONS[name](rows) if len(group) > 1]
    plain: dict[int, float] = {}
    own = {id(row): asker.rate(row) for row in itertools.chain.from_iterable(groups)}
    kept = [[row for row in group if np.isfinite(own[id(row)])] for group in groups]
    kept = [group for group in kept if len(group) > 1]
    plain = {id(row): asker.rate(row, datasheets=True) for group in kept for row in group}
    rates = (lambda r: own[id(r)], lambda r: plain[id(r)], fewest_first, most_first)
    found = [ranked(kept, rate) for rate in rates]
    cells = (str(found[0]), found[0].told_apart, *map(str, found[1:]))
    return f"| {name} | {len(kept)} | {' | '.join(cells)} |"


def errors_of(rows: Sequence[Row], asker: Asker) -> Iterator[str]:
    """Lines of how far off tokens/s are with a processor, and on several cards."""
    off: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "gpu" or row["test"] not in ("pp", "tg") or "ik_" in row["engine"]:
            continue
        if np.isfinite(rate := asker.rate(row)):
            ratio = rate / _measured(row)
            mode = f", {row['split_mode']}" if row["kind"] == "gpu-multi" else ""
            name = f"{row['test']}, {row['kind'].replace('-multi+cpu', '+cpu')}{mode}"
            for group in (name, f"{name}: {row['devices']}"):
                off[group].append(ratio)
    yield head("rows | | off: median, mean, worst; predicted over measured")
    for name, ratios in sorted(off.items()):
        apart = np.abs(np.array(ratios) - 1)
        yield (
            f"| {name} | {len(ratios)} | {np.median(apart):.1%}, {apart.mean():.1%}, "
            f"{apart.max():.0%}; {geomean(ratios):.2f} |"
        )


@click.command("layouts", help=__doc__)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--question", "questions", type=click.Choice(list(QUESTIONS)), multiple=True)
@click.option("--errors", is_flag=True, help="Tell errors instead of orders.")
def main(rows: Path, questions: tuple[str, ...], errors: bool) -> None:
    with rows.open() as file:
        asked = [row for row in csv.DictReader(file) if not re.search(LEFT_OUT, row["note"])]
    asked = [row for row in asked if size_of(row["model"]) is not None]
    with tempfile.TemporaryDirectory(prefix="measured-layouts-") as root:
        asker = Asker(Path(root))
        if errors:
            click.echo("\n".join(errors_of(asked, asker)))
            return
        click.echo(
            head(
                "question | groups | kernels of llama.cpp | of pairs told apart | datasheets | "
                "fewest first | most first"
            )
        )
        for name in questions or QUESTIONS:
            click.echo(line_of(name, asked, asker))
