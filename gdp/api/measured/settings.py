"""Settings of an engine that are worth a measurement: copies of the model, and tokens of a pass."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from gdp.api.answer import answer as answer_to
from gdp.api.ask import ask
from gdp.api.traffic.disaggregated import Asked
from gdp.api.traffic.plan import with_ends
from gdp.api.traffic.serve import asked_under, numbers_of_copies, plan_of_copies
from gdp.base.errors import ArgumentError, InfeasibleError
from gdp.importers.spec import ModelSpec
from gdp.ops.vllm import AT_ONCE
from gdp.question.result import Result
from gdp.sim.traffic import ServedTraffic, Traffic
from gdp.sim.traffic_text import TrafficLimits
from gdp.targets.vllm.plan import vllm_model

TOKENS = (2048, 8192, 16384)
"""Tokens of a pass at most that are tried beside the default of vLLM."""
UBATCHES = (512, 1024, 2048, 4096)
"""Tokens of a micro-batch that are tried beside those of llama.cpp's own plan."""
END = statistics.NormalDist().inv_cdf(0.95)
"""Standard deviations from the middle to either end of a 90% interval."""
NODES = tuple(statistics.NormalDist().inv_cdf((k + 0.5) / 64) for k in range(64))
"""Standard deviations at the middles of 64 equally probable parts of a normal distribution."""
ALIKE = 1e-6
"""Relative difference of predictions below which two settings are one."""


class Setting(NamedTuple):
    """Settings of an engine beside its layout."""

    copies: int  # of the model
    tokens: int  # of a pass at most; 0: as many as the plan chooses

    @property
    def text(self) -> str:
        """The setting beside a layout, in words."""
        return f"at most {self.tokens:,} tokens a pass" if self.tokens else "passes as planned"


class Figures(NamedTuple):
    """Means over the requests of a traffic, or times of one request."""

    first_token_s: float
    token_s: float
    request_s: float
    share: float = 0.0  # the largest ratio of a 95th percentile to its limit
    first_p95_s: float = 0.0  # of first_token_s over the requests
    token_p95_s: float = 0.0

    @property
    def value(self) -> tuple[float, float]:
        """Smaller is better: as `ServedPlan.value`."""
        return max(1.0, self.share), self.request_s


Predicted = tuple[Figures, Figures, Figures]
"""Figures at the low end, in the middle and at the high end of 90% intervals."""


class SettingPlan(NamedTuple):
    """A setting with its plan."""

    setting: Setting
    result: Result
    layout: str
    predicted: Predicted

    def gain(
        self, best: Figures, measured: Sequence["tuple[SettingPlan, Figures]"], spread: float
    ) -> float:
        """Expected improvement on the best figures, as a share of them: of the limits where these
        exceed them, else of the seconds of a request where the limits are kept.

        E[max(0, 1 - X / best)] of a log-normal X, by the mean over `NODES`.

        Args:
            best: The best measured figures.
            measured: Settings that were measured, as they are predicted now.
            spread: Relative deviation of a measurement.
        """
        alike = [one for one in measured if one[0].passes == self.passes]
        share, request_s = (self._spread(name, alike, spread) for name in ("share", "request_s"))
        total = 0.0
        for deviations in NODES:
            excess = max(1.0, share.at(deviations))
            if best.share > 1.0:
                total += max(0.0, 1.0 - excess / best.share)
            elif excess <= 1.0:
                total += max(0.0, 1.0 - request_s.at(deviations) / best.request_s)
        return total / len(NODES)

    @property
    def passes(self) -> tuple[object, ...]:
        """Equal for settings whose engines compute with equal parts of the model."""
        return (self.layout, *(row.weights_bytes for row in self.result.of_request().memory))

    def _spread(
        self, name: str, alike: Sequence["tuple[SettingPlan, Figures]"], spread: float
    ) -> "_LogNormal":
        """A figure by its interval; where a setting with equal passes was measured, its figure
        times the predicted ratio. Errors of the passes cancel in it: the ratio is taken to be off
        by as much as it is from 1, beside the spread of the measurement."""
        low, middle, high = (_log(figures, name) for figures in self.predicted)
        deviation = (high - low) / (2 * END)
        ratios = [
            (middle - _log(one.predicted[1], name), _log(found, name)) for one, found in alike
        ]
        if not ratios:
            return _LogNormal(middle, deviation)
        ratio, known = min(ratios, key=lambda row: abs(row[0]))
        return _LogNormal(known + ratio, min(deviation, math.hypot(ratio, spread)))


class _LogNormal(NamedTuple):
    middle: float  # of the log
    deviation: float

    def at(self, deviations: float) -> float:
        return math.exp(self.middle + deviations * self.deviation)


def _log(figures: Figures, name: str) -> float:
    return math.log(max(getattr(figures, name), 1e-12))


