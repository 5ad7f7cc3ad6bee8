"""Multipliers learned from measured pieces: recovered, calibrated, applied to costs and links."""

import msgspec
import numpy as np
import pytest

from gdp.cluster.file import load_cluster
from gdp.costs.adapt import (
    AdaptedCosts,
    LinkSeconds,
    Piece,
    Run,
    Share,
    _variance,
    adapt,
    learned_rows,
    lessons,
    link_effects,
    op_effects,
    op_keys,
    piece_effects,
)
from gdp.costs.base import roofline
from gdp.graph.op_graph import GraphBuilder, make_graph

TYPES = tuple("ABCDEFGH")


def a_machine(seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    return {t: 0.3 + 0.3 * rng.normal() for t in TYPES}


def a_run(
    rng: np.random.Generator, machine: dict[str, float], noise: float, count: int = 12
) -> Run:
    pieces = []
    for _ in range(count):
        shares = tuple(
            Share(str(t), 4, f"{t} {rng.integers(20)}", float(rng.lognormal(-8, 1)))
            for t in rng.choice(TYPES, 4, replace=False)
        )
        took = sum(s.seconds * np.exp(machine[s.op_type]) for s in shares)
        took *= np.exp(noise * rng.normal())
        pieces.append(Piece("core0", "cpu-core", shares, float(took), False))
    return Run("m", tuple(pieces))


def log_predicted(adaptation, piece: Piece) -> tuple[float, float]:
    own = [(piece_effects(piece, s), s.seconds) for s in piece.shares]
    seconds = np.array([s * np.exp(adaptation.log_factor(e)) for e, s in own])
    return float(np.log(seconds.sum())), deviation(adaptation, own, seconds / seconds.sum())


def deviation(adaptation, shares, weights) -> float:
    """Standard deviation of the log of seconds by the posterior of all effects, noise included: of
    a linear model, to which draws are compared."""
    known, new = np.zeros(len(adaptation.names)), dict[str, float]()
    for (effects, _), weight in zip(shares, weights, strict=True):
        for effect in effects:
            if effect in adaptation.column:
                known[adaptation.column[effect]] += weight
            else:
                new[effect] = new.get(effect, 0.0) + weight
    prior = adaptation.variance * known
    variance = known @ prior + sum(w**2 * _variance(e, adaptation.spread) for e, w in new.items())
    if adaptation.gain.size:
        kernel = (adaptation.gain * adaptation.variance) @ adaptation.gain.T
        seen = adaptation.gain @ prior
        variance -= seen @ np.linalg.solve(kernel + np.eye(len(kernel)), seen)
    return float(np.sqrt(variance + adaptation.noise**2))


def test_multipliers_of_types_are_recovered_from_whole_pieces() -> None:
    machine, rng = a_machine(0), np.random.default_rng(0)
    found = adapt([a_run(rng, machine, 0.02) for _ in range(5)])
    for t in TYPES:
        assert found.log_factor(op_effects(t, 4, "new", "core0", "cpu-core")) == pytest.approx(
            machine[t], abs=0.1
        )


def test_new_pieces_are_predicted_within_the_noise_and_the_deviation_says_so() -> None:
    within, errors = [], []
    for seed in range(20):
        machine, rng = a_machine(seed), np.random.default_rng(seed)
        found = adapt([a_run(rng, machine, 0.05) for _ in range(3)])
        for piece in a_run(rng, machine, 0.05).pieces:
            log_s, deviation = log_predicted(found, piece)
            errors.append(np.log(piece.measured_s) - log_s)
            within.append(abs(errors[-1]) < deviation)
    assert np.std(errors) < 0.1  # 0.3 without learning
    assert 0.55 < np.mean(within) < 0.85  # 0.68 of a normal distribution


def slowed(run: Run, which: int, factor: float) -> Run:
    """A run of which one piece took so many times its seconds."""
    pieces = list(run.pieces)
    late_s = pieces[which].measured_s * factor
    pieces[which] = msgspec.structs.replace(pieces[which], measured_s=late_s)
    return Run(run.model, tuple(pieces))


@pytest.mark.parametrize("factor", [10.0, 0.1, 160.0])
@pytest.mark.parametrize("seed", range(2))
def test_one_piece_ten_times_too_slow_changes_the_others_by_less_than_two_percent(
    seed: int, factor: float
) -> None:
    """A process that was preempted, or a machine that was paused, is not the machine's speed."""
    machine, rng = a_machine(seed), np.random.default_rng(seed)
    run, which = a_run(rng, machine, 0.02, count=30), 7 * seed
    clean, dirty = adapt([run]), adapt([slowed(run, which, factor)])
    others = [piece for k, piece in enumerate(run.pieces) if k != which]
    change = [log_predicted(dirty, p)[0] - log_predicted(clean, p)[0] for p in others]
    assert np.abs(change).max() < 0.02
    assert (clean.outliers, clean.observations, dirty.observations) == ((), 30, 30)
    (told,) = dirty.outliers
    assert " on core0 in m took " in told
    said = float(told.split(" took ")[1].split()[0])
    assert said == pytest.approx(factor, rel=0.5)


def test_a_paused_machine_in_few_runs_of_one_piece_is_noticed() -> None:
    """Three times 5 ms and once 828 ms are a piece of 5 ms."""
    once = Piece("core0", "cpu-core", (Share("A", 4, "A", 5e-3),), 5e-3, False)
    paused = msgspec.structs.replace(once, measured_s=0.828)
    found = adapt([Run("m", (once, once, paused, once))])
    assert found.outliers == ("A on core0 in m took 1.7e+02 times what all others say",)
    assert log_predicted(found, once)[0] == pytest.approx(np.log(5e-3), abs=0.02)


def test_a_link_that_was_held_up_once_is_no_slower() -> None:
    sent = LinkSeconds("core0", "core1", 1e-4, 1e-4)
    held_up = msgspec.structs.replace(sent, measured_s=5e-3)
    found = adapt([Run("m", (), (sent,) * 5 + (held_up,))])
    assert found.outliers == ("transfers core0 to core1 in m took 50 times what all others say",)
    assert abs(found.log_factor(link_effects("core0", "core1"))) < 0.02


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_slow_type_of_ops_is_no_outlier_even_if_one_piece_alone_has_it(count: int) -> None:
    """All convolutions three times slower is what a machine is like."""
    rng, pieces = np.random.default_rng(0), []
    for k in range(30):
        op_type = "Conv" if k < count else str(rng.choice(TYPES))
        own = (Share(op_type, 4, f"{op_type} {rng.integers(5)}", float(rng.lognormal(-8, 1))),)
        took = own[0].seconds * (3.0 if k < count else 1.0) * np.exp(0.03 * rng.normal())
        pieces.append(Piece("core0", "cpu-core", own, float(took), False))
    found = adapt([Run("m", tuple(pieces))])
    assert found.outliers == ()
    learned = found.log_factor(piece_effects(pieces[0], pieces[0].shares[0]))
    assert learned > np.log(2.5)


def test_pieces_that_are_shorter_than_the_clock_tells_say_little() -> None:
    """Half a microsecond that is measured as one and a half is no slower op."""
    long = Piece("core0", "cpu-core", (Share("A", 4, "A", 1e-3),), 1e-3, False)
    short = Piece("core0", "cpu-core", (Share("A", 4, "A", 5e-7),), 1.5e-6, False)
    found = adapt([Run("m", (long,) * 3 + (short,) * 3)])
    assert found.outliers == ()
    assert log_predicted(found, long)[0] == pytest.approx(np.log(1e-3), abs=0.02)


@pytest.mark.parametrize("count", [3, 40])
def test_many_observations_are_condensed_and_say_the_same(count: int) -> None:
    """By hand: variance S of all effects together, seen n times with noise s, is
    S / (1 + n S / s^2). Kept are at most as many rows as there are effects."""
    once = Piece("core0", "cpu-core", (Share("A", 4, "A", 1e-1),), 1.2e-1, False)
    found = adapt([Run("m", (once,) * count)])
    prior, noise = float(found.variance.sum()), found.noise**2
    left = prior / (1.0 + count * prior / noise)
    assert log_predicted(found, once)[1] == pytest.approx(np.sqrt(left + noise), rel=1e-4)
    assert len(found.gain) == min(count, len(found.names))
    assert log_predicted(found, once)[0] == pytest.approx(
        np.log(1e-1) + np.log(1.2) * (1.0 - left / prior), abs=1e-3
    )


def test_the_spread_of_a_noisy_machine_is_no_outlier() -> None:
    """Deviations are counted in those of most pieces, not in a fixed share."""
    machine, rng = a_machine(2), np.random.default_rng(2)
    assert adapt([a_run(rng, machine, 0.4, count=40)]).outliers == ()
    # On a quiet one differences below the least deviation are noise, however small the others'.
    once = Piece("core0", "cpu-core", (Share("A", 4, "A", 5e-3),), 5e-3, False)
    other = msgspec.structs.replace(once, measured_s=7e-3)
    assert adapt([Run("m", (*(once,) * 9, other))]).outliers == ()


def test_the_prior_is_no_change_and_its_doubt_is_that_of_all_effects() -> None:
    piece = a_run(np.random.default_rng(0), a_machine(0), 0.0, 1).pieces[0]
    log_s, deviation = log_predicted(adapt([]), piece)
    assert log_s == pytest.approx(np.log(sum(s.seconds for s in piece.shares)))
    assert deviation > 0.5


def test_more_runs_leave_less_doubt() -> None:
    machine, rng = a_machine(3), np.random.default_rng(3)
    runs = [a_run(rng, machine, 0.05) for _ in range(8)]
    piece = a_run(rng, machine, 0.05).pieces[0]
    doubts = [log_predicted(adapt(runs[:n]), piece)[1] for n in (0, 1, 8)]
    assert doubts[0] > doubts[1] > doubts[2]


def test_draws_spread_around_the_mean_as_far_as_the_posterior() -> None:
    machine, rng = a_machine(4), np.random.default_rng(4)
    found = adapt([a_run(rng, machine, 0.05) for _ in range(3)])
    piece = a_run(rng, machine, 0.05).pieces[0]
    mean, deviation = log_predicted(found, piece)
    drawn = [log_predicted(found.sampled(seed), piece)[0] for seed in range(300)]
    expected = np.sqrt(deviation**2 - found.noise**2)
    assert np.mean(drawn) == pytest.approx(mean, abs=4 * expected / np.sqrt(300))
    assert np.std(drawn) == pytest.approx(expected, rel=0.25)
    assert (found.sampled(7).mean == found.sampled(7).mean).all()


@pytest.mark.parametrize("cache_bytes", [100, 0])
def test_products_of_a_token_are_learned_apart_from_a_prompts(cache_bytes: int) -> None:
    """A prompt takes what was planned, a token twice that. In a model with caches the one says
    little of the other's new kernels; other graphs are not split by what bounds an op."""
    b = GraphBuilder()
    for name, flop in (("prompt", 1e9), ("token", 1e8)):
        b.add_op(
            name, "mm", flop=flop, traffic_bytes=1e8, weight_bytes=100, cache_bytes=cache_bytes
        )
    prompt, token = (Share(*key, 1e-3) for key in op_keys(b.build("g")))
    both = (
        Piece("core0", "cpu-core", (prompt,), 1e-3, False),
        Piece("core0", "cpu-core", (token,), 2e-3, False),
    )
    learned = adapt([Run("m", both * 6)])
    new = [
        learned.log_factor(op_effects(share.op_type, 3, "new", "core0", "cpu-core"))
        for share in (prompt, token)
    ]
    if cache_bytes:
        assert np.exp(new[1] - new[0]) > 1.3
    else:
        assert new[0] == new[1]


def test_what_other_devices_cost_while_busy_is_learned_apart() -> None:
    shares = (Share("A", 4, "A", 1e-3),)
    alone = Piece("core0", "cpu-core", shares, 1e-3, False)
    beside = Piece("core0", "cpu-core", shares, 1.5e-3, True)
    found = adapt([Run("m", (alone, beside) * 6)])
    apart = found.log_factor(piece_effects(beside, shares[0])) - found.log_factor(
        piece_effects(alone, shares[0])
    )
    assert apart == pytest.approx(np.log(1.5), abs=0.1)


def test_links_and_dispatch_are_learned_from_their_own_rows() -> None:
    sent = LinkSeconds("core0", "core1", 1e-4, 3e-4)
    idle = Piece(
        "core0", "cpu-core", (Share("A", 1, "A", 1e-6), Share("", 0, "", 1e-4)), 5e-5, False
    )
    found = adapt([Run("m", (idle,) * 4, (sent,) * 4)])
    assert found.log_factor(link_effects("core0", "core1")) == pytest.approx(np.log(3), abs=0.15)
    assert found.log_factor(piece_effects(idle, idle.shares[1])) < np.log(0.7)


def a_graph():
    return make_graph(
        "g", list("abc"), ["Input", "A", "B"], [(0, 100), (1, 100)], [(0, 1), (1, 2)],
        flop=[0, 1e6, 1e6], memory_traffic_bytes=[0, 1e5, 1e5],
    )  # fmt: skip


def test_costs_are_multiplied_by_device_and_type_and_links_slowed() -> None:
    graph, cluster = a_graph(), load_cluster("2xcpu-core")
    key = op_keys(graph)[1]
    own = (Share(*key, 1e-3), Share("", 0, "", 6e-6))
    runs = [Run("m", (Piece("core0", "cpu-core", own, 2e-3, False),) * 5,
                (LinkSeconds("core0", "core1", 1e-4, 2e-4),) * 5)]  # fmt: skip
    costs = AdaptedCosts(roofline, adapt(runs))
    ratio = costs(graph, cluster)[1:] / roofline(graph, cluster)[1:]
    assert ratio[0, 0] == pytest.approx(2.0, rel=0.1)
    assert 1.0 < ratio[1, 1] < ratio[0, 1] == ratio[0, 0]  # shared by kind, then by type too
    slower = costs.with_runtime_overheads(cluster)
    assert slower.link_latency_s[0, 1] / cluster.link_latency_s[0, 1] == pytest.approx(2, rel=0.1)
    assert cluster.link_bytes_per_s[0, 1] / slower.link_bytes_per_s[0, 1] == pytest.approx(
        2, rel=0.1
    )
    assert slower.link_latency_s[0, 0] == 0.0


@pytest.mark.parametrize(("slower", "alike"), [(1.02, True), (2.0, False)])
def test_devices_of_a_kind_stay_equal_until_one_is_clearly_slower(
    slower: float, alike: bool
) -> None:
    graph, cluster = a_graph(), load_cluster("2xcpu-core")
    own = (Share(*op_keys(graph)[1], 1e-3),)
    pieces = [Piece(f"core{d}", "cpu-core", own, 1.5e-3 * slower**d, False) for d in (0, 1)] * 8
    seconds = AdaptedCosts(roofline, adapt([Run("m", tuple(pieces))]))(graph, cluster)[1]
    assert (seconds[0] == seconds[1]) == alike
    assert seconds[1] / seconds[0] == pytest.approx(1.0 if alike else slower, rel=0.05)


def test_a_device_that_was_never_measured_is_the_mean_of_its_kind() -> None:
    graph, cluster = a_graph(), load_cluster("4xcpu-core")
    own = (Share(*op_keys(graph)[1], 1e-3),)
    pieces = [Piece(f"core{d}", "cpu-core", own, 1e-3 * 3.0**d, False) for d in (0, 1)] * 8
    seconds = AdaptedCosts(roofline, adapt([Run("m", tuple(pieces))]))(graph, cluster)[1]
    assert seconds[2] == seconds[3] == pytest.approx(np.sqrt(seconds[0] * seconds[1]))
    assert seconds[1] / seconds[0] == pytest.approx(3.0, rel=0.05)


def test_kinds_that_were_never_measured_keep_their_costs() -> None:
    graph, cluster = a_graph(), load_cluster("2xt4-pcie4")
    runs = [Run("m", (Piece("core0", "cpu-core", (Share("A", 5, "A", 1e-3),), 9e-3, False),) * 5)]
    costs = AdaptedCosts(roofline, adapt(runs), together=True)
    assert (costs(graph, cluster) == roofline(graph, cluster)).all()
    assert costs.with_runtime_overheads(cluster).devices == cluster.devices


def test_lessons_name_what_changed_most_seconds_and_leave_out_what_did_not() -> None:
    def piece(op_type: str, seconds: float, factor: float) -> Piece:
        own = (Share(op_type, 4, op_type, seconds),)
        return Piece("core0", "cpu-core", own, seconds * factor, False)

    runs = [Run("m", (piece("A", 1e-2, 2.0), piece("B", 1e-2, 1.0), piece("C", 1e-4, 3.0)) * 6)]
    told = lessons(adapt(runs), runs)
    assert told[0] == "A on core0 2 times the costs", told
    assert not any("B" in text for text in told)


def test_learned_rows_sum_to_what_was_measured_of_a_device() -> None:
    machine, rng = a_machine(5), np.random.default_rng(5)
    runs = [a_run(rng, machine, 0.0) for _ in range(4)]
    rows = learned_rows(adapt(runs), runs)
    assert (rows[0].op_type, rows[0].device) == ("", "core0")
    assert rows[0].learned_s == pytest.approx(rows[0].measured_s, rel=0.02)
    assert rows[0].learned_s == pytest.approx(sum(r.learned_s for r in rows if r.op_type))
    assert abs(rows[0].planned_s / rows[0].measured_s - 1) > 0.1
