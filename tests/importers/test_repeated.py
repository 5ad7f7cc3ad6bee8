"""A model traced by one block of each kind has the graph of the model traced whole."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch import nn

from gdp.graph.op_graph import OpGraph
from gdp.importers.huggingface.model import huggingface_model
from gdp.importers.program import Traced
from gdp.importers.pytorch.cut import find_stacks
from gdp.importers.pytorch.phases import Phase
from tests.generating_configs import generating_config

WIDTH = 8


class Block(nn.Module):
    """Adds a product of its input."""

    def __init__(self, layer_idx: int, wide: int = 12, scale: float = 1.0) -> None:
        super().__init__()
        self.layer_idx, self.scale = layer_idx, scale
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, x: Any, mask: Any, shared: dict[str, Any]) -> Any:
        return x + self.down(self.up(x) * self.scale) * mask


class Sharing(Block):
    """Keeps a product for the layers behind it, or reads that of an earlier one."""

    keeps = False

    def forward(self, x: Any, mask: Any, shared: dict[str, Any]) -> Any:
        if self.keeps:
            shared["kept"] = self.up(x)
        return super().forward(x, mask, shared) + (shared["kept"].sum() if shared else 0)


class Skipping(Block):
    """Adds the result of an earlier layer, if it gets one."""

    def forward(self, x: Any, mask: Any, shared: dict[str, Any], skip: Any = None) -> Any:
        return super().forward(x if skip is None else x * skip, mask, shared)


class Indexed(Block):
    """Computes with its index."""

    def forward(self, x: Any, mask: Any, shared: dict[str, Any]) -> Any:
        return super().forward(x, mask, shared) * (self.layer_idx + 0.5)


class Pair(Block):
    """Hands on two tensors."""

    def forward(self, x: Any, mask: Any, shared: dict[str, Any]) -> Any:
        x, y = x
        return self.down(self.up(x)) + y, y * mask


class Joined(Pair):
    """Hands on two parts of one tensor, as single blocks of FLUX do."""

    def forward(self, x: Any, mask: Any, shared: dict[str, Any]) -> Any:
        joined = torch.cat(super().forward(x, mask, shared))
        return joined[:2], joined[2:]


class Writing(Pair):
    """Writes in place, so that a trace leaves out ops that nothing reads."""

    def forward(self, x: Any, mask: Any, shared: dict[str, Any]) -> Any:
        x, y = super().forward(x, mask, shared)
        return x.mul(2).add_(1), y.sigmoid()


class FirstOfPair(nn.Module):
    """The first result of the last of its blocks."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        pair = (x.tanh(), x.exp())
        for block in self.blocks:
            pair = block(pair, x, {})
        return pair[0]


