"""The problems of a run: graphs of the corpus by split, and random ones, made when asked for."""

import functools
import re
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from gdp.errors import GdpError
from gdp.files.reading import Kind, read_json
from gdp.graph.op_graph import OpGraph
from gdp.learn.instances import Instance, make, random_graph
from gdp.problem.problem import Problem
from gdp.resources import shipped

_KIND = Kind(
    "manifest of graphs", GdpError, "data/corpus has one for every graph that travels with gdp"
)

KEPT = 1500
"""Problems kept in memory, the least recently used leave first."""


class _Entry(msgspec.Struct):
    name: str
    file: str
    num_ops: int
    split: Literal["train", "validation", "test"]


class _Manifest(msgspec.Struct):
    """Fields of a corpus manifest that are read here."""

    graphs: list[_Entry]


@dataclass
class Problems:
    """Names by split, and a cache of problems."""

    train: list[str]
    validation: list[str]
    test: list[str] = field(default_factory=list)
    corpus: Path | None = None
    files: dict[str, str] = field(default_factory=dict)
    _made: OrderedDict[str, Problem] = field(default_factory=OrderedDict, repr=False)

    def get(self, instance: Instance) -> Problem:
        """The problem an instance names."""
        key = instance.key
        if key not in self._made:
            self._made[key] = make(instance, self.graph)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(key)
        return self._made[key]

    def graph(self, name: str) -> OpGraph:
        """A graph by name: from the corpus, or a random one."""
        if name in self.files:
            assert self.corpus is not None
            return _load(str(self.corpus / self.files[name]))
        return random_graph(name)


@functools.lru_cache(maxsize=512)
def _load(path: str) -> OpGraph:
    from gdp.graph.file import load_graph
    from gdp.graph.fuse import fuse

    # What is placed is what runtimes fuse, as in `gdp.place`.
    return fuse(load_graph(path)).graph


def random_names(count: int, seed: int, min_ops: int, max_ops: int) -> list[str]:
    """Names of random graphs, half layered and half series-parallel, sizes log-uniform."""
    import numpy as np

    rng = np.random.default_rng([seed, 77])
    sizes = np.exp(rng.uniform(np.log(min_ops), np.log(max_ops - 2), size=count)).astype(int)
    return [
        f"{'layered' if k % 2 else 'series'}-{size}-{seed * 10000 + k}"
        for k, size in enumerate(sizes)
    ]


def is_random(name: str) -> bool:
    """True for a graph that is generated from its name, so that its label serves every recipe."""
    return re.fullmatch(r"(layered|series)-\d+-\d+", name) is not None


def load_problems(
    corpus: str, *, random_graphs: int, seed: int, min_ops: int, max_ops: int
) -> Problems:
    """The graphs of a corpus folder between two sizes, by its own split, and random graphs.

    A tenth of the random graphs, and all of them where there is no corpus, serve validation too.
    """
    drawn = random_names(random_graphs, seed, min_ops, max_ops)
    held = random_names(max(4, random_graphs // 10), seed + 1, min_ops, max_ops)
    if not corpus:
        return Problems(train=drawn, validation=held)
    folder = Path(shipped(corpus))
    manifest = folder / "manifest.json"
    split: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    files = {}
    for entry in read_json(manifest, _KIND, _Manifest).graphs:
        if min_ops <= entry.num_ops <= max_ops and (folder / entry.file).exists():
            split[entry.split].append(entry.name)
            files[entry.name] = entry.file
    return Problems(
        train=split["train"] + drawn,
        validation=split["validation"],
        test=split["test"],
        corpus=folder,
        files=files,
    )
