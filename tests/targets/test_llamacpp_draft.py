"""A model that drafts in plans for llama.cpp: seconds, memory, its device, and its vocabulary."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gdp
from gdp.api.generation import generation_of
from gdp.api.traffic.drafting import Draft
from gdp.base.errors import ModelError
from gdp.cli.main import cli
from gdp.cluster.file import cluster_toml
from gdp.placement.placement import DraftModel
from gdp.question.models import with_draft
from gdp.sim.serving import written_in_a_pass
from gdp.targets.llamacpp.flags import flags_of, slots_of
from gdp.targets.llamacpp.parts import held_bytes
from tests.gguf_models import MIB, box, quick, write_gguf

ONCE = gdp.Search(seconds=None, evaluations=10)


def _pair(folder: Path, layers: int = 6) -> tuple[Path, Path]:
    large = write_gguf(folder / "large.gguf", layers=layers)
    return large, write_gguf(folder / "small.gguf", layers=2)


@pytest.mark.parametrize(("tokens", "acceptance", "new"), [
    (1, 0.0, 16), (4, 0.7, 64), (7, 0.95, 200), (3, 0.5, 1),
])  # fmt: skip
def test_seconds_are_counted_by_hand(
    tmp_path: Path, tokens: int, acceptance: float, new: int
) -> None:
    """On a processor alone: a pass is k + 1 passes of the small model, and one of k + 1 tokens."""
    large, small = _pair(tmp_path)
    cluster = box(cpu_bytes=640 * MIB)

    def placed(spec: str) -> gdp.Result:
        return gdp.place(spec, cluster, target="llamacpp", search=ONCE, costs="datasheet")

    asked = f"?prompt=64&new={new}"
    drafted = placed(with_draft(f"{large}{asked}", small, tokens, acceptance))
    both = generation_of(drafted.question, drafted.placement)
    request = drafted.question.graph.request
    assert request is not None
    passes = max(2, round(new / written_in_a_pass(tokens, acceptance)))
    assert request.passes == passes
    assert both.request_s == pytest.approx(both.first_token_s + passes * both.token_s, rel=0.01)
    assert both.tokens_per_s == pytest.approx(new / passes / both.token_s)

    graph, one, alone = (
        drafted.question.graph, gdp.load(f"{large}{asked}"), gdp.load(f"{small}{asked}")
    )  # fmt: skip
    # Each op of the small model as in a step of it alone, k + 1 times in a pass.
    drafts = [name for name in graph.op_names if name.startswith("step/draft/blk.")]
    own = [graph.op_index[name] for name in drafts if "mask" not in name]
    as_alone = [alone.op_index[graph.op_names[op].replace("draft/", "")] for op in own]
    assert graph.flop[own].tolist() == alone.flop[as_alone].tolist()
    assert (graph.repeats[own] == passes * (tokens + 1)).all()
    # The large model multiplies k + 1 tokens by weights that it reads once.
    names = [f"step/blk.{i}.ffn_{part}" for i in range(6) for part in ("gate", "up", "down")]
    checked, at = ([own.op_index[name] for name in names] for own in (graph, one))
    assert graph.flop[checked] == pytest.approx((tokens + 1) * one.flop[at])
    assert (graph.memory_traffic_bytes[checked] < 2 * one.memory_traffic_bytes[at]).all()
    assert (graph.repeats[checked] == passes).all()


@pytest.mark.parametrize(("sizes", "home", "words"), [
    ((64, 64), 1, ["--gpu-layers-draft", "all", "--device-draft", "CUDA0"]),
    # The first GPU has no room beside the blocks, or not even alone.
    ((1, 64), 2, ["--gpu-layers-draft", "all", "--device-draft", "CUDA1"]),
    ((1,), 0, ["--gpu-layers-draft", "0"]),
])  # fmt: skip
def test_the_small_model_is_where_there_is_room(
    tmp_path: Path, sizes: tuple[int, ...], home: int, words: list[str]
) -> None:
    large, small = _pair(tmp_path)
    cluster = box(*(size * MIB for size in sizes))
    spec = with_draft(f"{large}?prompt=64&new=32", small, 3, 0.6)
    result = gdp.place(spec, cluster, target="llamacpp", search=ONCE)
    graph, placement = result.question.graph, result.placement
    slots = slots_of(graph)
    assert (placement.device[slots.draft] == home).all()
    assert (placement.device[slots.draft_embedding] == 0).all()
    assert result.score.feasible
    assert result.bound_s <= result.value_s
    arguments = flags_of(graph, placement, cluster).arguments()
    assert arguments[-len(words) :] == words
    told = ["--model-draft", str(small), "--spec-type", "draft-simple", "--spec-draft-n-max", "3"]
    assert arguments[-len(words) - len(told) : -len(words)] == told
    assert any(f"the model that drafts is on {cluster.device_names[home]}" in n
               for n in result.notes)  # fmt: skip
    assert any("times as fast as without" in note for note in result.notes)
    answer = generation_of(result.question, placement)
    assert answer.draft is not None
    assert (answer.draft.model, answer.draft.tokens) == (str(small), 3)
    drafts = [row.draft_bytes > 0 for row in answer.memory]
    assert drafts == [d == home for d in range(cluster.num_devices)]


def test_blocks_have_the_memory_that_the_small_model_leaves(tmp_path: Path) -> None:
    """On a GPU that must have it, and has room for half of the blocks beside it."""
    large, small = _pair(tmp_path, layers=8)
    spec = with_draft(f"{large}?prompt=64&new=32", small, 3, 0.6)
    graph = gdp.load(spec)
    pinned = gdp.Constraints(pins=(gdp.Pin("draft", ("gpu0",)),))
    roomy = gdp.place(spec, box(64 * MIB), target="llamacpp", search=ONCE, constraints=pinned)
    held = held_bytes(roomy.question, slots_of(graph).draft)
    blocks = int(graph.weight_bytes[[s.startswith("blk.") for s in graph.scope]].sum())
    tight = box(held + blocks // 2 + MIB)
    result = gdp.place(spec, tight, target="llamacpp", search=ONCE, constraints=pinned)
    assert result.score.feasible
    on_gpu = {graph.scope[op] for op in np.flatnonzero(result.placement.device == 1)}
    assert 1 <= len(on_gpu & {f"blk.{i}" for i in range(8)}) < 8


def test_without_room_the_plan_has_no_drafts(tmp_path: Path) -> None:
    large = write_gguf(tmp_path / "large.gguf")
    small = write_gguf(tmp_path / "small.gguf", layers=60)
    spec = with_draft(f"{large}?prompt=64&new=32", small, 3, 0.6)
    result = gdp.place(spec, box(4 * MIB, cpu_bytes=8 * MIB), target="llamacpp", search=ONCE)
    assert "draft" not in str(result.question.model)
    assert any("no room on any device" in note for note in result.notes)


def test_one_gpu_drafts_beside_a_tensor_split(tmp_path: Path) -> None:
    """Its bytes are those of one member; the large model is divided as without it."""
    large, small = _pair(tmp_path)
    cluster, asked = quick(1e11, 1e11), f"{large}?prompt=64&new=64"
    plain, drafted = (
        gdp.place(own, cluster, target="llamacpp", search=ONCE, costs="datasheet")
        for own in (asked, with_draft(asked, small, 3, 0.9))
    )
    assert drafted.placement.splits == plain.placement.splits != ()
    graph = drafted.question.graph
    slots = slots_of(graph)
    assert (drafted.placement.device[slots.draft] == 1).all()
    more = drafted.score.peak_bytes - plain.score.peak_bytes
    held = held_bytes(drafted.question, slots.draft)
    assert held <= more[1] < 1.5 * held
    assert more[2] < 0.2 * held  # tensors alone


WORDS = [f"w{i}" for i in range(300)]


@pytest.mark.parametrize(("other", "said"), [
    (("gpt2", WORDS, 1), ""),
    (("gpt2", WORDS + ["more"] * 128, 1), ""),
    (("gpt2", ["x"] * 5 + WORDS[5:], 1), ""),  # the first five may differ
    (("llama", WORDS, 1), "kinds 'gpt2' and 'llama'"),
    (("gpt2", WORDS + ["more"] * 129, 1), "300 and 429 tokens"),
    (("gpt2", [*WORDS[:5], "x", *WORDS[6:]], 1), "token 5 differs"),
    (("gpt2", WORDS, 2), "ends of a text"),
])  # fmt: skip
def test_vocabularies_are_the_same(
    tmp_path: Path, other: tuple[str, list[str], int], said: str
) -> None:
    """The rule of `common_speculative_are_compatible`."""
    large = write_gguf(tmp_path / "large.gguf", words=("gpt2", WORDS, 1))
    small = write_gguf(tmp_path / "small.gguf", words=other, layers=1)
    spec = with_draft(f"{large}?prompt=64&new=32", small, 3, 0.6)
    if not said:
        assert gdp.load(spec).num_ops
        return
    with pytest.raises(ModelError, match=said):
        gdp.load(spec)


@pytest.mark.parametrize(("more", "said"), [
    ("&drafts=4&acceptance=0.7", "drafts for a whole request"),
    ("&draft=small.gguf&drafts=4", "drafts for a whole request"),
    ("&draft=small.gguf&drafts=65&acceptance=0.7", "from 1 to 64"),
    ("&draft=small.gguf&drafts=4&acceptance=1", "below 1"),
    ("&draft=small.gguf&drafts=4&acceptance=often", "below 1"),
])  # fmt: skip
def test_bad_drafts_are_refused(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        gdp.load(f"{write_gguf(tmp_path / 'large.gguf')}?prompt=64&new=8{more}")
    with pytest.raises(ModelError, match="whole request"):
        gdp.load(f"{tmp_path / 'large.gguf'}?sequence=64&draft=s.gguf&drafts=4&acceptance=0.5")


def test_the_command_line_drafts(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """`gdp place` and `gdp fit` take the small model; the answer and the flags tell of it."""
    large, small = _pair(tmp_path)
    (tmp_path / "box.toml").write_text(cluster_toml(box(64 * MIB)))
    drafts = ["--draft", f"{small},tokens=3,acceptance=0.6"]
    place = ["place", str(large), "--cluster", str(tmp_path / "box.toml"), "--for", "llamacpp"]
    plan, request = str(tmp_path / "p.json"), ["--generate", "prompt=64,new=32"]
    done = CliRunner().invoke(cli, [*place, *drafts, *request, "-o", plan])
    assert done.exit_code == 0, done.output
    assert f"drafts   of 3 tokens an iteration by {small} on gpu0" in done.output
    flags = CliRunner().invoke(cli, ["export", plan, "--to", "llamacpp", "-o", f"{tmp_path}/f"])
    assert f"--model-draft {small} --spec-type draft-simple" in flags.output
    fit = ["fit", str(large), "--cluster", str(tmp_path / "box.toml"), "--prompt", "64"]
    rows = CliRunner().invoke(cli, [*fit, *drafts, "--json", "--seconds", "0"])
    assert json.loads(rows.output)["rows"][0]["fits"]
    without = CliRunner().invoke(cli, [*place, *drafts])
    assert "drafts for a whole request" in f"{without.output}{without.exception}"
    result = gdp.place(
        gdp.Generation(large, 64, 32), str(tmp_path / "box.toml"), target="llamacpp",
        draft=Draft(small, 3, 0.6),
    )  # fmt: skip
    assert result.generation is not None
    assert result.generation.draft == DraftModel(str(small), 3)
    assert (gdp.load_placement(plan).device == result.placement.device).all()
    code, _, err = run(*place, *request, "--draft", "hf:m,tokens=3,acceptance=0.6")
    assert code == 2
    assert "'hf:m' is none" in err
