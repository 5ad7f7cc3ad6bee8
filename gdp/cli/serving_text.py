"""Text of traffic on a plan: latencies and rates that clients see, queue, groups, limits."""

import math
from typing import TYPE_CHECKING

from gdp.api.traffic.plan import NEAR, near
from gdp.base.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gdp.corrections.estimate import Correction
    from gdp.question.result import Result, ServedPlan


def serving_lines(plan: "ServedPlan") -> list[str]:
    """Lines of the default answer; their first words are at most eight letters."""
    served = plan.served
    first, token = served.first_token, served.token
    room = "" if plan.room is None else f" (KV cache for {plan.room} at full length)"
    lines = [
        f"speed    {served.tokens_per_s:.1f} tokens/s at a concurrency of {served.running:.1f}"
        f"{room}; {served.requests} requests in {format_seconds(served.seconds)}",
        f"latency  TTFT {format_seconds(first.mean_s)} (p95 {format_seconds(first.p95_s)}), "
        f"TPOT {format_seconds(token.mean_s)} (p95 {format_seconds(token.p95_s)})",
    ]
    lines += interval_lines(plan.intervals, plan.generation.correction)
    if served.waiting_s > first.mean_s / 2:
        lines.append(_queue(plan))
    if not near(plan.side_by_side, plan.passes_of):
        lines.append(
            f"passes   are those of a batch of {plan.passes_of}, where {plan.side_by_side} run: "
            "a single request is predicted too slow, many too fast"
        )
    if plan.prefill is not None:
        own, others = _used(plan.result), _used(plan.prefill.result)
        lines.append(
            f"groups   prefill on {others}, decode on {own}: the KV cache of a prompt, "
            f"{format_bytes(plan.prefill.sent_bytes)}, is sent in "
            f"{format_seconds(plan.prefill.transfer_s)} "
            f"({format_seconds(plan.prefill.sent.mean_s)} with waiting for the link)"
        )
    if plan.value[0] > 1:
        lines.append(
            f"limits   none of the plans keeps them for 95% of the requests: this one takes "
            f"{plan.value[0]:.2f} times as long; fewer clients, or more or faster GPUs, may"
        )
    return lines


def interval_lines(
    intervals: "Mapping[str, tuple[float, float]]", correction: "Correction | None"
) -> list[str]:
    """The line on 90% intervals of times and rate, and what they rest on; none where unknown."""
    if correction is None or not intervals:
        return []
    words = {"first_token_s": "TTFT", "token_s": "TPOT"}
    texts = [
        f"{word} {format_seconds(intervals[name][0])} to {format_seconds(intervals[name][1])}"
        for name, word in words.items()
    ]
    low, high = intervals["tokens_per_s"]
    texts.append(f"{low:.4g} to {high:.4g} tokens/s")
    return [f"90%      {', '.join(texts)}: {correction.text}"]


def compared_lines(plan: "ServedPlan") -> list[str]:
    """A line for each plan that was compared."""
    return [
        f"plan     {row.layout}: {row.reason}"
        if row.request_s is None or row.tokens_per_s is None
        else f"plan     {row.layout}: {format_seconds(row.request_s)} per request, "
        f"{row.tokens_per_s:.1f} tokens/s"
        for row in plan.compared_with
    ]


def _queue(plan: "ServedPlan") -> str:
    """Seconds that requests wait, and the reason."""
    served, engine = plan.served, plan.engine
    text = f"queue    requests wait {format_seconds(served.waiting_s)} before they start: "
    # Little's law; near a limit some requests meet it, far below none does.
    demand = served.running + served.waiting_s * served.requests / max(served.seconds, 1e-9)
    if demand * NEAR < min(plan.room or math.inf, engine.copies * engine.requests_at_once):
        prefilling = engine if plan.prefill is None else plan.prefill.engine
        return (
            f"{text}for the pass under way and prompts before theirs, "
            f"{prefilling.tokens_at_once} tokens a pass at most"
        )
    room = "no limit" if math.isinf(engine.cache_tokens) else int(engine.cache_tokens)
    each = f" of each of {engine.copies} copies" if engine.copies > 1 else ""
    return (
        f"{text}caches{each} hold {room} tokens, and {engine.requests_at_once} requests run at most"
    )


def _used(result: "Result") -> str:
    """Names of the GPUs that hold a part of the model."""
    counts = result.placement.ops_on
    gpus = {d.name for d in result.question.cluster.devices if not d.is_cpu}
    return ", ".join(name for name, count in counts.items() if count and name in gpus)
