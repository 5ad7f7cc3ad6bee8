"""Language models on boxes: what is by hand agrees with headers, plans and networks."""

from pathlib import Path

import pytest

from benchmarks.boxes import BOXES, NETWORKS, least_step_s, network_s, placed
from benchmarks.measured_world.llama import size_of, write_header
from gdp.api.generation import generation_answer

pytest.importorskip("gguf")


@pytest.mark.parametrize("name", ["70b-two-cards", "experts-small-card"])
def test_weights_by_hand_are_those_of_a_header(name: str, tmp_path: Path) -> None:
    """All but the norms, whose numbers are counted in no answer by hand."""
    box, path = BOXES[name], tmp_path / "m.gguf"
    size = size_of(box.model)
    assert size is not None
    held = write_header(path, size, "Q4_K_M")
    norms = 4 * size.width * (2 * size.layers + 1)
    assert held == pytest.approx(box.weights.all + norms, rel=1e-9)


@pytest.mark.slow
def test_a_step_takes_what_its_bytes_take(tmp_path: Path) -> None:
    """Experts in memory behind a card."""
    box = BOXES["experts-small-card"]
    result = placed(box, tmp_path)
    answer = generation_answer(result.question, result.placement, result.score)
    assert answer is not None
    by_hand_s = least_step_s(box.weights, result, answer)
    assert by_hand_s < answer.token_s < 2 * by_hand_s
    # Of 17 GB of experts a sixteenth is read, at 90 to 360 GB/s.
    assert 17.1e9 / 16 / 360e9 < by_hand_s < 17.1e9 / 16 / 90e9 + 1.3e9 / 360e9


def test_a_network_takes_a_row_there_and_logits_back() -> None:
    slower_s = network_s(NETWORKS["1-gbit"]) - network_s(NETWORKS["10-gbit"])
    assert slower_s == pytest.approx(9 * (8192 + 128256) * 4 / 1.25e9)
