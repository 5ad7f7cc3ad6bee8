"""Peak memory of each device, in bytes.

One run (latency). Weights, and optimizer state with them, are there throughout, each weight id once
per device; so are caches, on the device that computes the ops (`Device.runs_on`). A tensor is held
* on the device that makes it: from the start of its producer until its last reader there has
  finished and its last outgoing transfer has arrived, or, with neither, until its producer ends;
* on a device that receives it: from when the channel takes the transfer until its last reader
  there has finished;
* on the host, where an `Output` op reads it: until the run ends.
Intervals are half open: a tensor that ends at an instant makes room for one that starts at it.

A full pipeline (throughput). Each device runs its ops of one sample in topological order, and holds
* weights, as above;
* each tensor that it receives, twice and throughout: one is read while the next arrives;
* each tensor that it makes: from its producer until its last reader there has run, or, if it is
  sent, until the sample is done;
* in training (some op is backward), once more for every stage that follows: the tensors that a
  forward op made and a backward op reads there. A device with k stages after it starts k more
  samples forward before the first comes back (1F1B: Narayanan et al. 2019, PipeDream,
  doi 10.1145/3341301.3359646). Stages are devices in the order of their first forward op.

Devices that share a memory (`Device.memory_pool`) fit where their peaks add up to no more than it,
though they may come at different times. What overflows is counted once: beyond a device's own
limit, and what the devices hold within theirs beyond the memory that they share.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from gdp.graph.op_graph import OUTPUT
from gdp.problem.problem import Problem, stored_bytes
from gdp.sim.schedule import Schedule


class Held(NamedTuple):
    """Bytes on one device over a run: from each instant to the next. Axis: K instants."""

    time_s: Float[np.ndarray, "K"]  # ascending, from 0
    held_bytes: Int[np.ndarray, "K"]


def pipeline_peaks(problem: Problem, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "D"]:
    """Peak bytes of each device in a full pipeline."""
    graph, d = problem.graph, problem.num_devices
    tensor, where = graph.use_tensor, device[graph.use_op]
    home, size = device[graph.producer], graph.held_bytes
    away = where != home[tensor]
    received = np.unique(tensor[away] * d + where[away])
    held = weights_held(problem, device)
    np.add.at(held, received % d, 2 * size[received // d])
    if graph.is_backward.any():
        kept = graph.is_backward[graph.use_op] & ~graph.is_backward[graph.producer[tensor]]
        pairs = np.unique(tensor[kept] * d + where[kept])
        after = _stages_after(problem, device)
        np.add.at(held, pairs % d, size[pairs // d] * after[pairs % d])
    last = graph.producer.astype(np.int64)
    np.maximum.at(last, tensor[~away], graph.use_op[~away])
    stays = np.ones(graph.num_tensors, dtype=bool)
    stays[tensor[away]] = False
    made, freed = np.zeros((2, graph.num_ops), dtype=np.int64)
    np.add.at(made, graph.producer, size)
    np.add.at(freed, last[stays], size[stays])
    peak = held.copy()
    for i in range(d):
        mine = device == i
        while_it_runs = np.cumsum(made[mine]) - np.cumsum(freed[mine]) + freed[mine]
        peak[i] += while_it_runs.max(initial=0)
    return peak


def _stages_after(problem: Problem, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "D"]:
    """Devices whose first forward op comes after that of each device; 0 for one without any."""
    graph, never = problem.graph, problem.num_ops
    first = np.full(problem.num_devices, never)
    forward = np.flatnonzero(~graph.is_backward & ~graph.is_io)
    np.minimum.at(first, device[forward], forward)
    return ((first[:, None] < first) & (first < never)).sum(axis=1)


def run_peaks(
    problem: Problem, schedule: Schedule, device: Int[np.ndarray, "N"]
) -> Int[np.ndarray, "D"]:
    """Peak bytes of each device in one run; the weights alone where it never ends."""
    peak = weights_held(problem, device)
    if not np.isfinite(schedule.latency_s):
        return peak
    start_s, end_s, size, where = _copies(problem, schedule, device)
    for i in range(problem.num_devices):
        mine = (where == i) & (end_s > start_s)
        change = np.concatenate([size[mine], -size[mine]])
        time_s = np.concatenate([start_s[mine], end_s[mine]])
        in_turn = np.lexsort((change, time_s))  # what ends makes room first
        peak[i] += np.cumsum(change[in_turn]).max(initial=0)
    return peak


def held_over_time(
    problem: Problem, schedule: Schedule, device: Int[np.ndarray, "N"]
) -> list[Held]:
    """Bytes on each device at every instant of one run; the largest value is the peak.

    For people to look at. Where the run never ends, the weights alone.
    """
    weights = weights_held(problem, device)
    if not np.isfinite(schedule.latency_s):
        return [Held(np.zeros(1), weights[d : d + 1]) for d in range(problem.num_devices)]
    start_s, end_s, size, where = _copies(problem, schedule, device)
    curves = []
    for d in range(problem.num_devices):
        mine = (where == d) & (end_s > start_s)
        time_s = np.concatenate([[0.0], start_s[mine], end_s[mine]])
        change = np.concatenate([weights[d : d + 1], size[mine], -size[mine]])
        instants, number = np.unique(time_s, return_inverse=True)
        steps = np.zeros(len(instants), dtype=np.int64)
        np.add.at(steps, number.reshape(-1), change)
        kept = instants <= schedule.latency_s
        curves.append(Held(instants[kept], np.cumsum(steps)[kept]))
    return curves


def weights_held(problem: Problem, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "D"]:
    """Bytes of weights and caches that each device holds, every id once."""
    return weights_of_ways(problem, device[None])


def weights_of_ways(problem: Problem, devices: Int[np.ndarray, "B N"]) -> Int[np.ndarray, "D"]:
    """Bytes of weights and caches on each device that serves several placements round-robin."""
    held, d = stored_bytes(problem), problem.num_devices
    on = np.stack([held.on(problem, device) for device in devices])
    kept, which = np.unique(held.id * d + on, return_inverse=True)
    largest = np.zeros(len(kept), dtype=np.int64)
    np.maximum.at(largest, which.reshape(-1), np.tile(held.size_bytes, len(devices)))
    total = np.zeros(d, dtype=np.int64)
    np.add.at(total, kept % d, largest)
    return total


def _copies(
    problem: Problem, schedule: Schedule, device: Int[np.ndarray, "N"]
) -> tuple[
    Float[np.ndarray, "C"], Float[np.ndarray, "C"], Int[np.ndarray, "C"], Int[np.ndarray, "C"]
]:
    """Start, end, bytes and device of every copy of a tensor, by the rules above."""
    graph, sent = problem.graph, schedule.transfers
    t, d = graph.num_tensors, problem.num_devices
    leaves = graph.has_type((OUTPUT,))[graph.use_op]
    read_s = np.where(leaves, np.inf, schedule.finish_s[graph.use_op])
    # Of every tensor and device that reads it: when the last reader there finishes.
    pairs, number = np.unique(graph.use_tensor * d + device[graph.use_op], return_inverse=True)
    last_s = np.full(len(pairs) + 1, -np.inf)
    np.maximum.at(last_s, number, read_s)

    def last_reader_s(pair: Int[np.ndarray, "P"]) -> Float[np.ndarray, "P"]:
        at = np.searchsorted(pairs, pair)
        return last_s[np.where(np.append(pairs, -1)[at] == pair, at, len(pairs))]

    arrive_s = np.full(t, -np.inf)
    np.maximum.at(arrive_s, sent.tensor, sent.arrive_s)
    home = device[graph.producer]
    kept_s = np.maximum(last_reader_s(np.arange(t) * d + home), arrive_s)
    kept_s = np.where(np.isneginf(kept_s), schedule.finish_s[graph.producer], kept_s)
    return (
        np.concatenate([schedule.start_s[graph.producer], sent.start_s]),
        np.concatenate([kept_s, last_reader_s(sent.tensor * d + sent.destination)]),
        np.concatenate([graph.held_bytes, graph.held_bytes[sent.tensor]]),
        np.concatenate([home, sent.destination]),
    )
