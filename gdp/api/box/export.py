"""Files that start the models of a box: a shell script, llama-swap, ollama, docker compose.

llama-swap starts and stops servers by its `config.yaml` (mostlygeek/llama-swap,
docs/config.example.yaml, config-schema.json): `models` with `cmd`, `env`, `proxy`, `ttl` and
`concurrencyLimit`; `groups` say which of them stop each other: in a group with `swap` one member
runs, groups that are not `exclusive` leave the others alone, members of a `persistent` one are
never stopped by others. Newer versions read groups beside a `matrix`, of which a file has one.
ollama decides itself which card a model is on; what its variables and `num_gpu` can say of the plan
is written. A compose file gives each service its cards by number (Compose Deploy Specification,
`devices`).

YAML is written as JSON in its places, which YAML 1.2 reads.
"""

import json
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

from gdp.api.box.answer import BoxAnswer, PlacedModel
from gdp.api.box.models import OTHER
from gdp.api.box.start import FIRST_PORT
from gdp.base.errors import PlacementError
from gdp.base.files.writing import OverwritePolicy, indented_json, new_contents
from gdp.importers.spec import ModelSpec
from gdp.placement.placement import save_placement

KIND = "engines of a box"
IMAGES = {
    "llamacpp": "ghcr.io/ggml-org/llama.cpp:server-cuda",
    "vllm": "vllm/vllm-openai:latest",
    "sglang": "lmsysorg/sglang:latest",
}
"""Images whose servers take the arguments of the plans."""
SWAP_REQUESTS = 10
"""Requests of a model beyond which llama-swap answers 429 by default (config-schema.json)."""
_PROGRAMS = {"llamacpp": 1, "vllm": 2, "sglang": 0}
"""Words of a command that an image's entry point stands for."""


def export_box(answer: BoxAnswer, output: str | os.PathLike[str], force: bool = False) -> list[str]:
    """Write the files of an answer to a folder; returns their names.

    Raises:
        TargetError: The folder holds anything but such files, unless `force`.
        PlacementError: No model is placed.
    """
    placed = [m for m in answer.models if m.priced is not None]
    if not placed:
        raise PlacementError("no model is placed, so that nothing can be started")
    files = {
        "start.sh": start_script(answer), "llama-swap.yaml": llama_swap(answer),
        "compose.yaml": compose(answer), "ollama.env": ollama(answer),
    }  # fmt: skip
    names = ["box.json", *(name for name, text in files.items() if text)]
    with new_contents(output, KIND, OverwritePolicy(force=force)) as folder:
        (folder / "box.json").write_bytes(indented_json(_finite(answer.to_json())) + b"\n")
        for name, text in files.items():
            if text:
                (folder / name).write_text(text)
        for model in placed:
            if model.priced is not None and model.priced.result is not None:
                names.append(f"{model.model.name}.plan.json")
                save_placement(model.priced.result.placement, folder / names[-1])
    return names


def _finite(value: Any) -> Any:
    """Plain data without infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def start_script(answer: BoxAnswer) -> str:
    """A shell script that starts all models that stay loaded; of a group the first one.

    Engines of vLLM start one after the other: each measures the memory that is free on its cards
    while it starts.
    """
    lines, seen = ["#!/bin/sh"], set[int]()
    if any(m.sm_percent for m in answer.models):
        lines += [
            "# Engines share SMs; echo quit | nvidia-cuda-mps-control ends that.",
            "CUDA_DEVICE_ORDER=PCI_BUS_ID nvidia-cuda-mps-control -d",
        ]
    lines.append("# One engine after the other: each measures its cards.")
    for placed in answer.models:
        if not placed.commands:
            continue
        waits = placed.group is not None and placed.group in seen
        if placed.group is not None:
            seen.add(placed.group)
        note = " (takes turns: llama-swap.yaml starts it when it is asked)" if waits else ""
        lines.append(f"\n# {placed.model.name}{note}")
        for k, command in enumerate(placed.commands):
            lines.append(f"# {command}" if waits else f"{command} &")
            port = _port(answer, placed) + 100 * k
            if not waits and placed.model.engine != OTHER:
                lines.append(
                    f"until curl -sf http://127.0.0.1:{port}/health >/dev/null; do sleep 1; done"
                )
    return "\n".join([*lines, "", "wait", ""])


def _port(answer: BoxAnswer, placed: PlacedModel) -> int:
    return FIRST_PORT + answer.models.index(placed)


def llama_swap(answer: BoxAnswer) -> str:
    """llama-swap's configuration: a group for models that take turns, one for all others."""
    models: dict[str, Any] = {}
    for placed in answer.models:
        if len(placed.commands) != 1:  # several servers are behind a balancer of their own
            continue
        port = _port(answer, placed)
        entry: dict[str, Any] = {"cmd": _bare(placed), "proxy": f"http://127.0.0.1:{port}"}
        if placed.environment:
            entry["env"] = [f"{name}={value}" for name, value in placed.environment.items()]
        entry["ttl"] = placed.model.idle_s
        if placed.priced is not None and placed.priced.slots > SWAP_REQUESTS:
            entry["concurrencyLimit"] = placed.priced.slots
        models[placed.model.name] = entry
    turns = [[name for name in names if name in models] for names in answer.groups]
    apart = [name for name in models if not any(name in names for names in turns)]
    always = {m.model.name for m in answer.models if not m.model.swaps}
    groups: dict[str, Any] = {
        f"turns-{k + 1}": {"swap": True, "exclusive": False, "members": names}
        for k, names in enumerate(turns)
        if names
    }
    if apart:
        groups["together"] = {
            "swap": False, "exclusive": False, "persistent": True, "members": apart
        }  # fmt: skip
    hooks = [name for name in apart if name in always]
    # Seconds for which a server may load: ten times the longest prediction.
    patience_s = max(120, math.ceil(10 * max(m.load_s for m in answer.models)))
    document: dict[str, Any] = {"healthCheckTimeout": patience_s}
    if hooks:
        document["hooks"] = {"on_startup": {"preload": hooks}}
    return _yaml(document | {"models": models, "groups": groups}) if models else ""


