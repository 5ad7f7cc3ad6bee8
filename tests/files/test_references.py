"""Files from elsewhere run nothing: every text in every format is a name or a number, except for
the few that name a file or code, and these are followed as SECURITY.md says."""

import ast
import dataclasses
import importlib
import json
import os
import signal
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from click.testing import CliRunner

import gdp
from gdp.base.errors import GdpError
from gdp.base.files.reading import open_regular, require_regular
from gdp.cli.main import cli
from gdp.graph.file import save_graph
from gdp.learn.instances import load_problems
from gdp.placement.placement import digest_of
from tests.test_even import model

ROOT = Path(gdp.__file__).resolve().parent

# A decision for each field that holds text, by format. CODE: a spec that may run code; refused
# where a file names it. DATA: a file that is read, bounded and regular; a folder is never listed.
# TEXT: shown, compared, or looked up among names.
CODE, DATA, TEXT = "code", "data", "text"
DECISIONS = {
    "api.box.models.ModelEntry": {
        "command": TEXT,  # of a server that gdp knows nothing of: written down for users to start
        "devices": TEXT, "engine": TEXT, "memory": TEXT, "name": TEXT, "residence": TEXT,
        "spec": CODE, "traffic": DATA,
    },
    "api.box.models.Within": {"tpot": TEXT, "ttft": TEXT},
    "api.measured.trial_files.TrialRecord": {"asked": TEXT, "benchmark": TEXT, "layout": TEXT},
    "base.checkpoint._Meta": {"sha256": TEXT},
    "cluster.detect": {"*": TEXT},  # what amd-smi prints
    "cluster.file.ClusterEntry": {"host": TEXT, "name": TEXT},
    "cluster.file.DeviceEntry": dict.fromkeys(
        ("backend", "dispatch_per", "flop_per_s", "kind", "memory_bytes", "memory_pool", "model",
         "name", "preset", "reserve_bytes", "supported"), TEXT),
    "cluster.file.LinkEntry": {"channel": TEXT, "dst": TEXT, "src": TEXT},
    "cluster.table": {"*": TEXT},  # travels with gdp
    "cluster.table.Preset": dict.fromkeys(
        ("dispatch_per", "family", "flop_per_s", "kind", "maker", "memory", "memory_bytes",
         "power_source", "product", "source"), TEXT),
    "importers.diffusers.spec": {"*": TEXT},  # travel with gdp
    "importers.diffusers.spec._Component": dict.fromkeys(("class_name", "config", "source"), TEXT),
    "importers.diffusers.spec._Pipeline": dict.fromkeys(
        ("class_name", "components", "fields", "source"), TEXT),
    "placement.constraints.Constraints": {"together": TEXT, "whole": TEXT},
    "placement.constraints.Pin": {"devices": TEXT, "match": TEXT},
    "placement.constraints._File": {"together": TEXT, "whole": TEXT},
    "corrections.features.EngineStack": dict.fromkeys(
        ("backend", "card", "engine", "host", "version"), TEXT),
    "corrections.process.CorrectionMeta": dict.fromkeys(
        ("constants", "date", "far", "formats", "known", "quantiles", "shapes", "source", "stacks"),
        TEXT),  # travels with gdp
    "corrections.features.Pass": {"parts_s": TEXT},
    "corrections.records.RunRecord": dict.fromkeys(
        ("costs", "date", "format", "measured", "model", "predicted", "tool"), TEXT),
    "costs.adapt.LinkSeconds": {"destination": TEXT, "source": TEXT},
    "costs.adapt.Piece": {"device": TEXT, "kind": TEXT},
    "costs.adapt.Run": {"model": TEXT},
    "costs.adapt.Share": {"kernel": TEXT, "op_type": TEXT},
    "costs.cost_file._Meta": dict.fromkeys(
        ("arrays_sha256", "date", "level", "rates", "runtime", "types", "versions"), TEXT),
    "costs.machine.MachineRecord": dict.fromkeys(
        ("costs", "date", "digest", "model", "runtime", "versions"), TEXT),
    "costs.machine.TunedDevice": {"kind": TEXT, "model": TEXT},
    "costs.measured.own.CardKernels": {"card": TEXT, "date": TEXT},
    "costs.measured.collectives.CollectivesMeta": dict.fromkeys(
        ("curves", "date", "errors", "licence", "links", "source"), TEXT),  # travels with gdp
    "costs.measured.collectives.MeasuredLink": dict.fromkeys(("devices", "family"), TEXT),
    "costs.measured.collectives.Typical": dict.fromkeys(("efficiency", "sends"), TEXT),
    "costs.measured.network.MeasuredDevice": {"arithmetic": TEXT},
    "costs.measured.network.NetworkMeta": dict.fromkeys(
        ("date", "devices", "shapes", "source"), TEXT),  # travels with gdp
    "costs.profile.DeviceRecord": {"features": TEXT, "kind": TEXT, "model": TEXT},
    "costs.profile._File": dict.fromkeys(
        ("date", "level", "runtime", "statistic", "versions"), TEXT),
    "costs.profile.Kernel": {"name": TEXT, "type": TEXT},
    "costs.profile._Model": {"family": TEXT, "graph": TEXT, "name": TEXT},
    "base.files.writing.FolderManifest": {"files": DATA, "kind": TEXT},  # below their folder
    "graph.file._Detail": {"attributes": TEXT, "dtype": TEXT},
    "graph.file._File": {"name": TEXT, "ops": TEXT, "scopes": TEXT, "tensors": TEXT, "types": TEXT},
    "importers.huggingface.modelopt._Beside": {"quantization": TEXT},
    "importers.pytorch.quantised.StoredWeight": {"arithmetic": TEXT, "dense_copy": TEXT},
    "importers.pytorch.trace_cache": {"*": TEXT},  # of gdp's own cache
    "importers.pytorch.trace_cache.ModelFacts": {"name": TEXT, "options": TEXT, "task": TEXT},
    "importers.pytorch.unread.Unread": {"dtype": TEXT, "held": TEXT},
    "importers.pytorch.trace_cache._CachedProgram": dict.fromkeys(
        ("assumptions", "estimated", "ops", "paths", "values"), TEXT),
    "importers.pytorch.trace_cache._CachedTrace": dict.fromkeys(
        ("assumptions", "estimated", "graph"), TEXT),
    "learn.instances.CorpusEntry": {
        "arguments": TEXT, "family": TEXT, "file": DATA, "kind": TEXT, "name": TEXT, "sha256": TEXT,
    },  # the file below the corpus
    "learn.instances.CorpusManifest": {"licence": TEXT, "source": TEXT},
    "learn.instances.Instance": {"graph": TEXT},
    "learn.labels.Label": {"device": TEXT, "digest": TEXT, "found_by": TEXT},
    "learn.pretrain._State": {"past": TEXT, "recipe": TEXT},
    "learn.recipe.DataConfig": {"corpus": DATA, "instances": TEXT, "labels": DATA},
    "learn.recipe.Recipe": {"name": TEXT, "start": DATA},
    "placement.placement.DraftModel": {"model": DATA},  # a configuration, whatever it looks like
    "placement.placement.QuestionRecord": {
        "cluster": TEXT, "costs": DATA, "costs_sha256": TEXT, "dims": TEXT, "draft": TEXT,
        "granularity": TEXT, "model": CODE, "objective": TEXT, "offload": TEXT, "role": TEXT,
        "target": TEXT, "whole": TEXT,
    },
    "placement.placement._File": dict.fromkeys(
        ("devices", "graph_digest", "made_by", "ops"), TEXT),
    "policy.policy.KeptPlacement": {"device": TEXT, "digest": TEXT, "rank": TEXT},
    "policy.policy._Meta": {"name": TEXT},
    "targets.target.StartCommand": dict.fromkeys(("command", "machine", "role"), TEXT),  # shown
}  # fmt: skip
# Formats without a type: the reader's name says where they are checked.
UNTYPED = {
    "base.checkpoint:dict", "base.files.reading:", "placement.device_maps:", "reports.html:",
}  # fmt: skip
READERS = {"read_json", "decode_json", "read_toml", "decode_toml", "convert"}


