"""What fits: a row for every machine and request, its reason where it does not."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import gdp
from gdp.api.fit import FitRow, fit
from gdp.cli.fit import fit_text
from gdp.cli.main import cli
from tests.gguf_models import write_gguf

QUICK = ["--new", "4", "--seconds", "0.1"]


def test_rows_say_what_fits_and_why_not(tmp_path: Path) -> None:
    """The longest bar of the picture is that of the fastest row."""
    model, small = write_gguf(tmp_path / "m.gguf", layers=1), tmp_path / "small<.toml"
    small.write_text(
        'name = "small<"\nhost = "d"\n[[device]]\nname = "d"\npreset = "cpu"\n'
        "memory_bytes = 600000\n"
    )
    words = ["fit", str(model), "--clusters", f"cpu+t4,{small}", "--prompt", "8,64",
             "--batch", "1,2", *QUICK]  # fmt: skip
    svg = tmp_path / "fit.svg"
    done = CliRunner().invoke(cli, [*words, "--picture", str(svg), "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output.splitlines()[-1])["rows"]
    assert [(r["cluster"], r["prompt"], r["batch"]) for r in rows] == [
        (name, prompt, batch)
        for name in ("cpu+t4", "small<") for prompt in (8, 64) for batch in (1, 2)
    ]  # fmt: skip
    fits = [row["fits"] for row in rows]
    assert fits == [True] * 4 + [False] * 4
    assert "fit" in rows[-1]["limit"]
    drawn = svg.read_text()
    assert drawn.count("does not fit") == 4
    assert "small&lt;" in drawn
    speeds = [row["tokens_per_s"] for row in rows[:4]]
    widths = [float(width) for width in re.findall(r'<rect [^>]* width="([\d.]+)"', drawn)]
    assert widths == pytest.approx([310 * speed / max(speeds) for speed in speeds], abs=0.05)


@pytest.mark.parametrize(
    ("models", "named"),
    [
        (["a/b/x.gguf", "a/b/y.gguf"], ["x.gguf", "y.gguf"]),
        (["a/x.gguf", "b/x.gguf"], ["a/x.gguf", "b/x.gguf"]),
        (["x.gguf?ubatch=512", "x.gguf"], ["x.gguf?ubatch=512", "x.gguf"]),
    ],
)
def test_several_models_are_named_by_their_files(models: list[str], named: list[str]) -> None:
    """By their whole paths where the files of two have one name."""
    told = [FitRow("box", 8, 4, 1, fits=False, model=model, limit="no room") for model in models]
    lines = fit_text(told).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == named
    assert [line.split(" on ")[0] for line in lines[4:6]] == named


@pytest.mark.parametrize("names", ["", ",cpu+t4", "cpu+t4,"])
def test_machines_have_names(tmp_path: Path, names: str) -> None:
    model = write_gguf(tmp_path / "m.gguf", layers=2)
    done = CliRunner().invoke(cli, ["fit", str(model), "--clusters", names, *QUICK])
    assert (done.exit_code, "has an empty name" in done.output) == (2, True)


@pytest.mark.parametrize("context", [None, 512, "max"])
def test_a_row_is_what_place_answers(tmp_path: Path, context: int | str | None) -> None:
    """To the digit, for a prompt of either length."""
    model = write_gguf(tmp_path / "m.gguf", layers=2)
    once, machine = gdp.Search(seconds=None, evaluations=20), gdp.Cluster.load("cpu+2xt4-pcie3")
    rows = fit(model, [machine], prompts=[8, 64], new=4, context=context, search=once)
    for row in rows:
        asked = gdp.Generation(model, prompt=row.prompt, new=4, context=context)
        result = gdp.place(asked, machine, target="llamacpp", search=once)
        told = result.generation
        assert told is not None
        assert result.to_json()["generation"] == told.to_json()
        for name in (
            "tokens_per_s", "first_token_s", "request_s", "full_tokens_per_s", "context",
            "intervals",
        ):  # fmt: skip
            assert getattr(row, name) == getattr(told, name), name
        low, high = row.intervals["tokens_per_s"]
        assert row.tokens_per_s is not None
        assert low < row.tokens_per_s < high
        header, cells = (line.split("  ") for line in fit_text([row]).splitlines()[:2])
        assert "90%" in map(str.strip, header)
        assert f"{low:.4g} to {high:.4g}" in map(str.strip, cells)
        assert row.to_json()["intervals"].keys() == {"first_token_s", "token_s", "tokens_per_s"}
        assert row.gap == result.gap
        full = row.full_tokens_per_s
        assert (full is None) == (context is None)
        assert full is None or row.tokens_per_s is None or full <= row.tokens_per_s


def test_the_longest_context_is_that_of_the_machine(tmp_path: Path) -> None:
    """One for all prompts, and for several models one each, of a machine whose memory ends before
    what the models were made for."""
    models = [write_gguf(tmp_path / f"{n}.gguf", layers=n) for n in (1, 2)]
    rows = fit(models, ["cpu+t4"], prompts=[8, 64], new=4)
    assert [row.model for row in rows] == [str(model) for model in models for _ in range(2)]
    assert rows[0].longest_context == rows[1].longest_context
    assert rows[2].longest_context == rows[3].longest_context
    assert all(row.longest_context and row.longest_context >= row.prompt + 4 for row in rows)


def test_the_row_of_a_scheme_names_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.generating_configs import generating_config

    (tmp_path / "config.json").write_text(json.dumps(generating_config("llama")))
    words = ["fit", f"hf:{tmp_path}", "--cluster", "cpu+t4", "--prompt", "8", *QUICK]
    done = CliRunner().invoke(cli, [*words, "--quantize", "int8"])
    assert done.exit_code == 0, done.output
    header, row, *_ = done.stdout.splitlines()
    assert header.split()[:5] == ["machine", "tokens", "batch", "quantised", "fits"]
    assert row.split()[:5] == ["cpu+t4", "8+4", "1", "int8", "yes"]


def test_only_configurations_are_fitted() -> None:
    done = CliRunner().invoke(cli, ["fit", "model.onnx", "--cluster", "cpu"])
    assert done.exit_code == 2
    assert "gdp fit takes hf:CONFIG and .gguf models, not 'model.onnx'" in done.output
