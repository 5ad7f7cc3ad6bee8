"""Value and memory of placements, by the problem's objective.

Replicated stages are devices that take the samples of a full pipeline round-robin.

A team (`gdp.placement.placement.Teams`) of r devices runs the ops that are placed on its first
member: sample i on member i modulo r, so that the runs of consecutive samples overlap. Every member
holds the weights of all of them. Inputs and outputs of the graph stay on the host. So sample i sees
a plain placement of its own, `devices_of_sample(i)`, and these repeat after the least common
multiple of the teams' sizes, a cycle of L samples.

Period: the largest busy time of any device or channel over a cycle, divided by L. Compute and
dispatch of a team of r so divide by r. A tensor is sent once for each sample, from the member that
made it to each device that reads it: between teams of r and s devices, each pair that meets carries
one of lcm(r, s) samples, on its own channel; what goes over a channel that the members share is not
divided. Nothing is exchanged between the members of a team, as there are no gradients: what
PipeDream (Narayanan et al. 2019, doi 10.1145/3341301.3359646) and Tarnawski et al. 2020 (arXiv
2006.16423) add for their weights has no counterpart in inference.

Memory: every member holds what a plain pipeline holds there (`gdp.sim.memory`) when it serves: all
weights, and two buffers of each tensor that it receives. The host, where it is a member, besides
holds the inputs that it sends to the other members and the outputs that they send.

Devices of one processor compute one at a time, so what they are busy for adds up over all samples:
members of a team on one processor gain nothing.

Latency: one sample goes one way; the slowest of the ways counts.
"""

import math
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from gdp.base.errors import ArgumentError
from gdp.base.rows import imported
from gdp.cluster.types import ALONE, overflow_bytes
from gdp.placement.placement import Assignment, Teams, team_faults
from gdp.problem.problem import Problem
from gdp.problem.ticks import in_ticks, seconds_per_unit
from gdp.sim.latency import busy_ticks, simulate
from gdp.sim.memory import weights_held, weights_of_ways
from gdp.sim.objectives import Score as Score
from gdp.sim.objectives import objective_of, peaks

MAX_CYCLE = 1000
"""Samples after which the ways must repeat: each of them is simulated."""


def score(
    problem: Problem,
    device: Int[np.ndarray, "N"],
    rank: Int[np.ndarray, "N"] | None = None,
    teams: Teams = (),
) -> Score:
    """The score of one placement. Memory is of one run, or of a full pipeline for throughput."""
    if teams:
        return replicated_score(problem, device, rank, teams)
    return objective_of(problem).score(problem, device, rank)


def score_of(problem: Problem, assignment: Assignment) -> Score:
    """The score of an assignment, replica groups and splits included: each member of a split holds
    as much as its first one, or its own share."""
    scored = score(problem, assignment.device, assignment.rank, assignment.teams)
    assigned = objective_of(problem).assigned
    if assigned and (assignment.teams or assignment.splits):
        value = imported(assigned)(problem, assignment, scored)
        scored = replace(scored, value_s=value)
    if not assignment.splits:
        return scored
    held = scored.peak_bytes.copy()
    for split in assignment.splits:
        held[list(split.devices)] = held[split.devices[0]]
    for d, graph in problem.origin.members.items():
        own = replace(problem, graph=graph)
        peak = score(own, assignment.device, assignment.rank, assignment.teams).peak_bytes
        held[d] = peak[next(s.devices[0] for s in assignment.splits if d in s.devices)]
    over = overflow_bytes(problem.cluster, held)
    return replace(scored, peak_bytes=held, overflow_bytes=over)


def values(
    problem: Problem,
    devices: Int[np.ndarray, "B N"],
    ranks: Int[np.ndarray, "N"] | Int[np.ndarray, "B N"] | None = None,
) -> tuple[Float[np.ndarray, "B"], Int[np.ndarray, "B"]]:
    """Seconds of the problem's objective and overflow in bytes, for each placement."""
    return objective_of(problem).values(problem, devices, ranks)


def may_replicate(problem: Problem) -> bool:
    """True if a placement may have replica groups: a pipeline of an inference, allowed, and not all
    on one processor, whose devices compute one at a time."""
    processor = problem.cluster.processor
    return (
        problem.replicas
        and problem.num_devices > 1
        and bool(processor[0] == ALONE or (processor != processor[0]).any())
        and objective_of(problem).memory == "pipeline"
        and not problem.graph.is_backward.any()
    )


