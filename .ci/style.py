"""The house rules that no library checks; CONTRIBUTING.md says why they are there.

    python .ci/style.py [--counts] [PATH ...]

Prints one line for each violation and exits with 1 if there are any: a docstring whose first line
begins with a question word or points at another thing instead of naming its own, a class name that
stands twice in the package, a file of tests whose name stands twice, a compiled kernel with more
than twelve parameters, a function of more than sixty lines without its docstring, a folder of more
than `MAX_FILES` files, a package of more than `MAX_LINES` lines, a relative clause where a noun
should stand (`of what` and the like, in
docstrings and comments). With `--counts` also the lines and files of each folder, the short files
that only one other file imports, and rates that fall where code gets simpler.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPENINGS = re.compile(r"(What|The same|As `|Those|How|Which|Where|Whether)\b|As `")
CLAUSES = re.compile(r"\b(of|with|to|by|from|in|on|for|than)\s+(#\s+)?what\b")
QUESTION = frozenset((
    "model", "cluster", "objective", "costs", "search", "constraints", "method", "checkpoint",
    "target", "granularity", "offload", "dims", "seconds", "simplicity",
))  # fmt: skip
"""Arguments that ask for a placement: functions that take four of them pass a question in parts."""
RUNTIMES = {"accelerate": "accelerate", "llama.cpp": "llama_?cpp", "OpenVINO": "openvino"}
MAX_PARAMETERS = 12
MAX_FUNCTION_LINES = 60
MAX_FILES = 18
MAX_LINES = 91_000  # images and videos, joules: 4,000 of them
"""Of gdp. More lines need a reason that outweighs a longer way for every reader: raise the budget
with that reason, or remove as much elsewhere."""
SHORT_LINES = 150


def trees(paths: list[Path]) -> dict[Path, ast.Module]:
    """The parsed modules at and below `paths`."""
    files = sorted({f for p in paths for f in ([p] if p.is_file() else p.rglob("*.py"))})
    return {f.relative_to(ROOT): ast.parse(f.read_text(encoding="utf-8")) for f in files}


def summaries(path: Path, tree: ast.Module) -> Iterator[str]:
    """Docstrings whose first line does not name the thing (house rule 5 of CONTRIBUTING.md)."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            first, *_ = (ast.get_docstring(node) or "").splitlines() or [""]
            if OPENINGS.match(first):
                yield f"{path}:{getattr(node, 'lineno', 1)}: docstring begins {first[:60]!r}"


def constants(path: Path, tree: ast.Module) -> Iterator[str]:
    """The same rule for the strings that stand below a constant or a field."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, after in itertools.pairwise(body):
            if not isinstance(before, (ast.Assign, ast.AnnAssign)):
                continue
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                continue
            if isinstance(after.value.value, str) and OPENINGS.match(after.value.value):
                text = after.value.value[:60]
                yield f"{path}:{after.lineno}: docstring begins {text!r}"


def kernels(path: Path, tree: ast.Module) -> Iterator[str]:
    """Compiled functions with too many parameters: their arrays belong in one struct."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        if not any(re.search("jit|kernel", ast.unparse(d)) for d in node.decorator_list):
            continue
        count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        if count > MAX_PARAMETERS:
            yield f"{path}:{node.lineno}: kernel {node.name} has {count} parameters"


def clauses(path: Path, tree: ast.Module) -> Iterator[str]:
    """Docstrings and comments with a relative clause where a noun should stand."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if not CLAUSES.search(text):
        return
    docstrings = {
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        told = token.type == tokenize.STRING and token.start[0] in docstrings
        if told or token.type == tokenize.COMMENT:
            for match in CLAUSES.finditer(token.string):
                line = token.start[0] + token.string.count("\n", 0, match.start())
                yield f"{path}:{line}: {match[0]!r}: a noun says it"


def class_names(modules: dict[Path, ast.Module]) -> Iterator[str]:
    """Public class names, and names of types, that stand in two places."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"{where[0]}: class {name} stands again at {', '.join(where[1:])}"


