"""The learned baselines by name: `(problem, evaluations, seed) -> Found`."""

from collections.abc import Callable

from benchmarks.baselines.common import Found
from benchmarks.baselines.doppler import doppler
from benchmarks.baselines.hdp import hdp
from benchmarks.baselines.placeto import placeto
from benchmarks.baselines.rnn import rnn
from gdp.problem.problem import Problem

LEARNED: dict[str, Callable[[Problem, int, int], Found]] = {
    "HDP": hdp,
    "RNN": rnn,
    "Placeto": placeto,
    "DOPPLER": doppler,
}
