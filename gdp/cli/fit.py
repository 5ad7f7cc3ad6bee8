"""`gdp fit`: requests, or traffic, on several machines and in several schemes."""

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gdp.base.units import format_seconds
from gdp.cli import options
from gdp.cli.asking import NO_BACKEND, limited, require_writable
from gdp.cli.show import show, stages
from gdp.targets.table import PLANNERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from gdp.api.fit import FitRow, TrafficRow
    from gdp.cli.energy_text import Price
    from gdp.sim.traffic import Traffic


_NOT_OF_TRAFFIC = {
    "prompts": "--prompt", "batches": "--batch", "new": "--new", "context": "--context",
}  # fmt: skip


def _sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    from gdp.base.units import whole_number

    sizes = [whole_number(part.strip()) for part in value.split(",")]
    if None in sizes:
        raise click.BadParameter(f"{value!r} must be whole numbers such as 2048,8192")
    return tuple(dict.fromkeys(size for size in sizes if size is not None))


@click.command()
@options.stack(
    click.argument("models", metavar="MODEL...", nargs=-1, required=True),
    click.option(
        "--cluster", "--clusters", "clusters", multiple=True, required=True, metavar="A,B",
        help="Presets or TOML files to compare; may be repeated.",
    ),
    click.option(
        "--prompt", "prompts", default="2048,8192", show_default=True, callback=_sizes,
        help="Tokens that are read.",
    ),
    click.option(
        "--batch", "batches", default="1", show_default=True, callback=_sizes,
        help="Sequences side by side.",
    ),
    click.option(
        "--quantize", default="", metavar="A,B",
        callback=lambda _, __, value: tuple(dict.fromkeys(p.strip() for p in value.split(","))),
        help="Schemes that weights are stored in, such as none,int8,nf4.",
    ),
    click.option(
        "--new", type=click.IntRange(1, 2**31 - 1), default=256, show_default=True,
        help="Tokens that are written.",
    ),
    options.CONTEXT,
    click.option(
        "--for", "target", type=click.Choice(tuple(PLANNERS)),
        help="Rows that this runtime can follow.",
    ),
    options.TRAFFIC, options.DRAFT, options.MAX_MEMORY, options.RESERVE, options.BACKEND,
    options.POWER_LIMIT, options.PRICE,
    click.option(
        "--seconds", type=float, default=1.0, show_default=True, help="Search of each row."
    ),
    options.SEED, options.COSTS,
    click.option("--picture", metavar="P.svg", help="Write bars (SVG)."),
    options.FORCE, options.AS_JSON,
)  # fmt: skip
def fit(
    models: tuple[str, ...], clusters: tuple[str, ...], max_memory: Any, reserve: Any,
    backend: str | None, seconds: float, seed: int, costs: str | None, picture: str | None,
    force: bool, traffic: "Traffic | None", target: str | None, draft: Any, power_limit: Any,
    price: "Price | None", **sizes: Any,
) -> None:  # fmt: skip
    """Compare models, contexts, batches, schemes and machines: if they fit, and how fast they are.

    MODEL is a configuration of transformers (hf:CONFIG) or a .gguf file, for llama.cpp; there may
    be several. Every row is a placement of one request: the prompt is read, then tokens are
    written; with --traffic, a plan for vLLM of requests that share the engine.
    """
    from gdp.api.fit import fit as fit_rows
    from gdp.api.fit import fit_picture, fit_traffic
    from gdp.api.traffic.drafting import drafted
    from gdp.base.files.writing import write_atomic
    from gdp.base.terminal import listening
    from gdp.cluster.types import Cluster
    from gdp.methods.base import Search

    names = [name.strip() for given in clusters for name in given.split(",")]
    _require_models(models, names, backend)
    if traffic is not None:
        _require_traffic(models, target)
    elif draft is not None:
        models = tuple(drafted(model, draft) for model in models)
    require_writable(
        force, *models, costs, *(name for name in names if name.endswith(".toml")), picture=picture
    )
    machines = limited(map(Cluster.load, names), max_memory, reserve, backend, power_limit)
    with stages() as say, listening(say):
        if traffic is not None:
            rows = fit_traffic(
                models, machines, traffic, quantize=sizes["quantize"], costs=costs, draft=draft,
                progress=say,
            )  # fmt: skip
            text = functools.partial(traffic_text, rows, price)
        else:
            rows = fit_rows(
                models, machines, target=target, costs=costs, search=Search(seed, seconds),
                progress=say, **sizes,
            )  # fmt: skip
            text = functools.partial(fit_text, rows, price)
    if picture:
        write_atomic(picture, fit_picture(rows).encode())
    plain = [row.to_json() | _money_json(row, price) for row in rows]
    show({"models": list(models), "rows": plain}, text)


def _money_json(row: "FitRow | TrafficRow", price: "Price | None") -> "dict[str, float]":
    if price is None or row.joules_per_token is None:
        return {}
    return {"price_per_million_tokens": price.of(1e6 * row.joules_per_token)}


def _energy_columns(price: "Price | None") -> "list[tuple[str, Callable[[Any], str | None]]]":
    """Columns of joules, watts and money."""

    def money(row: "FitRow | TrafficRow") -> str:
        joules = row.joules_per_token
        return "" if price is None or joules is None else price.text(1e6 * joules)

    return [
        ("J/token?", lambda row: _known(row.joules_per_token, "{:.3g}".format)),
        ("watts?", lambda row: _known(row.watts, "{:.0f}".format)),
        ("per million tokens?", money),
    ]


