"""Layouts of llama-bench: groups, placements of rows, and how they are ranked."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measured_world import layouts as benched
from benchmarks.measured_world.layouts import (
    LAYOUT,
    OF_MODEL,
    Asker,
    Machine,
    fewest_first,
    kind_of,
    layouts,
    most_first,
    ranked,
    several,
)
from benchmarks.measured_world.llama import SIZES, size_of, write_header
from gdp.cluster.presets import cluster_preset
from gdp.question.models import load
from gdp.targets.llamacpp.flags import slots_of
from gdp.targets.llamacpp.pipeline import OVERLAPS


def row(devices: str, rate: float, **more: str) -> dict[str, str]:
    """A row of llama-bench."""
    plain = dict.fromkeys((*OF_MODEL, *LAYOUT, "source", "note", "build", "flash_attention"), "")
    plain |= {
        "backend": "CUDA",
        "engine": "llama.cpp",
        "test": "tg",
        "kind": "gpu",
        "model": "llama 8B",
        "quantisation": "Q8_0",
        "prompt_or_gen_tokens": "128",
    }
    return plain | {"devices": devices, "tokens_per_s": str(rate)} | more


def test_machines_and_quantisations_by_their_names() -> None:
    assert Machine.of("2 x RTX 3090").cards == ("RTX 3090",) * 2
    pair = Machine.of("RTX 3090 + RTX 3060 12GB").cluster()
    assert pair is not None
    assert [d.kind for d in pair.devices] == ["cpu", "rtx3090", "rtx3060"]
    assert Machine.of("Voodoo 2").cluster() is None
    names = ("Q4_K - Medium", "UD-Q4_K_XL", "IQ4_XS - 4.25 bpw", "Q6_K (i1)", "Q5_K_L", "IQ1_S")
    assert [kind_of(name) for name in names] == [
        "Q4_K_M", "Q4_K_M", "IQ4_XS", "Q6_K", "Q5_K_M", None,
    ]  # fmt: skip


def test_groups_have_the_fastest_row_of_each_way() -> None:
    """One card or several alike; unlike cards and one of them; experts here or there. What other
    machines did is in no group."""
    alone, pair = row("RTX 3090", 50), row("2 x RTX 3090", 80, kind="gpu-multi")
    rows = [alone, row("RTX 3090", 40), pair, row("RTX 3090", 90, source="elsewhere")]
    assert [alone, pair] in several(rows)
    mixed = row("RTX 3090 + RTX 3060", 30, source="box")
    own = row("RTX 3090", 50, source="box")
    assert layouts([mixed, own, alone], unlike=True) == [[mixed, own]]
    assert layouts([mixed, own, row("RTX 4090", 90, source="box")], unlike=True) == []
    away = [row("RTX 3090", 9, kind="gpu+cpu", n_cpu_moe=n, source="x") for n in ("2", "4")]
    assert layouts([*away, mixed], unlike=False) == [away]


def test_pairs_and_losses_by_hand() -> None:
    """Of 100, 80 and 79 tokens/s two pairs differ; the predicted best loses a fifth."""
    group = [row("a", 100), row("b", 80), row("c", 79)]
    rates = {"a": 2.0, "b": 3.0, "c": 1.0}
    found = ranked([group], lambda r: rates[r["devices"]])
    assert (found.right, found.pairs, found.lost) == (1, 2, (pytest.approx(0.2),))
    assert str(found) == "50% of 2; 20.0%, 20%"
    rates["b"] = 2.02  # a tie
    assert ranked([group], lambda r: rates[r["devices"]]).told_apart == "100% of 1"
    assert ranked([group], lambda r: 0.0).pairs == 0


def test_rules() -> None:
    few, many = row("a", 1, n_cpu_moe="2"), row("2 x a", 1, n_cpu_moe="30")
    assert fewest_first(few) > fewest_first(many)
    assert most_first(few) < most_first(many)
    small, large = (row("a", 1, test="pp", n_ubatch=n) for n in ("512", "4096"))
    assert fewest_first(large) > fewest_first(small)


@pytest.mark.parametrize(
    ("told", "cards", "away"),
    [
        ({"ngl": "99"}, [1] * 3 + [2] * 2, []),  # five slots by memory, which is equal
        ({"ngl": "3"}, [0, 0, 1, 1, 2], [0, 1]), ({"tensor_split": "3/1"}, [1, 1, 1, 1, 2], []),
        ({"n_cpu_moe": "2"}, [1] * 3 + [2] * 2, [0, 1]),
        ({"ngl": "3", "n_cpu_moe": "1"}, [0, 0, 1, 1, 2], [0, 1, 2]),
    ],
)  # fmt: skip
def test_a_row_says_where_blocks_and_experts_lie(
    told: Mapping[str, str], cards: list[int], away: list[int], tmp_path: Path
) -> None:
    """Four blocks and the output: the last ones on cards; of these the first keep their experts on
    the processor."""
    pytest.importorskip("gguf", reason="needs the gguf package")
    size = SIZES["olmoe 7B"].__class__(4, 256, 256, 4, 2, 1024, experts=4, used=2)
    write_header(tmp_path / "m.gguf", size, "Q8_0")
    graph, cluster = load(f"{tmp_path / 'm.gguf'}?prompt=8&new=2"), cluster_preset("cpu+2xrtx3090")
    placement = benched.placed(graph, cluster, row("2 x RTX 3090", 1, split_mode="layer", **told))
    assert placement is not None
    slots = slots_of(graph)
    assert [int(placement.device[ops[0]]) for ops in slots.layers] == cards
    there = [b for b, ops in enumerate(slots.experts) if len(ops) and placement.device[ops[0]] == 0]
    assert there == away
    assert benched.placed(graph, cluster, row("2 x RTX 3090", 1, split_mode="row")) is None


def test_rates_of_a_pipeline_and_of_hybrids(tmp_path: Path) -> None:
    """A prompt of four micro-batches gains from a second card, one of a single one does not; half a
    token's bytes on a slower card slow it down; models with delta nets are read."""
    pytest.importorskip("gguf", reason="needs the gguf package")
    asker = Asker(tmp_path)
    one, two = ("RTX 3090", "2 x RTX 3090")
    gains = [
        asker.rate(row(two, 1, test="pp", prompt_or_gen_tokens=n, split_mode="layer"))
        / asker.rate(row(one, 1, test="pp", prompt_or_gen_tokens=n))
        for n in ("512", "2048")
    ]
    assert gains[0] <= 1.0
    saved = 1 - (1 / 4 + 3 / 4 * 0.5)
    assert gains[1] == pytest.approx(1 / (1 - OVERLAPS * saved), rel=0.1)
    slower = asker.rate(row("RTX 3090 + RTX 3060", 1, split_mode="layer"))
    assert slower < asker.rate(row(one, 1))
    hybrid = asker.rate(row(one, 1, model="Qwen3.5-9B"))
    assert 60 < hybrid < 936.2e9 / 8.5e9
    assert np.isnan(asker.rate(row(one, 1, model="unheard")))
    size = size_of("Qwen3.5-122B-A10B")
    assert size is not None
    assert write_header(tmp_path / "y.gguf", size, "Q4_K_M") / 2**30 == pytest.approx(
        69.8, rel=0.02
    )
