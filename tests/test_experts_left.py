"""Schemes that convert Linear modules leave experts at 16 bits, and the answer says how many."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import gdp
from gdp.api.fit import fit
from gdp.base.errors import InfeasibleError
from gdp.base.units import format_bytes
from gdp.question.models import Generation, load
from tests.generating_configs import generating_config

ONCE = gdp.Search(seconds=None, evaluations=5)
EXPERTS_BYTES = 2 * 4 * (2 * 24 * 48 + 48 * 24) * 2  # layers, experts, their matrices, bfloat16


@pytest.fixture
def asked(tmp_path: Path) -> Any:
    """A request to a mixture of four experts of 24 x 48 in two layers, by its scheme."""
    config = {**generating_config("qwen3_moe"), "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return lambda scheme: Generation(f"hf:{tmp_path}?quantize={scheme}", prompt=8, new=4)


@pytest.mark.parametrize("scheme", ["nf4", "int8", "hqq", "fp8", "none"])
def test_bytes_that_stay_are_told_with_the_schemes_that_would_not(asked: Any, scheme: str) -> None:
    result = gdp.place(asked(scheme), "cpu+t4", search=ONCE)
    told = [note for note in result.notes if "experts" in note]
    if scheme in ("fp8", "none"):
        assert not told
        return
    graph = load(asked(scheme))
    weights = int((graph.weight_bytes - graph.cache_bytes).sum())
    (note,) = told
    start = f"{format_bytes(EXPERTS_BYTES)} of {format_bytes(weights)} of weights are experts that "
    assert note.startswith(start)
    assert "gptq, awq, fp8, mxfp4, nvfp4, w8a8, w4a16 store experts in fewer bits, too" in note
    assert "GGUF" in note


def test_rows_and_refusals_say_it_too(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = fit(asked("nf4").model, ["cpu+t4"], prompts=[8], new=4, search=ONCE)
    assert row.note.startswith(format_bytes(EXPERTS_BYTES))
    monkeypatch.setenv("GDP_KEEP_TRACES", "0")  # weights are looked at before what is not traced
    device = gdp.Device("small", "gpu", {"default": 1e12}, 1e12, memory_bytes=EXPERTS_BYTES)
    with pytest.raises(InfeasibleError, match=r"its weights alone miss .*; .* of weights are exp"):
        gdp.place(asked("nf4"), gdp.make_cluster("one", [device]), search=ONCE)
