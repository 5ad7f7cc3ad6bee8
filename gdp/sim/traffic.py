"""Traffic of a serving engine: requests, and the latency and throughput that clients see."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gdp.base.errors import ArgumentError

ROUNDS = 10
"""Requests of each client by default, as benchmark clients of serving engines send."""


class Arrival(NamedTuple):
    """A request of the traffic."""

    at_s: float  # when it arrives; with a fixed concurrency, no earlier than another ends
    prompt: int  # tokens that are read
    new: int  # tokens that are written
    line: int = 0  # of the table that it stands in; 0 where none does


@dataclass(frozen=True)
class Traffic:
    """Requests in the order of their arrival; `concurrency` of them at once, 0 for no limit."""

    requests: tuple[Arrival, ...]
    concurrency: int = 0
    begin_s: float = 0.0  # earlier arrivals fill the engine and are not counted
    together: bool = False  # all clients begin at once, as those of a tool that measures do
    rate: float = 0.0  # requests per second that arrivals were drawn with; 0: of none

    def __post_init__(self) -> None:
        if not self.requests:
            raise ArgumentError("traffic has no request")
        for request in self.requests:
            if request.prompt < 1 or request.new < 1 or not 0 <= request.at_s < math.inf:
                raise ArgumentError(f"a request needs a prompt, new tokens and a time: {request}")

    @property
    def prompt(self) -> int:
        """Mean tokens of a prompt."""
        return max(1, round(float(np.mean([r.prompt for r in self.requests]))))

    @property
    def new(self) -> int:
        """Mean tokens that are written."""
        return max(1, round(float(np.mean([r.new for r in self.requests]))))


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of seconds over requests."""

    mean_s: float
    median_s: float
    p95_s: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Spread":
        """Of the seconds of each request; zeros where there are none."""
        values = np.array(list(seconds))
        if not values.size:
            return cls(0.0, 0.0, 0.0)
        return cls(float(values.mean()), *(float(np.percentile(values, p)) for p in (50, 95)))


@dataclass(frozen=True)
class ServedTraffic:
    """Predicted latency and throughput of traffic."""

    requests: int
    seconds: float  # from the first arrival to the last token
    first_token: Spread  # TTFT
    token: Spread  # TPOT, mean of each request
    request: Spread  # from the arrival of a request to its last token
    tokens_per_s: float  # written by all
    running: float  # requests at once, mean over time
    waiting_s: float  # from arrival to start, mean
    watts: float | None = None  # of the devices that compute, mean; None where unknown

    @property
    def joules_per_token(self) -> float | None:
        """Joules of each token that is written, prompts included; None where watts are unknown."""
        return None if self.watts is None else self.watts / self.tokens_per_s


class Work(NamedTuple):
    """Work of some passes."""

    start_s: float
    end_s: float
    joules: float  # above idle


def require_rounds(traffic: Traffic) -> None:
    """Raise `ArgumentError` where clients that begin at random times ask fewer than two times each:
    the first request of each fills the engine, and only what follows is counted."""
    count, clients = len(traffic.requests), traffic.concurrency
    if clients > 1 and count < 2 * clients and not traffic.together:
        raise ArgumentError(
            f"{count} requests are too few for {clients} clients: give requests={2 * clients} or "
            "more, or start=together"
        )


@dataclass(eq=False, slots=True)
class ServedRequest:
    """A request, and when it was served."""

    prompt: int
    new: int
    asked_s: float
    started_s: float = math.nan
    first_s: float = math.nan
    ended_s: float = math.nan


def summary_of(
    rows: Sequence[ServedRequest], begin_s: float, work: Sequence[Work] = (),
    idle_w: float | None = None,
) -> ServedTraffic:  # fmt: skip
    """Latency percentiles of requests that arrive after the warm-up; throughput, concurrency and
    watts over the same interval.

    Args:
        rows: All requests.
        begin_s: End of the warm-up.
        work: Of all passes.
        idle_w: Watts of all devices while nothing is computed; None where they are unknown.
    """
    begin_s = max(begin_s, min(row.asked_s for row in rows))
    counted = [row for row in rows if row.asked_s >= begin_s]
    end_s = max(row.ended_s for row in counted)
    # While the last requests end, fewer and fewer share the engine.
    until_s = end_s if len(counted) == len(rows) else max(row.asked_s for row in counted)
    until_s = until_s if until_s > begin_s else end_s
    seconds = until_s - begin_s

    def share(start_s: float, end_s: float) -> float:
        """Fraction of an interval that is inside those seconds."""
        inside = min(end_s, until_s) - max(start_s, begin_s)
        return max(0.0, inside / (end_s - start_s)) if end_s > start_s else 0.0

    tokens = sum(row.new * share(row.first_s, row.ended_s) for row in rows if row.new > 1)
    tokens += sum(begin_s <= row.ended_s <= until_s for row in rows if row.new == 1)
    busy_s = sum((row.ended_s - row.started_s) * share(row.started_s, row.ended_s) for row in rows)
    work_j = sum(part.joules * share(part.start_s, part.end_s) for part in work)
    return ServedTraffic(
        requests=len(counted),
        seconds=end_s - begin_s,
        first_token=Spread.of(row.first_s - row.asked_s for row in counted),
        token=Spread.of(
            (row.ended_s - row.first_s) / (row.new - 1) for row in counted if row.new > 1
        ),
        request=Spread.of(row.ended_s - row.asked_s for row in counted),
        tokens_per_s=tokens / seconds if seconds else math.inf,
        running=busy_s / seconds if seconds else 0.0,
        waiting_s=float(np.mean([row.started_s - row.asked_s for row in counted])),
        watts=None if idle_w is None else idle_w + (work_j / seconds if seconds else 0.0),
    )
