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


def exported(placement: Path, target: str, folder: Path, name: str = "arguments") -> list[str]:
    """The lines of one of the files that an export writes."""
    ran("export", placement, "--to", target, "-o", folder)
    return (folder / f"{name}.txt").read_text().removesuffix("\n").split("\n")


def vllm_lines(placement: Path, model: Path, folder: Path) -> list[str]:
    """The lines for a shell that the export of a placement for vLLM describes."""
    environment = exported(placement, "vllm", folder / "options", "environment")
    arguments = exported(placement, "vllm", folder / "again")
    return [
        f"{variables} vllm serve {model} {words}"
        for variables, words in zip(environment, arguments, strict=True)
    ]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    pytest.importorskip("transformers")
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    return model


def test_llama_cpp_starts_with_the_flags_of_the_plan(tmp_path: Path) -> None:
    model, placed = write_gguf(tmp_path / "a model.gguf"), tmp_path / "p.json"
    place = ("place", model, "--for", "llamacpp", "--cluster", "cpu+2xrtx4090")
    request = ("--generate", "prompt=64,new=16")
    (start,) = json.loads(ran(*place, *request, "--json", "-o", placed))["start"]
    (flags,) = exported(placed, "llamacpp", tmp_path / "flags")
    command = f"llama-server --model '{model}' {flags}"
    assert start == {"command": command, "machine": "", "role": ""}
    assert f"start: {start['command']}\n" in ran(*place, *request)


@pytest.mark.parametrize("traffic", [False, True])
def test_vllm_starts_with_the_options_of_the_plan(
    tmp_path: Path, config: Path, *, traffic: bool
) -> None:
    placed = tmp_path / "p.json"
    sizes = ("--traffic", "concurrency=4,prompt=64,new=16", "--no-disaggregation")
    request = sizes if traffic else ("--generate", "prompt=64,new=16")
    place = ("place", f"hf:{config}", "--for", "vllm", "--cluster", "cpu+2xh100-nvlink", *request)
    starts = json.loads(ran(*place, "--json", "-o", placed))["start"]
    assert [start["command"] for start in starts] == vllm_lines(placed, config, tmp_path)
    assert all("CUDA_VISIBLE_DEVICES=" in start["command"] for start in starts)


def test_answers_without_an_engine_start_nothing(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    answer = ran("place", model, "--cluster", "2xcpu-core", "--method", "single", "--json")
    assert "start" not in json.loads(answer)
