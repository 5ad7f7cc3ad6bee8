"""Do the tests notice a wrong algorithm? Faults put into functions, and what became of each.

    python tests/mutants.py [--only "sim*"] [--list] [--table FILE]

`mutants.toml` has a row for each fault: a function by its qualified name, and its new `body`, or
tokens (`old`) that occur in it once and what stands there instead (`new`). Layout, comments and all
outside the function may change. Each mutant is applied alone in a copy of the tree, the tests of
the row run there, and the function comes back. A test that fails kills the mutant; one that
survives is a fault that no test would notice, and the row says why where that is meant. A row that
no longer applies, or whose tests are gone, is stale. Before, the tests run once unchanged.
DeMillo, Lipton and Sayward 1978, doi 10.1109/C-M.1978.218136.
"""

import ast
import contextlib
import fnmatch
import importlib
import io
import multiprocessing
import os
import re
import resource
import shutil
import sys
import tempfile
import textwrap
import tokenize
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import msgspec

ROOT = Path(__file__).resolve().parent.parent
LONGEST_CPU_S = 400  # a mutant that computes for so long hangs, and is killed


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault."""

    name: str
    function: str  # gdp.module.function, gdp.module.Class.method or gdp.module.CONSTANT
    tests: list[str]  # of the module, as pytest takes them
    body: str = ""  # of the function, or the value of the constant
    old: str = ""  # tokens that occur in the function once
    new: str = ""  # empty: they are deleted
    survives: str = ""  # why no test can notice it; empty where one should


class StaleError(Exception):
    """A row does not apply to the tree as it is."""


def definition(source: str, names: Sequence[str]) -> ast.stmt:
    """The definition of a function, a method or a constant."""
    node: ast.AST = ast.parse(source)
    for name in names:
        for inside in ast.iter_child_nodes(node):
            target = getattr(inside, "targets", [getattr(inside, "target", inside)])[0]
            if name in (getattr(target, "id", None), getattr(target, "name", None)):
                node = inside
                break
        else:
            raise StaleError(f"no {'.'.join(names)}")
    assert isinstance(node, ast.stmt)
    return node


def place_of(old: str, source: str, node: ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the tokens of `old` begin and end, (line, column) each."""
    inside = [t for t in tokens(source) if node.lineno <= t.start[0] <= (node.end_lineno or 0)]
    wanted, said = [t.string for t in tokens(old.strip())], [t.string for t in inside]
    found = [k for k in range(len(said)) if said[k : k + len(wanted)] == wanted]
    if len(found) != 1:
        raise StaleError(f"its tokens occur {len(found)} times")
    return inside[found[0]].start, inside[found[0] + len(wanted) - 1].end


def tokens(text: str) -> list[tokenize.TokenInfo]:
    """The tokens of a piece of source, without its layout."""
    found = []
    with contextlib.suppress(tokenize.TokenError, IndentationError):  # a piece need not be whole
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            found += [token] if token.string.strip() and token.type != tokenize.COMMENT else []
    return found


def mutated(source: str, names: Sequence[str], mutant: Mutant) -> str:
    """The source of a module with the fault. Raises `StaleError` where it cannot be put there."""
    node = definition(source, names)
    if mutant.old:
        start, end = place_of(mutant.old, source, node)
    else:
        first = last = getattr(node, "value", node)  # of a constant
        if isinstance(node, ast.FunctionDef):
            first, last = node.body[min(len(node.body) - 1, bool(ast.get_docstring(node)))], node
        start = (first.lineno, first.col_offset)
        end = (last.end_lineno or 0, last.end_col_offset or 0)
    lines = source.splitlines(keepends=True)
    before, after = (sum(map(len, lines[: line - 1])) + column for line, column in (start, end))
    indent = re.match(r"\s*", lines[start[0] - 1])
    new = textwrap.dedent(mutant.new if mutant.old else mutant.body).strip("\n").splitlines()
    text = source[:before] + f"\n{indent[0] if indent else ''}".join(new) + source[after:]
    try:
        same = ast.dump(ast.parse(text)) == ast.dump(ast.parse(source))
    except SyntaxError as error:
        raise StaleError(f"it makes no Python of the function: {error}") from None
    if same:
        raise StaleError("it changes nothing")
    return text


