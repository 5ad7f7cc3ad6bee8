"""A .gguf file is run by llama.cpp alone, so that `fit` answers as `place --for llamacpp` does."""

from pathlib import Path

import gdp
from gdp.api.fit import fit
from gdp.question.models import Generation
from tests.gguf_models import MIB, box, write_gguf


def test_rows_are_the_answers_of_llamacpp(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "m.gguf"))
    machine, once = box(4 * MIB, cpu_bytes=64 * MIB), gdp.Search(seconds=None, evaluations=10)
    rows = fit(path, [machine], prompts=(64, 512), new=8, search=once)
    for row in rows:
        asked = Generation(path, prompt=row.prompt, new=8)
        placed = gdp.place(asked, machine, target="llamacpp", search=once)
        assert row.request_s == placed.score.latency_s
