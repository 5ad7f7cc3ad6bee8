"""Record the golden answers anew, and print what changed as lines for the changelog.

From the root of the repository:

    python -m tests.golden.record            # all cases whose extras are installed
    python -m tests.golden.record NAME ...   # these; globs such as 'method-*' too
    python -m tests.golden.record --check    # write nothing; exit with 1 where something differs
"""

import argparse
import fnmatch
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Nothing that was learned of this machine, as in the tests.
os.environ["GDP_DATA_DIR"] = os.path.join(tempfile.gettempdir(), f"gdp-golden-{os.getpid()}")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))

LONG_S = 2.0
"""CPU seconds of a case that are worth a word."""


def main() -> int:
    """Record, or check, and say how long it took."""
    from golden import answers, runs

    parser = argparse.ArgumentParser(description="Record the golden answers anew.")
    parser.add_argument("names", nargs="*", help="cases, or globs; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    wanted = [n for n in runs.NAMES if not options.names or _matches(n, options.names)]
    if not wanted:
        parser.error(f"no case is called {' or '.join(options.names)}")
    kept = {name: answer for name, answer in answers.load().items() if name in runs.NAMES}
    changed, skipped = 0, 0
    for name in wanted:
        if module := runs.missing(name):
            skipped += 1
            print(f"# {name} is left as it was: {module} is not installed")
            continue
        began_s = time.process_time()
        found = runs.answer(name)
        if libraries := runs.traced_with(name):
            found["traced_with"] = libraries
        if (took_s := time.process_time() - began_s) > LONG_S:
            print(f"# {name} took {took_s:.1f} CPU seconds", file=sys.stderr, flush=True)
        lines = list(answers.differences(kept[name], found)) if name in kept else ["new"]
        changed += bool(lines)
        for line in lines:
            print(f"- `{name}`: {line}", flush=True)
        if lines and not options.check:
            kept[name] = found
            answers.save(kept)
    if not options.check:
        answers.save(kept)
    print(
        f"# {len(wanted)} cases, {changed} changed, {skipped} skipped, "
        f"{time.process_time():.0f} CPU seconds",
        file=sys.stderr,
    )
    return int(options.check and changed > 0)


def _matches(name: str, globs: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


if __name__ == "__main__":
    raise SystemExit(main())
