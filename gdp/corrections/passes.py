"""Measured times under load as log residuals of the passes below them.

A benchmark tells TTFT and TPOT of its requests, which wait for each other. How much longer prefill
and decode passes took than predicted is found through the simulator of the traffic: the factors of
both with which it gives the measured times.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gdp.sim.serving import ServingEngine, in_steady_state, serve
from gdp.sim.traffic import ServedTraffic, Traffic

MOST = math.log(30.0)
"""Largest log residual that is looked for."""
STEPS = (0.02, -0.1, 0.1, -0.3, 0.3)
"""Of a log factor, for slopes: times of few requests have jumps, over which wider ones see.
Either side has its own."""
ITERATIONS = 20
CLOSE = 1e-3
"""Change of a log factor below which a search ends."""
FAR = 5e-3
"""Log of a time that counts as missed."""
TIE = 0.03
"""Weight of a log factor against the log of a time: a factor that times do not show stays small."""


class Times(NamedTuple):
    """Seconds of a run, measured or predicted; nan where unknown."""

    ttft_s: float
    tpot_s: float


TTFT_TELLS = 1 / 3
"""Share by which TTFT under load tells of prefill passes, as it hangs on queues, too."""


class Residuals(NamedTuple):
    """Log of measured over predicted seconds of passes, and how well the times show them."""

    prefill: float
    decode: float
    shown: tuple[float, float]  # change of the log of any time by one of each residual, at most 1

    @property
    def phases(self) -> tuple[float, float]:
        """Both residuals, prefill first."""
        return self.prefill, self.decode

    def under_load(self) -> "Residuals":
        """Residuals of requests that wait for each other: prefill is told less surely."""
        prefill, decode = self.shown
        return self._replace(shown=(prefill * TTFT_TELLS, decode))


def scaled(engine: ServingEngine, prefill: float, decode: float) -> ServingEngine:
    """An engine whose passes take exp(residual) times as long, those of a draft model, too."""
    drafting = engine.drafting and engine.drafting._replace(
        token_s=engine.drafting.token_s * math.exp(prefill),
        step_s=engine.drafting.step_s * math.exp(decode),
        context_s=engine.drafting.context_s * math.exp(decode),
    )
    return engine._replace(
        drafting=drafting,
        token_s=engine.token_s * math.exp(prefill), launch_s=engine.launch_s * math.exp(prefill),
        step_s=engine.step_s * math.exp(decode), context_s=engine.context_s * math.exp(decode),
    )  # fmt: skip


def served_times(engine: ServingEngine, traffic: Traffic, median: bool = False) -> Times:
    """Times of traffic on an engine, means or medians over the requests."""
    served: ServedTraffic = serve(in_steady_state(traffic, engine), engine)
    spreads = (served.first_token, served.token)
    return Times(*(s.median_s if median else s.mean_s for s in spreads))


def residuals(
    predict: Callable[[float, float], Times], measured: Times, tie: float = TIE
) -> Residuals:
    """Residuals of prefill and decode with which a prediction gives the measured times.

    Gauss-Newton on log times with a small penalty on the residuals; where it ends away from them,
    it goes on by slopes over wider steps.

    Args:
        predict: Times of the run by (prefill, decode) residuals.
        measured: Its times; nan for one that was not measured.
        tie: Weight of the penalty.
    """
    known = np.array([math.isfinite(t) and t > 0 for t in measured])
    wanted = np.log(np.where(known, measured, 1.0))

    def logs(at: np.ndarray) -> np.ndarray:
        return np.where(known, np.log(np.maximum(predict(*at), 1e-12)), 0.0)

    def cost(value: np.ndarray, at: np.ndarray) -> float:
        return float(((value - wanted * known) ** 2).sum() + (tie * at**2).sum() * tie)

    at = np.zeros(2)
    value = logs(at)
    slopes, wider = np.zeros((2, 2)), 0
    for _ in range(ITERATIONS):
        step = STEPS[wider]
        slopes = np.column_stack([(logs(at + move) - value) / step for move in step * np.eye(2)])
        off = (wanted - value) * known
        move = np.linalg.solve(slopes.T @ slopes + tie**2 * np.eye(2), slopes.T @ off - tie**2 * at)
        move = np.clip(move, -1.0, 1.0)
        share, best = 1.0, cost(value, at)
        while share > 0.05:
            there = np.clip(at + share * move, -MOST, MOST)
            now = logs(there)
            if cost(now, there) < best:
                at, value = there, now
                break
            share /= 2
        if share <= 0.05 or np.abs(share * move).max() < CLOSE:
            if wider + 1 == len(STEPS) or np.abs((wanted - value) * known).max() < FAR:
                break
            wider += 1
    shown = np.minimum(1.0, np.abs(slopes).max(axis=0))
    return Residuals(float(at[0]), float(at[1]), (float(shown[0]), float(shown[1])))
