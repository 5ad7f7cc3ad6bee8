"""Plans with a small model that drafts tokens: `gdp.serve(draft=)` and `gdp place --draft`."""

import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gdp
from gdp.api.traffic.drafting import Draft, parse_draft
from gdp.base.units import format_bytes
from gdp.cli.main import cli
from gdp.placement.placement import DraftModel
from gdp.question.result import ServedPlan
from gdp.sim.serving import Drafting, ServingEngine, serve
from gdp.sim.traffic import Arrival, Traffic
from gdp.targets.vllm.export import VllmOptions
from tests.generating_configs import generating_config

ENGINE = ServingEngine(0.010, 0.001, 1e-5, 64, 8, math.inf)
SMALL = ServingEngine(0.002, 0.0001, 1e-6, 64, 8, math.inf)


def test_tokens_of_a_pass_are_those_accepted_in_a_row_and_one_more() -> None:
    """Of two tokens, each accepted half of the time: 0, 1 or 2 of them with 1/2, 1/4, 1/4."""
    assert Drafting.of(2, 0.5, SMALL).written == pytest.approx(1 + 1 / 4 + 2 / 4)
    assert Drafting.of(3, 0.0, SMALL).written == 1.0


def test_a_request_with_drafts_by_hand() -> None:
    """Three tokens drafted, one accepted of each pass in the mean: two of a pass, and 4 passes for
    the 8 tokens behind the first one."""
    drafting = Drafting(3, 2.0, *SMALL[:3])
    (request,) = Traffic((Arrival(0.0, 20, 9),)).requests
    served = serve(Traffic((request,)), ENGINE._replace(drafting=drafting))
    reads = max(0.010, 0.001 * 20) + 0.0001 * 20
    contexts = [21 + 2 * i for i in range(4)]
    passes = [
        max(0.010, 0.001 * (1 + 3)) + 1e-5 * c + 3 * (max(0.002, 0.0001) + 1e-6 * c)
        for c in contexts
    ]
    assert served.first_token.mean_s == pytest.approx(reads)
    assert served.request.mean_s == pytest.approx(reads + sum(passes))
    assert served.token.mean_s == pytest.approx(sum(passes) / 8)


def test_drafts_that_are_never_accepted_cost_their_passes() -> None:
    plain = Traffic(tuple(Arrival(0.01 * i, 16, 12) for i in range(6)))
    alone = serve(plain, ENGINE)
    drafted = serve(plain, ENGINE._replace(drafting=Drafting.of(2, 0.0, SMALL)))
    assert drafted.request.mean_s > alone.request.mean_s
    free = Drafting(2, 1.0, 0.0, 0.0, 0.0)
    same = serve(plain, ENGINE._replace(drafting=free, token_s=0.0))
    assert same == serve(plain, ENGINE._replace(token_s=0.0))


def test_many_requests_wait_for_arithmetic_where_one_waits_for_weights() -> None:
    """Drafting gains for one client, and loses where a pass checks more tokens than it has time."""
    drafting = Drafting.of(4, 0.5, SMALL._replace(step_s=0.001))
    gains = []
    for clients in (1, 8):
        traffic = Traffic(tuple(Arrival(0.0, 4, 40) for _ in range(4 * clients)), clients)
        engines = ENGINE._replace(token_s=0.002), ENGINE._replace(token_s=0.002, drafting=drafting)
        alone, drafted = (serve(traffic, engine) for engine in engines)
        gains.append(alone.request.mean_s / drafted.request.mean_s)
    assert gains[0] > 1.2
    assert gains[1] < 1.0


@pytest.mark.parametrize(("text", "said"), [
    ("", "must look like"), ("small", "must look like"), ("small,tokens=4", "must look like"),
    ("small,tokens=x,acceptance=0.5", "whole number of tokens"),
    ("small,tokens=4,acceptance=nan", "acceptance of at least 0"),
    ("small,tokens=4,acceptance=1", "below 1"), ("small,tokens=65,acceptance=0.5", "from 1 to 64"),
    ("small,tokens=4,acceptance=0.5,k=1", "must look like"),
    ("small,tokens=4,tokens=5,acceptance=0.5", "tokens is given twice"),
    ("small,tokens=0,acceptance=0.5", "whole number of tokens from 1 to 64"),
])  # fmt: skip
def test_bad_drafts_are_refused(text: str, said: str) -> None:
    with pytest.raises(gdp.ArgumentError, match=said):
        parse_draft(text)


