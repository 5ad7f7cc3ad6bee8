"""Favourite children: the reader of each op that is best kept on the device of what it reads."""

import logging
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from gdp.methods.ranks import mean_compute_s, mean_send_s
from gdp.problem.arrays import arrays_of
from gdp.problem.problem import Problem
from gdp.quiet import silent_stdout

LOG = logging.getLogger(__name__)
NO_CHILD = -1
MOST_EDGES = 3000
"""Of a graph whose linear program is solved, in about a second; beyond, longest paths decide."""
_HALF = 0.5 - 1e-6  # of an edge that is kept


class Edges(NamedTuple):
    """The pairs of ops of which one reads the other, by maker. Axis: E pairs."""

    src: Int[np.ndarray, "E"]
    dst: Int[np.ndarray, "E"]
    send_s: Float[np.ndarray, "E"]  # mean over all links; 0 inside a group, which shares a device
    choice: Bool[np.ndarray, "E"]  # of two groups that have a device in common


def favourite_children(problem: Problem) -> tuple[Int[np.ndarray, "N"], Float[np.ndarray, "N"]]:
    """(favourite child of each op or -1, seconds that its transfer would take).

    Each op has one at most, and is that of one op at most. They are the edges that the relaxed
    program for unlimited equal devices sends less than half of: minimise the end, with a start of
    each op after the ends of those that it reads, plus x times the transfer (x is 0 where the edge
    is kept, 1 where it is sent; of an op's outgoing edges one may be kept, likewise of the incoming
    ones). Hanen and Munier 2001, doi 10.1016/S0166-218X(00)00179-7; as in Baechi's m-SCT (Jeon et
    al. 2020, doi 10.1145/3419111.3421302). Edges inside a group are never sent and those between
    groups without a common device always: they count for the end, but are nobody's favourites. Of
    more than 3,000 edges, or where the program has no answer, those on the longest paths are taken
    one by one instead. Transfers take the mean over all links.
    """
    edges = _edges(problem)
    kept = np.zeros(len(edges.src), dtype=bool)
    if edges.choice.any():
        sent = relaxed_sends(problem, edges) if len(kept) <= MOST_EDGES else None
        kept = _longest_first(problem, edges) if sent is None else sent < _HALF
    child = np.full(problem.num_ops, NO_CHILD)
    saved_s = np.zeros(problem.num_ops)
    child[edges.src[kept]] = edges.dst[kept]
    saved_s[edges.src[kept]] = edges.send_s[kept]
    return child, saved_s


def _edges(problem: Problem) -> Edges:
    """Those of a problem; what one op sends another in several tensors is summed."""
    a = arrays_of(problem)
    n = problem.num_ops
    tensor = np.repeat(np.arange(len(a.producer)), np.diff(a.use_start))
    pair, at = np.unique(a.producer[tensor] * n + a.use_op, return_inverse=True)
    send_s = np.zeros(len(pair))
    np.add.at(send_s, at, mean_send_s(a)[tensor])
    src, dst = pair // n, pair % n
    apart = problem.group[src] != problem.group[dst]
    may = problem.group_allowed[problem.group]
    choice = apart & (may[src] & may[dst]).any(axis=1)
    return Edges(src, dst, np.where(apart, send_s, 0.0), choice)


def relaxed_sends(problem: Problem, edges: Edges) -> Float[np.ndarray, "E"] | None:
    """How much of each edge the relaxed program sends, 0 to 1; None where it has no answer.

    Variables: N starts in units of the mean op, the end, and x of each edge. Where there is no
    choice x is 1, so that the edge takes nobody's place as the one that is kept.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    src, dst = edges.src, edges.dst
    n, e = problem.num_ops, len(src)
    op_s = mean_compute_s(arrays_of(problem))
    unit_s = float(op_s.mean()) or 1.0
    op, send = op_s / unit_s, edges.send_s / unit_s
    edge, end, x = np.arange(e), n, n + 1 + np.arange(e)
    ops = np.arange(n)
    many_out, many_in = np.bincount(src, minlength=n), np.bincount(dst, minlength=n)
    rows = [edge, edge, edge, e + ops, e + ops, e + n + src, e + 2 * n + dst]
    columns = [src, dst, x, ops, np.full(n, end), x, x]
    values = [
        np.ones(e), -np.ones(e), send, np.ones(n), -np.ones(n), -np.ones(e), -np.ones(e),
    ]  # fmt: skip
    where = np.concatenate(rows), np.concatenate(columns)
    matrix = coo_array((np.concatenate(values), where), shape=(e + 3 * n, n + 1 + e)).tocsr()
    high = np.concatenate([-op[src], -op, 1.0 - many_out, 1.0 - many_in])
    cost = np.zeros(n + 1 + e)
    cost[end] = 1.0
    bounds = np.stack([np.zeros(n + 1 + e), np.full(n + 1 + e, np.inf)], axis=1)
    bounds[x, 0], bounds[x, 1] = ~edges.choice, 1.0
    with silent_stdout():
        found = linprog(cost, A_ub=matrix, b_ub=high, bounds=bounds, method="highs")
    if not found.success:
        LOG.debug("favourite children by longest paths: %s", found.message)
        return None
    return found.x[x]


def _longest_first(problem: Problem, edges: Edges) -> Bool[np.ndarray, "E"]:
    """The edges that are kept: by the longest path through them, each whose ends are still free."""
    src, dst, send_s = edges.src, edges.dst, edges.send_s
    op_s = mean_compute_s(arrays_of(problem))
    before_s, left_s = np.zeros(problem.num_ops), op_s.copy()  # of the start of each op
    for i in np.argsort(dst, kind="stable").tolist():  # ops are in topological order
        before_s[dst[i]] = max(before_s[dst[i]], before_s[src[i]] + op_s[src[i]] + send_s[i])
    for i in np.argsort(-src, kind="stable").tolist():
        left_s[src[i]] = max(left_s[src[i]], op_s[src[i]] + send_s[i] + left_s[dst[i]])
    through_s = before_s[src] + op_s[src] + send_s + left_s[dst]
    has_child = np.zeros(problem.num_ops, dtype=bool)
    has_parent = np.zeros(problem.num_ops, dtype=bool)
    kept = np.zeros(len(src), dtype=bool)
    for i in np.lexsort((np.arange(len(src)), -send_s, -through_s)).tolist():
        if edges.choice[i] and not has_child[src[i]] and not has_parent[dst[i]]:
            kept[i] = has_child[src[i]] = has_parent[dst[i]] = True
    return kept
