"""Lines on joules, watts and money, and the options that change them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import plain_graph

import gdp
from gdp.cli.energy_text import Price, parse_price
from gdp.graph.file import save_graph

Run = Callable[..., tuple[int, str, str]]
MACHINE = """
[[device]]
name = "card"
kind = "unheard-of"
flop_per_s = 1e9
bytes_per_s = 1e9
{watts}
"""


@pytest.fixture
def place(run: Run, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`gdp place` of one op that takes a second, on a card of these watts."""

    def placed(watts: str, *more: str) -> tuple[int, str, str]:
        graph, machine = tmp_path / "g.json", tmp_path / "m.toml"
        save_graph(plain_graph(1, [], flop=[1e9]), graph)
        machine.write_text(MACHINE.format(watts=watts))
        own = ("--cluster", machine, "--costs", "datasheet", "--evaluations", "5")
        return run("place", graph, *own, *more)

    return placed


def line_of(text: str) -> str:
    return next((line for line in text.splitlines() if line.startswith("energy")), "")


def test_joules_and_watts_of_a_run(place: Callable[..., tuple[int, str, str]]) -> None:
    """A second at the peak of arithmetic is one at the limit."""
    _, text, _ = place("watts = 100.0")
    assert line_of(text) == "energy   100 J per run; 100 W on average (GPU alone)"
    told = json.loads(place("watts = 100.0", "--json")[1])
    assert (told["joules"], told["watts"]) == pytest.approx((100.0, 100.0))


def test_a_power_limit_and_a_price(place: Callable[..., tuple[int, str, str]]) -> None:
    """36 J are 1e-5 kWh: a million runs at 0.30 a kWh cost 3."""
    _, text, _ = place("watts = 100.0", "--power-limit", "36W", "--price", "0.30EUR/kWh")
    assert line_of(text).endswith("36 W on average (GPU alone); 3 EUR per million runs")
    plain = json.loads(place("watts = 36.0", "--price", "0.30/kWh", "--json")[1])
    assert plain["price_per_million_runs"] == pytest.approx(3.0)
    assert plain["currency"] is None


def test_unknown_watts_say_nothing_but_with_verbose(
    place: Callable[..., tuple[int, str, str]],
) -> None:
    assert line_of(place("")[1]) == ""
    assert json.loads(place("", "--json")[1])["joules"] is None
    assert "no watts are known of device 'card'" in line_of(place("", "-v")[1])


def test_the_objective_is_refused_without_watts(
    place: Callable[..., tuple[int, str, str]],
) -> None:
    code, _, error = place("", "--objective", "energy")
    assert code == 2
    assert "no watts are known of device 'card' (unheard-of): give `watts` of it" in error


def test_the_objective_prints_joules_alone(place: Callable[..., tuple[int, str, str]]) -> None:
    _, text, _ = place("watts = 100.0", "--objective", "energy")
    lines = text.splitlines()
    assert "energy   100 J" in lines
    bound = next(line for line in lines if line.startswith("bound"))
    assert " J" in bound
    assert " ms" not in bound


def test_a_request_has_joules_per_token_and_per_request() -> None:
    from gdp.question.result import MeanPower

    power = MeanPower("GPU alone", 10.0, 100.0, 100.0, 60.0, 60.0, 60.0)
    # 2 s of prefill and 6 s of decode within 8 s: 80 J idle, 180 and 300 above.
    assert power.joules(8.0, 2.0, 6.0) == pytest.approx(560.0)


@pytest.mark.parametrize(
    ("text", "price"),
    [
        ("0.30/kWh", Price(0.3, "")),
        ("0.3 EUR/kwh", Price(0.3, "EUR")),
        ("$.12/kWh", Price(0.12, "$")),
    ],
)
def test_prices_are_read(text: str, price: Price) -> None:
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["", "0.30", "-1/kWh", "0.30/MWh", "$0.30EUR/kWh", "nan/kWh"])
def test_malformed_prices_are_refused(text: str) -> None:
    with pytest.raises(gdp.GdpError, match=r"must look like 0\.30/kWh"):
        parse_price(text)


def test_base_watts_of_a_system_are_counted() -> None:
    from gdp.cluster.presets import cluster_preset

    graph = plain_graph(1, [], flop=[1e12])
    alone = cluster_preset("rtx3060")
    small, whole = (
        gdp.place(graph, cluster, costs="datasheet", search=gdp.Search(seconds=None, evaluations=5))
        for cluster in (alone, replace(alone, base_watts=50.0))
    )
    assert small.energy is not None
    assert whole.energy is not None
    assert whole.energy.watts == pytest.approx(small.energy.watts + 50.0)
    assert whole.energy.devices == "GPU and rest of the system"
