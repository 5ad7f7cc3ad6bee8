"""`gdp learn`: measured runs of engines become corrections of their stack."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gdp.base.errors import ArgumentError
from gdp.base.files.writing import write_atomic
from gdp.cli import options
from gdp.cli.asking import Asking, require_writable
from gdp.cli.show import reporting_stages, show

if TYPE_CHECKING:
    from gdp.api.measured.kernels import LearnedKernels
    from gdp.api.measured.learn import Learned
    from gdp.api.measured.trial_files import EngineTrial
    from gdp.api.measured.trials import Trials
    from gdp.corrections.records import RunRecord

ALL = "all"
TRIALS = [
    click.option(
        "--for", "engine", type=click.Choice(["vllm", "sglang", "llamacpp"]),
        help="An engine that you run, here or elsewhere: trials by files of its own benchmark.",
    ),
    options.TRAFFIC, options.WITHIN,
    click.option(
        "--result", metavar="FILE",
        help="Result file of the last trial, where it is not in its folder.",
    ),
]  # fmt: skip
"""Options of `gdp tune` for engines."""
_OF_RUNS = (
    "runs", "place_seconds", "keep", "measure_seconds", "runtime", "write_costs", "report",
    "objective",
)  # fmt: skip
"""Options of `gdp tune` for models that it runs itself."""
FIGURES = {"first_token_s": "TTFT", "token_s": "TPOT", "request_s": "request"}


@click.command()
@options.stack(
    click.argument("files", nargs=-1, metavar="FILE..."),
    click.option("--plan", metavar="PLACEMENT", help="That was executed: a file of gdp place."),
    *options.NAMED_MODEL, *options.CLUSTER, options.COSTS,
    click.option(
        "--for", "target", type=click.Choice(["vllm", "llamacpp"]),
        help="Runtime of --model, where there is no plan; SGLang runs plans for vllm.",
    ),
    click.option("--no-keep", "keep", is_flag=True, flag_value=False, default=True,
                 help="Say what would be learned, and remember nothing."),
    click.option("--list", "listed", is_flag=True,
                 help="Stacks and cards that were measured, and exit."),
    click.option("--forget", metavar=f"STACK|CARD|{ALL}",
                 help="Forget the runs of a stack of --list, or the kernels of a card."),
    click.option("--export", "exported", metavar="RUNS.json",
                 help="Write all that is remembered as one file."),
    click.option("--import", "imported", metavar="RUNS.json", help="Remember runs of such a file."),
    options.FORCE, options.AS_JSON,
)  # fmt: skip
def learn(
    files: tuple[str, ...], plan: str | None, keep: bool, listed: bool, forget: str | None,
    exported: str | None, imported: str | None, force: bool, **values: Any,
) -> None:  # fmt: skip
    """Learn how an engine really runs here, from result files of its own benchmark.

    FILE is written by vllm bench serve, latency or throughput, SGLang's bench_serving, llama-bench,
    llama-batched-bench, GuideLLM, genai-perf, AIPerf, or gdp run --json. Say what ran by --plan, or
    by --model and --cluster (and --for vllm). Later answers about this stack (engine, version,
    backend, card, host) are corrected by the runs, whatever the model, with narrower intervals.

    A CSV of kernels that you measured on a card (kind,b,m,n,k,dtype,seconds) needs --cluster alone,
    and teaches its costs.
    """
    from gdp.api.measured.kernels import are_kernels, learn_kernels
    from gdp.corrections import records
    from gdp.costs.measured import own as cards

    managing = [listed, forget is not None, exported is not None, imported is not None]
    if sum(managing) + bool(files) != 1:
        raise click.UsageError("give FILEs, or one of --list, --forget, --export and --import")
    if files and all(map(are_kernels, files)):
        asking = Asking(**values)
        if plan is not None or asking.model is not None or asking.cluster is None:
            raise click.UsageError("kernels of a card need --cluster, and no --plan or --model")
        kernels = learn_kernels(files, asking.machine(), keep=keep)
        show(kernels.to_json(), lambda: kernels_text(kernels))
    elif files:
        asking = Asking(**values)
        with reporting_stages():
            found = _learned(files, plan, asking, keep)
        show(found.to_json(), lambda: learned_text(found))
    elif listed:
        rows = stacks_of(list(records.remembered().values()))
        known_cards = [
            {"card": x.card, "kernels": len(x.kernels), "date": x.date}
            for x in cards.remembered().values()
        ]
        show({"stacks": rows, "cards": known_cards}, lambda: stacks_text(rows, known_cards))
    elif forget is not None:
        named = None if forget == ALL else [forget]
        count, kernels_count = records.forget(named), cards.forget(named)
        if not count + kernels_count and named:
            raise ArgumentError(
                f"no run of a stack {forget!r}, nor kernels of such a card; gdp learn --list names "
                "them"
            )
        show({"forgot": count, "kernels": kernels_count},
             lambda: f"forgot {_known(count, kernels_count)}")  # fmt: skip
    elif exported is not None:
        require_writable(force, runs=exported)
        known, own = list(records.remembered().values()), list(cards.remembered().values())
        write_atomic(Path(exported), records.exported(known, own))
        size = sum(len(card.kernels) for card in own)
        show({"written": exported, "runs": len(known), "kernels": size},
             lambda: f"{_known(len(known), size)} written to {exported}")  # fmt: skip
    elif imported is not None:
        document = records.read_file(imported)
        folder = records.remember(document.runs)
        size = sum(len(card.kernels) for card in document.cards)
        if document.cards:
            cards.remember(document.cards)
        show({"remembered_in": str(folder), "runs": len(document.runs), "kernels": size},
             lambda: f"{_known(len(document.runs), size)} remembered in {folder}")  # fmt: skip


def _learned(files: Sequence[str], plan: str | None, asking: Asking, keep: bool) -> "Learned":
    from gdp.api.measured.learn import learn_runs

    if plan is None:
        target = asking.target if asking.target != "llamacpp" else None
        return learn_runs(
            files, model=asking.model, cluster=asking.machine(), target=target,
            costs=asking.costs, keep=keep,
        )  # fmt: skip
    cluster = None if asking.cluster is None else asking.machine()
    return learn_runs(
        files, plan=plan, model=asking.model, cluster=cluster, costs=asking.costs, keep=keep
    )


def _runs(count: int) -> str:
    return f"{count} measured run{'' if count == 1 else 's'}"


def _known(runs: int, kernels: int) -> str:
    more = f"{kernels:,} measured kernel{'' if kernels == 1 else 's'}"
    if not kernels:
        return _runs(runs)
    return f"{_runs(runs)} and {more}" if runs else more


def kernels_text(found: "LearnedKernels") -> str:
    """Text of `gdp learn` for kernels of a card."""
    kept = f"remembered in {found.folder}" if found.folder else "nothing is remembered (--no-keep)"
    return (
        f"predictions of these {found.kernels:,} kernels of {found.card} were "
        f"{found.off_before:.0%} off; learned from the others, those of layers left out are "
        f"{found.off:.0%} off; {found.known:,} kernels of it, {kept}"
    )


def learned_text(found: "Learned") -> str:
    """Text of `gdp learn`: measured beside predicted, and what was learned."""
    from gdp.base.terminal import printable_lines
    from gdp.base.units import format_seconds
    from gdp.cli.text import table

    def times(told: dict[str, float], name: str) -> str:
        return format_seconds(told[name]) if name in told else "-"

    rows = [
        [f"{run.prompt:g} + {run.new:g}", f"{run.concurrency:g}" if run.concurrency else "-",
         times(run.measured, "ttft_s"), times(run.predicted, "ttft_s"),
         times(run.measured, "tpot_s"), times(run.predicted, "tpot_s")] for run in found.runs
    ]  # fmt: skip
    header = ["tokens", "requests at once", "TTFT", "predicted", "TPOT", "predicted"]
    lines = [f"learned: {word}" for word in found.words]
    lines += [f"note: {note}" for note in found.notes]
    kept = f"remembered in {found.folder}" if found.folder else "nothing is remembered (--no-keep)"
    lines.append(
        f"predictions of these runs were {found.off_before:.0%} off, now {found.off:.0%}; "
        f"{_runs(found.known)} of {found.stack.key}, {kept}"
    )
    return f"{table(header, rows)}\n\n{printable_lines(lines)}"


def stacks_of(runs: "Sequence[RunRecord]") -> list[dict[str, Any]]:
    """A row for each stack: its key, runs, models and last date."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        row = found.setdefault(run.stack.key, {"stack": run.stack.key, "runs": 0, "models": []})
        row["runs"] += 1
        row["date"] = run.date
        if run.model not in row["models"]:
            row["models"].append(run.model)
    return list(found.values())


