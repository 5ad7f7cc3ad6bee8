"""A corpus of one's own: graphs of any models, split by families, with labels and a recipe.

A corpus is a folder: `manifest.json` (`CorpusManifest`: each graph with its family, its split, its
sizes and the SHA-256 of its file), a folder of graph files for each family, `labels.jsonl` (the
best placement that was searched of each problem) and `recipe.toml`, which `gdp pretrain` takes.
"""

import hashlib
import logging
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gdp.base.errors import GdpError
from gdp.base.files.writing import (
    OverwritePolicy,
    check_folder_writable,
    files_below,
    write_atomic,
    write_manifest,
)
from gdp.base.tasks import HERE, Engine, each
from gdp.graph.file import save_graph
from gdp.graph.fuse import fuse
from gdp.graph.op_graph import OpDetail, OpGraph, make_graph
from gdp.importers.spec import ModelSpec
from gdp.importers.table import GGUF_SUFFIX, GRAPH_SUFFIXES, HF_PREFIX, PYTHON_PREFIX
from gdp.learn.instances import (
    MANIFEST,
    CorpusEntry,
    CorpusManifest,
    Instance,
    draw,
    read_corpus,
    write_corpus,
)
from gdp.learn.labels import Corpus, Task, label_all, load_labels
from gdp.question.models import load, with_dims

log = logging.getLogger(__name__)

LABELS, RECIPE = "labels.jsonl", "recipe.toml"
LEAST_HELD = 16
"""Problems to validate on, below which the standard error of a mean is that of luck."""
MODEL_SUFFIXES = (".onnx", GGUF_SUFFIX, *GRAPH_SUFFIXES)
"""Endings of files of models; of a folder, plain .json is not read."""
MAX_OPS = 2000
"""Ops of a fused graph up to which it is taken: an update decodes dozens of placements of it."""
FIRST_EVALUATIONS, GROWTH = 500, 4
"""Evaluations of the first search of every label, whatever the seconds; factor of each further."""


@dataclass(frozen=True)
class CorpusConfig:
    """Settings of a corpus."""

    hold_out: float = 0.2  # share of the families that serve validation alone
    label_seconds: float = 60.0  # for all labels, beyond the first search of each
    problems: int = 2  # random clusters and memory limits for each graph
    max_ops: int = MAX_OPS
    dims: tuple[str, ...] = ()  # NAME=VALUE of symbolic dimensions
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.hold_out < 1.0:
            raise ValueError(f"hold_out must lie in [0, 1), got {self.hold_out}")
        if self.problems < 1:
            raise ValueError(f"problems must be at least 1, got {self.problems}")


class CorpusSummary(NamedTuple):
    """Content of a corpus that was built, and models that are not in it."""

    manifest: CorpusManifest
    left_out: dict[str, str]  # model: reason
    labels: int


class _Model(NamedTuple):
    spec: str
    family: str
    stem: str
    dims: tuple[str, ...]


def build_corpus(
    models: Sequence[str],
    folder: Path,
    config: CorpusConfig | None = None,
    *,
    engine: Engine = HERE,
    force: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, count, what: None,
) -> CorpusSummary:
    """Import models, split them by family, search labels, and write all that pre-training reads.

    Run again on the same folder, models are added and labels get better; what is there keeps its
    split.

    Args:
        models: What `gdp.load` takes, or folders of model files, each with `FAMILY=` before it or
            not: a file's family is the folder that holds it, where all are of one folder each is
            its own; of code it is the module, of a configuration its folder.
        folder: Where to write.
        config: Settings; None is `CorpusConfig()`.
        engine: Processes or Ray cluster that search labels; on a cluster the folder is on a disk
            that all machines share.
        force: Write among files that gdp did not write.
        progress: Called with (done, count, model or problem).

    Returns:
        The manifest, the models that were left out with their reasons, the number of labels.

    Raises:
        TargetError: if the folder holds something else.
        GdpError: if no model can be read.
    """
    config = config or CorpusConfig()
    check_folder_writable(folder, "corpus", OverwritePolicy(force=force))
    chosen = find_models(models, config.dims)
    folder.mkdir(parents=True, exist_ok=True)
    _own(folder)
    is_new = not (folder / MANIFEST).exists()
    manifest = CorpusManifest([], "gdp corpus build") if is_new else read_corpus(folder)
    left_out = _add_all(manifest, folder, chosen, config, engine, progress)
    if not manifest.graphs:
        reasons = [f"{spec}: {reason}" for spec, reason in left_out.items()]
        raise GdpError(f"no model is left to learn from: {'; '.join(reasons)}")
    _split(manifest, config)
    write_corpus(manifest, folder)
    if not (folder / RECIPE).exists():
        write_atomic(folder / RECIPE, recipe_text(folder, config).encode())
    _label(manifest, folder, config, engine, progress)
    _own(folder)
    return CorpusSummary(manifest, left_out, len(load_labels(folder / LABELS)))


