"""Questions that a few evaluations answer, which load no compiler."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    ]
    repository = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", ASKING, json.dumps(commands)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": repository},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answered = [line for line in done.stderr.splitlines() if line.startswith(("True", "False"))]
    assert answered == [" ".join(["False", *command]) for command in commands]
