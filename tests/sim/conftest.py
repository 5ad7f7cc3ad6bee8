"""The two simulators, in plain Python and compiled."""

import pytest

from gdp.sim import latency


@pytest.fixture(params=["plain", "compiled"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with either simulator."""
    monkeypatch.setattr(latency, "in_plain", lambda *_: request.param == "plain")
