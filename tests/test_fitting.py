"""What fits: a row for every machine and request, its reason where it does not."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("transformers", reason="transformers is not installed")

from gdp.cli.main import cli
from gdp.cli.place import fit_text
from gdp.commands.fitting import FitRow, picture
from tests.generating_configs import generating_config


def test_rows_say_what_fits_and_why_not(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(generating_config("llama")))
    small = tmp_path / "small.toml"
    small.write_text(
        'name = "small"\nhost = "d"\n[[device]]\nname = "d"\npreset = "cpu"\n'
        "memory_bytes = 180000\n"
    )
    words = ["fit", f"hf:{tmp_path}", "--clusters", f"cpu+t4,{small}", "--prompt", "8,64",
             "--batch", "1,2", "--new", "4", "--seconds", "0.1"]  # fmt: skip
    svg = tmp_path / "fit.svg"
    done = CliRunner().invoke(cli, [*words, "--picture", str(svg), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output.splitlines()[-1])["rows"]
    assert [(r["cluster"], r["prompt"], r["batch"]) for r in rows] == [
        (name, prompt, batch)
        for name in ("cpu+t4", "small") for prompt in (8, 64) for batch in (1, 2)
    ]  # fmt: skip
    assert [row["fits"] for row in rows[:4]] == [True] * 4
    assert not rows[-1]["fits"]
    assert "fit" in rows[-1]["limit"]
    assert rows[0]["tokens_per_s"] > 0
    assert svg.read_text().count("<rect") == sum(row["fits"] for row in rows)


def test_the_row_of_a_scheme_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(generating_config("llama")))
    words = ["fit", f"hf:{tmp_path}", "--cluster", "cpu+t4", "--prompt", "8", "--new", "4",
             "--seconds", "0.1", "--quantize", "int8"]  # fmt: skip
    done = CliRunner().invoke(cli, [*words, "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.output.splitlines()[-1])["rows"]
    assert row["quantize"] == "int8"
    assert row["fits"]
    text = fit_text([FitRow("a", 8, 4, 1, False, quantize="int8")])
    assert "quantised" in text.splitlines()[0]
    assert "int8" in text.splitlines()[1]


def test_the_longest_bar_is_the_fastest_row() -> None:
    rows = [
        FitRow("a", 8, 4, 1, True, 10.0), FitRow("b<", 8, 4, 1, True, 5.0),
        FitRow("c", 8, 4, 1, False),
    ]  # fmt: skip
    drawn = picture(rows)
    assert 'width="310.0"' in drawn
    assert 'width="155.0"' in drawn
    assert "b&lt;" in drawn
    assert drawn.count("does not fit") == 1


def test_only_configurations_are_fitted() -> None:
    done = CliRunner().invoke(cli, ["fit", "model.onnx", "--cluster", "cpu"])
    assert done.exit_code == 2
    assert "gdp fit takes hf:CONFIG and .gguf models, not 'model.onnx'" in done.output
