"""Groups of GPUs that divide layers, and which of them are the stages of a copy.

Engines start one process a machine, and give each as many ranks as every other, in the order of the
machines (`--nnodes`, `--node-rank` of vLLM and SGLang). So a group of GPUs lies within one machine,
or over several in equal parts where none alone has so many; the stages of a copy are in one
machine, or as many of them in each of several; and several copies lie within a machine each.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gdp.cluster.machines import machines
from gdp.cluster.types import Cluster

Group = tuple[int, ...]
Like = tuple[int, ...]  # class of each GPU of a group
MOST = 64
"""Sets of groups over several machines that are looked at, of one number of GPUs a group."""


class Arrangement(NamedTuple):
    """Groups that may be stages of a copy."""

    twins: dict[int, Group]  # by first GPU of each, those of the groups that take turns with it
    every: bool = False  # all groups are stages, not some of them


def grouped(cluster: Cluster, gpus: Sequence[int], size: int) -> list[Group]:
    """GPUs in groups of one size within a machine, identical ones together, the remaining ones with
    each other; if no machine has enough, one group over several."""
    at = machines(cluster)
    inside = [[d for d in gpus if at[d] == m] for m in dict.fromkeys(at[d] for d in gpus)]
    groups = [group for mine in inside for group in _of_machine(cluster, mine, size)]
    return groups or _over_machines(cluster, inside, size)


def _of_machine(cluster: Cluster, gpus: Sequence[int], size: int) -> list[Group]:
    kinds: dict[int, list[int]] = {}
    for d in gpus:
        kinds.setdefault(int(cluster.alike[d]), []).append(d)
    groups, left = list[Group](), list[int]()
    for alike in kinds.values():
        whole = len(alike) // size * size
        groups += [tuple(alike[i : i + size]) for i in range(0, whole, size)]
        left += alike[whole:]
    rest = [tuple(sorted(left[i : i + size])) for i in range(0, len(left) - size + 1, size)]
    return [*groups, *rest]


def _over_machines(cluster: Cluster, inside: Sequence[Sequence[int]], size: int) -> list[Group]:
    """One group of equal parts on the fewest machines that have them; none where there are none."""
    for count in range(2, len(inside) + 1):
        parts = [_of_machine(cluster, mine, size // count)[:1] for mine in inside]
        having = [part[0] for part in parts if part]
        if size % count == 0 and len(having) >= count:
            return [tuple(sorted(d for part in having[:count] for d in part))]
    return []


def arrangements(
    cluster: Cluster, groups: Sequence[Group], copies: int, free: Sequence[int]
) -> Iterator[Arrangement]:
    """Assignments of `copies` copies to groups of one size.

    Args:
        cluster: The machines.
        groups: As `grouped` made them.
        copies: Of the model, all alike.
        free: GPUs that may compute all ops, as copies do.
    """
    at = machines(cluster)
    inside: dict[int, list[Group]] = {}
    for group in groups:
        if copies == 1 or group[0] in free:
            inside.setdefault(at[group[0]], []).append(group)
    if copies > 1:
        yield from _in_turn(cluster, list(inside.values()), copies)
        return
    for own in _unlike(cluster, inside.values()):
        yield Arrangement({group[0]: () for group in own})
    for chosen in itertools.islice(_in_equal_parts(cluster, list(inside.values())), MOST):
        yield Arrangement({group[0]: () for group in chosen}, every=True)


def _like(cluster: Cluster, group: Group) -> Like:
    """Classes of the GPUs of a group."""
    return tuple(cluster.alike[list(group)].tolist())


def _unlike(cluster: Cluster, sets: Iterable[Sequence[Group]]) -> Iterator[Sequence[Group]]:
    """Sets of groups, one of each class of interchangeable sets."""
    seen = set[tuple[Like, ...]]()
    for own in sets:
        like = tuple(sorted(_like(cluster, group) for group in own))
        if like not in seen:
            seen.add(like)
            yield own


def _in_equal_parts(
    cluster: Cluster, inside: Sequence[Sequence[Group]]
) -> Iterator[Sequence[Group]]:
    """As many groups of each of several machines."""
    for count in range(2, len(inside) + 1):
        for each in range(1, max(map(len, inside)) + 1):
            having = [own for own in inside if len(own) >= each]
            parts = [list(_unlike(cluster, itertools.combinations(own, each))) for own in having]
            yield from _unlike(
                cluster,
                (
                    tuple(itertools.chain.from_iterable(chosen))
                    for some in itertools.combinations(parts, count)
                    for chosen in itertools.product(*some)
                ),
            )


def _in_turn(
    cluster: Cluster, inside: Sequence[Sequence[Group]], copies: int
) -> Iterator[Arrangement]:
    """Identical copies, each within a machine, with as many groups as every machine can give."""
    kinds = [Counter(_like(cluster, group) for group in own) for own in inside]
    seen = list[dict[Like, int]]()
    for counts in kinds:
        for parts in range(1, copies + 1):
            each = {like: count // parts for like, count in counts.items() if count >= parts}
            held = [min((own[k] // n for k, n in each.items()), default=0) for own in kinds]
            if not each or sum(held) < copies:
                continue
            if each not in seen:
                seen.append(each)
                rows = [
                    _leads(cluster, own, each, k)
                    for own, most in zip(inside, held, strict=True)
                    for k in range(most)
                ][:copies]
                yield Arrangement({row[0]: row[1:] for row in zip(*rows, strict=True)})
            break


def _leads(
    cluster: Cluster, groups: Sequence[Group], each: Mapping[Like, int], k: int
) -> list[int]:
    """First GPUs of the groups of the k-th copy on a machine."""
    leads = list[int]()
    for like, count in each.items():
        mine = [group[0] for group in groups if _like(cluster, group) == like]
        leads += mine[k * count : (k + 1) * count]
    return leads
