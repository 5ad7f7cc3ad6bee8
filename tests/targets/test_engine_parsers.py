"""Command lines that are exported, read by the parsers of vLLM and SGLang themselves."""

import argparse
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from gdp.placement.placement import DraftModel
from gdp.sim.traffic_text import parse_traffic
from gdp.targets.sglang import export as sglang
from gdp.targets.target import ExportJob
from gdp.targets.vllm import plan as vllm
from gdp.targets.vllm.export import VllmOptions

if not any(map(find_spec, ("vllm", "sglang"))):
    pytest.skip("neither vLLM nor SGLang is installed", allow_module_level=True)

ONE = VllmOptions((4,), (0,), 0.9, 4096)
DRAFT = DraftModel("hf:small/model?quantize=fp8", 4)
KINDS = {
    "one GPU": ONE,
    "stages": replace(ONE, partition=(3, 1), gpus=(0, 1), at_once=2048),
    "tensor and data": replace(ONE, gpus=(0, 1, 2, 3), tensor=2, data=2),
    "experts": replace(ONE, gpus=(0, 1), tensor=2, experts=True, mixture=True),
    "types": replace(ONE, quantize="fp8", kv_cache_dtype="fp8", dtype="float16", mixed=True),
    "prefill": replace(ONE, gpus=(0, 1), data=2, role="prefill"),
    "decode": replace(ONE, role="decode"),
    "drafts": replace(ONE, draft=DRAFT, other_words=True),
    "machines": replace(
        ONE, partition=(2, 2), gpus=(0, 0), machines=("first", "second"), port=8000
    ),
}
"""One layout of each kind."""
TRAFFIC = ("concurrency=4,prompt=64,new=8", "rate=2,prompt=64,new=8,requests=20")


def engine(name: str) -> ModuleType:
    """A module of an engine; skips where it, or what it imports, is not installed."""
    return pytest.importorskip(name, reason="the engine is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def vllm_serve() -> Any:
    """The parser of `vllm serve`, whose defaults are those of a device: here of a processor."""
    serve, platforms = engine("vllm.entrypoints.cli.serve"), engine("vllm.platforms")
    platforms.__dict__["current_platform"] = engine("vllm.platforms.cpu").CpuPlatform()
    return serve.make_arg_parser(serve.FlexibleArgumentParser())


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_serve_reads_every_layout(vllm_serve: Any, kind: str) -> None:
    for own in KINDS[kind].commands:
        read = vllm_serve.parse_args(["some/model", *own.arguments()])
        assert read.max_model_len == 4096
        assert read.tensor_parallel_size == own.tensor
        assert read.pipeline_parallel_size == len(own.partition)


@pytest.mark.parametrize("kind", KINDS)
def test_sglang_reads_every_layout(kind: str) -> None:
    server = engine("sglang.srt.server_args")
    parser = argparse.ArgumentParser()
    server.ServerArgs.add_cli_args(parser)
    for own in KINDS[kind].commands:
        read = parser.parse_args(["--model-path", "some/model", *sglang.arguments(own)])
        assert (read.context_length, read.tp_size) == (4096, own.tensor)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A plan of one server."""
    monkeypatch.setattr(vllm, "options_of", lambda _: ONE)
    plan = Mock(ExportJob)
    plan.spec = "hf:some/model/config.json"
    return plan


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_vllm_bench_reads_its_line(job: Any, traffic: str) -> None:
    bench = engine("vllm.benchmarks.serve")
    parser = bench.FlexibleArgumentParser()
    bench.add_cli_args(parser)
    words = shlex.split(vllm.benchmark(job, parse_traffic(traffic), Path("runs/one.json")))
    read = parser.parse_args(words[3:])
    assert words[:3] == ["vllm", "bench", "serve"]
    assert (read.random_input_len, read.random_output_len) == (64, 8)
    assert read.num_prompts == len(parse_traffic(traffic).requests)


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_sglang_bench_reads_its_line(
    job: Any, traffic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(sglang.benchmark(job, parse_traffic(traffic), Path("runs/one.jsonl")))
    bench, seen = engine(words[2]), []
    monkeypatch.setattr(bench, "run_benchmark", seen.append)
    monkeypatch.setattr("sys.argv", words[2:])
    bench.cli_main()
    assert (seen[0].random_input_len, seen[0].random_output_len) == (64, 8)
    assert seen[0].num_prompts == len(parse_traffic(traffic).requests)
