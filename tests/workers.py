"""Files of tests as they are dealt to workers: torch's to one, JAX's to another, the longest first.

A worker that imports both holds twice the memory, and waits for both imports. Where its own files
are done it takes those of no library, then the other's, so that no worker idles.
"""

import functools
import gc
import re
from pathlib import Path
from typing import Any

from xdist.scheduler import LoadFileScheduling

LIBRARIES = (re.compile(r"\b(torch|transformers|accelerate)\b|hf:"), re.compile(r"\bjax\b"))
LONGEST_S = {
    "importers/test_caches.py": 88, "methods/test_contract.py": 55, "learn/test_distributed.py": 53,
    "sim/test_direct.py": 34, "test_fuzz.py": 32, "methods/test_counted_work.py": 30,
    "learn/test_own_corpus.py": 27, "methods/test_chains.py": 27, "test_requests.py": 25,
    "importers/test_sizes.py": 25, "methods/test_exact_programs.py": 25, "test_tune.py": 24,
    "importers/test_repeated.py": 24, "benchmarks/test_baselines.py": 23, "test_tasks.py": 22,
    "importers/test_served.py": 22, "learn/test_finetune.py": 21,
}  # fmt: skip
"""Seconds of the processor that the longest files take, for an order: no test depends on them."""


class ByLibrary(LoadFileScheduling):
    """Whole files, each for the worker whose library it imports."""

    def _assign_work_unit(self, node: Any) -> None:
        number = int(node.gateway.id.removeprefix("gw"))
        best = min(self.workqueue, key=lambda path: _turn(self.config.rootpath / path, number))
        self.workqueue.move_to_end(best, last=False)
        super()._assign_work_unit(node)


def _turn(path: Path, worker: int) -> tuple[int, float]:
    """Order of a file for a worker: its library's, those of none, those of the other; by length."""
    own, other = library_of(path) == worker % 2, library_of(path) == (worker + 1) % 2
    seconds = LONGEST_S.get(path.relative_to(Path(__file__).parent).as_posix(), 0)
    return (0 if own else 2 if other else 1), -seconds


@functools.cache
def library_of(path: Path) -> int | None:
    """The index of the one library that a file of tests names; None for those of both or none."""
    text = path.read_text()
    named = [number for number, name in enumerate(LIBRARIES) if name.search(text)]
    return named[0] if len(named) == 1 else None


def compile_kernels(shared: Path) -> None:
    """Compile the groups of kernels that no other worker has taken yet, so that none is compiled
    twice; where all are kept already they are loaded. `shared` is a folder of all workers."""
    from gdp.api.first_run import GROUP_NAMES, compile_groups

    gc.disable()  # of millions of objects few are garbage
    for objective in ("latency", "throughput"):
        for group in GROUP_NAMES:
            try:
                (shared / f"{objective}-{group}").touch(exist_ok=False)
            except FileExistsError:
                continue
            compile_groups(objective, [group])
    gc.enable()
