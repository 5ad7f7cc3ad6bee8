"""Models to drop or to shrink, and cards to buy, where no packing keeps every limit."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from gdp.api.box.models import ON_DEMAND, OTHER, BoxModel
from gdp.box.table import PackingValue
from gdp.cluster.types import Cluster
from gdp.importers.spec import ModelSpec
from gdp.question.models import is_gguf

Rate = Callable[[Cluster, Sequence[BoxModel]], PackingValue | None]
"""Value of the best packing of models on a box; None where a model has no option."""
MOST, SECONDS = 4, 20.0
"""Changes that are named, and seconds after which no further one is tried."""


def advice(
    cluster: Cluster,
    models: Sequence[BoxModel],
    troubled: Sequence[str],
    now: PackingValue,
    rate: Rate,
) -> list[str]:
    """Single changes after which fewer limits are broken, or fewer models left out, the best first.

    Args:
        cluster: The box.
        models: All of them.
        troubled: Names of those that are left out or whose limits are broken.
        now: The value of the answer.
        rate: See `Rate`.
    """
    rows: list[tuple[tuple[float, ...], int, str]] = []
    until = time.monotonic() + SECONDS
    for text, other, changed in _changes(cluster, models, troubled):
        if time.monotonic() > until:
            break
        value = rate(other, changed)
        if value is not None and value[:3] < now[:3]:
            rest = "all limits are kept" if not any(value[:3]) else _rest(value)
            rows.append((value[:3], len(rows), f"{text}: {rest}"))
    return [text for _, _, text in sorted(rows)[:MOST]]


def _rest(value: PackingValue) -> str:
    parts = (
        (value.dropped, "is left out"), (value.broken, "breaks its limits alone"),
        (value.crowded - value.broken, "does so while all others are busy"),
    )  # fmt: skip
    return ", ".join(f"weight {weight:g} {what}" for weight, what in parts if weight > 0)


def _changes(
    cluster: Cluster, models: Sequence[BoxModel], troubled: Sequence[str]
) -> Iterator[tuple[str, Cluster, list[BoxModel]]]:
    """(words, box, models) of every change."""

    def having(k: int, **other: object) -> list[BoxModel]:
        return [*models[:k], replace(models[k], **other), *models[k + 1 :]]

    for k, model in enumerate(models):  # the prices of these are known
        if len(models) > 1 and model.name not in troubled:
            yield f"drop {model.name}", cluster, [*models[:k], *models[k + 1 :]]
        if not model.swaps and model.name in troubled:
            changed = having(k, residence=ON_DEMAND)
            yield f"residence = '{ON_DEMAND}' of {model.name}", cluster, changed
    for kind in dict.fromkeys(d.kind for d in cluster.devices if not d.is_cpu):
        larger = with_another(cluster, kind)
        named = {d.name for d in cluster.devices if d.kind == kind}
        added = larger.device_names[-1]
        yield (
            f"buy another {kind}",
            larger,
            [
                replace(m, devices=(*m.devices, added)) if named & set(m.devices) else m
                for m in models
            ],
        )
    for k, model in enumerate(models):
        if model.engine == OTHER:
            continue
        spec = ModelSpec.of(model.spec)
        longest = max(r.prompt + r.new for r in model.traffic.requests)
        if model.context >= 2 * longest:
            half = model.context // 2
            yield f"context = {half} of {model.name}", cluster, having(k, context=half)
        name, value = ("cache", "q8_0") if is_gguf(model.spec) else ("quantize", "fp8")
        if name not in spec.options:
            what = "caches" if name == "cache" else "weights"
            changed = having(k, spec=str(spec.having(**{name: value})))
            yield f"{what} of {model.name} in 8 bits (?{name}={value})", cluster, changed


def with_another(cluster: Cluster, kind: str) -> Cluster:
    """The cluster with one card of a kind more, whose links are those of the last one."""
    last = max(d for d, device in enumerate(cluster.devices) if device.kind == kind)
    device = cluster.devices[last]
    rows = np.array([*range(cluster.num_devices), last])
    ids = np.ix_(rows, rows)
    rate, latency = cluster.link_bytes_per_s[ids], cluster.link_latency_s[ids]
    peers = [d for d, x in enumerate(cluster.devices) if x.kind == kind and d != last]
    near = peers[-1] if peers else cluster.host
    for table, own in ((rate, cluster.link_bytes_per_s), (latency, cluster.link_latency_s)):
        table[last, -1], table[-1, last] = own[last, near], own[near, last]
    channel = cluster.channel[ids]
    queues = channel >= 0
    fresh = np.arange(channel.size).reshape(channel.shape) + channel.max() + 1
    new = np.zeros_like(queues)
    new[-1], new[:, -1] = True, True
    channel = np.where(queues & new, fresh, channel)
    added = replace(device, name=f"{kind}-new", memory_pool="")
    return replace(
        cluster, devices=(*cluster.devices, added), link_bytes_per_s=rate, link_latency_s=latency,
        channel=channel,
    )  # fmt: skip
