"""Rates as measured on a machine that is busy with something else now and then."""

import numpy as np


class Busy:
    """A machine on which something else takes half of a core's speed in bursts: seconds between
    bursts and in them are exponential. Blocks are the rates of slices, a second apart."""

    def __init__(self, share: float, burst_s: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.share, self.burst_s = share, burst_s

    def blocks(self, count: int, slice_s: float = 0.2) -> list[float]:
        gap_s = self.burst_s * (1 - self.share) / self.share
        pairs = 2 * round(count / (gap_s + self.burst_s)) + 20  # more than are needed
        begins_in_burst = bool(self.rng.random() < self.share)
        bursts = np.arange(2 * pairs) % 2 == (0 if begins_in_burst else 1)
        seconds = self.rng.exponential(np.where(bursts, self.burst_s, gap_s))
        edge_s = np.concatenate([[0.0], np.cumsum(seconds)])
        in_burst_s = np.concatenate([[0.0], np.cumsum(np.where(bursts, seconds, 0.0))])
        start_s = np.arange(count)
        end, start = (np.interp(t, edge_s, in_burst_s) for t in (start_s + slice_s, start_s))
        jitter = np.exp(0.01 * self.rng.standard_normal(count))
        return (100 * (1 - (end - start) / slice_s / 2) * jitter).tolist()
