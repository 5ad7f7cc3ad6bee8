"""Fit the shares of `gdp.costs.power` on measured servers, and print them.

    python -m pretrain.costs.power ROWS.jsonl [--data FOLDER]

ROWS are those of `benchmarks.measured_world energy -o`: ops of one GPU with their predicted
seconds, and its measured mean watts; the loss is the mean absolute log of their ratio. Errors are
also printed with each model left out of the fit, and with each GPU left out. `--data` is
AIConfigurator's package, of which the tables of B200 in vLLM 0.22 have watts of single kernels:
attention of prompts and of tokens, experts. These are not fitted, only compared.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize

from benchmarks.measured_world.serving import installed
from benchmarks.tables import head
from gdp.cluster.presets import device_preset
from gdp.costs.power import IDLE

START = (0.2, 0.6)
FLOP_SHARE = 2.0
"""FLOP is not fitted: errors are flat from 1.3 to 8 (mean 11.8 to 10.5% on 42 rows), as an op above
a third of the peak draws the limit with any. At 2 an H100 takes 1.1 pJ a FLOP of bfloat16."""
KERNELS = 400
"""Drawn of each table, so that a fit takes seconds."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Ops of one GPU over some seconds and its mean watts. Axis: C classes of ops."""

    name: str  # of the model, or "kernels"
    gpu: str
    watts: float  # measured mean
    power: tuple[float, float, float]  # watts of the product, idle watts, limit
    count: Float[np.ndarray, "C"]
    seconds: Float[np.ndarray, "C"]
    flop_s: Float[np.ndarray, "C"]  # at the peak
    byte_s: Float[np.ndarray, "C"]  # at the bandwidth
    all_s: float  # in which the ops run: of a token, prompts included
    joules: float = np.nan  # measured, of a token of all its requests

    def predicted(self, shares: Float[np.ndarray, "3"]) -> float:
        """Mean watts by `gdp.costs.power.joules_above_idle`."""
        watts, idle, limit = self.power
        busy, flop, byte = shares
        work_s = busy * self.seconds + flop * np.minimum(self.flop_s, self.seconds)
        work_s = work_s + byte * np.minimum(self.byte_s, self.seconds)
        joules = np.minimum((watts - idle) * work_s, (limit - idle) * self.seconds)
        return idle + float((self.count * joules).sum()) / self.all_s

    def off(self, shares: Float[np.ndarray, "3"]) -> float:
        """Log of predicted over measured watts."""
        return float(np.log(self.predicted(shares) / self.watts))


def servers(path: Path) -> Iterator[Sample]:
    """Engines that write tokens: a decode step and its share of the prompts."""
    for row in map(json.loads, path.read_text().splitlines()):
        if "why" in row:
            continue
        run, work = row["run"], np.array(row["work"])
        decode = work[:, 0] == 1
        count = np.where(decode, work[:, 1], work[:, 1] / run["new"])
        all_s = row["token_s"] + row["first_s"] / run["new"]
        yield Sample(
            run["model"], run["system"], row["watts"] / run["tensor"], tuple(row["power"]), count,
            work[:, 2], work[:, 3], work[:, 4], all_s, row["joules"] * run["batch"] / run["tensor"],
        )  # fmt: skip


def kernels(data: Path) -> Iterator[Sample]:
    """Single kernels of B200."""
    import pandas as pd

    device, rng = device_preset("b200"), np.random.default_rng(0)
    folder = data / "systems" / "data" / "b200_sxm"
    peaks = {"bfloat16": "bfloat16", "fp8": "float8", "fp8_block": "float8"}
    tables: dict[str, Callable[[pd.DataFrame], tuple[pd.Series, pd.Series, pd.Series]]] = {
        "attention/vllm/0.22.0/context_attention_perf": _prompts,
        "attention/vllm/0.22.0/generation_attention_perf": _tokens,
        "moe/vllm/0.22.0/moe_perf": _experts,
    }
    for name, work in tables.items():
        table = pd.read_parquet(folder / f"{name}.parquet")
        table = table.iloc[rng.choice(len(table), KERNELS, replace=False)]
        flop, moved, dtype = work(table)
        peak = dtype.map(lambda d: device.speed(peaks.get(d, "bfloat16")))
        seconds = table["latency"] / 1e3
        limit = table["power_limit"]
        for s, f, b, w, most in zip(
            seconds, flop / peak, moved / device.bytes_per_s, table["power"], limit, strict=True
        ):
            one, own_s, flop_s, byte_s = (np.array([x]) for x in (1.0, s, f, b))
            power = (most, IDLE * most, most)
            yield Sample("kernels", "b200", w, power, one, own_s, flop_s, byte_s, s)


