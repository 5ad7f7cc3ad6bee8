"""Which faults the tests notice: small mutants of the source, one at a time, in a copy.

    python benchmarks/mutants.py --only "methods*"

`mutants.toml` is the table: a file, a text that occurs in it once, what it is replaced by, and the
tests that belong to it. Each mutant is applied to a copy of the tree, its tests run there, and the
text comes back. A test that fails kills the mutant; one that survives is a fault that no test
would notice, and the table says why where that is meant. Before, the tests run once unchanged.
DeMillo, Lipton and Sayward 1978, doi 10.1109/C-M.1978.218136.
"""

import fnmatch
import importlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

import click
import msgspec

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix(".toml")
COPIED = (
    "gdp", "tests", "benchmarks", "checkpoints", "pretrain", "finetune", "data", "docs", "examples",
    "README.md", "pyproject.toml",
)  # fmt: skip
LONGEST_S = 400.0
"""A mutant that runs on for so long is killed: it hangs where the original ends."""


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault."""

    name: str
    file: str  # relative to the repository
    text: str  # occurs in the file once
    replacement: str
    tests: list[str]  # of the module, as pytest takes them
    survives: str = ""  # why no test can notice it; empty where one should


class Outcome(msgspec.Struct, frozen=True):
    """What became of a mutant."""

    name: str
    result: str  # "killed", "survived", or "broken" where the tests did not run
    seconds: float
    by: str  # the test that failed first


def read_table(path: Path = TABLE) -> list[Mutant]:
    """The mutants of the table."""
    rows = tomllib.loads(path.read_text())["mutant"]
    return [msgspec.convert(row, Mutant) for row in rows]


def mutated(source: str, mutant: Mutant) -> str:
    """The text with the fault; raises `ValueError` where it does not occur once."""
    if (found := source.count(mutant.text)) != 1:
        raise ValueError(f"mutant {mutant.name!r}: its text occurs {found} times in {mutant.file}")
    return source.replace(mutant.text, mutant.replacement)


def dependants(sources: dict[str, str], module: str) -> set[str]:
    """The modules that import a module, or one that does, and itself.

    >>> sorted(dependants({"a": "", "b": "from a import x", "c": "import b"}, "a"))
    ['a', 'b', 'c']
    """
    found, waiting = {module}, [module]
    while waiting:
        name = waiting.pop()
        pattern = re.compile(rf"^\s*(?:from|import) {re.escape(name)}\b", re.MULTILINE)
        for other, text in sources.items():
            if other not in found and pattern.search(text):
                found.add(other)
                waiting.append(other)
    return found


_FORK = multiprocessing.get_context("fork")
"""Trials begin as forks: importing JAX, numba and the rest takes longer than most tests."""
_PRELOADED = ("beartype", "jax.numpy", "jaxtyping", "numba", "optax", "onnx", "scipy.optimize")


def _run_pytest(arguments: list[str], tree: Path, cache: Path, log: Path) -> None:
    """Run pytest in a tree, with what it prints in a file; ends the process with its code."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True  # a change within a second would go unnoticed
    # For what tests start themselves as well.
    os.environ |= {
        "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(cache),
    }  # fmt: skip
    import pytest
    from numba.core.config import reload_config

    reload_config()  # numba was imported before, with another cache
    code = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(int(code))


