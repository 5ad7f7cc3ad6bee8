"""Answers for engines hold the commands that start them, as exports write them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from gguf_models import write_gguf
from test_without_compiler import CONFIG

from gdp.cli.main import cli


def ran(*words: object) -> str:
    done = CliRunner().invoke(cli, [*map(str, words)])
    assert done.exit_code == 0, done.output
    return done.stdout


def exported(placement: Path, target: str, folder: Path) -> str:
    """The lines of arguments that an export writes."""
    ran("export", placement, "--to", target, "-o", folder)
    return (folder / "arguments.txt").read_text().strip()


def test_llama_cpp_starts_with_the_flags_of_the_plan(tmp_path: Path) -> None:
    model, placed = write_gguf(tmp_path / "a model.gguf"), tmp_path / "p.json"
    place = ("place", model, "--for", "llamacpp", "--cluster", "cpu+2xrtx4090")
    request = ("--generate", "prompt=64,new=16")
    (start,) = json.loads(ran(*place, *request, "--json", "-o", placed))["start"]
    flags = exported(placed, "llamacpp", tmp_path / "flags")
    assert start == {"command": f"llama-server --model '{model}' {flags}", "machine": ""}
    assert f"start: {start['command']}\n" in ran(*place, *request)


@pytest.mark.parametrize("traffic", [False, True])
def test_vllm_starts_with_the_options_of_the_plan(tmp_path: Path, *, traffic: bool) -> None:
    pytest.importorskip("transformers")
    model, placed = tmp_path / "tiny", tmp_path / "p.json"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    sizes = ("--traffic", "concurrency=4,prompt=64,new=16", "--no-disaggregation")
    request = sizes if traffic else ("--generate", "prompt=64,new=16")
    place = ("place", f"hf:{model}", "--for", "vllm", "--cluster", "cpu+2xh100-nvlink", *request)
    starts = json.loads(ran(*place, "--json", "-o", placed))["start"]
    lines = exported(placed, "vllm", tmp_path / "options").splitlines()
    assert len(starts) == len(lines)
    for start, arguments in zip(starts, lines, strict=True):
        assert start["command"].endswith(f" vllm serve {model} {arguments}")
        assert "CUDA_VISIBLE_DEVICES=" in start["command"]


def test_answers_without_an_engine_start_nothing(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    answer = ran("place", model, "--cluster", "2xcpu-core", "--method", "single", "--json")
    assert "start" not in json.loads(answer)
