"""The command line: each verb calls one library function and prints what it returns."""

from typing import NoReturn

import click

from gdp.base.terminal import log_to_stderr
from gdp.base.version import gdp_version
from gdp.cli import costs, fit, inform, learn, measured, place, run
from gdp.cli.program import Verbs, prepare_process, verbose_option
from gdp.cli.program import run as run_program


def main() -> NoReturn:
    """The `gdp` program.

    Exits with 0: done, 1: infeasible or failed check, 2: wrong input, 3: a bug of gdp, 130:
    interrupted, 141: nobody reads standard output any more. An error is one line on stderr;
    standard output holds a whole result or nothing, with --json as without.
    """
    prepare_process()
    run_program(cli)


def _say_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    """Of the tree that runs, which need not be installed."""
    if wanted and not context.resilient_parsing:
        click.echo(f"gdp, version {gdp_version()}")
        context.exit()


@click.group(
    cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_say_version,
    help="Show the version and exit.",
)  # fmt: skip
def cli() -> None:
    """Decide on which device each operator of a neural network runs.

    MODEL is an .onnx path, onnx:NAME (a light model of the installed onnx package), a .gguf path,
    hf:CONFIG (a config.json of transformers, its folder, or ORG/NAME in the Hugging Face cache), a
    graph file, or python:package.module:function (a JAX function or a PyTorch module with example
    inputs).
    """
    log_to_stderr()


cli.params.append(verbose_option())
for verb in (
    place.place, fit.fit, place.compare, place.simulate, place.report, inform.explain, run.run,
    run.tune, measured.learn, run.export, inform.inspect, inform.devices, costs.profile,
    costs.calibrate, learn.corpus, learn.pretrain, learn.finetune, inform.doctor,
):  # fmt: skip
    cli.add_command(verb)