def _formats() -> Iterator[tuple[str, Any]]:
    """(module, type) of everything that gdp decodes; None where a call names no type."""
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and (called := _type_argument(node)) is not None:
                scope = vars(importlib.import_module(f"gdp.{module}"))
                name = ast.unparse(called)
                if name != "type_":  # the readers themselves
                    yield module, eval(name, scope)  # of gdp's own source


def _type_argument(call: ast.Call) -> ast.expr | None:
    """The type that a call decodes into, a constant None where it names none."""
    name = ast.unparse(call.func)
    if name in READERS:
        return call.args[2]
    if not name.startswith("msgspec.") or name.rpartition(".")[2] not in ("decode", "convert"):
        return None
    named = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
    return (named or call.args[1:] or [ast.Constant(None)])[0]


def _texts(kind: Any, where: str, seen: set[Any]) -> Iterator[str]:
    """`Class.field` of every field that holds text, in a type and all types within it."""
    parts = typing.get_args(kind)
    if parts:
        for part in parts:
            yield from _texts(part, where, seen)
        return
    if not isinstance(kind, type):
        return
    is_record = dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct)
    if is_record or hasattr(kind, "_fields"):
        if kind not in seen:
            seen.add(kind)
            for field, inner in typing.get_type_hints(kind).items():
                at = f"{kind.__module__.removeprefix('gdp.')}.{kind.__qualname__}:{field}"
                yield from _texts(inner, at, seen)
    elif kind is dict or kind is msgspec.Raw or issubclass(kind, str | bytes):
        yield where


