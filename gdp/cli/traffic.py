"""Options of traffic, and the object that `gdp place` gets of them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gdp.base.errors import ArgumentError
from gdp.cli.options import pass_one

if TYPE_CHECKING:
    from gdp.api.traffic.drafting import Draft
    from gdp.sim.traffic import Traffic
    from gdp.sim.traffic_text import TrafficLimits

traffic_option = click.option(
    "--traffic", metavar="concurrency=32,prompt=2048,new=256",
    help="Requests that share the engine, instead of one: so many clients, or rate=2.5 requests a "
    "second; sizes may be ranges (512..2048); or a table of requests, FILE.csv with the columns "
    "at_s, prompt and new. hf: models --for vllm.",
)  # fmt: skip


_within = click.option(
    "--within", metavar="first=500ms,token=30ms",
    help="TTFT and TPOT that 95% of the requests of --traffic are to keep.",
)  # fmt: skip


_joint = click.option(
    "--no-disaggregation", "joint", is_flag=True,
    help="All GPUs prefill and decode the requests of --traffic: no disaggregated serving.",
)  # fmt: skip


draft_option = click.option(
    "--draft", metavar="MODEL,tokens=K,acceptance=A",
    help="A small model that drafts K tokens a pass, where that is faster: hf: for --traffic, "
    ".gguf for a .gguf model and --generate; A is the probability that the first one is accepted.",
)  # fmt: skip


@contextlib.contextmanager
def _refused_as(flag: str) -> Iterator[None]:
    """Refuse a malformed value by the name of its option."""
    try:
        yield
    except ArgumentError as error:
        raise click.UsageError(f"{flag}: {error}") from None


def parsed_traffic(text: str) -> "Traffic":
    """The value of `--traffic`; raises `UsageError` for a malformed one."""
    from gdp.sim.traffic_text import parse_traffic

    with _refused_as("--traffic"):
        return parse_traffic(text)


def parsed_draft(text: str | None) -> "Draft | None":
    """The value of `--draft`; raises `UsageError` for a malformed one."""
    from gdp.api.traffic.drafting import parse_draft

    with _refused_as("--draft"):
        return None if text is None else parse_draft(text)


def drafted(spec: str, draft: str | None) -> str:
    """The spec of a model for one request, with the value of `--draft`; raises `UsageError` if the
    two conflict."""
    from gdp.api.traffic.drafting import parse_draft
    from gdp.question.models import is_gguf, with_draft

    if draft is None:
        return spec
    if not is_gguf(spec):
        raise click.UsageError(
            "--draft is for .gguf models with --generate (--for llamacpp), and for requests of "
            "--traffic to hf: models (--for vllm)"
        )
    with _refused_as("--draft"):
        small = parse_draft(draft)
        return with_draft(spec, small.model, small.tokens, small.acceptance)


@dataclass(frozen=True)
class TrafficOptions:
    """Traffic that a plan is for, and demands on it."""

    traffic: str | None
    draft: str | None
    within: str | None
    joint: bool

    def parsed(self) -> "tuple[Traffic, TrafficLimits, Draft | None]":
        """Requests, limits and the draft model; raises `UsageError` for malformed ones."""
        from gdp.sim.traffic_text import NO_LIMITS, parse_limits

        traffic = parsed_traffic(self.traffic or "")
        with _refused_as("--within"):
            limits = NO_LIMITS if self.within is None else parse_limits(self.within)
        return traffic, limits, parsed_draft(self.draft)

    def require_none(self) -> None:
        """Raise `UsageError` where an option is given that is for traffic alone."""
        given = {"--within": self.within, "--no-disaggregation": self.joint}
        if name := next((name for name, value in given.items() if value), None):
            raise click.UsageError(
                f"{name} is for requests of --traffic to hf: models (--for vllm)"
            )


traffic_options = pass_one("serving", TrafficOptions, {
    "traffic": traffic_option, "draft": draft_option, "within": _within, "joint": _joint,
})  # fmt: skip
