"""The learned baselines by name: `(problem, evaluations, seed) -> Found`."""

from collections.abc import Callable

from benchmarks.published.baselines.common import Found
from benchmarks.published.baselines.doppler import doppler
from benchmarks.published.baselines.gdp_one import gdp_one
from benchmarks.published.baselines.hdp import hdp
from benchmarks.published.baselines.placeto import placeto
from benchmarks.published.baselines.rnn import rnn
from gdp.problem.problem import Problem

LEARNED: dict[str, Callable[[Problem, int, int], Found]] = {
    "HDP": hdp,
    "RNN": rnn,
    "Placeto": placeto,
    "DOPPLER": doppler,
    "GDP-one": gdp_one,
}
