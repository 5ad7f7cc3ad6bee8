"""Advice: the heuristics' placements as the policy reads them."""

import numpy as np
import pytest
from tiny import fork_join, random_problem

from gdp.base.errors import MissingExtraError
from gdp.methods.base import Answer, Assignment
from gdp.methods.priorities import timing
from gdp.policy.advice import ADVISERS, Advice, advice, judge
from gdp.policy.decode import decode
from gdp.policy.model.config import NetworkConfig
from gdp.policy.model.network import init
from gdp.policy.policy import Policy
from gdp.policy.view.decode_problem import PAIR, PairFeatures
from gdp.policy.view.features import NUM_OP_FEATURES, features
from gdp.problem.symmetry import canonical


def test_the_incumbent_is_the_best_adviser() -> None:
    for seed in range(4):
        problem = random_problem(seed, num_ops=30, num_devices=3)
        found = advice(problem)
        assert found.device.shape == (1 + len(ADVISERS), problem.num_ops)
        assert found.cost_s[0] == found.cost_s[1:].min()
        np.testing.assert_array_equal(judge(problem, found.device)[0], found.cost_s)
        assert found.weight.sum() == pytest.approx(1.0)
        assert found.weight[0] == found.weight.max()
        for row in found.device:
            assert (row == canonical(problem, row, timing(problem).order)).all()


def test_the_decoder_sees_where_advisers_put_an_op() -> None:
    """Followed from start to end, the incumbent's feature is one exactly where it goes."""
    problem = random_problem(2, num_ops=30, num_devices=3)
    found = advice(problem)
    policy = Policy(CONFIG, init(CONFIG, 0))
    drawn = decode(
        policy.view(problem), policy.head(problem), samples=1, seed=0, forced=found.device[:1],
        keep=(problem.num_ops, problem.num_devices),
    )  # fmt: skip
    followed = 0
    for op in np.flatnonzero(drawn.taken[0]):
        seen = drawn.feats[0, op]
        for row in range(1 + len(ADVISERS)):
            mark = np.zeros(problem.num_devices)
            mark[found.device[row, op]] = 1.0
            legal = drawn.legal[0, op]
            np.testing.assert_array_equal(seen[:, PAIR.incumbent + row], mark * legal)
        assert seen[:, PAIR.votes].sum() <= 1.0 + 1e-6
        followed = max(followed, seen[:, PAIR.followed].max())
    assert 0.5 < followed <= 1.0, "the share of the incumbent's choices that were followed grows"


CONFIG = NetworkConfig(
    width=8, heads=2, sage_layers=1, attention_layers=0, head_width=8, segment=64
)


def test_features_without_advice_are_zero_there() -> None:
    problem = fork_join()
    plain, told = features(problem), features(problem, "full", advice(problem))
    assert plain.op.shape == told.op.shape == (problem.num_ops, NUM_OP_FEATURES)
    assert (plain.op[:, -3:] == 0).all()
    assert (plain.whole[-6:] == 0).all()
    assert told.whole[-6:-2].min() == 0.0, "one adviser is the best"


def test_without_metis_the_best_of_the_others_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object) -> None:
        raise MissingExtraError("method 'metis' needs pymetis: pip install 'gdp-placement[metis]'")

    monkeypatch.setattr("gdp.methods.heuristics.metis.metis", missing)
    found = advice(random_problem(0, num_ops=30, num_devices=3))
    assert (found.device[-1] == found.device[0]).all()
    assert found.cost_s[-1] == found.cost_s[0] == found.cost_s[1:-1].min()
    assert len(found.device) == 1 + len(ADVISERS)


def test_every_adviser_has_its_own_pair_feature_in_their_order() -> None:
    assert PairFeatures._fields[PAIR.incumbent : PAIR.votes] == ("incumbent", *ADVISERS)


def test_an_adviser_whose_answer_is_known_is_not_asked_again() -> None:
    problem, twin = random_problem(2, num_ops=30), random_problem(2, num_ops=30)
    row = ADVISERS.index("heft") + 1
    odd = problem.group_allowed.argmax(axis=1)[problem.group]
    told = advice(problem, {"heft": Answer(Assignment(odd))})
    wanted = canonical(problem, odd, timing(problem).order)
    assert (told.device[row] == wanted).all()
    assert (advice(twin).device[row] != wanted).any(), "by itself it answers something else"
    assert advice(problem, {"heft": Answer(None)}) is told, "once asked, the advice stays"


def test_costs_of_nothing_are_equal() -> None:
    """Models without work have plans of 0 s, whose ratio is no number."""
    devices = np.zeros((3, 2), dtype=np.int64)
    assert Advice(devices, np.array([0.0, 0.0, 1.0]), 0).log_ratio.tolist() == [0.0, 0.0, 3.0]