def stacks_text(rows: Sequence[dict[str, Any]], cards: Sequence[dict[str, Any]] = ()) -> str:
    """Text of `gdp learn --list`."""
    from gdp.cli.text import shown, table

    if not rows and not cards:
        return "no run was learned from yet: gdp learn FILE --plan PLACEMENT"
    cells = [[r["stack"], str(r["runs"]), ", ".join(r["models"]), r["date"][:10]] for r in rows]
    lines = [table(["stack", "runs", "models", "last"], cells)] if rows else []
    if cards:
        cells = [[c["card"], f"{c['kernels']:,}", c["date"][:10]] for c in cards]
        lines.append(table(["card", "kernels", "last"], cells))
    return shown(lines)


def tune_by_files(
    engine: str, traffic: Any, within: Any, result: str | None, folder: str | None, force: bool,
    values: dict[str, Any],
) -> None:  # fmt: skip
    """`gdp tune --for ENGINE`: read the results so far, and write the next trial."""
    from gdp.api.measured.trials import next_trial

    context = click.get_current_context()
    for name in _OF_RUNS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = "--no-keep" if name == "keep" else f"--{name.replace('_', '-')}"
            raise click.UsageError(
                f"{flag} is for models that gdp runs itself: leave it out with --for {engine}"
            )
    asking = Asking(**values, target="llamacpp" if engine == "llamacpp" else "vllm")
    model, parts = asking.model, asking.parts()
    for name in ("target", "cluster"):
        parts.pop(name)
    with reporting_stages():
        found = next_trial(
            model or "", asking.machine(), engine, traffic=traffic, within=within, folder=folder,
            result=result, force=force, **parts,
        )  # fmt: skip
    show(found.to_json(), lambda: trials_text(found))


