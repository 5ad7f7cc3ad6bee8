"""Programs scaled from those of three sizes are those that a trace at other sizes lists."""

import json
import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdp.graph.op_graph import OpGraph
from gdp.importers.program import Op, Value
from gdp.importers.pytorch.repeated import Listed
from gdp.importers.pytorch.sizes import (
    Sizes,
    UnscalableError,
    scaled,
    sizes_traced,
    with_growth,
)
from gdp.ops.rule import Shape
from gdp.ops.table import aten_cost
from tests.generating_configs import generating_config


def program(size: Sizes, rows: int | None = None) -> Listed:
    """An input of [batch, tokens, 8] times a matrix of 8x8, on so many rows of tokens."""
    dims = (size.batch, size.tokens if rows is None else rows, 8)
    given, weight = Value(dims, "float32", 4, 0), Value((8, 8), "float32", 4, weight=(0,))
    made = Value(dims, "float32", 4, 1)
    shapes = (Shape(dims, 4), Shape((8, 8), 4)), (Shape(dims, 4),)
    cost = aten_cost("linear", {}, *shapes)
    return Listed(
        ops=[
            Op("Input", "", [], [given], 0.0, 0.0, False, "float32", name="x"),
            Op("linear", "m", [given, weight], [made], cost.flop, cost.traffic_bytes, False,
               "float32", (dims, (8, 8)), {"end": size.tokens}, shapes=shapes),
        ],
        weights=[weight], paths={"m.weight": weight},
    )  # fmt: skip


@pytest.mark.parametrize("asked", [Sizes(1, 16), Sizes(5, 33), Sizes(2, 63)])
def test_a_program_is_scaled_as_it_would_be_listed(asked: Sizes) -> None:
    traced = sizes_traced(asked.tokens)
    own, listed = scaled([*map(program, traced)], traced, asked), program(asked)
    for one, other in zip(own.ops, listed.ops, strict=True):
        for name in ("flop", "traffic_bytes", "in_dims", "attributes"):
            assert getattr(one, name) == getattr(other, name), name
        assert [v.dims for v in one.outs] == [v.dims for v in other.outs]
    assert own.ops[1].ins[1] is own.weights[0] is own.paths["m.weight"]


@pytest.mark.parametrize("rows_of", [
    lambda tokens: min(tokens, 30), lambda tokens: -(-tokens // 16) * 16, lambda tokens: tokens**3,
])  # fmt: skip
def test_sizes_that_follow_no_law_are_refused(rows_of: Any) -> None:
    """A window that ends between the traces, tokens in chunks, and a cube."""
    traced = sizes_traced(40)
    programs = [program(size, rows_of(size.tokens)) for size in traced]
    with pytest.raises(UnscalableError, match="follow no law"):
        scaled(programs, traced, Sizes(2, 40))


def test_other_ops_or_costs_are_refused() -> None:
    traced = sizes_traced(40)
    programs = [*map(program, traced)]
    branched = replace(programs[1], ops=[*programs[1].ops, programs[1].ops[1]])
    with pytest.raises(UnscalableError, match="other ops"):
        scaled([programs[0], branched, programs[2]], traced, Sizes(2, 40))
    programs[2].ops[1].flop *= 2
    with pytest.raises(UnscalableError, match="cost of linear"):
        scaled(programs, traced, Sizes(2, 40))


def test_caches_grow_up_to_their_window() -> None:
    """8 bytes a token and sequence up to 100 tokens, by hand: 3 sequences of 70 tokens have 1680,
    of 100 and more 2400."""
    traced = sizes_traced(40)
    programs = [
        replace(
            program(size), contexts=(size.tokens + 1, 100, 256),
            cache_at={0: tuple(8 * size.batch * min(t, 100) for t in (size.tokens + 1, 100, 256))},
        )
        for size in traced
    ]  # fmt: skip
    step = scaled(programs, traced, Sizes(3, 60))
    grown = with_growth(step, programs, 3, 70, 200)
    assert (grown.contexts, grown.cache_at) == ((70, 100, 200), {0: (1680, 2400, 2400)})
    assert with_growth(step, programs, 3, 120, 200).contexts == (120, 240)
    programs[2].cache_at[0] = (999, 2400, 2400)
    with pytest.raises(UnscalableError, match="grows"):
        with_growth(step, programs, 3, 70, 200)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mixtral", "gemma3"])
def test_graphs_of_other_sizes_are_those_of_a_trace(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches and prompts at random: no more is traced, and each array equals that of a trace."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from gdp.importers.pytorch import model
    from gdp.question.models import load

    (tmp_path / "config.json").write_text(json.dumps(generating_config(architecture)))
    monkeypatch.setenv("GDP_CACHE_DIR", str(tmp_path / "cache"))
    export, made = model.exported, list[object]()
    monkeypatch.setattr(model, "exported", lambda *a, **k: made.append(a) or export(*a, **k))
    draw = random.Random(architecture)

    def spec() -> str:
        batch, prompt, new = draw.randint(1, 9), draw.randint(17, 55), draw.randint(1, 8)
        served = draw.choice(["", f"&max_num_batched_tokens={draw.randint(8, 64)}"])
        return f"hf:{tmp_path}?prompt={prompt}&new={new}&batch={batch}{served}"

    monkeypatch.setenv("GDP_KEEP_TRACES", "1")
    load(f"hf:{tmp_path}?prompt=40&new=4&batch=2")
    assert len(made) == 6
    text = spec()
    graph = load(text)
    assert len(made) == 6
    monkeypatch.setenv("GDP_KEEP_TRACES", "0")
    assert _unequal(graph, load(text)) == [], text


def _unequal(one: OpGraph, other: OpGraph) -> list[str]:
    pairs = ((f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(OpGraph))
    return [
        name for name, a, b in pairs
        if not (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)
    ]  # fmt: skip
