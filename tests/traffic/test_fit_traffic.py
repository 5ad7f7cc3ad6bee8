"""`gdp fit` under traffic and under limits of memory."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import gdp
from gdp.cli.asking import limited
from gdp.cli.main import cli
from gdp.cluster.file import parse_max_memory
from gdp.cluster.reserve import parse_reserve
from tests.generating_configs import generating_config
from tests.gguf_models import write_gguf

TEXT = "concurrency=4,prompt=64,new=16,requests=12"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(generating_config("llama")))
    return f"hf:{folder}"


def test_each_row_is_what_the_machine_alone_would_serve(config: str, tmp_path: Path) -> None:
    """A machine without room has its reason, and a row of a scheme is that of `gdp.serve`."""
    small, picture = tmp_path / "small.toml", tmp_path / "p.svg"
    small.write_text(
        'name = "small"\nhost = "d"\n[[device]]\nname = "d"\npreset = "t4"\nmemory_bytes = 6000\n'
    )
    words = ["fit", config, "--clusters", f"cpu+t4,{small}", "--for", "vllm", "--traffic", TEXT]
    done = CliRunner().invoke(cli, [*words, "--quantize", "none,int8", "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output.splitlines()[-1])["rows"]
    assert [(row["cluster"], row["quantize"], row["fits"]) for row in rows] == [
        ("cpu+t4", "none", True), ("cpu+t4", "int8", True), ("small", "none", False),
        ("small", "int8", False),
    ]  # fmt: skip
    for row, scheme in zip(rows[:2], ("none", "int8"), strict=True):
        alone = gdp.serve(f"{config}?quantize={scheme}", "cpu+t4", TEXT)
        assert row["tokens_per_s"] == pytest.approx(alone.served.tokens_per_s)
        assert row["first_token"]["p95_s"] == pytest.approx(alone.served.first_token.p95_s)
        assert row["token"]["mean_s"] == pytest.approx(alone.served.token.mean_s)
        assert row["room"] == alone.room
    assert rows[2]["tokens_per_s"] is None
    assert "fit" in rows[2]["limit"]
    low, high = rows[0]["intervals"]["tokens_per_s"]
    assert low <= rows[0]["tokens_per_s"] <= high
    assert rows[2]["intervals"] == {}
    text = CliRunner().invoke(cli, [*words, "--picture", str(picture)])
    assert text.exit_code == 0, text.output
    table = text.output.splitlines()
    (head,) = (line for line in table if line.startswith("machine"))
    assert head.split()[-5:] == ["concurrency", "room", "layout", "J/token", "watts"]
    assert picture.read_text().count("does not fit") == 1


@pytest.mark.parametrize(("more", "said"), [
    ([], "--traffic is for hf: models --for vllm"),
    (["--for", "vllm", "--prompt", "64"], "says all tokens and requests: leave out --prompt"),
    (["--for", "vllm", "--new", "64"], "leave out --new"),
    (["--for", "accelerate"], "--traffic is for hf: models --for vllm"),
    (["--for", "vllm", "--draft", "hf:small"], "--draft: 'hf:small' must look like"),
])  # fmt: skip
def test_what_traffic_does_not_go_with_is_refused(config: str, more: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["fit", config, "--cluster", "cpu+t4", "--traffic", TEXT, *more])
    assert done.exit_code == 2
    assert said in done.output


def test_limits_are_of_the_machines_that_have_the_device() -> None:
    one, two = gdp.Cluster.load("cpu+t4"), gdp.Cluster.load("cpu+2xrtx3090")
    first, second = limited(
        [one, two], [parse_max_memory("1=4GiB,cpu=8GiB")], [parse_reserve("0=2GiB")]
    )
    assert [d.memory_bytes / 2**30 for d in first.devices if d.is_cpu] == [8]
    assert first.devices[1].memory_bytes == one.devices[1].total_bytes - 2 * 2**30
    assert [d.memory_bytes / 2**30 for d in second.devices] == [8, 22, 4]
    with pytest.raises(gdp.ClusterError, match=r"--max-memory: max memory names 'rtx5090'"):
        limited([one, two], [parse_max_memory("rtx5090=4GiB")], [])


def test_rows_keep_the_limits(tmp_path: Path) -> None:
    """Under a limit of every device that the model has no room in, the row says what misses."""
    model = write_gguf(tmp_path / "m.gguf", layers=2)
    words = ["fit", str(model), "--cluster", "cpu+t4", "--prompt", "8", "--new", "4", "--json"]
    limits = ["--max-memory", "0=20KB", "--max-memory", "cpu=30KB", "--reserve", "0"]
    done = CliRunner().invoke(cli, [*words, "--seconds", "0.1", *limits])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.output.splitlines()[-1])["rows"]
    assert not row["fits"]
    assert "KiB" in row["limit"]