def _add_all(
    manifest: CorpusManifest, folder: Path, chosen: Sequence[_Model], config: CorpusConfig,
    engine: Engine, progress: Callable[[int, int, str], None],
) -> dict[str, str]:  # fmt: skip
    """Import models into the corpus; the reasons of those that are left out, by spec."""
    left_out: dict[str, str] = {}
    here = engine if engine.ray is None else HERE  # models are on this machine
    for number, (at, (graph, reason)) in enumerate(each(_imported, chosen, here), start=1):
        model = chosen[at]
        progress(number, len(chosen), model.spec)
        if graph is not None and graph.num_ops > config.max_ops:
            reason = f"{graph.num_ops} ops, more than --max-ops {config.max_ops}"
        if graph is None or reason:
            left_out[model.spec] = reason
            continue
        _add(manifest, folder, model, graph)
        _own(folder)
    return left_out


def find_models(given: Sequence[str], dims: tuple[str, ...] = ()) -> list[_Model]:
    """The models of paths, specs and folders, each with its family; raises `GdpError` for none."""
    parts = [_named_family(text) for text in given]
    specs = [(family, spec) for family, text in parts for spec in _files(text)]
    if not specs:
        raise GdpError(
            f"no models in {', '.join(given) or 'nothing'}: give files "
            f"({', '.join(MODEL_SUFFIXES)}), folders of them, "
            "python:package.module:function or hf:CONFIG"
        )
    folders = {Path(spec).parent for _, spec in specs if _is_file(spec)}
    models = []
    for family, spec in specs:
        stem = Path(ModelSpec.of(spec).path).name
        for suffix in MODEL_SUFFIXES:
            stem = stem.removesuffix(suffix)
        if _is_file(spec):
            own = Path(spec).resolve().parent.name if len(folders) > 1 else stem
        elif spec.startswith(PYTHON_PREFIX):
            path, _, query = spec.removeprefix(PYTHON_PREFIX).partition("?")
            module, _, stem = path.rpartition(":")
            stem += query and f"-{query}"
            own = module
        elif spec.startswith(HF_PREFIX):
            path = Path(ModelSpec.of(spec).path.removeprefix(HF_PREFIX))
            own = stem = path.parent.name if path.suffix == ".json" else path.name
        else:
            own = stem = spec.rpartition(":")[2]
        models.append(_Model(spec, _plain(family or own), _plain(stem), dims))
    return models


def _named_family(text: str) -> tuple[str, str]:
    """(family, spec) of `FAMILY=SPEC`, whose family is a word; "" where none is given."""
    match = re.fullmatch(r"([\w-]+)=(.+)", text)
    return (match[1], match[2]) if match and not Path(text).exists() else ("", text)


def _is_file(spec: str) -> bool:
    return Path(ModelSpec.of(spec).path).is_file()


def _files(spec: str) -> list[str]:
    """The model files below a folder; of anything else, itself."""
    folder = Path(spec)
    if not folder.is_dir():
        return [spec]
    endings = tuple(suffix for suffix in MODEL_SUFFIXES if suffix != ".json")
    return sorted(str(p) for p in folder.rglob("*") if p.name.endswith(endings))


def _plain(name: str) -> str:
    """A name that files, keys of instances and TOML can have."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "model"


def _imported(model: _Model) -> tuple[OpGraph | None, str]:
    """(the fused graph, "") or (None, the reason)."""
    try:
        return compact(load(model.spec, with_dims(model.dims))), ""
    except GdpError as error:
        return None, str(error)


def _add(manifest: CorpusManifest, folder: Path, model: _Model, graph: OpGraph) -> None:
    """Save a graph, in the place of the same model's earlier one."""
    old = next((e for e in manifest.graphs if e.arguments.get("from") == model.spec), None)
    taken = {entry.name for entry in manifest.graphs}
    name = base = model.stem if model.stem == model.family else f"{model.family}-{model.stem}"
    number = 2
    while old is None and name in taken:
        name, number = f"{base}-{number}", number + 1
    if old is not None:
        name = old.name
        manifest.graphs.remove(old)
    entry = CorpusEntry(
        name, f"{model.family}/{name}.json.gz", graph.num_ops, "train", model.family,
        arguments={"from": model.spec},
    )  # fmt: skip
    if old is not None and old.family == model.family:
        entry.split = old.split
    manifest.graphs.append(save_entry(graph, entry, folder))


