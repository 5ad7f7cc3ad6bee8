"""Traces the corpus's models and writes them as graph files with a manifest."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from gdp.api.corpus import compact, save_entry
from gdp.base.files.writing import TargetError, write_atomic
from gdp.base.tasks import HERE, Engine, each
from gdp.graph.op_graph import OpGraph
from gdp.importers.jax.trace import trace, trace_training_step
from gdp.learn.instances import MANIFEST, CorpusEntry, CorpusManifest, read_corpus, write_corpus
from pretrain.corpus.families import CorpusGraph, corpus_graphs
from pretrain.corpus.layers import Params, parameter_shapes


def traced(graph: CorpusGraph) -> OpGraph:
    """The graph of a model, forward or as a training step, before fusion."""
    model, batch = graph.builder(**graph.arguments)
    shapes = parameter_shapes(model, batch)
    if graph.kind == "forward":
        return trace(
            lambda values, inputs: model(Params(values), inputs), shapes, batch,
            weight_argnums=0, name=graph.name,
        )  # fmt: skip

    def loss(values: dict[str, jax.Array], inputs: Any) -> jax.Array:
        return jnp.square(model(Params(values), inputs)).mean()

    import optax

    return trace_training_step(
        loss, shapes, batch, optimizer=optax.sgd(0.1, momentum=0.9),
        microbatches=graph.microbatches, name=graph.name,
    )  # fmt: skip


def build(item: CorpusGraph, folder: Path) -> CorpusEntry:
    """Make one graph, write its file, and return its line of the manifest."""
    graph = compact(traced(item) if item.is_traced else item.builder(**item.arguments))
    entry = CorpusEntry(
        item.name, f"{item.family}/{item.name}.json.gz", graph.num_ops, item.split, item.family,
        item.kind, arguments=item.arguments,
    )  # fmt: skip
    return save_entry(graph, entry, folder)


def build_missing(
    folder: Path,
    families: Sequence[str] = (),
    limit: int | None = None,
    rebuild: bool = False,
    progress: Callable[[int, int, CorpusEntry], None] = lambda done, count, entry: None,
    engine: Engine = HERE,
) -> CorpusManifest:
    """Build what a corpus folder lacks of some families, or of all; with `rebuild` all of these.

    At most `limit` graphs, and the manifest is written after each, so that it goes on where it was
    stopped. `progress` gets (graphs done, graphs to do, the last one). Raises `ValueError` for an
    unknown family and `TargetError` where the folder holds something else.
    """
    manifest, every = read_manifest(folder), list(corpus_graphs())
    known, names = {item.name for item in every}, {item.family for item in every}
    if unknown := sorted({*families} - names):
        raise ValueError(f"no family {unknown[0]!r}; there are {', '.join(sorted(names))}")
    entries = {entry.name: entry for entry in manifest.graphs if entry.name in known}
    todo = [item for item in every if rebuild or item.name not in entries]
    chosen = [item.name for item in todo if not families or item.family in families][:limit]
    for done, (_, (entry, content)) in enumerate(each(_built, chosen, engine), start=1):
        write_atomic(folder / entry.file, content)
        entries[entry.name] = entry
        manifest.graphs = list(entries.values())
        write_corpus(manifest, folder)
        progress(done, len(chosen), entry)
    return manifest


def _built(name: str) -> tuple[CorpusEntry, bytes]:
    """The line of the manifest and the file of a graph, wherever it is built."""
    item = next(item for item in corpus_graphs() if item.name == name)
    with tempfile.TemporaryDirectory() as folder:
        entry = build(item, Path(folder))
        return entry, (Path(folder) / entry.file).read_bytes()


def read_manifest(folder: Path) -> CorpusManifest:
    """The manifest of a corpus folder; empty where there is none, or no such folder. Raises
    `TargetError` where the folder holds something else."""
    if (folder / MANIFEST).exists():
        return read_corpus(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TargetError(f"{str(folder)!r} holds something else than a corpus; give a new folder")
    return CorpusManifest([], "python -m pretrain.corpus", "Apache-2.0")
