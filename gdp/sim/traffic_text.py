"""Traffic, and limits on it, from text."""

import math
import re
from typing import Any, NamedTuple

import numpy as np

from gdp.base.errors import ArgumentError
from gdp.sim.traffic import ROUNDS, Arrival, ServedTraffic, Traffic, require_rounds
from gdp.sim.traffic_file import SUFFIX, read_traffic

OF_A_RATE = 500
"""Default number of requests of traffic with a rate."""
FORM = "concurrency=32,prompt=2048,new=256"
_NAMES = ("concurrency", "rate", "requests", "prompt", "new", "seed", "start")


def parse_traffic(text: str) -> Traffic:
    """Traffic from its text, as `gdp place --traffic` takes it.

    `concurrency=C` clients that ask again once they are answered, or `rate=R` requests a second
    whose arrivals are random (exponential distances); `prompt` and `new` a number of tokens or
    A..B, drawn evenly; `requests` how many in all, at least two for each client, `seed` of the
    draws; `start=together` where all clients begin at once, by default at random times
    (`in_steady_state`). Or the path of a table of requests (`read_traffic`), which ends with
    ".csv".

    Raises:
        ArgumentError: The text has another form.

    >>> traffic = parse_traffic("concurrency=4,prompt=100..200,new=50,requests=8")
    >>> traffic.concurrency, len(traffic.requests), traffic.requests[0].new
    (4, 8, 50)
    """
    if text.endswith(SUFFIX):
        return read_traffic(text)
    given: dict[str, str] = {}
    for part in text.replace(" ", "").split(","):
        name, is_given, value = part.partition("=")
        if name not in _NAMES or not is_given or name in given:
            raise ArgumentError(f"{part!r} must look like {FORM}; names are {', '.join(_NAMES)}")
        given[name] = value
    if ("concurrency" in given) == ("rate" in given):
        raise ArgumentError(f"{text!r} must have concurrency or rate, such as {FORM}")
    if missing := next((name for name in ("prompt", "new") if name not in given), None):
        raise ArgumentError(f"{text!r} must look like {FORM}: {missing} misses")
    if given.get("start", "together") != "together":
        raise ArgumentError(f"start can be together, got {given['start']!r}")
    concurrency = _whole(given["concurrency"], "concurrency") if "concurrency" in given else 0
    count = min(ROUNDS * concurrency, MOST) if concurrency else OF_A_RATE
    count = _whole(given["requests"], "requests") if "requests" in given else count
    rng = np.random.default_rng(_whole(given.get("seed", "0"), "seed", least=0))
    prompt, new = (_drawn(given[name], name, count, rng) for name in ("prompt", "new"))
    at_s, rate = np.zeros(count), _positive(given["rate"]) if "rate" in given else 0.0
    if rate:
        at_s = np.cumsum(rng.exponential(1.0 / rate, count))
    rows = zip(at_s.tolist(), prompt, new, strict=True)
    arrivals = tuple(Arrival(*row) for row in rows)
    traffic = Traffic(arrivals, concurrency, together="start" in given, rate=rate)
    require_rounds(traffic)
    return traffic


MOST = 1_000_000
"""Requests, clients and tokens of one request, at most."""


def _whole(text: str, name: str, least: int = 1) -> int:
    if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) <= MOST):
        raise ArgumentError(f"{name} must be a whole number from {least} to {MOST}, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ArgumentError(f"rate must be a positive number of requests a second, got {text!r}")
    return rate


def _drawn(text: str, name: str, count: int, rng: Any) -> list[int]:
    """Tokens of each request, from a number or A..B."""
    low, is_range, high = text.partition("..")
    least = _whole(low, name)
    most = _whole(high, name) if is_range else least
    if most < least:
        raise ArgumentError(f"{name} must go from the smaller number to the larger, got {text!r}")
    return rng.integers(least, most + 1, count).tolist()


class TrafficLimits(NamedTuple):
    """Seconds that 95% of the requests are to keep; inf for no limit."""

    first_s: float = math.inf  # to the first token
    token_s: float = math.inf  # between two tokens of a request, in its mean

    def excess(self, served: ServedTraffic) -> float:
        """The largest ratio of seconds to their limit; 1 where all are kept."""
        return max(1.0, self.share(served.first_token.p95_s, served.token.p95_s))

    def share(self, first_s: float, token_s: float) -> float:
        """The larger ratio of a TTFT and a TPOT to their limits; 0 without limits."""
        return max(first_s / self.first_s, token_s / self.token_s)


NO_LIMITS = TrafficLimits()
LIMITS_FORM = "first=500ms,token=30ms"
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def parse_within(text: str) -> TrafficLimits | float:
    """Seconds that one run may take, such as "50ms", or the limits of traffic.

    >>> parse_within("50ms"), parse_within("token=30ms").token_s
    (0.05, 0.03)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(s|ms|us)", text, re.ASCII)
    return float(match[1]) * _UNITS[match[2]] if match else parse_limits(text)


def parse_limits(text: str) -> TrafficLimits:
    """TrafficLimits from their text, as `gdp place --within` takes it.

    Raises:
        ArgumentError: The text has another form.

    >>> parse_limits("first=1.5s,token=30ms")
    TrafficLimits(first_s=1.5, token_s=0.03)
    """
    given: dict[str, float] = {}
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(first|token)=(\d+\.?\d*|\.\d+)(s|ms|us)", part, re.ASCII)
        if match is None or match[1] in given or not float(match[2]):
            raise ArgumentError(
                f"{part!r} must look like {LIMITS_FORM}: seconds to the first token and between "
                "tokens"
            )
        given[match[1]] = float(match[2]) * _UNITS[match[3]]
    return TrafficLimits(given.get("first", math.inf), given.get("token", math.inf))
