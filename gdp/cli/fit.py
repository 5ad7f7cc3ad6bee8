"""`gdp fit`: which requests to a language model fit on which machines, and how fast."""

from typing import TYPE_CHECKING

import click

from gdp.cli import options
from gdp.cli.show import show, stages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdp.commands.fitting import FitRow


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    sizes = [part.strip() for part in value.split(",")]
    if not all(s.isascii() and s.isdecimal() and 1 <= int(s) < 1 << 31 for s in sizes):
        raise click.BadParameter(f"{value!r} must be whole numbers such as 2048,8192")
    return tuple(dict.fromkeys(map(int, sizes)))


def _schemes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in value.split(",")))


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--cluster", "--clusters", "clusters", multiple=True, required=True, metavar="A,B",
    help="Presets or TOML files to compare; may be repeated.",
)  # fmt: skip
@click.option(
    "--prompt", "prompts", default="2048,8192", show_default=True, callback=_sizes,
    help="Tokens that are read.",
)  # fmt: skip
@click.option(
    "--batch", "batches", default="1", show_default=True, callback=_sizes,
    help="Sequences side by side.",
)  # fmt: skip
@click.option(
    "--quantize", default="", callback=_schemes, metavar="A,B",
    help="Schemes that weights are stored in, such as none,int8,nf4.",
)  # fmt: skip
@click.option(
    "--new", type=click.IntRange(1, 2**31 - 1), default=256, show_default=True,
    help="Tokens that are written.",
)  # fmt: skip
@click.option("--seconds", type=float, default=1.0, show_default=True, help="Search of each row.")
@options.seed
@options.costs
@options.outputs(picture=options.written("--picture", metavar="P.svg", help="Write bars (SVG)."))
@options.as_json
def fit(
    model: str, clusters: tuple[str, ...], prompts: tuple[int, ...], batches: tuple[int, ...],
    quantize: tuple[str, ...], new: int, seconds: float, seed: int, costs: str | None,
    outputs: options.Outputs,
) -> None:  # fmt: skip
    """Compare contexts, batches, schemes and machines: if they fit, and how fast they are.

    MODEL is a configuration of transformers (hf:CONFIG) or a .gguf file. Every row is a placement
    of one request: the prompt is read, then tokens are written.
    """
    from gdp.commands.fitting import fit as fit_rows
    from gdp.commands.fitting import picture
    from gdp.files.writing import write_atomic
    from gdp.methods.base import Search
    from gdp.models import HF_PREFIX, is_gguf
    from gdp.terminal import listening

    if not (model.startswith(HF_PREFIX) or is_gguf(model)):
        raise click.UsageError(f"gdp fit takes hf:CONFIG and .gguf models, not {model!r}")
    names = [name for given in clusters for name in given.split(",")]
    outputs.require(model, costs, *(name for name in names if name.endswith(".toml")))
    with stages(lines=False) as say, listening(say):
        rows = fit_rows(
            model, names, prompts=prompts, batches=batches, quantize=quantize, new=new,
            costs=costs, search=Search(seed, seconds), progress=say,
        )  # fmt: skip
    if path := outputs.paths.get("picture"):
        write_atomic(path, picture(rows).encode())
    show({"model": model, "rows": [row.to_json() for row in rows]}, lambda: fit_text(rows))


def fit_text(rows: "Sequence[FitRow]") -> str:
    """Text of `gdp fit`."""
    from gdp.cli.text import shown, table
    from gdp.units import format_seconds

    body, tried = [], any(row.quantize for row in rows)
    for row in rows:
        start = [row.cluster, f"{row.prompt}+{row.new}", str(row.batch)]
        start += [row.quantize or "-"] if tried else []
        if not row.fits or row.first_token_s is None or row.request_s is None:
            body.append([*start, "no", "-", "-", "-", "-"])
            continue
        body.append(
            [
                *start, "yes", f"{row.tokens_per_s:.1f}", format_seconds(row.first_token_s),
                format_seconds(row.request_s), f"{row.fullest or 0:.0%}",
            ]
        )  # fmt: skip
    header = ["machine", "tokens", "batch", *["quantised"] * tried, "fits", "tokens/s"]
    header += ["first token", "request", "fullest"]
    reasons = dict.fromkeys(
        f"{row.cluster}, {row.prompt}+{row.new} tokens, batch {row.batch}"
        f"{row.quantize and f', {row.quantize}'}: {row.limit}"
        for row in rows
        if row.limit
    )
    return shown([table(header, body), "", *reasons])
