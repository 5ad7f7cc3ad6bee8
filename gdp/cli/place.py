"""`gdp place`, `compare`, `simulate` and `report`."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gdp.base.clock import Phases
from gdp.base.errors import InfeasibleError
from gdp.base.terminal import listening, printable_lines
from gdp.cli import options
from gdp.cli.asking import Asking, require_writable
from gdp.cli.program import STARTED_S
from gdp.cli.show import placing, show, stages

if TYPE_CHECKING:
    from gdp.base.files.writing import OverwritePolicy
    from gdp.question.result import Result
    from gdp.sim.traffic import Traffic


@click.command()
@options.stack(
    *options.asking(options.PLACE_OBJECTIVE), *options.METHOD, *options.DESTINATION,
    *options.SERVING, options.VIDEO, options.PRICE,
    options.output("P", "Write the placement (JSON)."),
    options.REPORT, options.TRACE, options.FORCE, options.AS_JSON,
)  # fmt: skip
def place(
    output: str | None, report: str | None, trace: str | None, force: bool, traffic: Any,
    within: Any, disaggregated: bool, draft: Any, video: str | None, price: Any, **values: Any,
) -> None:  # fmt: skip
    """Place a model on a cluster."""
    from gdp.api.place import placed
    from gdp.api.run import start_commands
    from gdp.cli.energy_text import price_json
    from gdp.cli.text import result_text

    phases, asking = Phases(STARTED_S), Asking(**values)
    phases.ended("import")
    if asking.holds_models:
        from gdp.cli.box import place_box

        says = f"{asking.spec} holds several models and says {{}} of each itself"
        _require_options(_OF_A_BOX, says)
        place_box(asking.spec, asking.machine(), asking.costs, output, force)
        return
    if asking.makes_media or video is not None:
        from gdp.cli.diffusion import place_media

        _require_options(_OF_MEDIA, f"{{}} is not for {asking.spec}, which makes images or videos")
        image = None if asking.image is None else str(asking.image)
        own = asking.spec, asking.machine(), {"image": image, "video": video}
        place_media(*own, asking.quantize or "", asking.costs, output, force, price)
        return
    model, parts = asking.model, asking.parts()
    asking.search()  # refuses bad values before files are looked at
    paths = {"placement": output, "report": report, "trace": trace}
    require_writable(force, model, *asking.files, **paths)
    with stages() as say, listening(say):
        result = placed(
            model or "", search=asking.search(placing(say)), phases=phases, traffic=traffic,
            within=within, disaggregated=disaggregated, draft=draft, **parts,
        )  # fmt: skip
    # Files of a python: model are known once it is loaded.
    overwrite = require_writable(force, model, *asking.files, **paths)
    _write(result, output, report, trace, overwrite)
    starts = start_commands(result)
    plain = result.to_json() | ({"start": [s._asdict() for s in starts]} if starts else {})
    plain |= price_json(result, price)
    show(plain, lambda: result_text(result, output, starts, price))


_OF_A_BOX = {"spec", "cluster", "max_memory", "reserve", "costs", "output", "force"}
"""Options that a file of several models takes; it says all else itself."""
_OF_MEDIA = _OF_A_BOX | {"image", "video", "quantize", "price", "power_limit"}


def _require_options(known: set[str], message: str) -> None:
    """Raise `UsageError` with the first option of the command line that is not known here."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if given and parameter.expose_value and name not in known:
            raise click.UsageError(f"{message.format(parameter.opts[0])}: leave it out")


def beside(path: str) -> str:
    """The file of the prefill GPUs, where the decode GPUs have another.

    >>> beside("plans/p.json")
    'plans/p.prefill.json'
    """
    stem, dot, ending = path.rpartition(".")
    return f"{stem}.prefill.{ending}" if dot and "/" not in ending else f"{path}.prefill"


def _write(
    result: "Result", output: str | None, report: str | None, trace: str | None,
    overwrite: "OverwritePolicy",
) -> None:  # fmt: skip
    """Write the requested files."""
    from gdp.api import report as reporting
    from gdp.base.files.writing import check_file_writable, is_stream
    from gdp.placement.placement import save_placement

    prefill = None if result.traffic is None else result.traffic.prefill
    if prefill is not None and output and not is_stream(output):
        check_file_writable(beside(output), "placement", overwrite)
        save_placement(prefill.result.placement, beside(output))
    if output:
        save_placement(result.placement, output)
    if trace:
        reporting.trace(result.question, result.placement, trace)
    if report:
        reporting.write_page(result.question, result, report)


