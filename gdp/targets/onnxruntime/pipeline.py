"""Execution of the pieces of a cut model, one thread per core, several samples in flight.

Every sample in flight has a slot: its own tensors, allocated once and bound to the sessions, so
that a piece reads what another wrote without a copy. A worker runs, of the pieces that are ready on
its core, the one that is due first. A piece may have several workers, each with a session of its
own: sample i is run by worker i modulo their number. One slot gives the latency of single samples,
several a pipeline; the queues are bounded because there are no more samples than slots.
"""

import heapq
import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from gdp.base.errors import ModelError
from gdp.measure.cycle import Cycle
from gdp.measure.measuring import Quota
from gdp.measure.statistics import Trace
from gdp.targets.onnxruntime.sessions import from_array, pinned, to_array


class Serving(NamedTuple):
    """A worker and the session with which it runs a stage."""

    worker: int
    session: Any  # onnxruntime.InferenceSession


@dataclass(frozen=True)
class SessionStage:
    """A piece of a model with its session, and who waits for it."""

    worker: int
    session: Any  # onnxruntime.InferenceSession
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    readers: tuple[int, ...] = ()  # positions of the stages that read from it
    waits_for: int = 0  # stages that it reads from
    rank: int = 0  # smallest first among the ready pieces of one sample
    others: tuple[Serving, ...] = ()  # who serve with the worker in turn

    @property
    def serving(self) -> tuple[Serving, ...]:
        """All who serve the stage, in the order of the samples."""
        return (Serving(self.worker, self.session), *self.others)


@dataclass(frozen=True)
class Slot:
    """The tensors of one sample in flight, bound to every stage."""

    values: Mapping[str, Any]  # onnxruntime.OrtValue by name
    bindings: tuple[tuple[Any, ...], ...]  # onnxruntime.IOBinding of each stage and who serves it

    def read(self, name: str) -> np.ndarray:
        """A copy of a tensor: the memory is written again by the next sample."""
        return to_array(self.values[name])


def make_slot(
    stages: Sequence[SessionStage], feeds: Mapping[str, np.ndarray], like: Mapping[str, Any]
) -> Slot:
    """A slot that holds the feeds; `like` gives every tensor that a stage makes, as an OrtValue of
    the same type and shape."""
    from gdp.targets.onnxruntime.telemetry import ort

    values = {name: from_array(array) for name, array in feeds.items()}
    for stage in stages:
        for name in stage.outputs:
            kind = like[name].element_type()
            if kind == _STRING:
                raise ModelError(f"{name!r} holds strings, which cannot be handed over")
            values[name] = ort.OrtValue.ortvalue_from_shape_and_type(like[name].shape(), kind)
    return Slot(values, tuple(_bindings(stage, values) for stage in stages))


