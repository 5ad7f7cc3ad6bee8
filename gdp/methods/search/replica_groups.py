"""Teams of replicated stages as single devices, so that every search of pipelines searches them.

A team of r devices takes samples round-robin (`gdp.sim.score`): per sample it is busy for 1 / r
of one member's seconds, and each link between two teams carries the samples in which its ends meet.
So the period of a placement with these teams is that of a plain placement on a cluster with one
device in place of each team, r times as fast. Exactly so where the members' links are alike and
the host is in no team; what is found is judged by the simulator of the whole anyway.

Axes: N ops, D devices, K devices and teams.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from gdp.base.clock import Clock
from gdp.base.errors import InfeasibleError
from gdp.cluster.types import ALONE, NO_CHANNEL, Cluster, overflow_bytes
from gdp.methods.base import Answer, Assignment, Method, Search
from gdp.methods.pipeline.stage_costs import device_classes
from gdp.methods.scoring import Evaluated, is_compiling
from gdp.methods.search.local_search import local_search
from gdp.methods.shares import TEAMS_LOOK_SHARE
from gdp.placement.placement import Teams
from gdp.problem.problem import Problem, make_problem
from gdp.problem.ticks import round_to_ticks
from gdp.sim.score import MAX_CYCLE, busy_seconds, cycle_length, peak_bytes, period_s, score

DeviceGroups = tuple[tuple[int, ...], ...]
_FEW_DEVICES, _FEW_OPS = 4, 256  # of which every way to join devices is tried
_LOOK, _DESCENDED = 200, 3  # evaluations of such a look; looks that are improved upon
Plain = Callable[[Problem, Search, Sequence[tuple[str, Method]]], Answer]
"""A method, and further ones whose answers it starts from as well."""


@dataclass(frozen=True, eq=False)
class ReplicaContraction:
    """A problem with one device for each team."""

    whole: Problem
    problem: Problem
    teams: Teams
    groups: DeviceGroups  # the whole's devices that each device stands for

    def project(self, device: Int[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
        """A placement of the whole on the devices that stand for its own."""
        stands = np.empty(self.whole.num_devices, dtype=np.int64)
        for k, group in enumerate(self.groups):
            stands[list(group)] = k
        return stands[device]

    def judged(self, device: Int[np.ndarray, "N"]) -> Evaluated:
        """A placement on the merged devices, as one of the whole with teams."""
        whole = self.whole
        placed = np.array([group[0] for group in self.groups])[device]
        placed = np.where(whole.graph.is_io, whole.cluster.host, placed)
        evaluation = score(whole, placed, None, self.teams)
        assignment = Assignment(placed, None, self.teams)
        return Evaluated(assignment, evaluation.overflow_bytes, evaluation.value_s)


def contract_replicas(problem: Problem, teams: Teams) -> ReplicaContraction | None:
    """The problem with each team as one device; None where some op could go nowhere then, or all
    devices are one team, which leaves nothing to search."""
    groups = _groups(problem, teams)
    if len(groups) < 2:
        return None
    io, host = problem.graph.is_io, problem.cluster.host
    compute_s = np.empty((problem.num_ops, len(groups)))
    allowed = np.empty(compute_s.shape, dtype=bool)
    for k, group in enumerate(groups):
        members = list(group)
        compute_s[:, k] = problem.compute_s[:, members].max(axis=1) / len(group)
        allowed[:, k] = problem.allowed[:, members].all(axis=1)
        if host in group:  # inputs and outputs stay there
            compute_s[io, k], allowed[io, k] = (
                problem.compute_s[io, host],
                problem.allowed[io, host],
            )
    compute_s = round_to_ticks(compute_s, problem.unit)
    try:
        small = make_problem(
            problem.graph, _cluster(problem, groups), compute_s, problem.objective,
            allowed=allowed, together=problem.group, unit=problem.unit,
        )  # fmt: skip
    except InfeasibleError:
        return None
    return ReplicaContraction(problem, small, teams, groups)


def _groups(problem: Problem, teams: Teams) -> DeviceGroups:
    """The teams and the devices that are in none, each at its first device."""
    others = {d for team in teams for d in team[1:]}
    team_of = {team[0]: team for team in teams}
    return tuple(team_of.get(d, (d,)) for d in range(problem.num_devices) if d not in others)


def search_teams(
    problem: Problem,
    first: Evaluated | None,
    search: Search,
    limit_s: float,
    plain: Plain,
    starts: Sequence[Evaluated] = (),
) -> tuple[Evaluated | None, int]:
    """(the best placement with teams that is found, `first` included, evaluations spent).

    Looked at are the teams of `first`, those of all devices of each class, and those that grow from
    `first` and from `starts`; a `plain` method searches the better ones with all of the budget,
    unless a first look at them comes to more than `limit_s` seconds.
    """
    clock, best, spent = search.budget(), first, 0
    looks: list[tuple[Evaluated, ReplicaContraction]] = []
    for option in _options(problem, first):
        if looks and clock.is_over():
            break
        look_only = Search(seed=search.seed, clock=clock.part(TEAMS_LOOK_SHARE), evaluations=1)
        answer = plain(option.problem, look_only, ())
        spent += answer.evaluations
        candidates = [] if answer.assignment is None else [option.judged(answer.assignment.device)]
        if first is not None and first.assignment.teams == option.teams:
            candidates.append(first)
        if candidates:
            looks.append((min(candidates), option))
    grown = [grow_teams(problem, x, clock.part(TEAMS_LOOK_SHARE)) for x in (first, *starts) if x]
    for end in [*grown, *_best_partitions(problem, search.seed, clock)]:
        spent += end.evaluations
        if not end.assignment.teams or end.overflow_bytes > 0:
            continue
        best = end if best is None else min(best, end)
        if (option := contract_replicas(problem, end.assignment.teams)) is not None:
            looks.append((end, option))
    if not looks:
        return best, spent
    look, option = min(looks, key=lambda entry: entry[0].key)
    if look.overflow_bytes == 0 and look.value_s <= limit_s:
        start = Answer(Assignment(option.project(look.assignment.device)))
        inner = replace(search, clock=clock, start=None, prior_answers={}, progress=None)
        answer = plain(option.problem, inner, [("replicas", lambda small, few: start)])
        spent += answer.evaluations
        if answer.assignment is not None:
            look = min(look, option.judged(answer.assignment.device))
    if look.overflow_bytes == 0 and (best is None or look < best):
        best = look
    return best, spent


def grow_teams(problem: Problem, start: Evaluated, clock: Clock) -> Evaluated:
    """Join the busiest device, or its team, with another device or team, as long as the period
    falls: devices need not be alike. O(D) evaluations a join; the result's are those of all."""
    best, spent = start, 0
    while not clock.is_over():
        device, teams = best.assignment.device, best.assignment.teams
        groups = _groups(problem, teams)
        busy_s = busy_seconds(problem, device, teams)[0]
        busiest = max(groups, key=lambda group: float(busy_s[list(group)].max()))
        joined = [_joined(problem, device, teams, busiest, g) for g in groups if g != busiest]
        scored = [_judged(problem, x) for x in joined if x is not None]
        spent += len(scored)
        if not scored or not min(scored) < best:
            break
        best = min(scored)
    return replace(best, evaluations=spent)


