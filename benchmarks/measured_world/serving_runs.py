"""Measured runs of servers, and predictions beside them."""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measured_world.servers import cache_bits, collectives_of, host_of

LOOKED_AT = ("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B", "MiniMaxAI/MiniMax-M2.5")
"""Models whose first tokens were looked at while `servers.py` was written, MiniMax later."""


@dataclass(frozen=True)
class Run:
    """One measured run; rows of one configuration are merged by their median."""

    name: str
    model: str
    system: str
    engine: str
    precision: str
    prompt: int
    new: int
    batch: int
    first_s: float
    token_s: float
    tensor: int = 1  # GPUs that divide each layer
    experts: bool = False  # each of them has whole experts
    sweep: bool = False  # of AIConfigurator's authors, not of InferenceX

    @property
    def sizes(self) -> tuple[str, int, int, int]:
        """All that a trace depends on."""
        return self.model, self.prompt, self.new, self.batch

    @property
    def question(self) -> tuple[object, ...]:
        """All that a prediction depends on."""
        own = host_of(self), cache_bits(self)
        own = *own, *(collectives_of(self) if self.tensor > 1 else ())
        return *self.sizes, self.system, self.precision, self.tensor, self.experts, *own

    @property
    def load(self) -> tuple[object, ...]:
        """One server's requests, whatever their number and the GPUs that share them."""
        return self.model, self.system, self.engine, self.precision, self.prompt, self.new

    @property
    def layout(self) -> str:
        """Layout in words."""
        return f"tensor {self.tensor}" + (", experts" if self.experts else "")

    @property
    def lengths(self) -> str:
        """Tokens of a prompt and of an answer, at most."""
        return f"{self.prompt}+{self.new} tokens"

    @property
    def looked_at(self) -> str:
        """Group of rows."""
        return "looked at" if self.model in LOOKED_AT else "not looked at"


@dataclass(frozen=True)
class Predicted:
    """An answer for a run."""

    batch: int
    first_s: float = math.nan
    token_s: float = math.nan
    why: str = ""


def measured_runs(
    data: Path, rows: Path, wanted: Iterable[str] = (), several: bool | None = False
) -> list[Run]:
    """The runs that may be looked at, on one GPU, on several that divide every layer, or (None) on
    any number."""
    with rows.open() as file:
        allowed = {
            row["id"]
            for row in csv.DictReader(file)
            if (row["split"], row["judged"], row["mode"]) == ("develop", "True", "agg")
            and not row["suspect"]
        }
    groups: dict[tuple[Any, ...], list[Mapping[str, str]]] = defaultdict(list)
    with (data / "systems" / "silicon_sample.csv").open() as file:
        for row in csv.DictReader(file):
            layout = _layout(row)
            if row["id"] in allowed and layout and several in (None, layout[0] > 1):
                key = (
                    row["model_path"], row["system"], row["backend"], row["precision"],
                    *(int(float(row[name])) for name in ("isl", "osl", "batch_size")), layout,
                )  # fmt: skip
                groups[key].append(row)
    names = list(wanted)
    return [
        Run(own[0]["id"], *key, *(
            median(float(row[name]) for row in own) / 1e3
            for name in ("silicon_ttft_ms", "silicon_tpot_ms")
        ), *layout, sweep="aic-auto-gap-analysis" in own[0]["silicon_data_source"])
        for (*key, layout), own in groups.items()
        if not names or any(name in own[0]["id"] for name in names)
    ]  # fmt: skip


def _layout(row: Mapping[str, str]) -> tuple[int, bool] | None:
    """(GPUs that divide each layer, whole experts on each of them); None for other layouts."""
    if row["tp_size"] == "":
        return None
    tensor, columns, experts = (
        int(float(row[name] or 1)) or 1 for name in ("tp_size", "moe_tp_size", "moe_ep_size")
    )
    alone = all(float(row[name] or 1) <= 1 for name in ("pp_size", "attention_dp_size"))
    if not alone or (columns, experts) not in ((1, 1), (tensor, 1), (1, tensor)):
        return None
    return tensor, experts > 1
