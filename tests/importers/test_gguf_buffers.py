"""Buffers that llama.cpp reserves, by hand, in every answer about memory."""

from pathlib import Path

import numpy as np
import pytest
from gguf_models import HEADS, INNER, MIB, VOCABULARY, WIDTH, box, write_gguf

from gdp.api.generation import generation_answer
from gdp.importers.gguf_buffers import logits_bytes
from gdp.question import solve
from gdp.question.models import load
from gdp.question.question import Question
from gdp.targets.llamacpp.plan import even_row


@pytest.mark.parametrize(("ubatch", "printed_mib"), [(4096, 3976), (3072, 2958)])
def test_logits_are_nearly_all_of_a_large_buffer(ubatch: int, printed_mib: int) -> None:
    """Buffers that others saw printed (ik_llama.cpp pull request 1560)."""
    assert 0.97 < logits_bytes(ubatch, 248_320) / (printed_mib * MIB) < 1


@pytest.mark.parametrize("ubatch", [64, 512, 2048])
@pytest.mark.parametrize("context", [1024, 4096])
@pytest.mark.parametrize("flash", ["on", "off"])
def test_each_device_has_one_mask_and_the_head_logits(
    ubatch: int, context: int, flash: str, tmp_path: Path
) -> None:
    """Beside weights, caches and tensors: 2 B a number of a mask, or 4 B and as many for each head,
    once a device; 4 B a number of logits on the device of the head, which is the last."""
    path = write_gguf(tmp_path / "m.gguf")
    cluster = box(999 * MIB, 999 * MIB, cpu_bytes=999 * MIB)
    graph = load(f"{path}?prompt=1000&new=24&ubatch={ubatch}&context={context}&flash={flash}")
    question, placement = Question(graph, cluster), even_row(graph, cluster)
    answer = generation_answer(question, placement, solve.simulate(question, placement))
    assert answer is not None
    held = np.array([row.activations_bytes for row in answer.memory])
    # Blocks are on the processor and the first GPU, the head on the second.
    masks = np.array([1, 1, 0]) * ubatch * context * (2 if flash == "on" else 4 * (1 + HEADS))
    logits = np.array([0, 0, 4 * ubatch * VOCABULARY])
    tensors = held - masks - logits
    assert (tensors > 0).all()
    assert (tensors <= 4 * min(ubatch, 1000) * (2 * INNER + 4 * WIDTH)).all()
    keys = 2 * WIDTH // 2 * context * 2  # of each block, and as many values
    assert sum(row.cache_bytes for row in answer.memory) == 3 * keys
    assert answer.longest_context is not None


def test_rows_of_logits_are_asked_for(tmp_path: Path) -> None:
    """llama-server reserves one row a sequence; others those of a micro-batch, or of all tokens."""
    path = write_gguf(tmp_path / "m.gguf")
    rows = {"sequence=100": 100, "decode&sequence=9000": 512, "sequence=9000&ubatch=1024": 1024,
            "prompt=8&new=8": 512, "prompt=8&new=8&outputs=1": 1}  # fmt: skip
    for query, count in rows.items():
        graph = load(f"{path}?{query}")
        held = graph.weight_bytes[[name.endswith("output.logits") for name in graph.op_names]]
        assert held.sum() == 4 * VOCABULARY * count
