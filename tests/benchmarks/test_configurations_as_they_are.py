"""Benchmarks ask what a user asks: configurations are read as their authors published them."""

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measured_world.engines import (
    SPREAD,
    has_room,
    median_pass_s,
    mlenergy_steps,
    pilot_steps,
    predicted,
    told,
)
from benchmarks.measured_world.serving import SCHEMES, configuration, plan_of, spec_of
from benchmarks.measured_world.serving_runs import Run
from gdp.base.errors import ModelError
from gdp.cluster.file import load_cluster
from gdp.importers.huggingface.spec import parse_config_spec
from gdp.importers.pytorch.quantised import QUANTIZE
from gdp.sim.serving import ServingEngine
from tests.generating_configs import DENSE

SOURCES = sorted((Path(__file__).resolve().parents[2] / "benchmarks").rglob("*.py"))
RUN = Run("r", "o/m", "h100_sxm", "vllm", "", 16, 8, 2, 0.05, 0.01)


def _calls(tree: ast.AST, *names: str) -> list[ast.Call]:
    """Calls of functions or methods of these names."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            found += [node] if name in names else []
    return found


def _writers(tree: ast.AST) -> list[ast.FunctionDef]:
    """Functions that write the file that transformers reads."""
    return [
        node for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(n, ast.Constant) and n.value == "config.json" for n in ast.walk(node))
        and _calls(node, "write_text", "write_bytes", "write_atomic", "dump")
    ]  # fmt: skip


def _reads_documents(tree: ast.AST) -> list[ast.Call]:
    """Reads of JSON, but of text that was made on the same line."""
    loads = [
        call for call in _calls(tree, "load", "loads", "decode")
        if isinstance(call.func, ast.Attribute) and "json" in ast.unparse(call.func)
    ]  # fmt: skip
    return [call for call in loads if not _calls(ast.Tuple(call.args, ast.Load()), "dumps")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_benchmark_writes_a_configuration_that_it_has_read(path: Path) -> None:
    """Who writes config.json makes all of it from a table of its own: the function reads no JSON,
    and its module names no published configuration."""
    text = path.read_text()
    for writer in _writers(ast.parse(text)):
        assert not _reads_documents(writer), f"{writer.name} reads, changes and writes"
        assert "model_configs" not in text, f"{writer.name} writes beside published files"
        assert "_config.json" not in text, f"{writer.name} writes beside published files"


def _publish(folder: Path, **more: object) -> bytes:
    """A published configuration, with spaces that no program would write again."""
    document = {**DENSE, "model_type": "llama", "architectures": ["LlamaForCausalLM"], **more}
    text = json.dumps(document, indent=3).replace(": ", " :  ") + "\n\n"
    (folder / "o--m_config.json").write_text(text)
    return text.encode()


@pytest.mark.parametrize("precision", SCHEMES)
@pytest.mark.parametrize("own", [None, "fp8", "mxfp4", "compressed-tensors"])
def test_a_row_asks_for_the_very_file(tmp_path: Path, precision: str, own: str | None) -> None:
    more = {"quantization_config": {"quant_method": own}} if own else {}
    published = _publish(tmp_path, **more)
    spec = parse_config_spec(f"hf:{spec_of(replace(RUN, precision=precision), [tmp_path])}")
    assert Path(spec.path) == tmp_path / "o--m_config.json"
    assert Path(spec.path).read_bytes() == published
    assert spec.quantize in ("", *QUANTIZE)
    if own == "mxfp4":
        assert spec.quantize in ("", "fp8", "w8a8", "w4a16")  # never NVFP4
    assert [path.name for path in tmp_path.iterdir()] == ["o--m_config.json"]


@pytest.mark.slow
def test_a_configuration_without_a_type_is_planned_as_it_is(tmp_path: Path) -> None:
    """Without `dtype` weights have the 16 bits that an engine loads, not twice as many."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    plans = []
    for more in ({}, {"dtype": "bfloat16"}):
        published = _publish(tmp_path, **more)
        spec = configuration("o/m", [tmp_path])
        assert spec is not None
        plans.append(plan_of(spec, load_cluster("cpu+h100"), RUN).answer)
        assert Path(spec).read_bytes() == published
    assert plans[0].memory == plans[1].memory
    assert plans[0].token_s == plans[1].token_s