class SettingPlans(NamedTuple):
    """Settings in the order of their predicted values, and reasons of those that are left out."""

    rows: list[SettingPlan]
    left_out: list[str]

    def distinct(self) -> "SettingPlans":
        """Of settings with equal predictions the first, in the order of their values.

        Raises:
            InfeasibleError: There is no setting.
        """
        if not self.rows:
            raise InfeasibleError(self.left_out[0])
        kept: list[SettingPlan] = []
        for row in self.rows:
            if not any(_alike(row, other) for other in kept):
                kept.append(row)
        return SettingPlans(sorted(kept, key=lambda row: row.predicted[1].value), self.left_out)

    def add(self, setting: Setting, plan: Callable[[Setting], SettingPlan]) -> None:
        """Add the plan of a setting, or the reason why there is none."""
        try:
            self.rows.append(plan(setting))
        except InfeasibleError as error:
            self.left_out.append(f"{setting.copies} x the model, {setting.text}: {error}")


def _alike(one: SettingPlan, other: SettingPlan) -> bool:
    pairs = zip(one.predicted[1], other.predicted[1], strict=True)
    return one.layout == other.layout and all(math.isclose(*p, rel_tol=ALIKE) for p in pairs)


# vLLM and SGLang.


def served_settings(
    parts: Mapping[str, Any], model: str, traffic: Traffic, within: TrafficLimits
) -> SettingPlans:
    """Plans under traffic for each number of copies and of tokens of a pass."""
    found, others = SettingPlans([], []), list[int]()
    for tokens in _tokens(parts, model, traffic):
        spec = ModelSpec.of(model).having(**{AT_ONCE: tokens})
        plan = partial(_served, asked_under(parts, str(spec), traffic), traffic, within)
        found.add(Setting(1, tokens), plan)
        if found.rows and not others:
            others = numbers_of_copies(found.rows[0].result.question, traffic)
        for copies in others:
            found.add(Setting(copies, tokens), plan)
    return found.distinct()


def _tokens(parts: Mapping[str, Any], model: str, traffic: Traffic) -> list[int]:
    """The tokens that a specification says, or the default of vLLM and others: no more than all
    prompts have that are in flight."""
    default = int(ModelSpec.of(vllm_model(model, parts["cluster"])).options[AT_ONCE])
    if AT_ONCE in ModelSpec.of(model).options:
        return [default]
    most = traffic.concurrency * traffic.prompt or math.inf
    enough = min((t for t in (default, *TOKENS) if t >= most), default=math.inf)
    enough = default if default >= most else enough
    return [default, *(t for t in TOKENS if t != default and (t < most or t == enough))]


def _served(asked: Asked, traffic: Traffic, within: TrafficLimits, setting: Setting) -> SettingPlan:
    plan = with_ends(plan_of_copies(asked, traffic, setting.copies, within), traffic)
    if plan.ends is None:
        raise _uncorrected()
    low, high = plan.ends
    predicted = [figures_of(one, within) for one in (low, plan.served, high)]
    return SettingPlan(
        setting, plan.result, plan.layout, (predicted[0], predicted[1], predicted[2])
    )


def figures_of(served: ServedTraffic, within: TrafficLimits) -> Figures:
    """Figures of predicted traffic."""
    late = served.first_token.p95_s, served.token.p95_s
    means = served.first_token.mean_s, served.token.mean_s, served.request.mean_s
    return Figures(*means, within.share(*late), *late)


def _uncorrected() -> ArgumentError:
    return ArgumentError("measured runs correct the shipped costs alone: leave out --costs")


# llama.cpp.


def llama_settings(parts: Mapping[str, Any], model: str) -> SettingPlans:
    """Plans of a request for each size of a micro-batch."""
    found, spec = SettingPlans([], []), ModelSpec.of(model)
    prompt = int(spec.options.get("prompt", 0))
    sizes = [0] if "ubatch" in spec.options else [0, *(n for n in UBATCHES if n < 2 * prompt)]
    for tokens in sizes:
        found.add(Setting(1, tokens), partial(_alone, parts, spec))
    return found.distinct()


def _alone(parts: Mapping[str, Any], spec: ModelSpec, setting: Setting) -> SettingPlan:
    own = spec.having(ubatch=setting.tokens) if setting.tokens else spec
    result = answer_to(ask(own, **parts))
    answer = result.of_request()
    ends = answer.intervals
    if not ends:
        raise _uncorrected()
    firsts, steps = ends["first_token_s"], ends["token_s"]
    rows = (firsts[0], steps[0]), (answer.first_token_s, answer.token_s), (firsts[1], steps[1])
    low, middle, high = (request_figures(answer.request.steps, *row) for row in rows)
    count = sum(row.weights_bytes > 0 for row in answer.memory)
    layout = "one device" if count == 1 else f"{count} devices"
    return SettingPlan(setting, result, layout, (low, middle, high))


def request_figures(steps: int, first_s: float, token_s: float) -> Figures:
    """Figures of one request."""
    return Figures(first_s, token_s, first_s + token_s * steps)