class Tiny(nn.Module):
    """Blocks between a first and a last layer."""

    def __init__(self, blocks: list[nn.Module], after: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks, self.after = nn.ModuleList(blocks), after

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        x = (x, x.exp()) if isinstance(self.blocks[0], Pair) else x
        masks, shared, seen = (x[0].sigmoid(), x[0].tanh()), {}, []
        for i, block in enumerate(self.blocks):
            x = block(x, masks[i % 3 == 2], shared)
            seen.append(x)
            if self.after is not None:
                x = self.after(i, x, seen)
        return self.last(x[0] + x[1] if isinstance(x, tuple) else x)


class UShaped(nn.Module):
    """Layers of the second half read those of the first, the last one the first."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Any:
        mask, skips = x.sigmoid(), []
        for i, block in enumerate(self.blocks):
            x = block(x, mask, {}, skips.pop()) if i >= 8 else block(x, mask, {})
            if i < 7:
                skips.append(x)
        return x


def tied() -> list[nn.Module]:
    """Every second block has the weights of one, and all have one `up`."""
    blocks = [Block(i) for i in range(8)]
    for i, block in enumerate(blocks):
        block.up.weight = blocks[0].up.weight
        if i % 2:
            block.down.weight = blocks[1].down.weight
    return [*blocks]


def sharing() -> list[nn.Module]:
    """The third block keeps a result that those behind it read."""
    blocks = [Sharing(i) for i in range(12)]
    blocks[2].keeps = True
    return [*blocks]


def third_last(i: int, x: Any, seen: list[Any]) -> Any:
    """The result of the third last layer is read behind the last one."""
    return x + seen[-3] if i == 11 else x


REPEATED: dict[str, Callable[[], nn.Module]] = {
    "one kind": lambda: Tiny([Block(i) for i in range(7)]),
    "two in turn": lambda: Tiny([Block(i, 12 + i % 2) for i in range(13)]),
    "first and last are others": lambda: Tiny([Block(i, 12 + (i in (0, 7))) for i in range(8)]),
    "tied weights": lambda: Tiny(tied()),
    "a result that all read": lambda: Tiny(sharing()),
    "two results": lambda: Tiny([Pair(i) for i in range(7)]),
    "two parts of one tensor": lambda: Tiny([Joined(i) for i in range(30)]),
    "a last layer that makes too much": lambda: FirstOfPair([Writing(i) for i in range(7)]),
    "results read in the form of a U": lambda: UShaped([Skipping(i) for i in range(15)]),
    "a result read from afar": lambda: Tiny([Block(i) for i in range(12)], third_last),
}
WHOLE: dict[str, Callable[[], nn.Module]] = {
    "ops between layers": lambda: Tiny([Block(i) for i in range(7)], lambda i, x, seen: x.relu()),
    "an index in the arithmetic": lambda: Tiny([Indexed(i) for i in range(7)]),
    "numbers of their own": lambda: Tiny([Block(i, scale=i) for i in range(7)]),
    "each reads the one before the last": lambda: Tiny(
        [Block(i) for i in range(7)], lambda i, x, seen: x + seen[i - 2] if i > 2 else x
    ),
}


def phase_of(make: Callable[[], nn.Module]) -> Phase:
    with torch.device("meta"):
        return Phase("tiny", make().eval(), (torch.empty(2, WIDTH),))


def differences(one: Traced, other: Traced) -> list[str]:
    """Fields in which two traces differ."""
    of_graph = [f.name for f in fields(OpGraph) if not f.name.startswith("_")]
    apart = [name for name in of_graph if not equal(one.graph, other.graph, name)]
    beside = ("estimated", "assumptions", "parameters")
    return apart + [name for name in beside if getattr(one, name) != getattr(other, name)]


def equal(one: OpGraph, other: OpGraph, name: str) -> bool:
    a, b = getattr(one, name), getattr(other, name)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_program_is_the_whole_one(name: str) -> None:
    phase = phase_of(REPEATED[name])
    listed = phase._repeated()
    assert listed is not None
    assert differences(phase.graph_of(listed), phase.trace()) == []


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_do_not_repeat_are_traced_whole(name: str) -> None:
    phase = phase_of(WHOLE[name])
    assert phase._repeated() is None
    assert differences(phase.graph_of(phase.program()), phase.trace()) == []


def test_the_model_is_whole_again_behind_a_cut() -> None:
    phase = phase_of(REPEATED["two in turn"])
    layers = list(phase.module.blocks)
    (stack,) = find_stacks(phase.module)
    assert stack.path == "blocks"
    assert stack.kinds == [i % 2 for i in range(13)]
    assert stack.kept == [0, 1, 11, 12]
    assert phase._repeated() is not None
    assert [*phase.module.blocks] == layers
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


def deepened(name: str, layers: int, **changed: Any) -> dict[str, Any]:
    """A configuration of the matrix with more layers."""
    config = generating_config(name) | changed
    kinds = config.get("layer_types")
    if kinds:
        config["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    if "text_config" in config:
        config["text_config"] = config["text_config"] | {"num_hidden_layers": layers}
    keys = ("num_hidden_layers", "num_layers")
    return config | {key: layers for key in keys if key in config}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "query"),
    [
        ("deepseek_v3", 4, "sequence=7"),  # latent attention; a mixture behind a dense layer
        ("gemma2", 6, "sequence=9&decode"),  # windows in turn, with their caches
        ("granite_hybrid", 6, "sequence=5&decode"),  # states beside caches
        ("t5", 4, "sequence=7&decode"),  # two lists; a bias that the first layer makes
        ("llava", 5, "sequence=7"),  # a list that no prompt of text calls
    ],
)
def test_an_architecture_repeated_is_the_whole_one(
    name: str, layers: int, query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GDP_KEEP_TRACES", "0")
    (tmp_path / "config.json").write_text(json.dumps(deepened(name, layers)))
    seen: list[object] = []
    by_repetition = Phase._repeated

    def counted(phase: Phase) -> Any:
        seen.append(by_repetition(phase))
        return seen[-1]

    monkeypatch.setattr(Phase, "_repeated", counted)
    repeated = huggingface_model(f"hf:{tmp_path}?{query}", whole=False).trace()
    assert len(seen) == 1
    assert seen[0] is not None
    monkeypatch.setattr(Phase, "_repeated", lambda phase: None)
    assert differences(repeated, huggingface_model(f"hf:{tmp_path}?{query}").trace()) == []
