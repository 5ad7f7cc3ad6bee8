"""First answers for block latency: serial calls, then small moves that the evaluator accepts.

Along a linear order of the elements, a call of an accelerator covers an interval, ops between calls
are on CPUs, and everything runs one after another. The best such plan is a dynamic program; it is
an upper bound of the latency, since independent calls really overlap.

Axes: N ops, T tensors, M elements, S = M + 1 places between them, A accelerators.
"""

import numpy as np
from jaxtyping import Float, Int

from gdp.clock import Clock
from gdp.methods.pipeline.elements import Contraction, contract, linear_orders, random_order
from gdp.problem.problem import Problem
from gdp.sim.host_load import is_cpu

_MOST_ORDERS = 40
_STEPS_PER_OP, _MOST_STEPS = 1000, 200_000
_HOT, _COLD = 0.02, 1e-5  # shares of the latency


def contiguous_start(problem: Problem, clock: Clock, seed: int) -> Int[np.ndarray, "N"] | None:
    """A placement of few calls, each accelerator called once; None where no plan fits."""
    rng = np.random.default_rng(seed)
    contraction = contract(problem)
    best, best_s = None, np.inf
    orders = linear_orders(contraction)
    for i in range(_MOST_ORDERS):
        order = orders[i] if i < len(orders) else random_order(contraction, rng)
        device = _serial_plan(problem, contraction, order)
        if device is not None and (value_s := _called_once_s(problem, device)) < best_s:
            best, best_s = device, value_s
        if clock.elapsed_s() > 0.3 * (clock.seconds or np.inf):
            break
    return None if best is None else _anneal(problem, best, best_s, clock, rng)


def _called_once_s(problem: Problem, device: Int[np.ndarray, "N"]) -> float:
    """Latency; inf where memory overflows or an accelerator is called more than once."""
    from gdp.sim.host_load import load_arrays
    from gdp.sim.kernels.block_latency import block_finish, block_ids
    from gdp.sim.kernels.host_load import batch_overflow

    flat = load_arrays(problem)
    rows = device[None]
    if batch_overflow(flat, rows)[0] > 0:
        return np.inf
    block = block_ids(flat, rows, rows)[0]
    called = np.unique(block[~flat.is_cpu[device]])
    if len(called) > len(np.unique(device[~flat.is_cpu[device]])):
        return np.inf
    return float(block_finish(flat, device, block).max())


def _serial_plan(
    problem: Problem, contraction: Contraction, order: Int[np.ndarray, "M"]
) -> Int[np.ndarray, "N"] | None:
    """The plan of least total time along an order; accelerators are called in their order."""
    m = len(order)
    place = np.empty(m + 1, dtype=np.int64)
    place[order], place[m] = np.arange(m), m
    at = place[contraction.element]
    cpu = is_cpu(problem)
    moved_s = _moved_s(problem, at, m)
    on_cpu_s, home = _cpu_steps(problem, at, m, np.flatnonzero(cpu))
    best = np.full(m + 1, np.inf)
    best[0] = 0.0
    tables = [_with_cpus(best, on_cpu_s)]
    origins: list[np.ndarray] = []
    for a in np.flatnonzero(~cpu).tolist():
        cost_s = _call_s(problem, at, m, a, moved_s)
        total_s = tables[-1][:, None] + cost_s  # [i, j]
        origin = total_s.argmin(axis=0)
        origins.append(origin)
        called = np.minimum(tables[-1], total_s[origin, np.arange(m + 1)])
        tables.append(_with_cpus(called, on_cpu_s))
    if not np.isfinite(tables[-1][m]):
        return None
    where = np.full(m + 1, problem.cluster.host)
    _walk_back(tables, origins, on_cpu_s, home, np.flatnonzero(~cpu), where)
    return where[at].astype(np.int64)


def _with_cpus(best: Float[np.ndarray, "S"], on_cpu_s: Float[np.ndarray, "M"]) -> np.ndarray:
    """The table after any number of further elements on CPUs."""
    best = best.copy()
    for j, seconds in enumerate(on_cpu_s.tolist()):
        best[j + 1] = min(best[j + 1], best[j] + seconds)
    return best


def _walk_back(
    tables: list[np.ndarray],
    origins: list[np.ndarray],
    on_cpu_s: Float[np.ndarray, "M"],
    home: Int[np.ndarray, "M"],
    accelerators: Int[np.ndarray, "A"],
    where: Int[np.ndarray, "S"],
) -> None:
    """Write the device of every place into `where`."""
    j, level = len(on_cpu_s), len(origins)
    while j > 0:
        now = tables[level][j]
        if tables[level][j - 1] + on_cpu_s[j - 1] == now:
            j -= 1
            where[j] = home[j]
        elif tables[level - 1][j] == now:
            level -= 1
        else:
            i = int(origins[level - 1][j])
            where[i:j] = accelerators[level - 1]
            j, level = i, level - 1


