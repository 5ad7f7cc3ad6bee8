"""Rows of llama-bench: which are asked, of what sizes their models are, and how pairs are told."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.measured_world.llama import (
    SIZES,
    Asker,
    Bench,
    benches,
    build_of,
    others,
    pairs,
    preset_of,
    size_of,
    told,
    write_header,
)
from gdp.costs.llamacpp import BEFORE_JULY_2024, NEWEST

HEAD = (
    "devices,n_devices,kind,engine,backend,model,quantisation,flash_attention,build,n_ubatch,test,"
    "prompt_or_gen_tokens,depth_tokens,tokens_per_s,note"
)
CARD = "RTX 3090,1,gpu,llama.cpp,CUDA,llama 8B Q8_0,Q8_0,,f9ec8858e (7474)"
NOW = replace(NEWEST, flash=False)
ROWS = (
    HEAD, f"{CARD},,tg,128,0,80,", f"{CARD},,tg,128,0,84,again", f"{CARD},512,pp,512,4096,3000,",
    f"{CARD},2048,pp,512,0,4000,", f"{CARD},,tg,128,0,9,spill", f"{CARD},,e2e,128,0,9,",
    f"{CARD},,tg,128,0,400,8 sequences together",
    "2 x RTX 3090,2,gpu-multi,llama.cpp,CUDA,llama 8B Q8_0,Q8_0,,,,tg,128,0,80,",
    "RTX 3080 Laptop 8GB,1,gpu,llama.cpp,CUDA,llama 8B Q8_0,Q8_0,,,,tg,128,0,80,",
    "RTX 3090,1,gpu,llama.cpp,CUDA,unheard 8B,Q8_0,,,,tg,128,0,80,",
)  # fmt: skip


def bench(preset: str, model: str, rate: float, test: str = "tg") -> Bench:
    """A measured row."""
    return Bench(preset, model, "Q8_0", "cuda", test, 128, 0, rate=rate)


def test_whole_models_on_known_cards_are_asked_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(ROWS) + "\n")
    assert benches(path) == [
        Bench("rtx3090", "llama 8B Q8_0", "Q8_0", "cuda", "tg", 128, 0, 512, NOW, 82.0),
        Bench("rtx3090", "llama 8B Q8_0", "Q8_0", "cuda", "pp", 512, 4096, 512, NOW, 3000.0),
        Bench("rtx3090", "llama 8B Q8_0", "Q8_0", "cuda", "pp", 512, 0, 2048, NOW, 4000.0),
    ]


def test_a_row_has_the_kernels_of_its_build() -> None:
    old = {"build": "32d9f7d9 (1786)", "flash_attention": ""}
    assert build_of(old) == build_of({**old, "build": "May 2024"}) == BEFORE_JULY_2024
    assert build_of({"build": "2f68ce7cf (6918)", "flash_attention": "1"}) == NEWEST
    assert not build_of({"build": "", "flash_attention": ""}).flash


def test_names_of_cards_and_models() -> None:
    assert preset_of("M1 Max 32-Core GPU 64GB") == "m1-max"
    assert preset_of("Ryzen AI Max+ 395 (Radeon 8060S, 128 GB)") == "ryzen-ai-max-395"
    assert size_of("llama 3 8B F16") is size_of("llama 8B Q6_K") is not size_of("llama 3 70B F16")
    assert size_of("gemma4 31B") is None


@pytest.mark.parametrize(
    ("model", "kind", "gib"),
    [
        ("llama 7B", "Q4_0", 3.56), ("llama 7B", "Q4_K_M", 3.80), ("llama 3 8B", "Q4_K_M", 4.58),
        ("llama 3 8B", "F16", 14.96), ("llama 3 70B", "Q4_K_M", 39.59), ("qwen2 7B", "Q8_0", 7.54),
        ("qwen3 8B", "Q5_K_M", 5.44), ("qwen3moe 30B", "Q8_0", 30.25),
        ("mistral3 14B", "BF16", 25.16),
    ],
)  # fmt: skip
def test_files_are_as_large_as_published_ones(
    model: str, kind: str, gib: float, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="needs the gguf package")
    size = size_of(model)
    assert size is not None
    assert write_header(tmp_path / "x.gguf", size, kind) / 2**30 == pytest.approx(gib, abs=0.05)


def test_a_rate_is_that_of_the_memory_at_least(tmp_path: Path, monkeypatch) -> None:
    """8 GiB of weights at 936 GB/s: at most 110 tokens/s, and within a third of it. A prompt behind
    a context is slower, as its attention sees that, too."""
    pytest.importorskip("gguf", reason="needs the gguf package")
    small = SIZES["llama (3 )?8B"]
    monkeypatch.setattr("benchmarks.measured_world.llama.size_of", lambda model: small)
    asker = Asker(tmp_path)
    row = bench("rtx3090", "llama 8B Q8_0", 80.0)
    held = write_header(tmp_path / "y.gguf", small, "Q8_0")
    assert 0.67 < asker.rate(row) * held / 936.2e9 < 1
    prompt = Bench("rtx3090", "llama 8B Q8_0", "Q8_0", "cuda", "pp", 512, 0)
    behind = Bench("rtx3090", "llama 8B Q8_0", "Q8_0", "cuda", "pp", 512, 16384)
    assert asker.rate(behind) < asker.rate(prompt)


def test_a_row_is_corrected_by_the_others_of_its_card() -> None:
    """By hand: B and C are measured at half and at an eighth of what is predicted."""
    rows = [bench("x", "A", 9), bench("x", "B", 5), bench("x", "C", 2), bench("y", "A", 1)]
    found = others(rows, np.array([16.0, 10.0, 16.0, 7.0]))
    assert found[0] == pytest.approx(16 * 0.25)
    assert np.isnan(found[3])


def test_pairs_and_errors_are_told() -> None:
    rows = [
        bench("t4", "A", 100), bench("l4", "A", 50), bench("a40", "A", 51), bench("t4", "B", 20),
    ]  # fmt: skip
    predicted = np.array([80.0, 90.0, 10.0, 40.0])
    assert pairs(rows, predicted, "card") == "50.0% of 2 pairs right, 50.0% lost in the mean"
    assert pairs(rows, predicted, "model") == "100.0% of 1 pairs right, 0.0% lost in the mean"
    lines = list(told(rows, {"here": predicted}, 1))
    assert "| tg, t4, cuda | 2 | 60.0%, 60.0%, 100% (1.26) |" in lines
    assert lines[-1].startswith("A Q8_0 on a40 (cuda), tg 128 at 0: 10.0 tokens/s, measured 51.0")