def test_every_field_of_every_file_has_a_decision() -> None:
    """A new field that holds text fails here until somebody says what it may lead to."""
    found: dict[str, set[str]] = {}
    for module, kind in _formats():
        if kind is None or kind is dict:
            name = "" if kind is None else "dict"
            shipped = {"cluster.table:dict", "importers.diffusers.spec:dict"}
            assert f"{module}:{name}" in UNTYPED | shipped
            continue
        for text in _texts(kind, f"{module}:*", set()):
            owner, _, field = text.partition(":")
            found.setdefault(owner, set()).add(field)
    assert len(found) > 25
    assert found == {owner: set(fields) for owner, fields in DECISIONS.items()}


READS = {"open", "read_bytes", "read_text", "fdopen"}
# Files that gdp has just written, or the system's own; scripts that exports hold for their users.
READ_BY_THEMSELVES = {
    "api/diffusion/export.py", "api/diffusion/runner.py",
    "api/corpus.py", "api/first_run.py", "cli/program.py", "cli/run.py", "cluster/detect.py",
    "base/files/reading.py", "base/files/writing.py", "importers/pytorch/trace_cache.py",
    "learn/labels.py",
    "base/kernels/cache.py", "learn/metrics.py", "measure/record.py", "reports/html.py",
    "targets/jax/export.py",
    "targets/llamacpp/worker.py", "targets/named_sharding/export.py",
    "targets/named_sharding/runner.py", "targets/onnxruntime/export.py",
    "targets/onnxruntime/profile.py", "targets/onnxruntime/runner_template.py",
    "targets/intel_openvino/loader.py", "targets/pipelining/export.py",
    "targets/pipelining/runner.py", "targets/tensor_parallel/export.py",
    "targets/tensor_parallel/run.py", "targets/tensor_parallel/runner.py",
    "targets/tensor_parallel/tp_runner.py", "base/tasks.py", "base/terminal.py", "base/version.py",
}  # fmt: skip


def test_files_are_opened_by_one_owner() -> None:
    """What opens a file itself would wait for a pipe and read a device without end."""
    opening = set()
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            plain = isinstance(function, ast.Name) and function.id == "open"
            method = isinstance(function, ast.Attribute) and function.attr in READS
            if plain or method:
                opening.add(path.relative_to(ROOT).as_posix())
    assert opening - READ_BY_THEMSELVES == set()