def trials_text(found: "Trials") -> str:
    """Text of `gdp tune --for`: predicted beside measured, lessons, and the lines to type next."""
    from gdp.base.units import format_seconds
    from gdp.cli.text import shown, table

    rows = []
    for trial in found.trials:
        low, middle, high = trial.record.predicted
        for name, title in FIGURES.items():
            ends = f"{format_seconds(getattr(low, name))} to {format_seconds(getattr(high, name))}"
            rows.append([
                f"{trial.record.trial} {title}", format_seconds(getattr(middle, name)), ends,
                format_seconds(getattr(trial.mean, name)),
            ])  # fmt: skip
    lines: list[str] = [table(["trial", "predicted", "90%", "measured"], rows)] if rows else []
    lines += [f"{trial.name}: {trial.text}" for trial in found.trials]
    lines += [f"learned: {word}" for word in found.learned]
    lines += [f"note: {note}" for note in found.notes]
    return shown([*lines, *(_next(found.next) if found.next is not None else _answer(found))])


def _next(trial: "EngineTrial") -> list[str]:
    """Lines of a trial that is to be measured."""
    gain = trial.record.gain
    why = "the best by what is known" if gain is None else f"expected to gain {gain:.1%}"
    lines = [f"next: {trial.name}, {trial.text}; {why}"]
    for one in trial.record.start:
        where = f" (on {one.machine})" if one.machine else ""
        lines.append(f"start{where}  {one.command}")
    return [
        *lines, f"measure  {trial.record.benchmark}",
        f"then  this command again; it reads {trial.result}",
    ]  # fmt: skip


def _answer(found: "Trials") -> list[str]:
    """The best measured trial, and why no other is tried."""
    from gdp.base.units import format_seconds

    best = found.best
    if best is None:
        return []
    why = "no setting is left to try"
    if found.untried and found.expected_gain is not None:
        why = (
            f"none of {found.untried} further settings is expected to gain {found.spread:.0%} "
            f"(at most {found.expected_gain:.1%})"
        )
    request = format_seconds(best.mean.request_s)
    late = ""
    if best.mean.share > 1.0:
        late = f", {best.mean.share:.2f} times the limits"
    return [
        f"answer: {best.name}, {best.text}: {request} a request{late}; {why}",
        *(f"start  {one.command}" for one in best.record.start),
    ]
