"""What is fuzzed: how a mutant of each kind of file is made, and what reads it."""

import dataclasses
import gzip
import hashlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import gdp
from benchmarks.partitioning_instances import load_dnn_partitioning
from gdp.cluster.file import cluster_toml
from gdp.cluster.types import Cluster
from gdp.costs.cost_file import load_costs
from gdp.costs.learned import LearnedCosts
from gdp.costs.machine import Knowledge, read_record
from gdp.costs.profile import DeviceRecord, Kernel, Profile, ProfiledModel, load_profile, merge
from gdp.costs.profile import save_profile as write_profile
from gdp.graph.file import encode_graph, load_graph
from gdp.graph.op_graph import INPUT, OUTPUT, OpDetail, OpGraph, make_graph
from gdp.importers.pytorch.trace_cache import find_trace
from gdp.learn.finetune import load_finetune
from gdp.learn.instances import load_problems
from gdp.learn.labels import load_labels
from gdp.learn.recipe import load_recipe
from gdp.methods.base import Search
from gdp.placement.constraints import Constraints, read_constraints
from gdp.placement.placement import load_placement, make_placement, save_placement
from gdp.policy.policy import WIDE, default_checkpoint, load_policy, pack
from gdp.question import solve
from gdp.question.models import load
from gdp.question.prepare import prepare_problem
from gdp.question.question import Question
from gdp.sim.scheduling import Scheduler
from gdp.sim.serving import ServingEngine, in_steady_state, serve
from gdp.sim.traffic_file import read_traffic
from tests.fuzz import configurations, gguf_files, modules, seeds
from tests.fuzz.documents import (
    mutate_bytes,
    mutate_message,
    mutate_value,
    to_json,
    to_toml,
)


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of file."""

    name: str
    weight: int  # how often it is drawn
    write: Callable[[Path, random.Random | None], Path]
    # writes a mutant into an empty folder, the valid seed without randomness; what to read
    read: Callable[[Path], Any]  # errors must name the path
    use: Callable[[Any], Any] = lambda found: None  # errors must be clean
    needs: tuple[str, ...] = ()  # modules, without which it is left out

    @property
    def is_possible(self) -> bool:
        """Whether all that it needs is installed."""
        return all(importlib.util.find_spec(name) is not None for name in self.needs)


@cache
def graph() -> OpGraph:
    """Six ops with all that a graph file can hold."""
    kernel = OpDetail("float32", ((1, 8), (8, 8)), ((1, 8),), {"axis": 1, "pads": (1, 2)})
    return make_graph(
        "tiny", ["in", "a", "b", "c", "d", "out"],
        [INPUT, "MatMul", "Relu", "Conv", "Add", OUTPUT],
        [(0, 100), (1, 200), (2, 300), (3, 400), (4, 500)],
        [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)],
        flop=[0, 1e6, 1e5, 2e6, 1.5, 0], memory_traffic_bytes=[0, 1e3, 1e4, 1e5, 10, 0],
        weight_bytes=[0, 256, 0, 512, 0, 0], weight_id=[0, 1, 2, 1, 4, 5],
        colocate=[0, 1, 1, 3, 4, 5], scope=["", "x", "x", "y", "", ""],
        detail=[OpDetail(), kernel, OpDetail(), kernel, OpDetail(), OpDetail()],
        is_backward=[False, False, False, True, False, False],
    )  # fmt: skip


@cache
def cluster() -> Cluster:
    return Cluster.load("2xcpu-core")


def _place(found: OpGraph, machine: Cluster | None = None, **options: Any) -> None:
    search = Search(seed=1, seconds=0.05, evaluations=20)
    solve.solve(Question(found, machine or cluster(), method="heft", search=search, **options))


def _file(name: str, document: Any, encode: Callable[[Any], bytes]) -> Any:
    """A writer of one file: half of the mutants change values, the rest bytes."""

    def write(folder: Path, rng: random.Random | None) -> Path:
        value = document() if callable(document) else document
        if rng is None:
            data = encode(value)
        elif rng.random() < 0.8:
            data = encode(mutate_value(value, rng))
        else:
            data = mutate_bytes(encode(value), rng)
        if rng is not None and name.endswith(".json") and rng.random() < 0.1:
            data = gzip.compress(data)
            data = mutate_bytes(data, rng) if rng.random() < 0.5 else data
        (folder / name).write_bytes(data)
        return folder / name

    return write


@cache
def _graph_document() -> Any:
    return json.loads(encode_graph(graph()))


def _placement_document() -> Any:
    return {
        "schema": 3, "graph_digest": graph().digest, "made_by": "x",
        "devices": list(cluster().device_names), "ops": list(graph().op_names),
        "device": [0, 1, 1, 0, 1, 0], "rank": [0, 1, 2, 3, 4, 5], "teams": [],
        "question": {
            "model": "g.json", "dims": {"batch": 2}, "cluster": cluster_toml(cluster()),
            "objective": "latency", "costs": "shipped", "costs_sha256": "", "target": "",
            "granularity": "op", "offload": "",
            "constraints": {"pins": [{"match": "a", "devices": ["core1"]}], "together": ["b*"]},
        },
    }  # fmt: skip


def _write_placement(folder: Path, rng: random.Random | None) -> Path:
    """A placement beside its model: half of the mutants change the question alone."""
    (folder / "g.json").write_bytes(encode_graph(graph()))
    document = _placement_document()
    if rng is not None and rng.random() < 0.5:
        document["question"] = mutate_value(document["question"], rng)
        (folder / "p.json").write_bytes(to_json(document))
        return folder / "p.json"
    return _file("p.json", document, to_json)(folder, rng)


def _record_document() -> Any:
    piece = ["core0", "cpu-core", [["MatMul", 3, "MatMul 8x8", 0.1], ["", 0, "", 1e-5]], 0.2, False]
    return {
        "schema": 1, "date": "2026-01-01", "model": "m", "digest": graph().digest,
        "runtime": "onnxruntime", "versions": {"onnxruntime": "1"}, "costs": "shipped",
        "devices": [{"kind": "cpu-core", "model": "made"}], "off_before": 0.5, "off": 0.1,
        "runs": [{"model": "m", "pieces": [piece], "transfers": [["core0", "core1", 1e-5, 2e-5]]}],
    }  # fmt: skip


def _write_corpus(folder: Path, rng: random.Random | None) -> Path:
    (folder / "f").mkdir()
    (folder / "f" / "g.json").write_bytes(encode_graph(graph()))
    entry = {"name": "g", "file": "f/g.json", "num_ops": 6, "split": "train", "family": "f",
             "arguments": {"from": "m.onnx"}, "sha256": ""}  # fmt: skip
    document = {"graphs": [entry, entry | {"name": "h", "split": "validation"}], "source": "x"}
    return _file("manifest.json", document, to_json)(folder, rng).parent


def _use_corpus(found: Any) -> None:
    for name in found.train + found.validation:
        found.graph(name)


def _write_trace(folder: Path, rng: random.Random | None) -> Path:
    """A kept trace in a cache of its own; its reader takes a damaged one for none."""
    (folder / "traces").mkdir(mode=0o700)
    document = {
        "graph": _graph_document(), "estimated": ["a"], "assumptions": ["x"], "parameters": 10,
    }  # fmt: skip
    path = _file("plain.json", document, to_json)(folder, rng)
    data = zlib.compress(path.read_bytes())
    damaged = rng is not None and rng.random() < 0.1
    (folder / "traces" / "key").write_bytes(mutate_bytes(data, rng) if damaged else data)
    return folder


def _read_trace(path: Path) -> Any:
    os.environ["GDP_CACHE_DIR"] = str(path)
    try:
        return find_trace("key")
    finally:
        del os.environ["GDP_CACHE_DIR"]


@cache
def _profile_document() -> Any:
    model = ProfiledModel(
        "m", "f", graph(), 0.1, (Kernel("k", "MatMul", (1, 2), 0.05, 0.1),), 10, 3
    )
    profile = Profile(
        DeviceRecord("cpu-core", "made", ("avx2",)), "onnxruntime", 1, "all", {"numpy": "1"},
        "2026-01-01", (model,),
    )  # fmt: skip
    path = Path(_scratch()) / "seed.json"
    write_profile(profile, path)
    return json.loads(path.read_bytes())


@cache
def _scratch() -> str:
    import tempfile

    return tempfile.mkdtemp(prefix="gdp-fuzz-")


def _use_placement(found: Any) -> None:
    solve.simulate(Question(graph(), cluster()), found)
    if found.question is not None:
        found.question.require_constraints(Constraints())
        gdp.simulate(None, found, objective=found.question.objective)
    save_placement(make_placement(graph(), cluster(), found.device), Path(_scratch()) / "p.json")


_costs = cache(seeds.cost_folder)


def _write_costs(folder: Path, rng: random.Random | None) -> Path:
    """Half of the mutants change meta.json; the rest the arrays, with a digest that agrees."""
    meta, arrays = _costs()
    data = seeds.npz(arrays)
    meta = dict(meta, arrays_sha256=hashlib.sha256(data).hexdigest())
    text = to_json(meta)
    if rng is not None and rng.random() < 0.5:
        value = mutate_value(meta, rng)
        text = to_json(value) if rng.random() < 0.8 else mutate_bytes(text, rng)
    elif rng is not None:
        changed: dict[str, Any] = dict(arrays)
        if rng.random() < 0.8:
            _change_arrays(changed, rng)
            data = seeds.npz(changed)
        else:
            data = mutate_bytes(data, rng)
        if rng.random() < 0.9:
            text = to_json(dict(meta, arrays_sha256=hashlib.sha256(data).hexdigest()))
    (folder / "meta.json").write_bytes(text)
    (folder / "costs.npz").write_bytes(data)
    return folder


def _change_arrays(arrays: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice(sorted(arrays))
    array, kind = arrays[name], rng.randrange(7)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[name] = array[:-1]
    elif kind == 2:
        arrays[name] = array[None] if rng.random() < 0.5 else array.reshape(-1)
    elif kind == 3:
        arrays[name] = array.astype(rng.choice(("float64", "int8", "complex64", "U3", "float16")))
    elif kind == 4:
        arrays[name] = array * array.dtype.type(rng.choice((0, -1, 100)))
    elif kind == 5 and array.dtype.kind == "f":
        arrays[name] = np.full_like(array, rng.choice((np.nan, np.inf, 3e38, -1e6)))
    else:
        arrays[rng.choice(("x", "layer_b9", "a/../b"))] = array


def _use_costs(found: Any) -> None:
    LearnedCosts((found,), any_model=True)(graph(), cluster())


def _write_checkpoint(folder: Path, rng: random.Random | None) -> Path:
    """Nine in ten mutants change meta.json, of which few get as far as the weights."""
    target = folder / "checkpoint"
    shutil.copytree(default_checkpoint(), target, ignore=shutil.ignore_patterns("*.png", "*.jsonl"))
    path = target / "meta.json"
    meta = json.loads(path.read_text())
    row = pack(np.array([0, 1, 1, 0, 1, 0]), WIDE)
    meta["placed"] = {"digest": graph().digest, "device": row, "rank": row}
    if rng is not None and rng.random() < 0.1:
        weights = target / "weights.npz"
        weights.write_bytes(mutate_bytes(weights.read_bytes(), rng))
    elif rng is not None:
        meta = mutate_value(meta, rng)
    path.write_bytes(to_json(meta))
    return target


def _write_recipe(folder: Path, rng: random.Random | None) -> Path:
    return _file("recipe.toml", seeds.RECIPE, to_toml)(folder, rng)


@cache
def _models() -> Any:
    return seeds.onnx_seeds()


def _write_onnx(folder: Path, rng: random.Random | None) -> Path:
    models = _models()
    path = folder / "m.onnx"
    if rng is None:
        path.write_bytes(models[0].SerializeToString())
        return path
    model = type(models[0])()
    model.CopyFrom(rng.choice(models[:9] if rng.random() < 0.6 else models))
    if rng.random() < 0.85:
        mutate_message(model, rng)
        path.write_bytes(model.SerializeToString())
    else:
        path.write_bytes(mutate_bytes(model.SerializeToString(), rng))
    return path


def _write_configuration(folder: Path, rng: random.Random | None) -> Path:
    """A tenth of the mutants is not changed but for the fields that are added to a third."""
    path, documents = folder / "config.json", configurations.configurations()
    if rng is None:
        path.write_bytes(to_json(documents[0]))
        return path
    document = rng.choice(documents)
    if rng.random() < 0.33:
        document |= rng.choice(configurations.additions())
    kind = rng.random()
    data = to_json(mutate_value(document, rng) if 0.1 < kind < 0.95 else document)
    path.write_bytes(mutate_bytes(data, rng) if kind >= 0.95 else data)
    return path


def _load_configuration(path: Path) -> OpGraph:
    return load(f"hf:{path}?sequence=8")


def _write_module(folder: Path, rng: random.Random | None) -> Path:
    path = folder / "module.py"
    path.write_text(modules.PLAIN if rng is None else modules.any_module(rng))
    return path


def _load_module(path: Path) -> OpGraph:
    """The module as one of a package, the folder, so that errors name it."""
    if str(path.parent.parent) not in sys.path:
        sys.path.append(str(path.parent.parent))
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == path.parent.name]:
        del sys.modules[name]
    return load(f"python:{path.parent.name}.{path.stem}:f")


def _label_document() -> Any:
    row = pack(np.array([0, 1, 1, 0, 1, 0]), "u1")
    return {
        "instance": {"graph": "g", "cluster": 1, "objective": "latency", "memory": 0.0},
        "digest": "0123456789abcdef", "value_s": 0.5, "evaluations": 10, "device": row,
    }  # fmt: skip


def _write_table(folder: Path, rng: random.Random | None) -> Path:
    """A table of requests: half of the mutants change cells, the rest bytes."""
    rows = [["at_s", "prompt", "new"], *([str(i / 4), str(9 + i), "5"] for i in range(8))]
    if rng is not None and rng.random() < 0.6:
        rows = mutate_value(rows, rng)
    lines = [",".join(map(str, row)) if isinstance(row, list) else str(row) for row in rows]
    data = "\n".join(lines).encode(errors="surrogatepass")
    if rng is not None and rng.random() < 0.4:
        data = mutate_bytes(data, rng)
    (folder / "t.csv").write_bytes(data)
    return folder / "t.csv"


def _serve(traffic: Any) -> None:
    engine = ServingEngine(0.01, 1e-4, 1e-7, 64, 4, 1e5, scheduler=Scheduler(preempts=True))
    served = serve(in_steady_state(traffic, engine), engine)
    assert 0 < served.tokens_per_s < float("inf")


def _instance_document() -> Any:
    node = {"cpuLatency": 3.0, "fpgaLatency": 1.0, "supportedOnFpga": True, "size": 100.0}
    return {
        "maxFPGAs": 2, "maxCPUs": 1, "maxSizePerFPGA": 1000.0,
        "nodes": [{**node, "id": i, "colorClass": i % 3} for i in range(4)],
        "edges": [{"sourceId": i, "destId": i + 1, "cost": 0.5} for i in range(3)],
    }  # fmt: skip


TARGETS = (
    Target("onnx", 30, _write_onnx, load,
           lambda found: prepare_problem(Question(found, cluster()))),
    Target("gguf", 8, _file("m.gguf", gguf_files.document, gguf_files.encode), load,
           lambda found: prepare_problem(Question(found, cluster())), ("gguf",)),
    Target("hf", 20, _write_configuration, _load_configuration,
           lambda found: prepare_problem(Question(found, cluster())), ("torch", "transformers")),
    Target("torch", 20, _write_module, _load_module,
           lambda found: prepare_problem(Question(found, cluster())), ("torch",)),
    Target("graph", 15, _file("g.json", _graph_document, to_json), load_graph, _place),
    Target("cluster", 10, _file("c.toml", seeds.CLUSTER, to_toml), Cluster.load,
           lambda found: _place(graph(), found)),
    Target("placement", 16, _write_placement, load_placement, _use_placement),
    Target("record", 6, _file("r.json", _record_document, to_json), read_record,
           lambda found: Knowledge([found]).adaptation()),
    Target("corpus", 4, _write_corpus,
           lambda path: load_problems(str(path), random_graphs=0, min_ops=1, max_ops=100),
           _use_corpus),
    Target("trace", 4, _write_trace, _read_trace, needs=("torch", "transformers")),
    Target("constraints", 6, _file("k.toml", seeds.CONSTRAINTS, to_toml), read_constraints,
           lambda found: prepare_problem(Question(graph(), cluster(), constraints=found))),
    Target("costs", 10, _write_costs, load_costs, _use_costs),
    Target("checkpoint", 6, _write_checkpoint, load_policy),
    Target("recipe", 8, _write_recipe, load_recipe,
           lambda found: load_problems("", random_graphs=min(found[0].data.random_graphs, 2),
                                       min_ops=found[0].data.min_ops,
                                       max_ops=found[0].data.max_ops)),
    Target("finetune", 2, _file("f.toml", seeds.FINETUNE, to_toml), load_finetune),
    Target("profile", 8, _file("q.json", _profile_document, to_json), load_profile,
           lambda found: merge([found, found])),
    Target("labels", 3, _file("l.jsonl", _label_document, to_json), load_labels),
    Target("traffic", 8, _write_table, read_traffic, _serve),
    Target("instance", 4, _file("i.json", _instance_document, to_json), load_dnn_partitioning),
)  # fmt: skip
