"""The longest context that fits: found as if every plan had been tried, and told everywhere."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import gdp
from gdp.api.fit import fit
from gdp.base.errors import ModelError
from gdp.cli.main import cli
from gdp.costs.base import roofline
from gdp.graph.generation import with_context
from gdp.question import solve
from gdp.question.models import Generation, load
from gdp.question.question import Question
from gdp.targets.contexts import STEP, longest_found, longest_of_plan
from tests.gguf_models import KEY_HEADS, WIDTH, box, sayable, write_gguf

TOKEN_BYTES = 2 * 2 * KEY_HEADS * (WIDTH // 4)  # keys and values of a block, in F16
ONCE = gdp.Search(seconds=None, evaluations=20)
LONGEST = 8192


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_gguf(tmp_path / "m.gguf", layers=2, context=LONGEST))


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_of_flags_has_a_longer_context(seed: int, model: str) -> None:
    """Against every placement that the flags can say, on two GPUs and a processor too small for
    all that the model was made for."""
    rng = np.random.default_rng(seed)
    asked = Generation(model, prompt=16, new=4, context="max")
    graph = load(Generation(model, prompt=16, new=4))
    weights = int((graph.weight_bytes - graph.cache_bytes).sum())
    sizes = (weights * rng.uniform(0.5, 1.2, 3) + TOKEN_BYTES * rng.integers(0, 5000, 3)).tolist()
    cluster = box(*map(int, sizes[:2]), cpu_bytes=int(sizes[2]))
    question = Question(graph, cluster, costs=roofline)
    scored = ((p, solve.simulate(question, p)) for p in sayable(graph, cluster))
    each = [longest_of_plan(question, p, score) for p, score in scored]
    best = max(tokens for tokens in each if tokens is not None)
    assert 20 < best < LONGEST
    placed = gdp.place(asked, cluster, target="llamacpp", costs=roofline, search=ONCE)
    record = placed.placement.question
    assert record is not None
    request = load(record.model).request
    assert request is not None
    assert best - max(STEP, best // 64) <= request.context <= best
    assert placed.score.feasible
    assert any(f"is {request.context} tokens" in note for note in placed.notes)


def test_a_plan_has_room_for_so_many_tokens_and_no_more(model: str) -> None:
    """On one GPU, by hand: what is left beside weights and tensors, in steps of 256 tokens."""
    graph = load(Generation(model, prompt=16, new=4))
    cluster = box(int(graph.weight_bytes.sum()) + 300 * TOKEN_BYTES + (1 << 20))
    plan = gdp.make_placement(graph, cluster, np.where(graph.is_io, cluster.host, 1))
    question = Question(graph, cluster, costs=roofline)
    score = solve.simulate(question, plan)
    tokens = longest_of_plan(question, plan, score)
    free = int(cluster.memory_bytes[1] - score.peak_bytes[1])
    # A mask of 512 tokens grows from 256 cells on, which both blocks share.
    token_bytes = 2 * TOKEN_BYTES + 512 * 2 * (LONGEST - 256) / (LONGEST - 20)
    assert tokens == (20 + free // token_bytes) // STEP * STEP > 256
    for context, fits in ((tokens, True), (tokens + STEP, False)):
        reserved = with_context(graph, context)
        again = gdp.make_placement(reserved, cluster, plan.device)
        assert solve.simulate(Question(reserved, cluster, costs=roofline), again).feasible == fits


def test_a_context_that_the_machine_holds_whole_is_found_by_one_plan(model: str) -> None:
    graph = load(Generation(model, prompt=16, new=4))
    asked: list[int] = []

    def plan(question: Question) -> gdp.Result:
        request = question.graph.request
        asked.append(0 if request is None else request.held)
        return solve.solve(question)

    question = Question(graph, box(1 << 30), costs=roofline, method="single")
    assert longest_found(question, plan)[0] == LONGEST
    assert asked == [LONGEST]


def test_a_context_is_placed_told_and_exported(model: str, tmp_path: Path) -> None:
    """Twice the tokens for two sequences; with max as many as the model was made for, as they
    fit."""
    plan, flags = tmp_path / "p.json", tmp_path / "flags"
    for context, tokens in ((1024, 1024), ("max", LONGEST)):
        words = ["place", model, "--generate", "prompt=16,new=4,batch=2", "--context", str(context),
                 "--cluster", "cpu+t4", "--for", "llamacpp", "-o", str(plan), "--json"]  # fmt: skip
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
        answer = json.loads(done.stdout.splitlines()[-1])["generation"]
        assert (answer["context"], answer["longest_context"]) == (tokens, LONGEST)
        assert sum(row["cache_bytes"] for row in answer["memory"]) == 2 * 2 * TOKEN_BYTES * tokens
        done = CliRunner().invoke(cli, ["export", str(plan), "--to", "llamacpp", "-o", str(flags)])
        assert done.exit_code == 0, done.output
        assert f"--ctx-size {2 * tokens} " in (flags / "arguments.txt").read_text()


def test_rows_of_what_fits_say_the_longest_context(model: str) -> None:
    """Of a machine that holds all: what is timed is the same, whatever the context is."""
    few = gdp.Search(seconds=None, evaluations=5)
    rows = [
        fit(model, ["cpu"], prompts=[16], new=4, context=context, search=few)[0]
        for context in (None, "max")
    ]
    assert [row.context for row in rows] == [20, LONGEST]
    assert [row.longest_context for row in rows] == [LONGEST] * 2
    assert rows[0].request_s == rows[1].request_s


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--generate", "prompt=16,new=4", "--context", "19"],
         "a context of 19 tokens holds no request of 16 + 4: ask for a context of 20 or more"),
        (["--generate", "prompt=16,new=4", "--context", "0"], "'0' must be a number of tokens"),
        (["--context", "max"], "--context is for a whole request: give --generate, too"),
    ],
)  # fmt: skip
def test_contexts_that_cannot_be(words: list[str], said: str, model: str) -> None:
    done = CliRunner().invoke(cli, ["place", model, "--cluster", "cpu+t4", *words])
    assert done.exit_code != 0
    assert said in f"{done.output} {done.exception}".replace("\n", " ")


def test_only_a_machine_knows_the_longest_context(model: str) -> None:
    with pytest.raises(ModelError, match=r"context=max is answered by gdp place and gdp fit"):
        load(Generation(model, prompt=16, new=4, context="max"))
    with pytest.raises(ModelError, match="context must be a positive whole number"):
        Generation(model, prompt=16, new=4, context="most")
