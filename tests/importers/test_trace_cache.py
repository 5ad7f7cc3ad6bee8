"""A configuration is traced once; every verb after that reads the trace."""

import ast
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers", reason="transformers is not installed")

from gdp.cli.main import cli
from gdp.graph.file import encode_graph
from gdp.importers.pytorch import model
from gdp.importers.pytorch.trace_cache import code_files
from gdp.question.models import load

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Counts traces, which are cached in a folder of the test."""
    monkeypatch.setenv("GDP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GDP_KEEP_TRACES", "1")
    made: list[object] = []
    export = model.exported

    def counted(*args: Any, **named: Any) -> Any:
        made.append(args)
        return export(*args, **named)

    monkeypatch.setattr(model, "exported", counted)
    return made


def written(folder: Path, **changed: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changed))
    return f"hf:{folder}?sequence=8"


def test_verbs_trace_once_and_see_one_graph(traces: list[object], tmp_path: Path) -> None:
    asked, placement = written(tmp_path / "m"), str(tmp_path / "p.json")
    cluster = ["--cluster", "cpu+2xt4-pcie4"]
    first = load(asked)
    assert len(traces) == 1
    for words in (
        ["place", asked, *cluster, "--method", "single", "--for", "accelerate", "-o", placement],
        ["inspect", asked, "--json"],
        ["simulate", asked, placement, *cluster],
        ["report", placement, "--model", asked, *cluster, "-o", str(tmp_path / "r.html")],
        ["explain", placement, "--model", asked, *cluster, "--scope", "lm_head"],
        ["export", placement, "--model", asked, *cluster, "--to", "accelerate",
         "-o", str(tmp_path / "map")],
    ):  # fmt: skip
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
    assert len(traces) == 1
    assert load(asked).digest == first.digest
    assert load(written(tmp_path / "elsewhere")).digest == first.digest
    assert len(traces) == 1


def test_what_a_trace_depends_on_is_traced_anew(
    traces: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = written(tmp_path / "m")
    first = load(asked)
    assert load(f"{asked}&batch=2").digest != first.digest
    assert load(written(tmp_path / "n", intermediate_size=64)).digest != first.digest
    assert len(traces) == 3
    monkeypatch.setattr("gdp.importers.pytorch.trace_cache._versions", lambda: ["torch 0"])
    assert load(asked).digest == first.digest
    assert len(traces) == 4
    monkeypatch.setattr("gdp.importers.pytorch.trace_cache._code", lambda: "of another importer")
    assert load(asked).digest == first.digest
    assert len(traces) == 5
    monkeypatch.setenv("GDP_KEEP_TRACES", "0")
    assert load(asked).digest == first.digest
    assert len(traces) == 6


def test_all_code_that_shapes_a_trace_names_it() -> None:
    """The importer, and what it imports: beside them stand errors, files and machines."""
    root = Path(model.__file__).parents[2]
    reached, left = set[Path](), [root / "importers/huggingface/model.py"]
    while left:
        path = left.pop()
        if path in reached or not path.is_file():
            continue
        reached.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gdp."):
                module = root.parent / str(node.module).replace(".", "/")
                left += [module.with_suffix(".py"), *(module / f"{a.name}.py" for a in node.names)]
    beside = {path.relative_to(root).as_posix() for path in reached - {*code_files()}}
    rooms = {"/".join(part.removesuffix(".py").split("/")[:2]) for part in beside}
    assert {room for room in rooms if not room.startswith("cluster/")} == {
        "base/clock", "base/errors", "base/files", "base/kernels", "base/terminal", "base/version",
    }  # fmt: skip


@pytest.mark.parametrize("damage", [b"", b"x" * 100, None])
def test_a_damaged_trace_is_ignored_and_written_again(
    damage: bytes | None, traces: list[object], tmp_path: Path
) -> None:
    asked = written(tmp_path / "m")
    first = load(asked)
    paths = sorted((tmp_path / "cache" / "traces").iterdir())
    whole = [path.read_bytes() for path in paths]
    assert len(paths) == 2  # the trace, and its program with dense weights
    for path, data in zip(paths, whole, strict=True):
        path.write_bytes(data[:-7] if damage is None else damage)
    assert load(asked).digest == first.digest
    assert [path.read_bytes() for path in paths] == whole
    assert load(asked).digest == first.digest
    assert len(traces) == 2


def test_a_kept_trace_says_what_was_assumed(
    traces: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load(written(tmp_path / "m"))
        found.append(caplog.messages)
    assert found[0] == found[1]
    assert len(traces) == 1


def test_stages_are_told_before_torch_is_imported(traces: list[object], tmp_path: Path) -> None:
    from gdp.base.terminal import listening

    said: list[str] = []
    with listening(said.append):
        load(written(tmp_path / "m"))
        assert [text.split()[0] for text in said] == ["importing", "building", "tracing"]
        load(written(tmp_path / "m"))
    assert len(said) == 3


def test_another_scheme_traces_nothing(
    traces: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = written(tmp_path / "m")
    load(asked)
    assert len(traces) == 1
    kept = [load(f"{asked}&quantize={scheme}") for scheme in ("nf4", "int8")]
    by_file = load(written(tmp_path / "q", quantization_config={
        "quant_method": "bitsandbytes", "load_in_4bit": True,
    }))  # fmt: skip
    assert len(traces) == 1
    assert kept[0].weight_bytes.sum() == by_file.weight_bytes.sum() < kept[1].weight_bytes.sum()
    monkeypatch.setenv("GDP_KEEP_TRACES", "0")
    anew = load(f"{asked}&quantize=nf4")
    assert len(traces) == 2
    assert encode_graph(anew) == encode_graph(kept[0])


@pytest.mark.slow
def test_a_longer_answer_traces_the_step_alone(traces: list[object], tmp_path: Path) -> None:
    asked = written(tmp_path / "m").partition("?")[0]
    first = load(f"{asked}?prompt=6&new=3")
    assert len(traces) == 2
    longer = load(f"{asked}?prompt=6&new=9")
    assert len(traces) == 3
    assert longer.cache_bytes.sum() * 9 == first.cache_bytes.sum() * 15  # 15 tokens for 9
    load(f"{asked}?prompt=6&new=9&quantize=nf4")
    assert len(traces) == 3
