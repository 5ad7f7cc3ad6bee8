"""Twelve questions of public threads about several models on one box, and gdp's answers.

    python -m benchmarks.shared_boxes [NAME ...]

Sizes of models and machines are those of the threads; where a thread names none, they are what is
usual, and said in `docs/worked-examples.md`, which has arithmetic by hand beside each. GGUF files
are headers with holes for weights; configurations are small files without weights.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

import gdp
from benchmarks.measured_world.llama import size_of, write_header
from gdp.base.errors import GdpError
from gdp.cli.box import box_text

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "tinyllama-1.1b": {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
        "max_position_embeddings": 2048},
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192},
    "mistral-7b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
        "max_position_embeddings": 32768},
    "deepseek-coder-6.7b": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32256,
        "max_position_embeddings": 16384},
}  # fmt: skip
"""Llama-like models in bfloat16, by their published sizes."""


class Asked(NamedTuple):
    """One question: models by name of a table, with their options, and the machine."""

    thread: str
    models: tuple[dict[str, Any], ...]
    devices: tuple[str, ...]  # `[[device]]` tables of the machine's file


def gguf(model: str, kind: str, name: str, context: int, **more: Any) -> dict[str, Any]:
    """A model of llama.cpp."""
    return {"gguf": (model, kind), "name": name, "context": context, **more}


def served(config: str, name: str, traffic: str, **more: Any) -> dict[str, Any]:
    """A model of vLLM."""
    return {"config": config, "name": name, "traffic": traffic, **more}


def given(name: str, memory: str, **more: Any) -> dict[str, Any]:
    """A server that gdp does not plan."""
    own = {"seconds": 1.0, "traffic": "rate=0.05,prompt=1,new=1,requests=50"}
    return {"spec": name, "name": name, "engine": "other", "memory": memory, **own, **more}


def card(preset: str, name: str, **more: Any) -> str:
    """A `[[device]]`."""
    lines = [f'name = "{name}"', f'preset = "{preset}"']
    return "\n".join(["[[device]]", *lines, *(f"{k} = {json.dumps(v)}" for k, v in more.items())])


CPU = card("cpu", "cpu")
DEMAND = {"residence": "on demand"}
EIGHT = (
    gguf("Qwen3-32B", "Q4_K_M", "chat", 16384, weight=3, within={"ttft": "4s", "tpot": "60ms"}),
    gguf("Qwen2.5-Coder-32B", "Q4_K_M", "coder", 16384, residence="on demand", weight=2),
    gguf("Qwen3-30B", "Q4_K_M", "agent", 32768, residence="idle after 5 min", weight=2),
    gguf("qwen2-5-1-5b", "Q8_0", "fim", 4096, traffic="rate=1,prompt=1024,new=16,requests=100",
         within={"ttft": "500ms"}),
    gguf("qwen3 8B", "Q4_K_M", "embedder", 4096, traffic="rate=1,prompt=512,new=1,requests=100"),
    gguf("qwen3 8B", "Q8_0", "reranker", 4096, residence="on demand",
         traffic="rate=0.2,prompt=1024,new=1,requests=50"),
    given("whisper", "4GiB", seconds=2.0), given("images", "9GiB", seconds=8.0),
)  # fmt: skip
"""Eight models of a household."""
ASKED: Mapping[str, Asked] = {
    "eight-on-six": Asked(
        "eight models on three 3090, two 3060 and a 4090",
        EIGHT,
        (CPU, card("rtx4090", "gpu0"), *(card("rtx3090", f"gpu{k}") for k in (1, 2, 3)),
         *(card("rtx3060", f"gpu{k}") for k in (4, 5)))),
    "ollama-11810": Asked(
        "two cards of 40 GB and more, two applications with qwen3:14b (10 GB): one copy or two?",
        (gguf("qwen3 14B", "Q4_K_M", "app-a", 8192), gguf("qwen3 14B", "Q4_K_M", "app-b", 8192)),
        (CPU, card("rtx6000-ada", "gpu0"), card("rtx6000-ada", "gpu1"))),
    "ollama-16391": Asked(
        "chat of 27B in 8 bits and an embedder of 8B; a card of 48 GB and one of 16 GB",
        (gguf("Qwen3.6-27B", "Q8_0", "chat", 32768, weight=3),
         gguf("qwen3 8B", "Q4_K_M", "embedder", 8192,
              traffic="rate=0.5,prompt=512,new=1,requests=100")),
        (CPU, card("rtx6000-ada", "gpu0"), card("rtx3070", "gpu1", memory_bytes="16GiB"))),
    "ollama-6950": Asked(
        "72B in 6 bits over four 3090, and an 8B that shall not evict it",
        (gguf("llama 3 70B", "Q6_K", "large", 8192, weight=3),
         gguf("llama 3 8B", "Q4_0", "small", 4096)),
        (card("cpu-server", "cpu", memory_bytes="755GiB"),
         *(card("rtx3090", f"gpu{k}") for k in range(4)))),
    "ollama-7041": Asked(
        "a 4060 of 16 GB and 64 GB of memory: the second model on the processor?",
        (gguf("qwen3 14B", "Q4_K_M", "first", 8192, weight=2),
         gguf("llama 3 8B", "Q8_0", "second", 8192)),
        (CPU, card("rtx4060ti", "gpu0"))),
    "ollama-1656": Asked(
        "a 3090 and a 2060: a model of 10.7B in 4 bits on one card or on both?",
        (gguf("llama 13B", "Q4_0", "solar", 4096),),
        (CPU, card("rtx3090", "gpu0"),
         card("rtx2080", "gpu1", memory_bytes="6GiB", bytes_per_s=336e9))),
    "ollama-11986": Asked(
        "Llama 3.3 70B in 8 bits and a 24B on two H200: split or not?",
        (gguf("llama 3 70B", "Q8_0", "large", 8192),
         gguf("Mistral-Small-24B", "Q8_0", "mid", 8192)),
        (card("cpu-server", "cpu"), card("h200", "gpu0"), card("h200", "gpu1"))),
    "ollama-8430": Asked(
        "two 3060 of 12 GB, an image server of 7.2 GB on the second, gemma3 12B of 14.9 GB",
        (given("images", "7.2GiB", devices=["gpu1"]),
         gguf("mistral3 14B", "Q4_K_M", "chat", 24576, weight=2)),
        (CPU, card("rtx3060", "gpu0"), card("rtx3060", "gpu1"))),
    "llama-swap-158": Asked(
        "four cards: fill-in-the-middle, a small chat, a large chat on two, another on three",
        (gguf("qwen2-5-1-5b", "Q8_0", "fim", 8192),
         gguf("qwen3 8B", "Q8_0", "small", 16384, **DEMAND),
         gguf("llama 3 70B", "Q4_K_M", "large", 8192, **DEMAND),
         gguf("llama 3 70B", "Q6_K", "larger", 8192, **DEMAND)),
        (CPU, *(card("rtx3090", f"gpu{k}") for k in range(4)))),
    "llama-swap-319": Asked(
        "24 GB and more models than fit: which may be loaded at once?",
        (gguf("Mistral-Small-24B", "Q4_K_M", "chat", 8192, **DEMAND),
         gguf("Qwen2.5-Coder-32B", "Q4_K_M", "coder", 8192, **DEMAND),
         gguf("qwen2-5-1-5b", "Q8_0", "embedder", 2048,
              traffic="rate=0.5,prompt=512,new=1,requests=100")),
        (CPU, card("rtx3090", "gpu0"))),
    "vllm-2193": Asked(
        "Mistral 7B and deepseek-coder 6.7B on one A100 of 80 GB",
        (served("mistral-7b", "chat", "concurrency=8,prompt=1024,new=256"),
         served("deepseek-coder-6.7b", "coder", "concurrency=8,prompt=1024,new=256")),
        (card("cpu-server", "cpu"), card("a100", "gpu0"))),
    "vllm-13633": Asked(
        "two to five small models on one H100",
        tuple(served("llama-8b", f"tune-{k}", "rate=1,prompt=512,new=128,requests=200",
                     within={"ttft": "2s", "tpot": "60ms"}) for k in range(3)),
        (card("cpu-server", "cpu"), card("h100", "gpu0"))),
    "vllm-14376": Asked(
        "TinyLlama twice on one L40S of 48 GB, with 20% each",
        (served("tinyllama-1.1b", "first", "concurrency=4,prompt=512,new=128", context=1024),
         served("tinyllama-1.1b", "second", "concurrency=4,prompt=512,new=128", context=1024)),
        (card("cpu-server", "cpu"), card("l40s", "gpu0"))),
}  # fmt: skip


def entries(asked: Asked, folder: Path) -> list[dict[str, Any]]:
    """The models of a question, with their files in a folder."""
    made = []
    for model in asked.models:
        own = dict(model)
        if "gguf" in own:
            name, kind = own.pop("gguf")
            path = folder / f"{name}-{kind}.gguf".replace(" ", "-")
            size = size_of(name)
            assert size is not None
            if not path.exists():
                write_header(path, size, kind)
            own["spec"] = str(path)
        if "config" in own:
            path = folder / own["config"]
            path.mkdir(exist_ok=True)
            document = {
                "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
                **CONFIGS[own.pop("config")],
            }  # fmt: skip
            (path / "config.json").write_text(json.dumps(document))
            own["spec"] = f"hf:{path / 'config.json'}"
        made.append(own)
    return made


def answered(name: str, folder: Path) -> str:
    """The text of an answer, or the sentence of a refusal."""
    asked, machine = ASKED[name], folder / f"{name}.toml"
    machine.write_text("\n".join(asked.devices) + "\n")
    try:
        answer = gdp.place_models(entries(asked, folder), machine)
        seconds = f"{answer.plans} plans in {answer.pricing_s:.1f} s, packed in "
        return f"{box_text(answer)}\n{seconds}{answer.packing_s:.1f} s"
    except GdpError as error:
        return str(error)


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
def main(names: tuple[str, ...]) -> None:
    """Print the answers."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names or ASKED:
            click.echo(f"== {name}: {ASKED[name].thread}")
            click.echo(answered(name, Path(folder)).replace(folder, "."))
            click.echo("")


if __name__ == "__main__":
    main()