# What is imported, opened or listed while `watching` is not empty. A hook cannot be removed.
watching: list[list[str]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if watching and event in ("import", "open", "os.listdir", "os.scandir", "os.walk"):
        watching[-1].append(f"{event} {arguments[0]}")


sys.addaudithook(_hook)


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The document of a placement in the folder of a module that would tell of its import."""
    monkeypatch.chdir(tmp_path)
    save_graph(model(), tmp_path / "g.json")
    done = CliRunner().invoke(
        cli, ["place", "g.json", "--cluster", "2xcpu-core", "--method", "heft", "-o", "p.json"]
    )
    assert done.exit_code == 0, done.output
    Path("canary_module.py").write_text("open('imported', 'w').close()\nf = lambda: 1\n")
    return json.loads(Path("p.json").read_text())


VERBS = {
    "simulate": ["simulate", "p.json"], "explain": ["explain", "p.json", "--op", "b"],
    "report": ["report", "p.json", "-o", "r.html"],
    "export": ["export", "p.json", "--to", "accelerate", "-o", "d"], "run": ["run", "p.json"],
}  # fmt: skip


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_code_that_a_placement_names_is_shown_and_asked_for(
    verb: str, placed: dict[str, Any]
) -> None:
    placed["question"]["model"] = "python:canary_module:f"
    Path("p.json").write_text(json.dumps(placed))
    done = CliRunner().invoke(cli, VERBS[verb])
    assert isinstance(done.exception, gdp.PlacementError), done.output
    said = str(done.exception)
    assert "p.json names the model 'python:canary_module:f', which is code" in said
    assert "give the model (--model, or MODEL before the placement)" in said
    assert not Path("imported").exists()
    assert "canary_module" not in sys.modules


def test_code_runs_where_the_user_names_it_and_where_nothing_was_read(
    placed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the library a result knows its own model; a placement that was loaded is a file's."""
    monkeypatch.syspath_prepend(os.getcwd())
    Path("canary_graph.py").write_text(
        "from gdp import load\ncalls = []\n"
        "def f():\n    calls.append(1)\n    return load('g.json')\n"
    )
    spec = "python:canary_graph:f"
    found = gdp.place(spec, "2xcpu-core", method="heft")
    assert gdp.simulate(None, found).feasible
    gdp.save_placement(found.placement, "q.json")
    calls = sys.modules["canary_graph"].calls
    before = len(calls)
    for placement in ("q.json", gdp.load_placement("q.json")):
        with pytest.raises(gdp.PlacementError, match="which is code"):
            gdp.simulate(None, placement)
    assert len(calls) == before
    assert gdp.simulate(spec, "q.json").feasible
    assert CliRunner().invoke(cli, ["simulate", spec, "q.json"]).exit_code == 0
    assert (
        CliRunner().invoke(cli, ["explain", "q.json", "--model", spec, "--op", "b"]).exit_code == 0
    )


HOSTILE = (
    "python:canary_module:f",
    "a" * 5000,
    "hf:{folder}",
    "{folder}",
    "{folder}/pipe",
    "/dev/zero",
)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_of_a_placement_leads_anywhere(hostile: str, placed: dict[str, Any]) -> None:
    """Every field in turn names code, a folder, a pipe and a device: nothing is imported, no folder
    is listed, and nothing is waited for."""
    folder = Path("elsewhere")
    folder.mkdir()
    (folder / "secret.txt").write_text("secret")
    os.mkfifo(folder / "pipe")
    placed["question"] |= {"costs": "", "costs_sha256": "0", "dims": {"a": 1}, "target": "",
                           "granularity": "", "offload": "", "objective": "latency", "role": "",
                           "draft": "", "whole": []}  # fmt: skip
    text = hostile.format(folder=folder.resolve())
    question = placed["question"]
    assert question.keys() >= set(DECISIONS["placement.placement.QuestionRecord"])
    signal.alarm(60)
    try:
        for holder, key in [*((question, key) for key in list(question)), (placed, "made_by")]:
            if not isinstance(holder[key], str):
                continue
            old, holder[key] = holder[key], text
            Path("p.json").write_text(json.dumps(placed))
            holder[key] = old
            watching.append([])
            try:
                CliRunner().invoke(cli, ["explain", "p.json", "--op", "b"], catch_exceptions=True)
            finally:
                events = watching.pop()
            assert any("p.json" in event for event in events)
            for name in ("canary_module", "secret.txt", "pipe", "/dev/zero"):
                assert not [e for e in events if name in e and not e.startswith("import gdp")], key
            listed = [e for e in events if str(folder.resolve()) in e and "open" not in e]
            assert not listed, key
    finally:
        signal.alarm(0)


def test_the_digest_of_costs_lists_no_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_text("1")
    assert digest_of(str(tmp_path)) == ""
    (tmp_path / "meta.json").write_text("{}")
    watching.append([])
    digest = digest_of(str(tmp_path))
    assert {e.partition(" ")[0] for e in watching.pop()} == {"open"}
    (tmp_path / "deep" / "a").write_text("2")
    assert digest == digest_of(str(tmp_path)) != ""


def test_a_pipe_a_socket_and_a_device_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="give a regular file"):
            require_regular(path)
        with pytest.raises(OSError, match="give a regular file"):
            open_regular(path)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)