class Bench:
    """A copy of the tree with compiled kernels of its own."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self.warm, self.cold = folder / "numba", folder / "numba_mutant"
        shutil.rmtree(self.tree, ignore_errors=True)
        self.tree.mkdir(parents=True)
        self.warm.mkdir(exist_ok=True)
        for name in COPIED:
            source, target = ROOT / name, self.tree / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, target)
        self.sources = {
            ".".join(path.relative_to(self.tree).with_suffix("").parts): path.read_text()
            for path in (self.tree / "gdp").rglob("*.py")
        }

    def run(self, tests: Iterable[str], cache: Path, *, first: bool) -> tuple[int, str, float]:
        """(pytest's exit code, what it printed, seconds)."""
        began_s = time.perf_counter()
        options = ["-q", "-n", "0", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # what was preloaded
        options += ["-x"] if first else []
        log = self.tree.parent / "log"
        process = _FORK.Process(
            target=_run_pytest, args=([*options, *tests], self.tree, cache, log), daemon=False
        )
        process.start()
        process.join(LONGEST_S if first else None)
        if process.is_alive():
            process.kill()
            process.join()
            return 1, f"FAILED after {LONGEST_S:.0f} s without an end", LONGEST_S
        seconds = time.perf_counter() - began_s
        text = log.read_text(errors="replace")
        code = process.exitcode or 0
        if code < 0:  # a test crashed the interpreter: that is noticed too
            return 1, f"{text}\nFAILED by signal {-code}", seconds
        return code, text, seconds

    def try_out(self, mutant: Mutant) -> Outcome:
        """Apply a mutant, run its tests, and take it back."""
        path = self.tree / mutant.file
        source, stamp = path.read_text(), path.stat()
        path.write_text(mutated(source, mutant))
        try:
            code, text, seconds = self.run(mutant.tests, self._cache(mutant, source), first=True)
        finally:
            path.write_text(source)
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
        if code not in (0, 1) or (code == 1 and failed is None):
            return Outcome(mutant.name, "broken", seconds, text.strip().splitlines()[-1])
        by = failed[1] if failed else ""
        return Outcome(mutant.name, "killed" if code else "survived", seconds, by)

    def _cache(self, mutant: Mutant, source: str) -> Path:
        """The kernels compiled from what the mutant leaves as it was.

        numba looks at the file of a kernel, not at those of the kernels that it inlines.
        """
        if "numba" not in source:
            return self.warm
        shutil.rmtree(self.cold, ignore_errors=True)
        shutil.copytree(self.warm, self.cold)
        module = mutant.file.removesuffix(".py").replace("/", ".")
        stale = {name.rpartition(".")[2] for name in dependants(self.sources, module)}
        for entry in self.cold.rglob("*.nb[ic]"):
            if entry.name.split(".")[0] in stale:
                entry.unlink()
        return self.cold


def summary(mutants: list[Mutant], outcomes: list[Outcome]) -> str:
    """The share killed, and each survivor with its reason."""
    why = {mutant.name: mutant.survives for mutant in mutants}
    killed = sum(outcome.result == "killed" for outcome in outcomes)
    lines = [f"{killed} of {len(outcomes)} killed ({killed / max(1, len(outcomes)):.0%})"]
    for outcome in outcomes:
        if outcome.result != "killed":
            lines.append(f"{outcome.result}: {outcome.name}: {why[outcome.name] or 'no reason'}")
    return "\n".join(lines)


@click.command()
@click.option("--only", default="*", help="Names to try, as a glob.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the copy and its kernels.")
@click.option("--skip-baseline", is_flag=True, help="Trust that the tests pass unchanged.")
def main(only: str, as_json: bool, folder: Path | None, skip_baseline: bool) -> None:
    """Say which mutants the tests kill."""
    mutants = [m for m in read_table() if fnmatch.fnmatch(m.name, only)]
    if not mutants:
        raise click.UsageError(f"--only {only!r}: no mutant has such a name; it is a glob")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in _PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants") as temporary:
        bench = Bench(folder or Path(temporary))
        if not skip_baseline:
            tests = sorted({test for mutant in mutants for test in mutant.tests})
            code, text, seconds = bench.run(tests, bench.warm, first=False)
            if code != 0:
                raise click.ClickException(f"the tests fail unchanged:\n{text[-3000:]}")
            click.echo(f"unchanged: {len(tests)} tests pass in {seconds:.0f} s", err=True)
        outcomes = []
        for mutant in mutants:
            outcome = bench.try_out(mutant)
            outcomes.append(outcome)
            line = f"{outcome.result:8} {outcome.seconds:6.1f} s  {outcome.name}  {outcome.by}"
            click.echo(line, err=as_json)
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(outcome) for outcome in outcomes], indent=1))
    else:
        click.echo(summary(mutants, outcomes))
    expected = {mutant.name for mutant in mutants if mutant.survives}
    sys.exit(any(o.result != "killed" and o.name not in expected for o in outcomes))


if __name__ == "__main__":
    main()
