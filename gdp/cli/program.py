"""How the program ends: exit codes, one line per error, tracebacks under -v alone."""

import errno
import logging
import os
import sys
import traceback
from typing import Any, NoReturn

import click

from gdp.errors import GdpError, InfeasibleError, MeasurementError
from gdp.terminal import printable


def _be_verbose(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        logging.getLogger().setLevel(logging.INFO)


class _UnreadError(Exception):
    """Nobody reads standard output any more."""


class Verbs(click.Group):
    """A group whose verbs all take -v, so that it may stand after the verb as well."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # click would end the program with 1, which says that nothing fits.
            raise _UnreadError from None

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        if not any(parameter.name == "verbose" for parameter in cmd.params):
            cmd.params.append(verbose_option())
        super().add_command(cmd, name)


def verbose_option() -> click.Option:
    """The -v of every verb: it acts when parsed and hands the verb nothing."""
    return click.Option(
        ["-v", "--verbose"], is_flag=True, expose_value=False, callback=_be_verbose,
        help="Log what is done to stderr; tracebacks of bugs.",
    )  # fmt: skip


def run(cli: click.Command) -> NoReturn:
    """Run the command line and exit as `gdp.cli.main.main` says."""
    try:
        code = cli.main(standalone_mode=False) or 0
        # What is still buffered may fail to be written, which must not happen unseen at exit.
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(code)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except (BrokenPipeError, _UnreadError):
        _quit_unread()
    except click.Abort:
        _fail("interrupted", 130)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (InfeasibleError, MeasurementError) as error:
        _fail(str(error), 1)
    except (GdpError, ValueError, ImportError) as error:
        _fail(str(error), 2)
    except OSError as error:
        # Files are named where they are written; what remains is what is printed.
        unnamed = "standard output: " if error.errno == errno.ENOSPC else ""
        where = f"{error.filename}: " if error.filename else unnamed
        _fail(f"{where}{error.strerror or error}", 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except MemoryError:
        _fail("out of memory; place a smaller graph or on fewer devices", 2)
    except Exception as error:
        _report_bug(error)


def _quit_unread() -> NoReturn:
    """As programs do that SIGPIPE ends: quietly, with 128 + 13."""
    # Python flushes standard output once more at exit, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


def _report_bug(error: Exception) -> NoReturn:
    """What nothing foresaw is a bug, not the user's mistake."""
    if logging.getLogger().isEnabledFor(logging.INFO):
        traceback.print_exception(error)
    _fail(
        f"internal error, please report it with the output of the same command under -v: "
        f"{type(error).__name__}: {error}",
        3,
    )


def _fail(message: str, code: int) -> NoReturn:
    click.echo("gdp: " + printable(" ".join(message.split())), err=True)
    sys.exit(code)
