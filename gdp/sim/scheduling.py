"""Schedulers of serving engines: the work of each iteration.

An engine schedules before every pass of the model (Orca, Yu et al., OSDI 2022). `Scheduler` does so
with chunked prefill (Sarathi-Serve, Agrawal et al., OSDI 2024); an engine with other rules has a
subclass, `scheduler.py` in its folder of `gdp.targets`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class IterationBatch(NamedTuple):
    """Work of one iteration."""

    chunks: list[int]  # prompt tokens of the first requests in the queue
    decodes: bool = True  # requests that decode get a token, too
    deferred_iterations: int = 0  # for which prompts have been left to wait by now


@dataclass(frozen=True)
class Scheduler:
    """Chunked prefill: prompts use the token budget that decoding leaves, cut at its end."""

    async_scheduling: bool = False  # a batch is chosen when the one before it starts
    request_s: float = 0.0  # of the host, before a request is in the queue of the engine
    preempts: bool = False  # admits by the prompt alone; else a request keeps room to its end
    admission_interval: int = 1  # iterations of decoding between two looks at new requests

    def next_batch(
        self, queue: Iterable[int], running: int, room: int, deferred: int
    ) -> IterationBatch:
        """The work of the next iteration.

        Args:
            queue: Unread prompt tokens of each admitted request, in the order of admission.
            running: Tokens that decoding takes.
            room: Tokens of one iteration.
            deferred: `IterationBatch.deferred_iterations` of the iteration before.
        """
        del deferred
        return IterationBatch(chunks_of(queue, room - running))


def chunks_of(queue: Iterable[int], room: int, whole: int = 0) -> list[int]:
    """Tokens of each prompt that fit, the last cut; prompts of at most `whole` tokens are not."""
    chunks = list[int]()
    for unread in queue:
        if room <= 0 or room < unread <= whole:
            break
        chunks.append(min(unread, room))
        room -= chunks[-1]
    return chunks