def _bindings(stage: SessionStage, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The tensors of a slot bound to every session of a stage."""
    bindings = []
    for _, session in stage.serving:
        binding = session.io_binding()
        for name in stage.inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in stage.outputs:
            binding.bind_ortvalue_output(name, values[name])
        bindings.append(binding)
    return tuple(bindings)


_STRING = 8  # onnx.TensorProto.STRING

_Item = tuple[float, int, int, int, int]  # (due, rank, sequence, stage, slot), smallest first


class PipelineExecutor:
    """Workers that run stages. Use as a context: the threads end with it."""

    def __init__(
        self,
        stages: Sequence[SessionStage],
        slots: Sequence[Slot],
        cores: Sequence[Sequence[int]],  # of each worker
        cycle: Cycle | None = None,  # when stages are due; without it the oldest sample goes first
    ) -> None:
        self._cycle = cycle or Cycle(1.0, (0.0,) * len(stages), len(slots))
        self._stages = tuple(stages)
        self._serving = tuple(stage.serving for stage in stages)
        self._slots = tuple(slots)
        self._cores = [tuple(own) for own in cores]
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._inbox: list[queue.SimpleQueue[_Item | None]] = [queue.SimpleQueue() for _ in cores]
        self._threads = [
            threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(len(cores))
        ]
        self._error: BaseException | None = None
        self._reset(Quota(0, 0.0, 0.0))

    def __enter__(self) -> "PipelineExecutor":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for inbox in self._inbox:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    @property
    def num_slots(self) -> int:
        """Samples that can be in flight together."""
        return len(self._slots)

    def start(self, quota: Quota) -> None:
        """Let samples in until the quota is met; `wait` before the next start."""
        self._reset(quota)
        with self._lock:
            first = [self._admit(slot) for slot in range(self.num_slots)]
        for slot in first:
            self._enter(slot)

    def wait(self) -> Trace:
        """Wait until all samples are done; raises the exception of a stage."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        finished = sorted(zip(self._finish_s, self._start_s, strict=True))
        return Trace(
            start_s=tuple(start for _, start in finished),
            finish_s=tuple(finish for finish, _ in finished),
            stage_runs=tuple(tuple((begin, end) for begin, end, _ in r) for r in self._stage_runs),
            run_turns=tuple(tuple(turn for _, _, turn in runs) for runs in self._stage_runs),
            worker=tuple(stage.worker for stage in self._stages),
            turns=tuple(len(serving) for serving in self._serving),
        )

    def run(self, samples: int) -> Trace:
        """So many samples, or one for every slot where those are more."""
        self.start(Quota(samples - 2 * self.num_slots, 0.0, math.inf, per_slot=1))
        return self.wait()

    def _reset(self, quota: Quota) -> None:
        self._done.clear()
        self._quota = quota
        self._began_s, self._full_s = time.perf_counter(), math.inf
        self._admitted = 0
        self._completed = 0
        self._sequence = 0
        self._sample_of = [0] * len(self._slots)
        self._missing = [[0] * len(self._stages) for _ in self._slots]
        self._left = [0] * len(self._slots)
        self._start_s: list[float] = []
        self._finish_s: list[float] = []
        self._stage_runs: list[list[tuple[float, float, int]]] = [[] for _ in self._stages]

    def _admit(self, slot: int) -> int:
        """Give a slot to the next sample; the lock is held."""
        self._sample_of[slot] = self._admitted
        self._admitted += 1
        self._missing[slot] = [stage.waits_for for stage in self._stages]
        self._left[slot] = len(self._stages)
        self._start_s.append(0.0)
        self._finish_s.append(0.0)
        return slot

    def _enter(self, slot: int) -> None:
        """Put the first stages of a slot's sample in their inboxes."""
        first = [i for i, stage in enumerate(self._stages) if stage.waits_for == 0]
        with self._lock:
            items = self._items(first, slot)
        self._start_s[self._sample_of[slot]] = time.perf_counter()
        for worker, item in items:
            self._inbox[worker].put(item)

    def _items(self, ready: Sequence[int], slot: int) -> list[tuple[int, _Item]]:
        items = []
        for position in ready:
            self._sequence += 1
            sample, serving = self._sample_of[slot], self._serving[position]
            due_s = self._cycle.due(sample, position)
            item = (due_s, self._stages[position].rank, self._sequence, position, slot)
            items.append((serving[sample % len(serving)].worker, item))
        return items

    def _work(self, worker: int) -> None:
        """Run due stages until the end is requested; the body of each thread."""
        cores = self._cores[worker]
        place: AbstractContextManager[None] = pinned(cores) if cores else nullcontext()
        heap: list[_Item] = []
        inbox = self._inbox[worker]
        try:
            with place:
                while (item := _next_item(inbox, heap)) is not None:
                    self._run_stage(worker, heap, item[3], item[4])
        except BaseException as error:
            self._error = error
            self._done.set()

    def _run_stage(self, worker: int, heap: list[_Item], position: int, slot: int) -> None:
        stage, serving = self._stages[position], self._serving[position]
        turn = self._sample_of[slot] % len(serving)
        begin_s = time.perf_counter()
        serving[turn].session.run_with_iobinding(self._slots[slot].bindings[position][turn])
        end_s = time.perf_counter()
        self._stage_runs[position].append((begin_s, end_s, turn))
        ready, missing = [], self._missing[slot]
        with self._lock:
            for reader in stage.readers:
                missing[reader] -= 1
                if missing[reader] == 0:
                    ready.append(reader)
            items = self._items(ready, slot)
            self._left[slot] -= 1
            complete = self._left[slot] == 0
        # Other workers first: they may be idle, while this one looks at its heap next anyway.
        for to, item in items:
            if to != worker:
                self._inbox[to].put(item)
        for to, item in items:
            if to == worker:
                heapq.heappush(heap, item)
        if complete:
            self._complete(slot, end_s)

    def _complete(self, slot: int, end_s: float) -> None:
        with self._lock:
            self._finish_s[self._sample_of[slot]] = end_s
            self._completed += 1
            if self._completed == self.num_slots:
                self._full_s = end_s
            more = self._quota.wants(
                self._admitted, self.num_slots, end_s - self._began_s, end_s - self._full_s
            )
            if more:
                self._admit(slot)
            is_last = self._completed == self._admitted
        if more:
            self._enter(slot)
        elif is_last:
            self._done.set()


def _next_item(inbox: "queue.SimpleQueue[_Item | None]", heap: list[_Item]) -> _Item | None:
    """The most urgent item, or None when the worker is to end."""
    try:
        while True:
            item = inbox.get_nowait()
            if item is None:
                return None
            heapq.heappush(heap, item)
    except queue.Empty:
        pass
    if heap:
        return heapq.heappop(heap)
    # Polling before this wait was measured to be slower: it contends for the interpreter lock.
    return inbox.get()


@dataclass(frozen=True)
class SideBySide:
    """Concurrent pipelines, each on separate samples: one, or the replicas of a model."""

    pipelines: tuple[PipelineExecutor, ...]

    @property
    def slots(self) -> int:
        """Samples in flight, in all pipelines together."""
        return sum(pipeline.num_slots for pipeline in self.pipelines)

    def run(self, quota: Quota) -> tuple[Trace, ...]:
        """Run all pipelines until each has its share of the quota; one trace for each."""
        share = replace(quota, completions=-(-quota.completions // len(self.pipelines)))
        for pipeline in self.pipelines:
            pipeline.start(share)
        return tuple(pipeline.wait() for pipeline in self.pipelines)