@click.command()
@options.stack(
    *options.asking(options.PLACE_OBJECTIVE), *options.SEARCH,
    click.option("--methods", metavar="A,B", help="Only these methods."), options.AS_JSON,
)  # fmt: skip
def compare(methods: str | None, **values: Any) -> None:
    """Run every method and print one table."""
    from gdp.api.place import compared
    from gdp.cli.text import compare_text

    def say(name: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"gdp: {name} ...", err=True)

    asking = Asking(**values)
    question = asking.question(search=asking.search())
    names = methods.split(",") if methods else None
    with stages() as report_stage, listening(report_stage):
        rows = compared(question, names, say)
    plain = [
        {"method": name, "feasible": False, "reason": row}
        if isinstance(row, str)
        else row.to_json()
        for name, row in rows.items()
    ]
    show({"rows": plain}, lambda: compare_text(question.graph, question.cluster, rows))
    if all(isinstance(row, str) for row in rows.values()):
        raise InfeasibleError("no method found a placement")


@click.command()
@options.stack(
    *options.about(options.MODEL), click.argument("placement", required=False), options.TRACE,
    options.FORCE, options.AS_JSON,
)  # fmt: skip
def simulate(placement: str | None, trace: str | None, force: bool, **values: Any) -> None:
    """Predict time and memory of a placement, or of a device map (JSON), accelerate's too.

    A placement that remembers its model is enough: gdp simulate PLACEMENT.
    """
    from gdp.api import report as reporting
    from gdp.api.generation import generation_answer, with_energy
    from gdp.cli.energy_text import energy_lines
    from gdp.cli.text import generation_lines, is_verbose
    from gdp.question import solve
    from gdp.sim.objectives import find_objective

    asking = Asking(**values)
    spec, placement = asking.beside(placement)
    require_writable(force, spec, placement, asking.cluster, asking.costs, trace=trace)
    question, placed = asking.about(placement, spec)
    result = solve.evaluate(question, placed, solve.UNPROVEN)
    score = result.score
    if trace:
        reporting.trace(question, placed, trace)
    row = find_objective(question.objective)
    prediction = {
        "objective": question.objective,
        "value": score.value_s,
        "unit": row.unit,
        "latency_s": score.latency_s,
        "period_s": score.period_s,
        "feasible": score.feasible,
        "overflow_bytes": score.overflow_bytes,
        "peak_bytes": dict(zip(placed.device_names, score.peak_bytes.tolist(), strict=True)),
    }
    answer = generation_answer(question, placed, score)
    result = replace(result, generation=answer) if answer else with_energy(result)
    prediction |= {name: result.to_json()[name] for name in ("joules", "watts")}
    if answer is not None:
        prediction["generation"] = answer.to_json()
    lines = [] if row.unit == "s" else [f"{row.quantity:8} {row.text(score.value_s)}"]
    lines += [str(score), *([] if answer is None else generation_lines(answer))]
    lines += energy_lines(result, verbose=is_verbose())
    show(prediction, lambda: printable_lines(lines))
    if not score.feasible:
        sys.exit(1)


@click.command()
@options.stack(
    click.argument("placement"), *options.about(options.NAMED_MODEL), options.TRAFFIC,
    options.output("R.html"), options.FORCE, options.AS_JSON,
)  # fmt: skip
def report(
    placement: str, traffic: "Traffic | None", output: str, force: bool, **values: Any
) -> None:
    """Write an HTML report of a placement."""
    from gdp.api import report as reporting
    from gdp.api.traffic.plan import on_vllm, served_on
    from gdp.question.solve import evaluate

    asking = Asking(**values)
    model = asking.model
    require_writable(force, model, placement, asking.cluster, asking.costs, report=output)
    question, placed = asking.about(placement, model)
    question = question if traffic is None else on_vllm(question, placed)
    result = evaluate(question, placed)
    if traffic is not None:
        result = replace(result, traffic=served_on(result, traffic))
    reporting.write_page(question, result, output)
    show({"report": output}, lambda: output)
