"""Traces the corpus's models and writes them as graph files with a manifest."""

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from gdp.corpus.families import TEST, VALIDATION, Variant, variants
from gdp.corpus.layers import Params, parameter_shapes
from gdp.corpus.synthetic import TILED, layered, series_parallel
from gdp.errors import GdpError
from gdp.files.reading import Kind, read_json
from gdp.files.writing import TargetError, write_atomic
from gdp.graph.file import save_graph
from gdp.graph.fuse import fuse
from gdp.graph.op_graph import OpDetail, OpGraph, make_graph
from gdp.importers.jax.trace import trace, trace_training_step
from gdp.tasks import HERE, Engine, each

MANIFEST = "manifest.json"
_KIND = Kind("manifest of a corpus", GdpError)
LARGE_LAYERED = ((100, 50), (200, 50), (160, 120), (500, 80), (300, 200))
"""(layers, width) of the largest random graphs."""
LARGE_SERIES_PARALLEL = (10_000, 20_000, 40_000, 80_000, 130_000)
"""Ops of the largest before fusion, which leaves about half."""


class Entry(msgspec.Struct, forbid_unknown_fields=True):
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
    graphs: list[Entry]


@dataclass(frozen=True)
class Item:
    """A graph that can be made."""

    name: str
    family: str
    kind: str
    arguments: dict[str, Any]
    make: Callable[[], OpGraph]

    @property
    def split(self) -> str:
        if self.family in TEST:
            return "test"
        return "validation" if self.family in VALIDATION else "train"


def items() -> Iterator[Item]:
    """All graphs of the corpus, the small sizes of every family first."""
    by_size: dict[int, list[Item]] = {}
    position: dict[str, int] = {}
    for variant in variants():
        size = position[variant.family] = position.get(variant.family, -1) + 1
        by_size.setdefault(size, []).append(_item(variant))
    for seed in range(1, 30):
        layers, width, reach = 6 + 3 * seed, 3 + seed % 9, 1 + seed % 3
        arguments = {"seed": seed, "layers": layers, "width": width, "reach": reach}
        by_size.setdefault(seed // 2, []).append(_random("random_layered", layered, arguments))
        arguments = {"seed": seed, "num_ops": int(50 * 1.17**seed)}
        by_size.setdefault(seed // 2, []).append(
            _random("series_parallel", series_parallel, arguments)
        )
    for index, (layers, width) in enumerate(LARGE_LAYERED):
        arguments = {"seed": 30 + index, "layers": layers, "width": width, "reach": 1 + index % 3}
        by_size.setdefault(15 + index, []).append(_random("random_layered", layered, arguments))
        arguments = {"seed": 30 + index, "num_ops": LARGE_SERIES_PARALLEL[index]}
        by_size.setdefault(15 + index, []).append(
            _random("series_parallel", series_parallel, arguments)
        )
    for family, (builder, sizes) in TILED.items():
        for index, arguments in enumerate(sizes):
            by_size.setdefault(index, []).append(_random(family, builder, arguments, "tiled"))
    for size in sorted(by_size):
        yield from by_size[size]


def _random(
    family: str, builder: Callable[..., OpGraph], arguments: dict[str, Any], kind: str = "random"
) -> Item:
    name = "-".join([family, *(f"{key}{value}" for key, value in arguments.items())])
    return Item(name, family, kind, arguments, lambda: builder(**arguments))


def _item(variant: Variant) -> Item:
    return Item(
        variant.name, variant.family, variant.kind, variant.arguments, lambda: traced(variant)
    )


def traced(variant: Variant) -> OpGraph:
    """The graph of a model, forward or as a training step, before fusion."""
    model, batch = variant.builder(**variant.arguments)
    shapes = parameter_shapes(model, batch)
    if variant.kind == "forward":
        return trace(
            lambda values, inputs: model(Params(values), inputs), shapes, batch,
            weight_argnums=0, name=variant.name,
        )  # fmt: skip

    def loss(values: dict[str, jax.Array], inputs: Any) -> jax.Array:
        return jnp.square(model(Params(values), inputs)).mean()

    import optax

    return trace_training_step(
        loss, shapes, batch, optimizer=optax.sgd(0.1, momentum=0.9),
        microbatches=variant.microbatches, name=variant.name,
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


def build(item: Item, folder: Path) -> Entry:
    """Make one graph, write its file, and return its line of the manifest."""
    graph = compact(item.make())
    file = f"{item.family}/{item.name}.json.gz"
    save_graph(graph, folder / file)
    return Entry(
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
    said: Callable[[int, int, Entry], None] = lambda done, count, entry: None,
    engine: Engine = HERE,
) -> CorpusManifest:
    """Build what a corpus folder lacks of some families, or of all; with `rebuild` all of these.

    At most `limit` graphs, and the manifest is written after each, so that it goes on where it was
    stopped. `said` gets (graphs done, graphs to do, the last one). Raises `ValueError` for an
    unknown family and `TargetError` where the folder holds something else.
    """
    manifest, every = read_manifest(folder), list(items())
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
        said(done, len(chosen), entry)
    return manifest


def _built(name: str) -> tuple[Entry, bytes]:
    """The line of the manifest and the file of a graph, wherever it is built."""
    item = next(item for item in items() if item.name == name)
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
    return CorpusManifest("gdp corpus build", "Apache-2.0", [])


def write_manifest(manifest: CorpusManifest, folder: Path) -> None:
    """Write the manifest, graphs sorted by name."""
    manifest.graphs.sort(key=lambda entry: entry.name)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    write_atomic(folder / MANIFEST, text + b"\n")
