"""Rates, intervals and what physics forbids, on traces written by hand."""

import dataclasses

import numpy as np
import pytest
from bursts import Busy
from scipy.stats import binom

from gdp.base.errors import GdpError, MeasurementError
from gdp.measure.measuring import PRECISION
from gdp.measure.statistics import (
    MIN_BLOCKS,
    Estimate,
    Trace,
    batch_means,
    check_physics,
    count,
    estimate,
)


def line(samples: int, slots: int, step_s: float, stages: tuple[float, ...] = ()) -> Trace:
    """A sample ends every `step_s`, each entered when the one `slots` before it ended."""
    finish = [step_s * (i + 1) for i in range(samples)]
    start = [0.0 if i < slots else finish[i - slots] for i in range(samples)]
    runs = [tuple((f - s, f) for f in finish) for s in stages]
    return Trace(tuple(start), tuple(finish), tuple(runs), tuple(range(len(stages))))


def test_filling_and_running_dry_do_not_count() -> None:
    """Two slots. The pipeline fills until 5, then a sample ends every second until the last enters
    at 17; what then runs dry ends in a burst."""
    finish = (4.0, *[5.0 + i for i in range(13)], 17.1, 17.2)
    trace = Trace((0.0, 0.0, *finish[:-2]), finish)
    found = count([trace], slots=2)
    assert (found.completions, found.seconds, found.rate_per_s) == (12, 12.0, 1.0)


def test_few_samples_count_as_a_whole_and_too_low_rather_than_too_high() -> None:
    """The same pipeline stopped at 9: the full part holds four completions for two slots, so all
    eight in 9.2 s count; one second a sample would have been right."""
    finish = (4.0, *[5.0 + i for i in range(5)], 9.1, 9.2)
    found = count([Trace((0.0, 0.0, *finish[:-2]), finish)], slots=2)
    assert (found.completions, found.seconds) == (8, 9.2)


def test_a_burst_of_completions_is_no_rate() -> None:
    """Twelve samples in flight come out at once every twelve seconds, one a second, although the
    seconds between two of them are none."""
    finish = np.repeat(np.arange(1, 9) * 12.0, 12) + np.tile(np.arange(12) * 1e-3, 8)
    start = np.concatenate([np.zeros(12), finish[:-12]])
    found = count([Trace(tuple(start), tuple(finish))], slots=12)
    assert found.completions >= 60
    assert found.rate_per_s == pytest.approx(1.0, rel=0.25)


def test_the_slower_of_two_replicas_counts_only_while_both_run() -> None:
    """The second takes twice as long until the first has let in its last sample at 14, then it has
    the machine to itself and takes as long as the first."""
    first = line(15, 1, 1.0)
    finish = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 15.0, 16.0]
    second = Trace((0.0, *finish[:-1]), tuple(finish))
    assert count([first, second], slots=1).rate_per_s == pytest.approx(1.5)
    # Too few to count so: 12 samples of the first and 6 of the second in the 12 s of both.
    few = Trace((0.0, *finish[:5]), tuple(finish[:6]))
    assert count([line(12, 1, 1.0), few], slots=1).rate_per_s == pytest.approx(18 / 12)
    assert count([line(6, 1, 1.0), few], slots=1).rate_per_s == pytest.approx(12 / 12)


def test_stretches_of_a_round_have_rates_of_their_own() -> None:
    finish = np.cumsum([1.0] * 5 + [2.0] * 5)
    trace = Trace((0.0, *finish[:-1]), tuple(finish))
    assert count([trace], slots=1).batch_rates(2) == pytest.approx([1.0, 0.5])


def test_batches_are_of_equal_length_up_to_one() -> None:
    assert batch_means(np.arange(5.0), 2) == [1.0, 3.5]
    assert batch_means(np.array([3.0]), 4) == [3.0]


def test_the_interval_of_nine_blocks_leaves_out_the_smallest_and_the_largest() -> None:
    """P(2 <= B <= 7) of nine coins is 1 - 2 (1 + 9) / 512 = 0.961, P(3 <= B <= 6) is 0.820."""
    found = estimate([9.0, 1.0, 5.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0])
    assert found == Estimate(5.0, 2.0, 8.0)
    assert found.width == pytest.approx(6 / 5)


@pytest.mark.parametrize("n", [*range(MIN_BLOCKS, 40), 100, 1000])
def test_the_interval_is_the_narrowest_of_order_statistics_that_covers_the_median(n: int) -> None:
    found = estimate([float(x) for x in range(1, n + 1)])
    k = round(found.low)
    assert found.high == n + 1 - k
    assert 1 - 2 * binom.cdf(k - 1, n, 0.5) >= 0.95 > 1 - 2 * binom.cdf(k, n, 0.5)


@pytest.mark.parametrize("seed", range(50))
def test_an_interval_holds_its_estimate_and_begins_above_nothing(seed: int) -> None:
    """However wild the blocks: values over twelve orders of magnitude."""
    rng = np.random.default_rng(seed)
    blocks = 10 ** rng.uniform(-6, 6, size=rng.integers(MIN_BLOCKS, 30))
    found = estimate(blocks.tolist())
    assert 0 < blocks.min() <= found.low <= found.value <= found.high <= blocks.max()


