"""The program as a process: quick start, exit codes, one line per error, tracebacks under -v."""

import errno
import gc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import click

from gdp.base.errors import GdpError, InfeasibleError, MeasurementError
from gdp.base.terminal import printable


def _started_s() -> float:
    """Start of the process on the clock of `time.perf_counter`, including Python's own start if the
    system reports it; else now."""
    now_s = time.perf_counter()
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        ticks = int(stat.rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return now_s
    return now_s - max(0.0, age_s)


STARTED_S = _started_s()
"""Start of the process."""
DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")
"""Half a second of imports for onnx_ir's arithmetic on symbolic dimensions, which few models need;
the second of them reads the first at once."""


def prepare_process() -> None:
    """Prepare the process, before NumPy is imported.

    One thread for NumPy's products, unless the user says otherwise: they are small here, and more
    threads spend their time waiting for one another. `DEFERRED` modules are read when something of
    theirs is first used (`importlib.util.LazyLoader`); where one is gone, nothing is lost.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Modules and traces are millions of objects that stay: collections find hardly any garbage.
    gc.set_threshold(50_000, 20, 50)
    if not any(isinstance(finder, _Deferring) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Deferring())


class _Deferring:
    """Finder of the deferred modules, with a loader that waits for their first use."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Spec of a deferred module; None for every other, which the next finders find."""
        if name not in DEFERRED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def _be_verbose(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        logging.getLogger().setLevel(logging.INFO)


class _UnreadError(Exception):
    """Standard output was closed by its reader."""


class Verbs(click.Group):
    """A group of commands which all take -v, which may follow the command as well."""

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
    """The -v of every command: it acts when parsed and passes the command nothing."""
    return click.Option(
        ["-v", "--verbose"], is_flag=True, expose_value=False, callback=_be_verbose,
        help="Print more of the answer, log what is done to stderr, tracebacks of bugs.",
    )  # fmt: skip


def use_utf8() -> None:
    """Restart the program in Python's UTF-8 mode if the locale has another encoding: file names are
    stored in JSON, which is UTF-8, and must lead back to the same files."""
    if sys.getfilesystemencoding() != "utf-8" and sys.executable and sys.orig_argv[1:]:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def run(cli: click.Command) -> NoReturn:
    """Run the command line and exit as `gdp.cli.main.main` says."""
    use_utf8()
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
    """Exit without a message and with 128 + 13, like programs that SIGPIPE ends."""
    # Python flushes standard output once more at exit, and would complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)


def _report_bug(error: Exception) -> NoReturn:
    """Report an unforeseen exception as a bug of gdp."""
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