def importers(modules: dict[Path, ast.Module]) -> dict[str, set[Path]]:
    """By module name: the files that import it."""
    users: defaultdict[str, set[Path]] = defaultdict(set)
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                users[node.module].add(path)
                for alias in node.names:
                    users[f"{node.module}.{alias.name}"].add(path)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    users[alias.name].add(path)
    return users


def print_counts(modules: dict[Path, ast.Module]) -> None:
    """Lines and files by folder, and the short files with one importer."""
    lines = {p: (ROOT / p).read_text(encoding="utf-8").count("\n") for p in modules}
    folders: defaultdict[Path, list[int]] = defaultdict(list)
    for path, count in lines.items():
        folders[path.parent].append(count)
    for folder, counts in sorted(folders.items()):
        print(f"{sum(counts):6} lines {len(counts):4} files  {folder}")
    print(f"{sum(lines.values()):6} lines {len(lines):4} files  in all")
    users = importers(trees([ROOT / "gdp"]))
    for path, count in lines.items():
        name = ".".join(path.with_suffix("").parts)
        if count < SHORT_LINES and path.stem != "__init__" and len(users[name]) == 1:
            print(f"{path}: {count} lines, imported by {next(iter(users[name]))} alone")


def print_rates(modules: dict[Path, ast.Module]) -> None:
    """Rates that fall where code gets simpler, not where files are merged."""
    once = parts = 0
    for path, tree in modules.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                private = node.name.startswith("_") and not node.name.endswith("__")
                once += private and len(re.findall(rf"\b{node.name}\b", text)) == 2
                given = {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
                parts += len(given & QUESTION) >= 4
    print(f"{once:6} private functions whose name stands once beside their definition")
    print(f"{parts:6} functions with four or more arguments of a question")
    for name, pattern in RUNTIMES.items():
        files = [
            p for p in modules if re.search(pattern, (ROOT / p).read_text(encoding="utf-8"), re.I)
        ]
        print(f"{len(files):6} files that name {name}")


def sizes(modules: dict[Path, ast.Module]) -> Iterator[str]:
    """Functions, folders and a package that are too long to read."""
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                has_docstring = ast.get_docstring(node) is not None
                first = node.body[1] if has_docstring and len(node.body) > 1 else node.body[0]
                # The signature, and all behind the docstring.
                lines = node.body[0].lineno - node.lineno + (node.end_lineno or 0) - first.lineno
                if lines >= MAX_FUNCTION_LINES:
                    yield f"{path}:{node.lineno}: {node.name} has {lines + 1} lines"
    for folder, count in Counter(path.parent for path in modules).items():
        if count > MAX_FILES:
            yield f"{folder}: {count} files; {MAX_FILES} are enough to look through"
    total = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in modules)
    if total > MAX_LINES:
        yield f"gdp has {total} lines, the budget of .ci/style.py is {MAX_LINES}"


def test_names(folder: Path) -> Iterator[str]:
    """Files of tests with one name in two folders: pytest imports only the first."""
    seen: dict[str, Path] = {}
    for path in sorted(folder.rglob("test_*.py")):
        if path.name in seen:
            first = seen[path.name].relative_to(ROOT)
            yield f"{path.relative_to(ROOT)}: a test file of this name stands at {first}"
        seen.setdefault(path.name, path)


def main(arguments: list[str]) -> int:
    paths = [Path(a).resolve() for a in arguments if not a.startswith("--")]
    modules = trees(paths or [ROOT / "gdp"])
    violations = [
        text
        for path, tree in modules.items()
        for check in (summaries, constants, kernels, clauses)
        for text in check(path, tree)
    ]
    package = trees([ROOT / "gdp"])
    violations += [*class_names(package), *sizes(package)]
    violations += test_names(ROOT / "tests")
    for text in violations:
        print(text)
    if "--counts" in arguments:
        print_counts(modules)
        print_rates(modules)
    print(f"{len(violations)} violations")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
