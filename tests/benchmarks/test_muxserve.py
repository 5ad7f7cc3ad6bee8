"""MuxServe's rows beside predictions, on made-up rows and a made-up profile."""

from dataclasses import replace

import pytest

from benchmarks.measured_world.muxserve import (
    PARAMETERS,
    Profile,
    Row,
    Shared,
    best_of_three,
    mesh_of,
    predictions,
    shared_passes,
)
from benchmarks.measured_world.muxserve_packing import Kept, kept_of, limits_of


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Steps of 10 ms and prompts of 0.1 ms a token for 7B on one GPU, in proportion to the size for
    others; half of the SMs take twice as long."""
    path = tmp_path_factory.mktemp("muxserve") / "profile.csv"
    lines = ["model,gpus,sm_percent,batch,sequence,prefill_ms,decode_ms"]
    for model in ("llama-7b", "llama-13b", "llama-65b"):
        size = PARAMETERS[model] / PARAMETERS["llama-7b"]
        for gpus in (1, 4):
            for sm in (50, 100):
                times = size * 100 / sm
                for batch in (1, 4, 16, 64):
                    for sequence in (32, 128, 256):
                        tokens = batch * sequence
                        step = times * (10 + 0.01 * batch + 1e-5 * tokens)
                        lines.append(
                            f"{model},{gpus},{sm},{batch},{sequence},{0.1 * times * tokens},{step}"
                        )
    path.write_text("\n".join(lines) + "\n")
    return Profile(path)


def row(llm: str, model: str, sharing: str, mesh: str, sm: int = 100) -> Row:
    return Row(500, sharing, 1, mesh, llm, model, sm, sm, 90, 1.0, 200.0, 0.012)


def test_a_profile_is_fitted_by_its_terms(profile: Profile) -> None:
    alone = profile.passes("llama-7b", 1, 100)
    assert alone.step_s == pytest.approx(0.010, rel=1e-6)
    assert alone.token_s == pytest.approx(1e-4, rel=1e-6)
    assert alone.context_s == pytest.approx(1e-8, rel=1e-3)
    assert profile.passes("llama-7b", 1, 50).step_s == pytest.approx(0.020, rel=1e-6)
    # 30B lies between 13B and 65B in proportion to its parameters.
    between = profile.passes("llama-30b", 1, 100).step_s / alone.step_s
    assert between == pytest.approx(PARAMETERS["llama-30b"] / PARAMETERS["llama-7b"], rel=1e-6)


def test_models_that_take_turns_wait_for_each_other(profile: Profile) -> None:
    tokens = {"a": 200.0, "b": 200.0}
    (alone,) = mesh_of([row("a", "llama-7b", "spatial", "0")], profile, tokens, {})
    both = [row("a", "llama-7b", "temporal", "0"), row("b", "llama-13b", "temporal", "0")]
    shared, other = mesh_of(both, profile, tokens, {})
    assert shared.tpot_s > 1.3 * alone.tpot_s
    assert shared.requests_per_s <= alone.requests_per_s
    # Iterations alternate, so that both wait for one of each.
    assert shared.tpot_s == pytest.approx(other.tpot_s, rel=0.35)


@pytest.mark.parametrize(("measured_best", "right"), [("spatial", 1), ("temporal", 0)])
def test_the_best_way_is_counted_by_mesh(profile: Profile, measured_best: str, right: int) -> None:
    """GPUs of one's own are predicted to be best; the rows say so, or not."""
    rows = [
        row(llm, model, sharing, mesh, sm)._replace(
            requests_per_s=2.0 if sharing == measured_best else 1.0
        )
        for llm, model in (("a", "llama-7b"), ("b", "llama-13b"))
        for sharing, mesh, sm in (
            ("spatial", llm, 100), ("temporal", "0", 100), ("flexsm", "0", 50)
        )
    ]  # fmt: skip
    assert best_of_three(predictions(rows, profile)) == (right, 1)


def test_requests_within_limits_are_counted_by_placement(profile: Profile) -> None:
    """Turns make each token of two equal models take twice as long: within three times its seconds
    alone, not within one and a half."""
    tokens, rows = {"a": 200.0, "b": 200.0}, [row(x, "llama-7b", "spatial", x) for x in "ab"]

    def kept(meshes: list[list[Shared]], scale: float) -> Kept:
        limits = limits_of(rows, profile, tokens, {}, scale)
        # The first token waits for a pass at most, whose seconds are no matter here.
        return kept_of(meshes, profile, tokens, {}, {k: (1.0, s) for k, (_, s) in limits.items()})

    apart = [[Shared(one)] for one in rows]
    turns = [[Shared(one._replace(sharing="temporal")) for one in rows]]
    assert kept(apart, 1.5) == Kept(180, 180, {"a": 1.0, "b": 1.0})
    assert kept(turns, 1.5).kept == 0
    assert kept(turns, 3.0).kept == 180


def test_shares_of_sms_add_up_on_each_gpu(profile: Profile) -> None:
    """b shares a GPU with a and another one with c: 50% + 50% on both, so that none waits."""
    tokens = dict.fromkeys("abc", 200.0)
    a, b, c = (row(x, "llama-7b", "flexsm", "0", sm=50)._replace(requests=30) for x in "abc")
    alone = shared_passes([Shared(b, (0, 1))], profile, tokens, {})[0][1].token.mean_s
    three = [Shared(a, (0,)), Shared(b, (0, 1)), Shared(c, (1,))]
    room = [replace(one, room=1e6) for one in three]
    seconds = [one.token.mean_s for _, one in shared_passes(room, profile, tokens, {})]
    assert seconds == pytest.approx([alone] * 3, rel=1e-6)
    crowded = [replace(one, on=(0, 1)) for one in room]
    assert shared_passes(crowded, profile, tokens, {})[0][1].token.mean_s > 1.01 * alone