def test_a_precision_or_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no configuration of o/m"):
        spec_of(RUN, [tmp_path])
    _publish(tmp_path)
    with pytest.raises(ModelError, match="no precision 'fp6'"):
        spec_of(replace(RUN, precision="fp6"), [tmp_path])


MLENERGY = (
    "model,task,gpu,gpus,tensor,expert,data,batch_mean,new_tokens_mean,tokens_per_s,itl_ms_median"
)
PILOT = (
    "model,gpu,gpus,users,prompt_tokens_mean,new_tokens_mean,tokens_per_s,itl_ms_median,itl_ms_mean"
)


ENGINE = ServingEngine(0.010, 1e-4, 0.0, 8192, 1000, math.inf, launch_s=0.050)


@pytest.mark.parametrize(
    ("batch", "seconds"),
    [
        (50, 0.010),  # half a request begins in a pass: most have no prompt
        (100, 0.050),  # one does, whose kernels are launched one by one
        (600, 0.120),  # six prompts of 100 tokens beside 600 others, 0.1 ms each
    ],
)
def test_the_median_pass_has_prompts_where_many_begin(batch: int, seconds: float) -> None:
    run = replace(RUN, prompt=100, new=100, batch=batch)
    assert median_pass_s(ENGINE, run) == pytest.approx(seconds)


def test_prompts_that_differ_are_short_in_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of a mean of 100 tokens have fewer in most passes, as few long ones make the mean."""
    run = replace(RUN, prompt=100, new=100, batch=600)
    monkeypatch.setitem(SPREAD, RUN.name, 2.0)
    assert 0.080 < median_pass_s(ENGINE, run) < 0.110


def test_requests_have_room_where_caches_hold_their_mean_lengths() -> None:
    run = replace(RUN, prompt=100, new=100, batch=4)
    assert has_room(ENGINE._replace(cache_tokens=600.0), run)
    assert not has_room(ENGINE._replace(cache_tokens=599.0), run)


@pytest.mark.slow
def test_rows_of_engines_are_read_and_answered(tmp_path: Path) -> None:
    """Rows without a told prompt and of data parallel attention are left out; a step is that of
    as many requests as ran."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([
        MLENERGY, "o/m,lm-arena-chat,H100,1,1,1,1,1.98,8,150,12", "o/m,gpqa,H100,2,2,1,1,4,8,400,9",
        "o/m,sourcegraph-fim,H100,1,1,1,1,2,8,150,12", "o/m,gpqa,H100,4,1,4,4,2,8,150,12",
    ]))  # fmt: skip
    one, two = mlenergy_steps(path)
    assert (one.run.prompt, one.run.batch, one.run.token_s) == (634, 2, 0.012)
    assert one.mean_s == pytest.approx(1.98 / 150)
    assert (two.run.prompt, two.run.tensor) == (224, 2)
    _publish(tmp_path, max_position_embeddings=4096)
    spec = configuration("o/m", [tmp_path])
    assert spec is not None
    answers = [predicted(step, spec) for step in (one, two)]
    assert all(answer.step_s > 1e-4 for answer in answers)
    lines = list(told([one, two], answers))
    assert any(line.startswith("| one GPU | 1 |") for line in lines)
    path.write_text(f"{PILOT}\no/m,T4,1,8,100.2,20.4,100,40,40.5\n")
    (pilot,) = pilot_steps(path)
    assert (pilot.run.batch, pilot.run.prompt, pilot.run.new) == (4, 96, 20)