def save_entry(graph: OpGraph, entry: CorpusEntry, folder: Path) -> CorpusEntry:
    """Write the file of a graph; the entry with its sizes and SHA-256."""
    save_graph(graph, folder / entry.file)
    entry.num_ops, entry.num_uses = graph.num_ops, graph.num_uses
    entry.gigaflop = round(float(graph.flop.sum()) / 1e9, 4)
    entry.sha256 = hashlib.sha256((folder / entry.file).read_bytes()).hexdigest()
    return entry


def compact(graph: OpGraph) -> OpGraph:
    """The fused graph without data that no policy reads: short names, output shapes only."""
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
        source=fused.source,
    )


def _split(manifest: CorpusManifest, config: CorpusConfig) -> None:
    """Hold out whole families until their share and `LEAST_HELD` problems are reached, by the
    latter at most half of them; families that are held out stay so."""
    held = {e.family for e in manifest.graphs if e.split != "train"}
    families = sorted({e.family for e in manifest.graphs})
    wanted = round(config.hold_out * len(families))
    if config.hold_out > 0 and len(families) > 1:
        wanted = min(max(wanted, 1), len(families) - 1)
    order = np.random.default_rng([config.seed, 7]).permutation(len(families))
    # What a corpus holds already keeps its split, so that only the first build holds out more.
    most = len(families) // 2 if config.hold_out > 0 and not held else 0
    graphs = Counter(entry.family for entry in manifest.graphs)
    for at in order:
        few = config.problems * sum(graphs[family] for family in held) < LEAST_HELD
        if len(held) < (max(wanted, most) if few else wanted):
            held.add(families[at])
    for entry in manifest.graphs:
        if entry.split == "train" and entry.family in held:
            entry.split = "validation"


def _label(
    manifest: CorpusManifest, folder: Path, config: CorpusConfig, engine: Engine,
    progress: Callable[[int, int, str], None],
) -> None:  # fmt: skip
    """Search labels, with more evaluations each time round, until the seconds are over."""
    begin = time.monotonic()
    version = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    source = Corpus(str(folder.resolve()), 0, 1, config.max_ops, version)
    graphs = sorted(manifest.graphs, key=lambda e: (e.split == "train", e.name))
    todo = [i for e in graphs if e.num_ops <= config.max_ops for i in _problems(e.name, config)]
    evaluations, left_s = FIRST_EVALUATIONS, np.inf
    while left_s > 0:
        tasks = [Task(source, i, None, evaluations, config.seed) for i in todo]
        label_all(folder / LABELS, tasks, left_s, engine, progress)
        evaluations *= GROWTH
        left_s = config.label_seconds - (time.monotonic() - begin)


def _problems(graph: str, config: CorpusConfig) -> list[Instance]:
    """Random instances of a graph, which depend on no other graph of the corpus."""
    rng = np.random.default_rng([config.seed, zlib.crc32(graph.encode())])
    return [draw(rng, [graph]) for _ in range(config.problems)]


def _own(folder: Path) -> None:
    """List all files as gdp's, which may change from run to run."""
    write_manifest(folder, "corpus", dict.fromkeys(files_below(folder), ""))


def recipe_text(folder: Path, config: CorpusConfig) -> str:
    """A recipe that trains fresh weights on the corpus."""
    return f"""# Written by `gdp corpus build`, and yours to change: it is not written again.
# Its tables and keys with their defaults: gdp/learn/recipe.py
name = "{_plain(folder.resolve().name)}"
# start = "checkpoints/default"   # a policy to start from; another than gdp's: its [network], too

[imitation]
updates = 300

[ppo]
updates = 700

[data]
corpus = "{folder.as_posix()}"
labels = "{(folder / LABELS).as_posix()}"
min_ops = 1
max_ops = {config.max_ops}
random_graphs = 0

[run]
validate_every = 25
"""