def run_pytest(arguments: list[str], tree: Path, log: Path, limit_s: int) -> None:
    """Run pytest in a tree, with what it prints in a file; ends the process with its code."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)  # for what tests start themselves
    import pytest

    code = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(int(code))


class Bench:
    """A copy of the repository with what is compiled, of which each trial gets a copy."""

    def __init__(self, root: Path, folder: Path, copied: Iterable[str]) -> None:
        self.folder, self.tree = folder, folder / "unchanged"
        self.tree.mkdir(parents=True)
        for source in (root / name for name in copied):
            if source.is_dir():
                old = shutil.ignore_patterns("*.nb[ic]")  # kernels may be those of another state
                shutil.copytree(source, self.tree / source.name, ignore=old)
            else:
                shutil.copy2(source, self.tree)
        paths = [*self.tree.rglob("*.py")]
        self.sources = {path.relative_to(self.tree): path.read_text() for path in paths}

    def run(self, tests: Iterable[str], tree: Path, *, first: bool) -> tuple[int, str]:
        """pytest's exit code and what it printed; with `first` it ends at the first failure."""
        options = ["-q", "-n", "0", "-rfE", "--tb=line", "-p", "no:cacheprovider"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # what was preloaded
        options, log = [*options, *(["-x"] if first else []), *tests], self.folder / "log"
        limit_s = LONGEST_CPU_S if first else 10**6
        # A fork: importing JAX, numba and the rest takes longer than most tests.
        process = multiprocessing.get_context("fork").Process(
            target=run_pytest, args=(options, tree, log, limit_s), daemon=False
        )
        process.start()
        process.join()
        text, code = log.read_text(errors="replace"), process.exitcode or 0
        # What hangs, or crashes the interpreter, is noticed too.
        return (code, text) if code >= 0 else (1, f"{text}\nFAILED by signal {-code}")

    def change_of(self, mutant: Mutant) -> tuple[Path, str]:
        """The module that a mutant changes, and its text then. Raises `StaleError`."""
        for file, _, function in (test.partition("::") for test in mutant.tests):
            if f"def {function.partition('[')[0]}" not in self.sources.get(Path(file), ""):
                raise StaleError(f"no test {file}::{function}")
        parts = mutant.function.split(".")
        for k in range(len(parts) - 1, 0, -1):
            path = Path(*parts[:k]).with_suffix(".py")
            if path in self.sources:
                return path, mutated(self.sources[path], parts[k:], mutant)
        raise StaleError(f"no module of {mutant.function}")

    def try_out(self, mutant: Mutant, module: Path, changed: str) -> tuple[str, str]:
        """("killed", "survived" or "stale", the first test that failed or what is stale)."""
        tree = self.folder / "changed"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(self.tree, tree, copy_function=os.link)
        (tree / module).unlink()  # it is a link
        (tree / module).write_text(changed)
        self._forget_kernels(tree, module)
        code, text = self.run(mutant.tests, tree, first=True)
        failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
        if code not in (0, 1) or (code == 1 and failed is None):
            return "stale", text.strip().splitlines()[-1]
        return ("killed", failed[1]) if code and failed else ("survived", "")

    def _forget_kernels(self, tree: Path, module: Path) -> None:
        """Drop what was compiled of a module and of all that import it: numba looks at the file of
        a kernel, not at those of the kernels that it inlines."""
        changed = [module]
        for each in changed:  # grows by all that import it
            name = re.escape(".".join(each.with_suffix("").parts))
            reads = re.compile(rf"^\s*(?:from|import) {name}\b", re.MULTILINE)
            changed += [p for p, s in self.sources.items() if p not in changed and reads.search(s)]
        for path in changed:
            for compiled in (tree / path.parent).glob(f"__pycache__/{path.stem}.*.nb[ic]"):
                compiled.unlink()


@click.command()
@click.option("--only", default="*", help="Names to try, as a glob.")
@click.option("--list", "only_list", is_flag=True, help="Run nothing; say what is stale.")
@click.option("--table", type=click.Path(path_type=Path), default=ROOT / "tests/mutants.toml")
@click.option("--root", type=click.Path(path_type=Path), default=ROOT, help="Of the repository.")
def main(only: str, only_list: bool, table: Path, root: Path) -> None:
    """Say which mutants the tests kill."""
    rows = tomllib.loads(table.read_text())
    mutants = msgspec.convert(rows["mutant"], list[Mutant])
    mutants = [mutant for mutant in mutants if fnmatch.fnmatch(mutant.name, only)]
    if not mutants:
        raise click.UsageError(f"--only {only!r}: no mutant has such a name; it is a glob")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    tally = {"killed": 0, "survived": 0, "survived as meant": 0, "stale": 0}
    with tempfile.TemporaryDirectory(prefix="mutants") as temporary:
        bench, fresh = Bench(root, Path(temporary), rows["copied"]), []
        for mutant in mutants:
            try:
                fresh.append((mutant, *bench.change_of(mutant)))
            except StaleError as error:
                tally["stale"] += 1
                click.echo(f"stale {mutant.name}: {error}")
        if not only_list:
            for name in rows.get("preloaded", ()):
                importlib.import_module(name)
            tests = sorted({test for mutant, *_ in fresh for test in mutant.tests})
            if fresh and (said := bench.run(tests, bench.tree, first=False))[0] != 0:
                raise click.ClickException(f"the tests fail unchanged:\n{said[1][-3000:]}")
            for mutant, module, changed in fresh:
                result, by = bench.try_out(mutant, module, changed)
                click.echo(f"{result} {mutant.name}: {by or mutant.survives}")
                tally[result + " as meant" * bool(result == "survived" and mutant.survives)] += 1
    click.echo(", ".join(f"{count} {result}" for result, count in tally.items()))
    sys.exit(bool(tally["survived"] or tally["stale"]))


if __name__ == "__main__":
    main()