def _best_partitions(problem: Problem, seed: int, clock: Clock) -> list[Evaluated]:
    """Of few ops on few devices: for every way to join devices, a short search's placement."""
    devices = range(problem.num_devices)
    if problem.num_devices > _FEW_DEVICES or problem.num_ops > _FEW_OPS or is_compiling():
        return []
    found: list[Evaluated] = []
    for teams in partitions(devices):
        if clock.is_over() or not teams:
            continue
        if len(teams[0]) == problem.num_devices:
            whole = np.where(problem.graph.is_io, problem.cluster.host, 0)
            end = _joined(problem, whole, (), *((d,) for d in devices))
            found += [] if end is None else [replace(_judged(problem, end), evaluations=1)]
        elif (option := contract_replicas(problem, teams)) is not None:
            look = Search(seed=seed, seconds=None, evaluations=_LOOK)
            answer = local_search(option.problem, look)
            if answer.assignment is not None:
                end = option.judged(answer.assignment.device)
                found.append(replace(end, evaluations=answer.evaluations))
    found.sort()
    return [_descended(problem, end, clock) for end in found[:_DESCENDED]] + found[_DESCENDED:]


def _descended(problem: Problem, start: Evaluated, clock: Clock) -> Evaluated:
    """Local descent over single groups of ops, for teams of heterogeneous members."""
    best, spent, teams = start, 0, start.assignment.teams
    groups = _groups(problem, teams)
    missed, work = 0, ~problem.graph.is_io
    for g in itertools.cycle(range(problem.num_groups)):
        if missed == problem.num_groups or spent >= _LOOK or clock.is_over():
            break
        moved = work & (problem.group == g)
        device = best.assignment.device
        ends = [
            _judged(problem, Assignment(np.where(moved, group[0], device), None, teams))
            for group in groups
            if moved.any() and group[0] != device[moved][0]
            if problem.allowed[moved][:, group].all()
        ]
        spent += len(ends)
        missed = missed + 1 if not ends or not min(ends) < best else 0
        best = min([best, *ends])
    return replace(best, evaluations=start.evaluations + spent)