def test_what_takes_the_place_of_a_file_is_no_file_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that stands there once the name was looked at: opened, told, and never waited for."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("gdp.base.files.reading.require_regular", lambda path: None)
    signal.alarm(60)
    try:
        with pytest.raises(OSError, match="it is a pipe; give a regular file"):
            open_regular(tmp_path / "pipe")
    finally:
        signal.alarm(0)


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "{}.onnx"], ["inspect", "{}.gguf"], ["inspect", "{}.json"], ["inspect", "{}"],
        ["inspect", "hf:{}"], ["devices", "--cluster", "{}.toml"], ["simulate", "g.json", "{}"],
        ["place", "g.json", "--constraints", "{}"], ["place", "g.json", "--costs", "{}.json"],
        ["pretrain", "{}", "-o", "out"], ["calibrate", "{}", "-o", "out"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("irregular", ["pipe", "device"])
def test_no_verb_waits_for_a_pipe_or_reads_a_device(
    command: list[str], irregular: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(model(), tmp_path / "g.json")
    for suffix in ("", ".onnx", ".gguf", ".json", ".toml"):
        if irregular == "pipe":
            os.mkfifo(f"x{suffix}")
        else:
            os.symlink("/dev/zero", f"x{suffix}")
    signal.alarm(60)
    try:
        done = CliRunner().invoke(cli, [part.format("x") for part in command])
    finally:
        signal.alarm(0)
    assert isinstance(done.exception, GdpError | ValueError | SystemExit), (
        done.output,
        done.exception,
    )
    assert done.exit_code != 0
    assert "\n" not in str(done.exception)


def test_a_model_does_not_read_numbers_of_another_file(tmp_path: Path) -> None:
    """Sizes that external data give are taken from the model's own files alone."""
    (tmp_path / "m").mkdir()
    (tmp_path / "other.bin").write_bytes(bytes([3, 0, 0, 0, 0, 0, 0, 0]))
    graph = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[6] x) => (float[a, b] y)'
        "{ y = Reshape (x, s) }"
    )
    shape = graph.graph.initializer.add(
        name="s", data_type=onnx.TensorProto.INT64, dims=[1],
        data_location=onnx.TensorProto.EXTERNAL,
    )  # fmt: skip
    entry = shape.external_data.add(key="location", value="own.bin")
    (tmp_path / "m" / "own.bin").write_bytes((6).to_bytes(8, "little"))
    onnx.save(graph, tmp_path / "m" / "m.onnx")
    assert gdp.load(tmp_path / "m" / "m.onnx").detail[1].output_shapes == ((6,),)
    entry.value = "../other.bin"
    onnx.save(graph, tmp_path / "m" / "m.onnx")
    with pytest.raises(gdp.ModelError):
        gdp.load(tmp_path / "m" / "m.onnx")


def test_a_corpus_names_only_its_own_files(tmp_path: Path) -> None:
    entry = {"name": "a", "file": "../../elsewhere.json", "num_ops": 40, "split": "train"}
    (tmp_path / "manifest.json").write_text(json.dumps({"graphs": [entry]}))
    with pytest.raises(GdpError, match=r"'../../elsewhere.json', which leads out of the corpus"):
        load_problems(str(tmp_path), random_graphs=0, min_ops=1, max_ops=100)


def test_names_that_no_file_can_have_are_missing_files(tmp_path: Path) -> None:
    entry = {"name": "a", "file": "a" * 5000, "num_ops": 40, "split": "train"}
    (tmp_path / "manifest.json").write_text(json.dumps({"graphs": [entry]}))
    found = load_problems(str(tmp_path), random_graphs=0, min_ops=1, max_ops=100)
    assert found.train == []
    for name in ("a" * 5000, "a" * 5000 + ".onnx", "a" * 5000 + ".json", "hf:" + "a" * 5000):
        with pytest.raises(gdp.ModelError):
            gdp.load(name)
