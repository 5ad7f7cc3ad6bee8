"""SGLang's flags: the layout that vLLM's options say, in its own words."""

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from gdp.cli.main import cli
from gdp.targets.sglang.export import arguments, environment, why
from gdp.targets.vllm.export import VllmOptions

MIXTURE = VllmOptions((3, 1), tuple(range(8)), 0.9, 4096, at_once=2048, tensor=2, data=2,
                      experts=True)  # fmt: skip


def test_every_size_of_a_layout_is_a_flag_with_a_reason() -> None:
    assert arguments(MIXTURE) == [
        "--tp-size", "2", "--pp-size", "2", "--dp-size", "2", "--ep-size", "2",
        "--context-length", "4096", "--chunked-prefill-size", "2048",
    ]  # fmt: skip
    assert environment(MIXTURE) == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "SGLANG_PP_LAYER_PARTITION": "3,1",
    }  # fmt: skip
    told = {*environment(MIXTURE), *arguments(MIXTURE)[::2]}
    assert set(why(MIXTURE)) == told | {"status"}


def test_weights_that_it_does_not_quantise_itself_are_asked_for() -> None:
    fp8, nf4 = (VllmOptions((4,), (0,), 0.9, 64, quantize=scheme) for scheme in ("fp8", "nf4"))
    assert arguments(fp8)[-2:] == ["--quantization", "fp8"]
    assert "--quantization" not in arguments(nf4)
    assert "stored as nf4" in why(nf4)["model"]
    assert "SGLANG_PP_LAYER_PARTITION" not in environment(fp8)


def test_from_a_plan_for_vllm_to_the_flags_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    placement, folder = str(tmp_path / "p.json"), tmp_path / "serve"
    for command in (
        ["place", f"hf:{tmp_path}", "--generate", "prompt=8,new=4", "--cluster", "cpu+2xt4-pcie4",
         "--for", "vllm", "-o", placement],
        ["export", placement, "--to", "sglang", "-o", str(folder)],
    ):  # fmt: skip
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.output
    words = shlex.split((folder / "arguments.txt").read_text())
    flags = dict(zip(words[::2], words[1::2], strict=True))
    gpus = (folder / "environment.txt").read_text().split()[1].partition("=")[2].split(",")
    sizes = (int(flags[f"--{kind}-size"]) for kind in ("tp", "pp", "dp"))
    assert len(gpus) == next(sizes) * next(sizes) * next(sizes)
    assert int(flags["--context-length"]) >= 12
    assert "SGLang was not run with this" in done.output