def partitions(devices: Sequence[int]) -> Iterator[Teams]:
    """Every way to join some of the devices into teams, the one without any first.

    >>> list(partitions((0, 1, 2)))
    [(), ((1, 2),), ((0, 1),), ((0, 2),), ((0, 1, 2),)]
    """
    if not devices:
        yield ()
        return
    first, others = devices[0], devices[1:]
    for size in range(len(others) + 1):
        for more in itertools.combinations(others, size):
            team = ((first, *more),) if more else ()
            for rest in partitions([d for d in others if d not in more]):
                yield (*team, *rest)


def _joined(
    problem: Problem, device: Int[np.ndarray, "N"], teams: Teams, *groups: tuple[int, ...]
) -> Assignment | None:
    """The placement with groups of devices joined to one team; None where that is not allowed."""
    team = tuple(sorted(d for group in groups for d in group))
    work = ~problem.graph.is_io & np.isin(device, [group[0] for group in groups])
    if not problem.allowed[work][:, list(team)].all():
        return None
    kept = [other for other in teams if other not in groups]
    changed = tuple(sorted([*kept, team]))
    if cycle_length(changed) > MAX_CYCLE:
        return None
    return Assignment(np.where(work, team[0], device), None, changed)


def _judged(problem: Problem, assignment: Assignment) -> Evaluated:
    device, teams = assignment.device, assignment.teams
    held = peak_bytes(problem, device, teams)
    over = overflow_bytes(problem.cluster, held)
    return Evaluated(assignment, over, period_s(problem, device, teams))


def _options(problem: Problem, first: Evaluated | None) -> list[ReplicaContraction]:
    """The teams of a placement, and all devices of each class, the host aside."""
    alike = (_computing_at_once(problem, devices) for devices in device_classes(problem))
    chosen: list[Teams] = [tuple(sorted(devices for devices in alike if len(devices) > 1))]
    if first is not None:
        chosen.insert(0, first.assignment.teams)
    contractions = (contract_replicas(problem, teams) for teams in dict.fromkeys(chosen) if teams)
    return [option for option in contractions if option is not None]


def _computing_at_once(problem: Problem, devices: Sequence[int]) -> tuple[int, ...]:
    """Devices that compute at the same time: one of each processor, the host left out."""
    host, processor = problem.cluster.host, problem.cluster.processor.tolist()
    chosen: dict[tuple[str, int], int] = {}
    for d in devices:
        key = ("alone", d) if processor[d] == ALONE else ("processor", processor[d])
        if d != host:
            chosen.setdefault(key, d)
    return tuple(chosen.values())


def _cluster(problem: Problem, groups: DeviceGroups) -> Cluster:
    """One device for each group, which works for as long as one of r members does per sample."""
    cluster, devices = problem.cluster, []
    for group in groups:
        first = cluster.devices[group[0]]
        dispatch_s = round_to_ticks(np.array(first.dispatch_s / len(group)), problem.unit).item()
        memory = min(int(cluster.divided_among(group)[d]) for d in group)
        devices.append(replace(first, dispatch_s=dispatch_s, memory_bytes=memory))
    size = len(groups)
    latency_s, speed = np.zeros((size, size)), np.full((size, size), np.inf)
    channel = np.full((size, size), NO_CHANNEL)
    for a in range(size):
        for b in range(size):
            if a != b:
                latency_s[a, b], speed[a, b], channel[a, b] = _link(cluster, groups[a], groups[b])
    host = next(k for k, group in enumerate(groups) if cluster.host in group)
    latency_s = round_to_ticks(latency_s, problem.unit)
    return Cluster(cluster.name, tuple(devices), speed, latency_s, channel, host)


def _link(cluster: Cluster, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[float, float, int]:
    """(latency, bytes per second, channel) between two groups, as busy as the busiest channel."""
    cycle = math.lcm(len(a), len(b))
    meet = [(a[i % len(a)], b[i % len(b)]) for i in range(cycle)]
    at = tuple(np.array(meet).T)
    used = cluster.channel[at]
    share = float(np.unique(used, return_counts=True)[1].max()) / cycle
    slowest_s = float((1.0 / cluster.link_bytes_per_s[at]).max()) * share
    speed = 1.0 / slowest_s if slowest_s > 0 else np.inf
    return float(cluster.link_latency_s[at].max()) * share, speed, int(used.min())
