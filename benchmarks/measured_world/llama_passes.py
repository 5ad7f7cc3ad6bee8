"""Predicted passes of llama-bench rows, with their parts, one JSON line each.

    python -m benchmarks.measured_world llama-passes --rows llama_bench.csv -o ROWS.jsonl
        [--every K]

The rows that `layouts --errors` tells, and those of one card, which lie whole on it; of each
machine, model and quantisation every K-th. `pretrain.corrections` learns from them beside those of
`passes`.
"""

import csv
import json
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from benchmarks.measured_world.layouts import (
    NEWEST,
    Machine,
    Row,
    _build,
    _graph,
    placed,
)
from benchmarks.measured_world.llama import LEFT_OUT, costs_of, kind_of, size_of, write_header
from gdp.api.generation import generation_answer
from gdp.base.errors import GdpError
from gdp.cluster.types import Cluster
from gdp.costs.offload import OpOffloadCosts
from gdp.question import solve
from gdp.question.passes import passes_of, stack_of
from gdp.question.question import Question

GROUP = ("devices", "backend", "model", "quantisation", "test")
"""Columns that rows of one machine, model and test share."""


@dataclass(frozen=True)
class Asker:
    """Predictions of rows, by models whose headers lie in a folder."""

    folder: Path

    def document(self, row: Row) -> dict[str, Any] | None:
        """A row's pass and stack; None where gdp knows too little."""
        size, kind = size_of(row["model"]), kind_of(row["quantisation"])
        machine = Machine.of_row(row)
        cluster = machine.cluster()
        if size is None or kind is None or cluster is None:
            return None
        path = self.folder / f"{re.sub('[ /].*', '', row['model'])} {size.layers} {kind}.gguf"
        if not path.exists():
            write_header(path, size, kind)
        prefill = row["test"] == "pp"
        depth, tokens = int(row["depth_tokens"] or 0), int(row["prompt_or_gen_tokens"] or 128)
        lengths = (depth + tokens, 1) if prefill else (max(depth, 1), tokens)
        graph = _graph(str(path), *map(str, lengths), str(int(row["n_ubatch"] or 512)))
        placement = placed(graph, cluster, row)
        if placement is None:
            return None
        build = _build(row)
        question = Question(graph, cluster, costs=OpOffloadCosts(costs_of(build)))
        score = solve.simulate(question, placement)
        answer = generation_answer(question, placement, score, corrections=False)
        assert answer is not None
        one = passes_of(question, answer, placement)[0 if prefill else 1]
        measured_s = (tokens if prefill else 1) / float(row["tokens_per_s"])
        # A prompt behind a context takes its share of both read together.
        predicted_s = one.seconds * (tokens / (depth + tokens) if prefill else 1.0)
        version = "new" if build == NEWEST or build.fused else "2024"
        stack = stack_of(question, "llamacpp", version)
        host = next((d for d in cluster.devices if d.is_cpu), None)
        return {
            "source": "llama", "pass": msgspec.to_builtins(one), "measured_s": measured_s,
            "predicted_s": predicted_s, "model": row["model"], "format": row["quantisation"],
            "machine": f"{row['devices']}, {row['backend']}, {host.bytes_per_s if host else 0:g}",
            "kind": row["kind"], "test": row["test"],
            "stack": msgspec.to_builtins(stack), "memory_bytes": _card_bytes(cluster),
        }  # fmt: skip


def _card_bytes(cluster: Cluster) -> int:
    """Memory of the device that a stack is named by."""
    return max(cluster.devices, key=lambda d: (not d.is_cpu, d.bytes_per_s)).memory_bytes


@click.command("llama-passes", help=__doc__)
@click.option("--rows", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("-o", "output", type=click.Path(path_type=Path), required=True)
@click.option("--every", type=click.IntRange(1), default=1)
def main(rows: Path, output: Path, every: int) -> None:
    with rows.open() as file:
        asked = [
            row for row in csv.DictReader(file)
            if not re.search(LEFT_OUT, row["note"]) and row["test"] in ("pp", "tg")
            and row["engine"].startswith("llama.cpp") and size_of(row["model"]) is not None
        ]  # fmt: skip
    groups = defaultdict[tuple[str, ...], list[Row]](list)
    for row in asked:
        groups[
            tuple(row[k] for k in ("devices", "backend", "model", "quantisation", "test"))
        ].append(row)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="llama-passes-") as root, output.open("a") as file:
        asker = Asker(Path(root))
        for own in groups.values():
            for k in rng.permutation(len(own))[::every].tolist():
                try:
                    document = asker.document(own[k])
                except GdpError as error:
                    click.echo(f"{own[k]['devices']}: {error}", err=True)
                    continue
                if document is not None and np.isfinite(document["predicted_s"]):
                    file.write(json.dumps(document) + "\n")
                    file.flush()