def cycle_length(teams: Teams) -> int:
    """After how many samples the ways through the teams repeat.

    >>> cycle_length(((0, 1), (2, 3, 4)))
    6
    """
    return math.lcm(*(len(team) for team in teams))


def devices_of_sample(
    problem: Problem, device: Int[np.ndarray, "N"], teams: Teams, sample: int
) -> Int[np.ndarray, "N"]:
    """Device of each op for one sample."""
    serves = np.arange(problem.num_devices)
    for team in teams:
        serves[team[0]] = team[sample % len(team)]
    return np.where(problem.graph.is_io, device, serves[device])


def busy_seconds(
    problem: Problem, device: Int[np.ndarray, "N"], teams: Teams
) -> tuple[Float[np.ndarray, "D"], Float[np.ndarray, "C"], Float[np.ndarray, "Q"]]:
    """Busy seconds per sample of each device, of each channel, and of each processor that devices
    share, over a cycle."""
    cycle = _require(problem, device, teams)
    problem, per_sample_s = in_ticks(problem), seconds_per_unit(problem) / cycle
    ways = (devices_of_sample(problem, device, teams, i) for i in range(cycle))
    parts = zip(*(busy_ticks(problem, way) for way in ways), strict=True)
    busy_s, channel_s, processor_s = (np.sum(part, axis=0) * per_sample_s for part in parts)
    return busy_s, channel_s, processor_s


def period_s(problem: Problem, device: Int[np.ndarray, "N"], teams: Teams) -> float:
    """Seconds between two samples of a full pipeline with replicated stages."""
    return max(float(part.max(initial=0.0)) for part in busy_seconds(problem, device, teams))


def peak_bytes(
    problem: Problem,
    device: Int[np.ndarray, "N"],
    teams: Teams,
    rank: Int[np.ndarray, "N"] | None = None,
) -> Int[np.ndarray, "D"]:
    """Peak bytes of each device, by the objective's rule of memory."""
    _require(problem, device, teams)
    ways = max((len(team) for team in teams), default=1)
    rows = np.stack([devices_of_sample(problem, device, teams, i) for i in range(ways)])
    peak_rows = np.stack([peaks(problem, row, rank) for row in rows])
    most = peak_rows.max(axis=0)
    if len(problem.held_on) > 1:
        # Devices that serve unlike samples may keep their caches on one, which holds all of them.
        peak_rows = peak_rows - np.stack([weights_held(problem, row) for row in rows])
        most = peak_rows.max(axis=0) + weights_of_ways(problem, rows)
    if objective_of(problem).pipelined and any(problem.cluster.host in team for team in teams):
        # The least is that of a sample which another member serves: inputs and outputs alone.
        most[problem.cluster.host] += peak_rows.min(axis=0)[problem.cluster.host]
    return most


def replicated_score(
    problem: Problem, device: Int[np.ndarray, "N"], rank: Int[np.ndarray, "N"] | None, teams: Teams
) -> Score:
    """The score of a placement with teams; raises `ValueError` where the objective has none."""
    objective = objective_of(problem)
    if not objective.general:
        raise ArgumentError(
            f"objective {problem.objective!r} knows no replicated stages; judge the placement "
            "for throughput or latency"
        )
    period = period_s(problem, device, teams)
    latency_s = max(
        simulate(problem, devices_of_sample(problem, device, teams, i), rank).latency_s
        for i in range(max(len(team) for team in teams))
    )
    held = peak_bytes(problem, device, teams, rank)
    value_s = period if objective.pipelined else latency_s
    return Score(latency_s, period, overflow_bytes(problem.cluster, held), held, value_s)


def _require(problem: Problem, device: Int[np.ndarray, "N"], teams: Teams) -> int:
    """The length of the cycle; raises `ValueError` for teams that cannot serve these devices."""
    faults = list(team_faults(teams, problem.num_devices))
    others = np.array([d for team in teams for d in team[1:]], dtype=np.int64)
    if np.isin(device[~problem.graph.is_io], others).any():
        faults.append("an op is on a member of a team that is not its first")
    cycle = cycle_length(teams)
    if cycle > MAX_CYCLE:
        faults.append(f"the ways through the teams repeat after {cycle} samples, over {MAX_CYCLE}")
    if faults:
        raise ArgumentError("; ".join(faults))
    return cycle