def _bare(placed: PlacedModel) -> str:
    """A command without its environment."""
    words = shlex.split(placed.commands[0])
    return shlex.join(words[len(placed.environment) :])


def compose(answer: BoxAnswer) -> str:
    """A docker compose file: a service for each model, of groups with a profile each, so that one
    of them is up at a time."""
    services: dict[str, Any] = {}
    for placed in answer.models:
        engine = placed.model.engine
        if engine not in IMAGES or len(placed.commands) != 1 or placed.priced is None:
            continue
        words, port = shlex.split(_bare(placed))[_PROGRAMS[engine] :], _port(answer, placed)
        path = ModelSpec.of(placed.model.spec).path.removeprefix("hf:")
        if Path(path).exists():
            words = [word if word != path else f"/models/{Path(path).name}" for word in words]
        own: dict[str, Any] = {
            "image": IMAGES[engine],
            "command": [*words, "--host", "0.0.0.0"],
            "ports": [f"{port}:{port}"],
            "restart": "unless-stopped", "ipc": "host",
        }  # fmt: skip
        # Else it is a name that the server downloads. MPS clients reach the host's daemon there.
        volumes = [f"{Path(path).resolve().parent}:/models:ro"] * Path(path).exists()
        volumes += ["/tmp/nvidia-mps:/tmp/nvidia-mps"] * (placed.sm_percent > 0)
        if volumes:
            own["volumes"] = volumes
        cards = placed.environment.get("CUDA_VISIBLE_DEVICES", "")
        if cards:
            own["deploy"] = {"resources": {"reservations": {"devices": [
                {"driver": "nvidia", "device_ids": cards.split(","), "capabilities": ["gpu"]}
            ]}}}  # fmt: skip
        inside = {k: v for k, v in placed.environment.items() if k != "CUDA_VISIBLE_DEVICES"}
        if inside:
            own["environment"] = inside
        # Names of services have letters, digits, "._-" alone, those of profiles two at least
        # (schema/compose-spec.json and 15-profiles.md of compose-spec/compose-spec).
        name = re.sub(r"[^a-zA-Z0-9._-]", "-", placed.model.name)
        name = f"{name}-{port}" if name != placed.model.name else name
        if placed.group is not None:
            own["profiles"] = [f"{name}-alone"]
        services[name] = own
    return _yaml({"services": services}) if services else ""


def ollama(answer: BoxAnswer) -> str:
    """Environment of `ollama serve` and, as comments, the layers of each model on cards."""
    own = [m for m in answer.models if m.model.engine == "llamacpp" and m.priced is not None]
    if not own:
        return ""
    turns = {m.group for m in own if m.group is not None}
    loaded = len([m for m in own if m.group is None]) + len(turns)
    idle = [m.model.idle_s for m in own if m.model.swaps]
    keep = "-1" if not idle or not all(idle) else f"{max(idle)}s"
    slots = max(m.priced.slots for m in own if m.priced is not None)
    cards = sorted({
        card for m in own for card in m.environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if card
    })  # fmt: skip
    lines = [
        "# Environment of ollama serve. It chooses cards itself and keeps no model to one: start a",
        "# server for each set of cards, with its own OLLAMA_HOST, where that matters.",
        f"OLLAMA_MAX_LOADED_MODELS={loaded}", f"OLLAMA_NUM_PARALLEL={slots}",
        f"OLLAMA_KEEP_ALIVE={keep}", f"CUDA_VISIBLE_DEVICES={','.join(cards)}", "",
        "# Options of each model, of a request or behind PARAMETER in its Modelfile:",
    ]  # fmt: skip
    for m in own:
        words = shlex.split(m.commands[0])
        layers = words[words.index("--n-gpu-layers") + 1]
        context = int(words[words.index("--ctx-size") + 1]) // max(
            1, m.priced.slots if m.priced else 1
        )
        alive = -1 if not m.model.swaps else (m.model.idle_s or "5m")
        lines.append(f"# {m.model.name}: num_gpu {layers}, num_ctx {context}, keep_alive {alive}")
    return "\n".join([*lines, ""])


def _yaml(value: Any, indent: int = 0) -> str:
    """Block mappings of YAML whose leaves are JSON."""
    lines = []
    for key, own in value.items():
        head = " " * indent + json.dumps(str(key)) + ":"
        if isinstance(own, dict) and own:
            lines += [head, _yaml(own, indent + 2).rstrip("\n")]
        else:
            lines.append(f"{head} {json.dumps(own)}")
    return "\n".join(lines) + "\n"