def _prompts(t):
    """FLOP, bytes, format of causal attention of prompts behind `step` tokens of a cache."""
    context = np.where(t.window_size > 0, np.minimum(t.isl, t.window_size), t.isl)
    flop = 2 * t.batch_size * t.isl * (context + 2 * t.step) * t.num_heads * t.head_dim
    heads = 2 * t.isl * (t.num_heads + t.num_key_value_heads)
    moved = 2 * t.batch_size * t.head_dim * (heads + 2 * t.step * t.num_key_value_heads)
    return flop, moved, t.attn_dtype


def _tokens(t):
    """Those of attention of one token each to a cache."""
    context = t.isl + t.step
    context = np.where(t.window_size > 0, np.minimum(context, t.window_size), context)
    size = np.where(t.kv_cache_dtype == "fp8", 1, 2)
    pairs = t.batch_size * context * t.head_dim
    return 4 * pairs * t.num_heads, 2 * pairs * t.num_key_value_heads * size, t.attn_dtype


def _experts(t):
    """Those of gated experts, of which each is read that some token chose."""
    inner, experts = t.inter_size / t.moe_tp_size, t.num_experts / t.moe_ep_size
    chosen = t.num_tokens * t.topk / t.moe_ep_size
    met = experts * (1 - (1 - 1 / experts) ** chosen)
    size = np.where(t.moe_dtype == "bfloat16", 2, 1)
    moved = met * 3 * t.hidden_size * inner * size + chosen * t.hidden_size * 4
    return 6 * chosen * t.hidden_size * inner, moved, t.moe_dtype


def fitted(samples: list[Sample]) -> Float[np.ndarray, "3"]:
    """Shares of least mean absolute log error."""

    def shares(x: Float[np.ndarray, "2"]) -> Float[np.ndarray, "3"]:
        return np.array([abs(x[0]), FLOP_SHARE, abs(x[1])])

    def loss(x: Float[np.ndarray, "2"]) -> float:
        return float(np.mean([abs(s.off(shares(x))) for s in samples]))

    return shares(minimize(loss, START, method="Nelder-Mead", options={"maxiter": 80}).x)


@click.command(help=__doc__)
@click.argument("rows", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(rows: Path, data: Path | None) -> None:
    samples, data = list(servers(rows)), data or installed()
    shares = fitted(samples)
    click.echo("BUSY, FLOP, BYTES = " + ", ".join(f"{x:.2f}" for x in shares))
    click.echo(head("watts of | samples | error: median, mean | left out of the fit | TDP", 1))
    for attribute in ("name", "gpu"):
        every, left_out = sorted({getattr(s, attribute) for s in samples}), list[float]()
        for value in every:
            mine = [s for s in samples if getattr(s, attribute) == value]
            fold = fitted([s for s in samples if getattr(s, attribute) != value])
            own = [s.off(fold) for s in mine]
            left_out += own
            click.echo(_line(value, mine, shares, own))
        ordered = sorted(samples, key=lambda s: getattr(s, attribute))
        click.echo(_line(f"all, by {attribute}", ordered, shares, left_out))
    if data is not None:
        own = list(kernels(data))
        click.echo(_line("kernels", own, shares, [s.off(shares) for s in own]))


def _line(
    name: str, samples: list[Sample], shares: Float[np.ndarray, "3"], left_out: list[float]
) -> str:
    rows = [[s.off(shares) for s in samples], left_out]
    rows.append([float(np.log(s.power[2] / s.watts)) for s in samples])
    errors = [np.abs(np.expm1(row)) for row in rows]
    cells = [f"{np.median(off):.1%}, {np.mean(off):.1%}" for off in errors]
    return f"| {name} | {len(samples)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