def test_fewer_than_six_blocks_have_no_interval() -> None:
    """The range of five covers the median with probability 1 - 2 / 32 = 0.9375."""
    with pytest.raises(ValueError, match="at least 6 blocks, got 5"):
        estimate([10.0, 10.1, 9.9, 10.0, 10.2])


def test_bursts_in_two_of_twelve_rounds_leave_the_interval_as_it_is() -> None:
    """Twice at a tenth of the speed: a t interval of the mean would reach from 6.6 to 10.4."""
    quiet = [10.0, 10.1, 9.9, 10.0, 10.1, 9.9, 10.0, 10.1, 9.9, 10.0]
    found = estimate([*quiet, 1.0, 1.0])
    assert found.width < 0.03
    assert (found.low, found.high) == (9.9, 10.1)


BURSTS = [(0.1, 0.05), (0.1, 0.5), (0.3, 0.05), (0.3, 0.3), (0.6, 0.3)]
"""Share of the time and seconds of each."""


@pytest.mark.parametrize(("share", "burst_s"), BURSTS)
def test_intervals_cover_the_true_median_under_bursts(share: float, burst_s: float) -> None:
    """Of 200 measurements of ten rounds, ended early where they are precise, at least nine in ten:
    as `gdp.measure.measuring.measure` stops, which looks several times and so covers less."""
    truth = np.median(Busy(share, burst_s, seed=0).blocks(4000))
    covered = 0
    for seed in range(1, 201):
        blocks = Busy(share, burst_s, seed).blocks(10)
        found = estimate(blocks)
        for n in range(MIN_BLOCKS, 10):
            if (early := estimate(blocks[:n])).width < PRECISION:
                found = early
                break
        covered += found.low <= truth <= found.high
    assert covered >= 180


def test_the_median_round_counts_and_not_the_best() -> None:
    assert estimate([10.0, 10.2, 25.3, 10.1, 9.9, 30.0]).value == pytest.approx(10.15)


def test_intervals_wider_than_a_twentieth_are_noisy() -> None:
    assert not Estimate(100.0, 97.5, 102.5).is_noisy
    assert Estimate(100.0, 97.4, 102.5).is_noisy


def test_a_rate_above_what_a_busy_worker_allows_is_an_error() -> None:
    """A sample every 5 ms, of a worker that says it was busy 86 ms for each."""
    trace = line(120, 2, 0.005, stages=(0.001, 0.086))
    with pytest.raises(MeasurementError, match=r"placed: 200 samples/s .* worker 1 busy for 86 ms"):
        check_physics("placed", [trace], count([trace], 2), 2)
    assert issubclass(MeasurementError, GdpError)


def test_a_worker_that_is_never_idle_is_at_the_limit_and_no_error() -> None:
    trace = line(120, 2, 0.005, stages=(0.005, 0.004))
    check_physics("placed", [trace], count([trace], 2), 2)
    just_above = line(120, 2, 0.005, stages=(0.0053, 0.004))
    with pytest.raises(MeasurementError, match="worker 0"):
        check_physics("placed", [just_above], count([just_above], 2), 2)


def test_a_burst_at_the_end_of_a_run_cut_short_is_no_rate() -> None:
    """Six samples in flight, each of which keeps the worker for a second, leave together."""
    finish = tuple(6.0 * (i // 6 + 1) + 1e-3 * (i % 6) for i in range(19))
    runs = tuple((float(i), float(i + 1)) for i in range(18))
    trace = Trace((0.0,) * 6 + finish[:13], finish, (runs,), (0,))
    found = count([trace], 6)
    assert found.rate_per_s <= 1.0
    check_physics("placed", [trace], found, 6)


def test_two_stages_of_one_worker_add_up() -> None:
    trace = line(120, 2, 0.005, stages=(0.003, 0.003))
    check_physics("placed", [trace], count([trace], 2), 2)
    together = Trace(trace.start_s, trace.finish_s, trace.stage_runs, (0, 0))
    with pytest.raises(MeasurementError, match="worker 0 busy for 6 ms"):
        check_physics("placed", [together], count([together], 2), 2)


def test_workers_that_take_samples_in_turn_allow_as_many_times_the_rate() -> None:
    """A sample every 5 ms, of a stage of 10 ms that two workers serve in turn; three cannot be."""
    trace = dataclasses.replace(line(120, 2, 0.005, stages=(0.0099,)), turns=(2,))
    check_physics("placed", [trace], count([trace], 2), 2)
    slow = dataclasses.replace(line(120, 2, 0.005, stages=(0.0106,)), turns=(2,))
    with pytest.raises(MeasurementError, match=r"worker 0 with 1 more in turn busy for 10\.6 ms"):
        check_physics("placed", [slow], count([slow], 2), 2)
    alone = dataclasses.replace(trace, turns=())
    with pytest.raises(MeasurementError, match="worker 0 busy"):
        check_physics("placed", [alone], count([alone], 2), 2)


def test_samples_on_their_way_for_longer_than_the_slots_allow_are_an_error() -> None:
    """Without stages: two slots, a sample a second, each of which says that it took five."""
    check_physics("jax", [line(60, 2, 1.0)], count([line(60, 2, 1.0)], 2), 2)
    finish = tuple(float(i + 1) for i in range(60))
    trace = Trace(tuple(f - 5.0 for f in finish), finish)
    with pytest.raises(MeasurementError, match="2 slots busy for 5000 ms"):
        check_physics("jax", [trace], count([trace], 2), 2)
