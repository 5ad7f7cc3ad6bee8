"""SGLang's scheduler: prefill before decode, in batches of its own."""

from collections.abc import Iterable
from dataclasses import dataclass

from gdp.sim.scheduling import IterationBatch, Scheduler, chunks_of


@dataclass(frozen=True)
class SglangScheduler(Scheduler):
    """Decoding stops while prompts are read, as without `--enable-mixed-chunk`; the overlap
    scheduler is on. `admission_interval` is `--scheduler-recv-interval`."""

    async_scheduling: bool = True

    def next_batch(
        self, queue: Iterable[int], running: int, room: int, deferred: int
    ) -> IterationBatch:
        """Prompts alone while there are any."""
        del running, deferred
        chunks = chunks_of(queue, room)
        return IterationBatch(chunks, decodes=not chunks)