def test_vllm_drafts_with_no_gguf_file() -> None:
    with pytest.raises(gdp.ArgumentError, match="is a configuration"):
        gdp.serve(
            "hf:large", "cpu+h100", "concurrency=1,prompt=64,new=8", draft=Draft("s.gguf", 4, 0.5)
        )


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model, and one of half its layers."""
    pytest.importorskip("transformers")
    paths = []
    for name, layers in (("large", 6), ("small", 1)):
        folder = tmp_path_factory.mktemp(name)
        config = generating_config("llama") | {"num_hidden_layers": layers}
        config |= {"max_position_embeddings": 16384}
        (folder / "config.json").write_text(json.dumps(config))
        paths.append(f"hf:{folder}")
    return paths[0], paths[1]


@pytest.fixture(scope="module")
def plan(configs: tuple[str, str]) -> ServedPlan:
    draft = Draft(configs[1], 3, 0.9)
    return gdp.serve(configs[0], "cpu+t4", "concurrency=1,prompt=64,new=33,requests=3", draft=draft)


def test_the_small_model_is_on_the_same_gpu_with_caches_of_its_own(plan: ServedPlan) -> None:
    alone, drafted = plan.compared_with
    assert drafted.layout == "one GPU, 3 tokens drafted" == plan.layout
    assert alone.request_s is not None
    assert plan.served.request.mean_s < alone.request_s
    assert plan.engine.drafting is not None
    assert plan.engine.drafting.step_s < plan.engine.step_s
    # A layer more keeps a sixth of what the six of the model keep.
    (row,) = (row for row in plan.generation.memory if row.cache_bytes)
    assert row.draft_cache_bytes * 6 == row.cache_bytes
    assert row.draft_bytes > row.draft_cache_bytes
    assert row.free_bytes is not None
    room = row.free_bytes + row.cache_bytes + row.draft_cache_bytes
    of_token = row.cache_bytes / (64 + 33) * 7 / 6
    assert plan.engine.cache_tokens == pytest.approx(room / of_token)
    assert plan.generation.room == room * 6 // (7 * row.cache_bytes)


def test_the_small_model_takes_of_what_the_large_one_leaves(
    configs: tuple[str, str], plan: ServedPlan
) -> None:
    """Its weights are those that it has alone."""
    traffic = "concurrency=1,prompt=64,new=33,requests=3"
    large, small = (gdp.serve(model, "cpu+t4", traffic).generation.memory[1] for model in configs)
    both = plan.generation.memory[1]
    assert both.draft_bytes == small.weights_bytes + small.cache_bytes
    assert large.free_bytes is not None
    assert both.free_bytes == large.free_bytes - both.draft_bytes
    assert plan.generation.memory[0].draft_bytes == 0


def test_the_command_exports_the_draft(
    configs: tuple[str, str], tmp_path: Path, plan: ServedPlan,
    run: Callable[..., tuple[int, str, str]],
) -> None:  # fmt: skip
    path, out = tmp_path / "p.json", tmp_path / "out"
    large, small = configs
    words = ["place", large, "--cluster", "cpu+t4", "--for", "vllm", "-o", str(path), "--json"]
    words += ["--traffic", "concurrency=1,prompt=64,new=33,requests=3"]
    done = CliRunner().invoke(cli, [*words, "--draft", f"{small},tokens=3,acceptance=0.9"])
    assert done.exit_code == 0, done.output
    traffic = json.loads(done.stdout)["traffic"]
    assert traffic["layout"] == plan.layout
    assert traffic["engine"]["drafting"]["tokens"] == 3
    _tells_of_the_draft(path, small, json.loads(done.stdout)["generation"])
    done = CliRunner().invoke(cli, ["export", str(path), "--to", "vllm", "-o", str(out)])
    assert done.exit_code == 0, done.output
    arguments = (out / "arguments.txt").read_text().split()
    told = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert told["--speculative-config.model"] == small.removeprefix("hf:")
    assert told["--speculative-config.num_speculative_tokens"] == "3"
    assert told["--speculative-config.draft_tensor_parallel_size"] == "1"
    page = CliRunner().invoke(
        cli, ["report", str(path), "--traffic", "concurrency=1,prompt=64,new=33", "-o",
              str(tmp_path / "p.html")],
    )  # fmt: skip
    assert page.exit_code == 1
    assert "of a model with a draft model" in str(page.exception)
    code, _, err = run("place", large, "--draft", f"{small},tokens=3,acceptance=0")
    assert code == 2
    assert "--draft is for .gguf models" in err
    assert "requests of --traffic" in err


def _tells_of_the_draft(path: Path, small: str, answer: dict[str, Any]) -> None:
    """The file of the placement, `gdp explain`, `gdp simulate` and the page have its memory."""
    assert json.loads(path.read_text())["question"]["draft"] == {"model": small, "tokens": 3}
    assert answer["draft"] == {"model": small, "tokens": 3}
    draft_bytes = answer["memory"][1]["draft_bytes"]
    assert draft_bytes > 0
    for verb in ("explain", "simulate"):
        told = json.loads(CliRunner().invoke(cli, [verb, str(path), "--json"]).stdout)
        rows = told["generation"]["memory"]
        assert [row["draft_bytes"] for row in rows] == [0, draft_bytes]
    text = CliRunner().invoke(cli, ["explain", str(path)]).stdout
    assert f"of 3 tokens an iteration by {small} on t4" in " ".join(text.split())
    assert format_bytes(draft_bytes) in text
    page = path.with_suffix(".html")
    assert CliRunner().invoke(cli, ["report", str(path), "-o", str(page)]).exit_code == 0
    assert f'<td data-label="draft">{format_bytes(draft_bytes)}</td>' in page.read_text()


def test_older_files_hold_the_small_model_as_a_text(
    configs: tuple[str, str], tmp_path: Path, plan: ServedPlan
) -> None:
    path = tmp_path / "p.json"
    gdp.save_placement(plan.result.placement, path)
    plain = json.loads(path.read_text())
    plain["question"]["draft"] = f"3 {configs[1]}"
    path.write_text(json.dumps(plain))
    record = gdp.load_placement(path).question
    assert record is not None
    assert record.draft == record.draft_model == DraftModel(configs[1], 3)
    for text in ("x small", "3 ", "65 small", "small"):
        plain["question"]["draft"] = text
        path.write_text(json.dumps(plain))
        with pytest.raises(gdp.PlacementError, match="must be an object such as"):
            gdp.load_placement(path)
    for bad in ({"model": "a", "tokens": 0}, {"model": "a", "tokens": 3, "k": 1}, {"tokens": 3}):
        plain["question"]["draft"] = bad
        path.write_text(json.dumps(plain))
        with pytest.raises(gdp.PlacementError, match="draft"):
            gdp.load_placement(path)


@pytest.mark.parametrize("name", ["python:canary_module:f", "hf:python:canary_module:f"])
def test_no_code_drafts(
    name: str, tmp_path: Path, plan: ServedPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a small model is that of a configuration, in a file as everywhere."""
    (tmp_path / "canary_module.py").write_text("f = lambda: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    gdp.save_placement(plan.result.placement, "p.json")
    plain = json.loads(Path("p.json").read_text())
    plain["question"]["draft"]["model"] = name
    Path("p.json").write_text(json.dumps(plain))
    done = CliRunner().invoke(cli, ["explain", "p.json"])
    assert isinstance(done.exception, gdp.ModelError), done.output
    assert "canary_module" in str(done.exception)
    assert "canary_module" not in sys.modules


@pytest.mark.parametrize("model", [
    "x --trust-remote-code", "--trust-remote-code", "hf:--trust-remote-code", "", "a\nb",
])  # fmt: skip
def test_a_file_adds_no_arguments(model: str) -> None:
    options = VllmOptions((2,), (0,), 0.9, 64, draft=DraftModel(model, 3))
    with pytest.raises(gdp.PlacementError, match="must have no spaces"):
        options.arguments()


@pytest.mark.parametrize(("scheme", "method"), [
    ("?quantize=nf4", "bitsandbytes"), ("?batch=1&quantize=fp8", "fp8"), ("?quantize=none", None),
    ("", None), ("?quantize=int4", None),
])  # fmt: skip
def test_weights_of_a_draft_are_stored_as_the_plan_has_them(
    scheme: str, method: str | None
) -> None:
    options = VllmOptions((2,), (0,), 0.9, 64, draft=DraftModel(f"hf:small{scheme}", 3))
    words = options.arguments()
    told = dict(itertools.pairwise(words)).get("--speculative-config.quantization")
    assert (told, "small" in words) == (method, True)
    assert ("checkpoint" in options.why().get("draft", "")) == ("int4" in scheme)


def test_a_draft_without_room_leaves_the_model_alone(configs: tuple[str, str]) -> None:
    cluster = gdp.Cluster.load("cpu+t4")
    small = Path(__file__).parents[2] / "examples" / "llama-7b"
    draft = Draft(f"hf:{small}", 3, 0.9)
    traffic = "concurrency=64,prompt=8000,new=33,requests=128"
    plan = gdp.serve(configs[0], cluster, traffic, draft=draft)
    assert plan.engine.drafting is None
    assert plan.compared_with[-1].layout == "one GPU with drafts"
    assert "has no room" in plan.compared_with[-1].reason
