"""Settings of llama.cpp that plans propose, and those that go with its models alone."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import gdp
from gdp.api.fit import fit
from gdp.cli.main import cli
from gdp.targets.llamacpp.plan import PROPOSAL, PROPOSED
from tests.gguf_models import MIB, box, write_gguf

ONCE = gdp.Search(seconds=None, evaluations=10)


def _planned(spec: str, cluster: gdp.Cluster) -> gdp.Result:
    return gdp.place(spec, cluster, target="llamacpp", search=ONCE)


@pytest.mark.parametrize(("prompt", "size", "helps"), [
    (64, 64, False), (4096, 16, True), (4096, 20, True), (4096, 64, False),
])  # fmt: skip
def test_smaller_caches_are_proposed_where_they_help(
    tmp_path: Path, prompt: int, size: int, helps: bool
) -> None:
    """By the plan with them, and never taken unasked."""
    model = write_gguf(tmp_path / "m.gguf", layers=6, context=32768)
    spec, cluster = (
        f"{model}?prompt={prompt}&new=64&ubatch=512",
        box(size * MIB, cpu_bytes=640 * MIB),
    )
    plain, packed = (_planned(spec + more, cluster) for more in ("", "&cache=q8_0"))
    assert helps == (packed.value_s * PROPOSED <= plain.value_s)
    notes = [note for note in plain.notes if note.startswith(PROPOSAL)]
    assert len(notes) == helps
    assert "cache=" not in str(plain.question.model)
    if helps:
        assert f"{plain.value_s / packed.value_s:.2f} times as fast" in notes[0]
    assert not any(note.startswith(PROPOSAL) for note in packed.notes)
    row = fit(f"{model}?ubatch=512", [cluster], prompts=(prompt,), new=64, search=ONCE)[0]
    assert (PROPOSAL in row.note) == helps


@pytest.mark.parametrize("words", [
    ["place", "onnx:light_squeezenet"], ["fit", "hf:examples/llama-7b", "--prompt", "64"],
])  # fmt: skip
def test_a_backend_is_of_llama_cpp(words: list[str], tmp_path: Path) -> None:
    run = CliRunner().invoke(cli, [*words, "--cluster", "cpu+rtx3090", "--backend", "vulkan"])
    assert run.exit_code == 2
    assert "--backend is of llama.cpp alone" in run.output
    model = str(write_gguf(tmp_path / "m.gguf"))
    asked = ["place", model, "--for", "llamacpp", "--cluster", "cpu+rtx3090"]
    taken = CliRunner().invoke(cli, [*asked, "--backend", "vulkan"])
    assert taken.exit_code == 0, taken.output
