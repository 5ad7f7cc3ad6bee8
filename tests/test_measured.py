"""Measured rewards: the rate of a full pipeline."""

import numpy as np
import pytest

from gdp.measured import steady_s


def test_bursts_of_completions_are_no_rate() -> None:
    """Four samples come out at once every four seconds: a second each, not almost none."""
    finish_s = np.repeat(np.arange(1, 9) * 4.0, 4) + np.tile(np.arange(4) * 1e-3, 8)
    assert steady_s(finish_s, np.inf) == pytest.approx(1.0, rel=0.25)


def test_one_slow_block_does_not_count() -> None:
    steps = np.repeat([1.0, 9.0, 1.0], 8)
    assert steady_s(np.concatenate([[0.0], np.cumsum(steps)]), np.inf) == pytest.approx(1.0)


def test_completions_after_the_last_entry_do_not_count() -> None:
    finish_s = np.concatenate([np.arange(13.0), 12.0 + np.arange(1, 13) * 0.1])
    assert steady_s(finish_s, 12.0) == pytest.approx(1.0)
