"""Text of energy: joules and mean watts beside the seconds of an answer, and their price."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gdp.base.errors import ArgumentError
from gdp.sim.objectives import find_objective

if TYPE_CHECKING:
    from gdp.question.result import GenerationAnswer, Result, ServedPlan

JOULES_PER_KWH = 3.6e6
_PRICE = re.compile(r"([$€£]?)([0-9]*\.?[0-9]+)\s*([A-Za-z$€£]{0,3})/kWh", re.IGNORECASE)


class Price(NamedTuple):
    """Price of electricity."""

    per_kwh: float
    currency: str  # as the user writes it; "" for none

    def of(self, joules: float) -> float:
        """Money for so many joules."""
        return joules / JOULES_PER_KWH * self.per_kwh

    def text(self, joules: float) -> str:
        """Money for so many joules, with the currency.

        >>> Price(0.3, "EUR").text(3.6e6)
        '0.3 EUR'
        """
        return f"{self.of(joules):.3g} {self.currency}".rstrip()


def parse_price(text: str) -> Price:
    """A price of electricity; raises `ArgumentError` for other texts.

    >>> parse_price("0.30/kWh"), parse_price("$0.12/kWh")
    (Price(per_kwh=0.3, currency=''), Price(per_kwh=0.12, currency='$'))
    """
    match = _PRICE.fullmatch(text.strip())
    if match is None or (match[1] and match[3]):
        raise ArgumentError(f"{text!r} must look like 0.30/kWh or 0.30EUR/kWh")
    return Price(float(match[2]), match[1] or match[3])


def energy_lines(
    result: "Result", price: Price | None = None, *, verbose: bool = False
) -> list[str]:
    """The line of an answer on joules, watts and money; where watts are unknown, the reason for
    users who want to know more."""
    generation, run = result.generation, result.energy
    if generation is not None:
        return tokens_lines(generation, result.traffic or generation, price, verbose=verbose)
    if run is None:
        return [f"energy   unknown: {result.no_energy}"] if verbose and result.no_energy else []
    each = "sample" if find_objective(result.objective).pipelined else "run"
    money = "" if price is None else f"; {price.text(1e6 * run.joules)} per million {each}s"
    joules = f"{run.joules:.4g} J per {each}"
    return [f"energy   {joules}; {run.watts:.0f} W on average ({run.devices}){money}"]


def tokens_lines(
    generation: "GenerationAnswer", tokens: "GenerationAnswer | ServedPlan",
    price: Price | None = None, *, verbose: bool = False,
) -> list[str]:  # fmt: skip
    """The line on the joules of tokens, of a request alone or under traffic."""
    joules, watts, power = tokens.joules_per_token, tokens.watts, generation.power
    if joules is None or watts is None or power is None:
        return [f"energy   unknown: {generation.no_power}"] if verbose else []
    text = f"{joules:.3g} J per token, {tokens.joules_per_request:.4g} J per request"
    money = "" if price is None else f"; {price.text(1e6 * joules)} per million tokens"
    return [f"energy   {text}; {watts:.0f} W on average ({power.devices}){money}"]


def price_json(result: "Result", price: Price | None) -> Mapping[str, Any]:
    """Fields of `--json` on money; none where no price is given or no joules are known."""
    generation, served = result.generation, result.traffic
    if price is None:
        return {}
    fields: dict[str, Any] = {"price_per_kwh": price.per_kwh, "currency": price.currency or None}
    tokens = served or generation
    if tokens is not None and tokens.joules_per_token is not None:
        fields["price_per_million_tokens"] = price.of(1e6 * tokens.joules_per_token)
    if result.energy is not None:
        fields["price_per_million_runs"] = price.of(1e6 * result.energy.joules)
    return fields
