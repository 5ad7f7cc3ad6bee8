"""Questions that a few evaluations answer, which load no compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_models import write_gguf

ASKING = """
import json, sys
from gdp.cli import program
program.prepare_process()
from gdp.cli.main import cli
for command in json.loads(sys.argv[1]):
    cli(command, standalone_mode=False)
    print("numba" in sys.modules, *command, file=sys.stderr)
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 4096,
}  # fmt: skip


def test_plans_of_vllm_fits_and_predictions_load_no_compiler(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    request, machine = "prompt=64,new=16", ("--cluster", "cpu+2xh100-nvlink")
    place = ["place", "hf:tiny", "--for", "vllm", *machine]
    commands = [
        [*place, "--generate", request, "-o", "p.json"],
        ["simulate", "p.json"],
        ["explain", "p.json"],
        [*place, "--traffic", f"concurrency=4,{request}"],
        ["fit", "hf:tiny", "--for", "vllm", *machine, "--prompt", "64", "--new", "16"],
        ["place", "hf:tiny", "--for", "vllm", "--cluster", "cpu+h100", "--generate", request],
    ]
    load_no_compiler(commands, tmp_path)


def test_plans_and_fits_of_gguf_files_load_no_compiler(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    request = ("--generate", "prompt=64,new=16")
    place = ["place", "tiny.gguf", "--for", "llamacpp", *request]
    commands = [
        [*place, "--cluster", "cpu+rtx4090"],
        [*place, "--cluster", "cpu+2xrtx4090", "-o", "p.json"],
        ["simulate", "p.json"],
        ["explain", "p.json"],
        ["fit", "tiny.gguf", "--cluster", "cpu+rtx4090,cpu+h100", "--prompt", "64", "--new", "16"],
    ]
    load_no_compiler(commands, tmp_path)


def load_no_compiler(commands: list[list[str]], folder: Path) -> None:
    """Run commands in a process of their own and check after each that numba is not loaded."""
    repository = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", ASKING, json.dumps(commands)],
        cwd=folder, env=os.environ | {"PYTHONPATH": repository},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answered = [line for line in done.stderr.splitlines() if line.startswith(("True", "False"))]
    assert answered == [" ".join(["False", *command]) for command in commands]