def _cpu_steps(
    problem: Problem, at: Int[np.ndarray, "N"], m: int, cpus: Int[np.ndarray, "C"]
) -> tuple[Float[np.ndarray, "M"], Int[np.ndarray, "M"]]:
    """(seconds of each element on its best CPU, that CPU)."""
    if not len(cpus):
        return np.full(m, np.inf), np.zeros(m, dtype=np.int64)
    seconds = np.zeros((m + 1, len(cpus)))
    np.add.at(seconds, at, np.where(problem.allowed, problem.compute_s, np.inf)[:, cpus])
    return seconds[:m].min(axis=1), cpus[seconds[:m].argmin(axis=1)]


def _moved_s(problem: Problem, at: Int[np.ndarray, "N"], m: int) -> Float[np.ndarray, "S S"]:
    """[i, j]: seconds of the transfers between the places i to j - 1 and all others."""
    graph = problem.graph
    made = at[graph.producer]
    send_s = np.array(problem.tensor_s, dtype=float)
    last = made.copy()
    np.maximum.at(last, graph.use_tensor, at[graph.use_op])
    by_reader = np.argsort(-at[graph.use_op], kind="stable")
    total = np.zeros((m + 1, m + 1))
    following = np.full(graph.num_tensors, m)  # first reader at place >= i
    by_place: list[list[int]] = [[] for _ in range(m + 1)]
    for e in by_reader.tolist():
        by_place[int(at[graph.use_op[e]])].append(int(graph.use_tensor[e]))
    for i in range(m - 1, -1, -1):
        following[by_place[i]] = i
        outside = (made < i) & (following < m)
        loads = np.bincount(following[outside] + 1, weights=send_s[outside], minlength=m + 1)
        total[i] += np.cumsum(loads[: m + 1])
    for j in range(1, m + 1):
        kept = (made < j) & (last >= j)
        stores = np.bincount(made[kept], weights=send_s[kept], minlength=m + 1)
        total[:, j] += np.cumsum(stores[::-1])[::-1][: m + 1]
    return total


def _call_s(
    problem: Problem, at: Int[np.ndarray, "N"], m: int, a: int, moved_s: np.ndarray
) -> Float[np.ndarray, "S S"]:
    """[i, j]: seconds of a call of accelerator a for the places i to j - 1; inf where it cannot."""
    work_s = np.zeros(m + 1)
    np.add.at(work_s, at, np.where(problem.allowed[:, a], problem.compute_s[:, a], np.inf))
    barred = np.concatenate([[0], np.cumsum(~np.isfinite(work_s[:m]))])
    done_s = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(work_s[:m]), work_s[:m], 0.0))])
    held = np.zeros(m + 1)
    np.add.at(held, at, problem.graph.weight_bytes.astype(float))
    bytes_ = np.concatenate([[0.0], np.cumsum(held[:m])])
    cost_s = moved_s + done_s[None] - done_s[:, None]
    room = float(problem.cluster.memory_bytes[a])
    cannot = (barred[None] > barred[:, None]) | (bytes_[None] - bytes_[:, None] > room)
    cannot |= np.tril(np.ones((m + 1, m + 1), dtype=bool))
    return np.where(cannot, np.inf, cost_s)


def _anneal(
    problem: Problem,
    device: Int[np.ndarray, "N"],
    value_s: float,
    clock: Clock,
    rng: np.random.Generator,
) -> Int[np.ndarray, "N"]:
    """The best placement found by moving groups to devices of their neighbours, or to others."""
    src, dst = problem.graph.edges
    group, now, now_s = problem.group, device.copy(), value_s
    best, best_s = device, value_s
    steps = min(_MOST_STEPS, _STEPS_PER_OP * problem.num_ops) if len(src) else 0
    for step in range(steps):
        if step % 64 == 0 and clock.is_over():
            break
        temperature = best_s * _HOT * (_COLD / _HOT) ** (step / steps)
        e = int(rng.integers(len(src)))
        u, v = (src[e], dst[e]) if rng.random() < 0.5 else (dst[e], src[e])
        to = int(now[u]) if rng.random() < 0.8 else int(rng.integers(problem.num_devices))
        if to == now[v] or not problem.group_allowed[group[v], to]:
            continue
        moved = now.copy()
        moved[group == group[v]] = to
        moved_s = _called_once_s(problem, moved)
        if moved_s <= now_s or rng.random() < np.exp((now_s - moved_s) / temperature):
            now, now_s = moved, moved_s
        if moved_s < best_s:
            best, best_s = moved.copy(), moved_s
    return best