def _require_models(
    models: "Sequence[str]", clusters: "Sequence[str]", backend: str | None
) -> None:
    """Raise `UsageError` for models of another kind, and names of no cluster."""
    from gdp.question.models import HF_PREFIX, is_gguf

    for model in models:
        if not (model.startswith(HF_PREFIX) or is_gguf(model)):
            raise click.UsageError(f"gdp fit takes hf:CONFIG and .gguf models, not {model!r}")
    if backend is not None and not any(map(is_gguf, models)):
        raise click.UsageError(NO_BACKEND)
    if "" in clusters:
        raise click.UsageError(
            f"--clusters {','.join(clusters)!r} has an empty name: write them like cpu+t4,cpu+h100"
        )


def _require_traffic(models: "Sequence[str]", target: str | None) -> None:
    """Refuse options that conflict with `--traffic`."""
    from gdp.question.models import HF_PREFIX

    if target != "vllm" or not all(model.startswith(HF_PREFIX) for model in models):
        raise click.UsageError("--traffic is for hf: models --for vllm")
    context = click.get_current_context()
    for name, flag in _NOT_OF_TRAFFIC.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--traffic says all tokens and requests: leave out {flag}")


def fit_text(rows: "Sequence[FitRow]", price: "Price | None" = None) -> str:
    """Text of `gdp fit`."""
    return _rows_text(rows, [
        ("model?", lambda row: row.model),
        ("machine", lambda row: row.cluster),
        ("tokens", lambda row: f"{row.prompt}+{row.new}"),
        ("batch", lambda row: str(row.batch)),
        ("quantised?", lambda row: row.quantize),
        ("fits", lambda row: "yes" if row.fits else "no"),
        ("tokens/s", lambda row: _known(row.tokens_per_s, "{:.1f}".format)),
        ("90%?", _interval),
        ("TTFT", lambda row: _known(row.first_token_s)),
        ("request", lambda row: _known(row.request_s)),
        ("gap", lambda row: _known(row.gap, "{:.0%}".format)),
        ("fullest", lambda row: _known(row.fullest, "{:.0%}".format)),
        ("longest context", lambda row: _known(row.longest_context, str)),
        ("tokens/s at it?", lambda row: _known(row.full_tokens_per_s, "{:.1f}".format)),
        ("layout?", lambda row: row.layout),
        *_energy_columns(price),
    ])  # fmt: skip


def traffic_text(rows: "Sequence[TrafficRow]", price: "Price | None" = None) -> str:
    """Text of `gdp fit --traffic`."""

    def room(row: "TrafficRow") -> str:
        return "no limit" if row.fits and row.room is None else _known(row.room, str)

    return _rows_text(rows, [
        ("model?", lambda row: row.model),
        ("machine", lambda row: row.cluster),
        ("quantised?", lambda row: row.quantize),
        ("fits", lambda row: "yes" if row.fits else "no"),
        ("tokens/s", lambda row: _known(row.tokens_per_s, "{:.1f}".format)),
        ("90%?", _interval),
        ("TTFT", lambda row: row.first_token and _known(row.first_token.mean_s)),
        ("95%", lambda row: row.first_token and _known(row.first_token.p95_s)),
        ("TPOT", lambda row: row.token and _known(row.token.mean_s)),
        ("95%", lambda row: row.token and _known(row.token.p95_s)),
        ("concurrency", lambda row: _known(row.running, "{:.1f}".format)),
        ("room", room),
        ("layout", lambda row: row.layout),
        *_energy_columns(price),
    ])  # fmt: skip


def _interval(row: "FitRow | TrafficRow") -> str:
    """90% interval of tokens/s."""
    return _known(row.intervals.get("tokens_per_s"), "{0[0]:.4g} to {0[1]:.4g}".format)


def _known(value: Any, text: "Callable[[Any], str]" = format_seconds) -> str:
    """A number as text; "" where it is not known."""
    return "" if value is None else text(value)


def _rows_text(
    rows: "Sequence[Any]", columns: "Sequence[tuple[str, Callable[[Any], str | None]]]"
) -> str:
    """Table and remarks of rows; columns whose name ends with "?" are left out where all cells are
    empty."""
    from gdp.cli.text import shown, table

    names = _file_names(row.model for row in rows)
    rows = [replace(row, model=names[row.model]) for row in rows]
    own = [(name, cell) for name, cell in columns if name[-1] != "?" or any(map(cell, rows))]
    body = [[cell(row) or "-" for _, cell in own] for row in rows]
    return shown([table([name.rstrip("?") for name, _ in own], body), "", *_remarks(rows)])


def _file_names(models: "Iterable[str]") -> dict[str, str]:
    """Models by the last part of their path, if these are distinct."""
    last = {model: model.rpartition("/")[2] for model in models}
    return last if len(set(last.values())) == len(last) else {model: model for model in last}


def _remarks(rows: "Sequence[FitRow | TrafficRow]") -> list[str]:
    """Lines below a table: limits of each row, notes on schemes, sources of seconds."""
    reasons = dict.fromkeys(f"{row.label}: {row.limit}" for row in rows if row.limit)
    notes = dict.fromkeys(
        f"note: {row.quantize or row.label}: {row.note}" for row in rows if row.note
    )
    costs = dict.fromkeys(f"costs of {row.cluster}: {row.costs}" for row in rows if row.costs)
    links = dict.fromkeys(f"links of {row.cluster}: {row.links}" for row in rows if row.links)
    return [*reasons, *notes, *costs, *links]
