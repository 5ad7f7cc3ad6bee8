"""Traces the corpus's models and writes them as graph files with a manifest."""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from gdp.errors import GdpError
from gdp.files.reading import Kind, read_json
from gdp.files.writing import TargetError, write_atomic
from gdp.graph.file import save_graph
from gdp.graph.fuse import fuse
from gdp.graph.op_graph import OpDetail, OpGraph, make_graph
from gdp.importers.jax.trace import trace, trace_training_step
from gdp.tasks import HERE, Engine, each
from pretrain.corpus.families import CorpusGraph, corpus_graphs
from pretrain.corpus.layers import Params, parameter_shapes

MANIFEST = "manifest.json"
_KIND = Kind("manifest of a corpus", GdpError)


class CorpusEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One graph of the manifest."""

    name: str
    family: str
    split: str
    kind: str
    file: str
    num_ops: int
    num_uses: int
    gigaflop: float
    arguments: dict[str, Any]
    sha256: str


class CorpusManifest(msgspec.Struct, forbid_unknown_fields=True):
    """The graphs of a corpus, their source and licence."""

    source: str
    licence: str
    graphs: list[CorpusEntry]


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


def compact(graph: OpGraph) -> OpGraph:
    """The fused graph without what no policy reads: short names, output shapes only."""
    fused = fuse(graph).graph
    names = [f"{i}" if not io else name for i, (name, io) in
             enumerate(zip(fused.op_names, fused.is_io, strict=True))]  # fmt: skip
    details = [OpDetail(d.dtype, (), d.output_shapes[:1]) for d in fused.detail]
    return make_graph(
        fused.name,
        names,
        fused.op_types,
        list(zip(fused.producer.tolist(), fused.tensor_bytes.tolist(), strict=True)),
        list(zip(fused.use_tensor.tolist(), fused.use_op.tolist(), strict=True)),
        flop=fused.flop,
        memory_traffic_bytes=np.round(fused.memory_traffic_bytes),
        weight_bytes=fused.weight_bytes,
        weight_id=fused.weight_id,
        colocate=fused.colocate,
        is_backward=fused.is_backward,
        detail=details,
        tensor_names=[f"{i}" for i in range(fused.num_tensors)],
    )


def build(item: CorpusGraph, folder: Path) -> CorpusEntry:
    """Make one graph, write its file, and return its line of the manifest."""
    graph = compact(traced(item) if item.is_traced else item.builder(**item.arguments))
    file = f"{item.family}/{item.name}.json.gz"
    save_graph(graph, folder / file)
    return CorpusEntry(
        name=item.name,
        family=item.family,
        split=item.split,
        kind=item.kind,
        file=file,
        num_ops=graph.num_ops,
        num_uses=graph.num_uses,
        gigaflop=round(float(graph.flop.sum()) / 1e9, 4),
        arguments=item.arguments,
        sha256=hashlib.sha256((folder / file).read_bytes()).hexdigest(),
    )


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
        write_manifest(manifest, folder)
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
    path = folder / MANIFEST
    if path.exists():
        return read_json(path, _KIND, CorpusManifest)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TargetError(f"{str(folder)!r} holds something else than a corpus; give a new folder")
    return CorpusManifest("python -m pretrain.corpus", "Apache-2.0", [])


def write_manifest(manifest: CorpusManifest, folder: Path) -> None:
    """Write the manifest, graphs sorted by name."""
    manifest.graphs.sort(key=lambda entry: entry.name)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_atomic(folder / MANIFEST, text + b"\n")
