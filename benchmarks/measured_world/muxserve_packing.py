"""gdp's packing of MuxServe's 16 models on 32 A100 beside MuxServe's placements.

    python -m benchmarks.measured_world muxserve-packing --bench FOLDER --configs FOLDER
        [--load LOAD] [--scale TIMES]

`--configs` holds llama-7b/config.json and those of 13b, 30b and 65b. `gdp.place_models` plans all
models for vLLM, each with the rate of the load and the limits below; its prices are by its own
costs, and it knows nothing of the profile. All placements are simulated as in `muxserve`: passes of
the measured profile; engines that share GPUs by time slices ("temporal"), by shares of SMs
("flexsm"), or not at all ("spatial"); gdp's by shares of SMs where its plan has them. A request is
kept where its TTFT and its TPOT are within so many times those of one request alone on the GPUs
that MuxServe gave its model for itself.
"""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

import gdp
from benchmarks.measured_world.muxserve import (
    OUTPUT,
    SECONDS,
    Profile,
    Row,
    Shared,
    host_seconds,
    rows_of,
    shared_passes,
)
from gdp.api.box.answer import BoxAnswer
from gdp.api.box.pricing import plan_of

MACHINE = "cpu-server-ddr5+32xa100-nvlink"


class Kept(NamedTuple):
    """Requests of a placement that keep their limits."""

    kept: int
    requests: int
    models: dict[str, float]  # share of each


def sizes(tokens: float) -> tuple[int, int]:
    """Tokens of a prompt and of an answer, of a request's."""
    new = max(2, round(OUTPUT * tokens))
    return max(1, round(tokens) - new), new


def limits_of(
    spatial: list[Row], profile: Profile, tokens: dict[str, float], host_s: dict[str, float],
    scale: float,
) -> dict[str, tuple[float, float]]:  # fmt: skip
    """(TTFT, TPOT) limits of each model: `scale` times those of a request alone."""
    found = {}
    for row in spatial:
        one = Shared(row._replace(requests=1))
        ((rows, _),) = shared_passes([one], profile, tokens, host_s)
        (only,) = rows
        token_s = (only.ended_s - only.first_s) / (only.new - 1)
        found[row.llm] = scale * (only.first_s - only.asked_s), scale * token_s
    return found


def kept_of(
    meshes: list[list[Shared]], profile: Profile, tokens: dict[str, float],
    host_s: dict[str, float], limits: dict[str, tuple[float, float]],
) -> Kept:  # fmt: skip
    """Requests within their limits, of all meshes."""
    kept = count = 0
    models = {}
    for mesh in meshes:
        for one, (rows, _) in zip(mesh, shared_passes(mesh, profile, tokens, host_s), strict=True):
            first_s, token_s = limits[one.row.llm]
            own = sum(
                r.first_s - r.asked_s <= first_s
                and (r.ended_s - r.first_s) / (r.new - 1) <= token_s
                for r in rows
            )
            models[one.row.llm] = own / len(rows)
            kept, count = kept + own, count + len(rows)
    return Kept(kept, count, models)


def theirs(rows: list[Row], load: int, sharing: str) -> list[list[Shared]]:
    """Meshes of MuxServe's placement."""
    meshes = defaultdict[str, list[Shared]](list)
    for row in rows:
        if (row.load, row.sharing) == (load, sharing):
            meshes[row.mesh].append(Shared(row))
    return list(meshes.values())


def packed(
    spatial: list[Row], tokens: dict[str, float], limits: dict[str, tuple[float, float]],
    configs: Path,
) -> tuple[list[list[Shared]], BoxAnswer]:  # fmt: skip
    """Meshes of gdp's packing: models that share GPUs, whichever, and its answer."""
    asked = []
    for row in spatial:
        prompt, new = sizes(tokens[row.llm])
        first_s, token_s = limits[row.llm]
        rate = row.requests / (SECONDS / row.load)
        asked.append({
            "name": row.llm, "spec": f"hf:{configs / row.model}", "engine": "vllm",
            "traffic": f"rate={rate:.4f},prompt={prompt},new={new},requests=200",
            "within": {"ttft": f"{1e3 * first_s:.3f}ms", "tpot": f"{1e3 * token_s:.3f}ms"},
        })  # fmt: skip
    answer = gdp.place_models(asked, MACHINE, progress=lambda text: click.echo(text, err=True))
    found = []
    for row, placed in zip(spatial, answer.models, strict=True):
        priced = placed.priced
        assert priced is not None
        on = tuple(
            d for d, held in zip(priced.devices, priced.held, strict=True) if held.weights_bytes
        )
        plan = plan_of(priced)
        copies = 1 if plan is None else plan.engine.copies
        alone = row._replace(gpus=len(on) // copies, sharing="temporal")
        if sm := placed.sm_percent:
            alone = alone._replace(sharing="flexsm", prefill_sm=sm, decode_sm=sm)
        found.append(Shared(alone, on, priced.cache_tokens / copies, copies))
    meshes = list[list[Shared]]()
    for one in found:
        touching = [mesh for mesh in meshes if any(set(one.on) & set(other.on) for other in mesh)]
        meshes = [mesh for mesh in meshes if mesh not in touching]
        meshes.append([*(x for mesh in touching for x in mesh), one])
    return meshes, answer


@click.command("muxserve-packing", help=__doc__)
@click.option(
    "--bench", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True
)
@click.option(
    "--configs", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True
)
@click.option("--load", type=int, default=1200, show_default=True)
@click.option("--scale", type=float, default=8.0, show_default=True, help="Limits over alone.")
def main(bench: Path, configs: Path, load: int, scale: float) -> None:
    """Print requests kept within their limits by each placement."""
    rows, profile = rows_of(bench / "muxserve_runs.csv"), Profile(bench / "muxserve_profile.csv")
    tokens = {r.llm: r.tokens_per_s / r.requests_per_s for r in rows if r.sharing == "spatial"}
    host_s = host_seconds(rows, profile, tokens)
    spatial = [row for row in rows if (row.load, row.sharing) == (load, "spatial")]
    limits = limits_of(spatial, profile, tokens, host_s, scale)
    lines = dict[str, Kept]()
    for sharing in ("spatial", "temporal", "flexsm"):
        lines[f"MuxServe, {sharing}"] = kept_of(
            theirs(rows, load, sharing), profile, tokens, host_s, limits
        )
    meshes, answer = packed(spatial, tokens, limits, configs)
    lines["gdp"] = kept_of(meshes, profile, tokens, host_s, limits)
    for mesh in meshes:
        for one in mesh:
            click.echo(
                f"{one.row.llm} {one.row.model}: GPUs {', '.join(map(str, one.on))}"
                f"{f', {one.copies} copies' if one.copies > 1 else ''}, kept "
                f"{lines['gdp'].models[one.row.llm]:.0%} (theirs, flexsm "
                f"{lines['MuxServe, flexsm'].models[one.row.llm]:.0%})"
            )
    click.echo(f"gdp: load {answer.load:.2f}, priced in {answer.pricing_s:.0f} s")
    for name, found in lines.items():
        least = np.min(list(found.models.values()))
        click.echo(
            f"{name}: {found.kept} of {found.requests} requests within {scale:g} times alone "
            f"({found.kept / found.requests:.1%}), of the worst model {least:.0%}"
        )
