"""Non-contiguous max-load as a mixed-integer program.

    minimise T    subject to, for every device d,
    sum over v of work(v, d) x(v, d)  +  sum over h of weight(h) cut(h, d)  <=  T   (cuts: paying d)
    cut(h, d) = top(h, d) - low(h, d),   low(h, d) <= x(v, d) <= top(h, d)   for the pins v of h
    sum over v of bytes(v) x(v, d)  <=  memory(d),        sum over d of x(v, d) = 1

cut(h, d) is 1 where d holds some, but not all, pins of h (Tarnawski et al. 2020, arXiv 2006.16423,
section 5.2, without its contiguity constraint). Equal devices are told apart by one rule: of the
nodes in order of work, the i-th is on one of the first i of them.
"""

import numpy as np
from jaxtyping import Int

from gdp.bounds.linear_program import CONTINUOUS, INTEGRAL, LinearModel
from gdp.methods.exact.hypergraph import LoadModel, equal_devices
from gdp.methods.period.solution import UNIT, LoadSolution, read_solution


def solve_loads(
    model: LoadModel, upper_s: float, seconds: float | None, relative_gap: float = 1e-6
) -> LoadSolution:
    """The assignment of least load below `upper_s`, as far as the seconds suffice."""
    scale = UNIT / (upper_s if np.isfinite(upper_s) else _any_upper_s(model))
    rows = LinearModel()
    load = int(rows.variables(1, 0.0, upper_s * scale)[0])
    x = np.asarray(rows.variables(model.work_s.shape, 0.0, 1.0, INTEGRAL))
    for v in range(model.num_nodes):
        rows.constrain(x[v], np.ones(len(x[v])), 1.0, 1.0)
        for d in np.flatnonzero(~np.isfinite(model.work_s[v])):
            rows.fix(x[v, d], 0.0)
    _break_symmetry(model, rows, x)
    for d in range(model.num_devices):
        _limit_load(model, rows, x, load, d, scale)
    limit_weights(rows, x, model.held_bytes, model.shared, model.memory_bytes)
    return read_solution(rows.minimise(load, seconds, relative_gap), x, upper_s, scale)


def _any_upper_s(model: LoadModel) -> float:
    """No assignment has a larger load than all work and all transfers together."""
    work_s = np.where(np.isfinite(model.work_s), model.work_s, 0.0).max(axis=1)
    return float(work_s.sum() + model.weight_s.sum()) or 1.0


def _limit_load(
    model: LoadModel, rows: LinearModel, x: np.ndarray, load: int, d: int, scale: float
) -> None:
    works = np.isfinite(model.work_s[:, d]) & (model.work_s[:, d] > 0)
    columns = [load, *x[works, d]]
    values = [-1.0, *(model.work_s[works, d] * scale)]
    if model.pays[d]:
        for pins, seconds in zip(model.pins, model.weight_s.tolist(), strict=True):
            for column, sign in _cut(rows, [int(x[v, d]) for v in pins]):
                columns.append(column)
                values.append(sign * seconds * scale)
    rows.constrain(columns, values, high=0.0)


def _cut(rows: LinearModel, pins: list[int]) -> list[tuple[int, float]]:
    """(variable, factor) pairs that add up to 1 where some, but not all, pins are 1."""
    live = [v for v in pins if rows.high[v] > 0]
    if not live:
        return []
    top = int(rows.variables(1, 0.0, 1.0, CONTINUOUS)[0]) if len(live) > 1 else live[0]
    if len(live) < len(pins):  # one pin is never there: any other is a cut
        if len(live) > 1:
            for v in live:
                rows.constrain([top, v], [1.0, -1.0], low=0.0)
        return [(top, 1.0)]
    if len(pins) == 2:
        one, two = pins
        rows.constrain([top, one, two], [1.0, -1.0, 1.0], low=0.0)
        rows.constrain([top, one, two], [1.0, 1.0, -1.0], low=0.0)
        return [(top, 1.0)]
    low = int(rows.variables(1, 0.0, 1.0, CONTINUOUS)[0])
    for v in pins:
        rows.constrain([top, v], [1.0, -1.0], low=0.0)
        rows.constrain([v, low], [1.0, -1.0], low=0.0)
    return [(top, 1.0), (low, -1.0)]


def limit_weights(
    rows: LinearModel,
    x: np.ndarray,
    held_bytes: Int[np.ndarray, "V"],
    shared: tuple[tuple[int, tuple[int, ...]], ...],
    memory_bytes: Int[np.ndarray, "D"],
) -> None:
    """Weights fit into every device; a weight that nodes share is there once."""
    total = int(held_bytes.sum()) + sum(size for size, _ in shared)
    for d, capacity in enumerate(memory_bytes.tolist()):
        if capacity >= total:
            continue
        columns, values = list(x[:, d]), list(held_bytes / capacity)
        for size, nodes in shared:
            held = int(rows.variables(1, 0.0, 1.0)[0])
            columns.append(held)
            values.append(size / capacity)
            for v in nodes:
                rows.constrain([held, x[v, d]], [1.0, -1.0], low=0.0)
        rows.constrain(columns, values, high=1.0)


def _break_symmetry(model: LoadModel, rows: LinearModel, x: np.ndarray) -> None:
    order = np.argsort(-np.where(np.isfinite(model.work_s), model.work_s, 0.0).max(axis=1))
    for devices in equal_devices(model):
        inside = [v for v in order.tolist() if np.isfinite(model.work_s[v, devices[0]])]
        for i, v in enumerate(inside[: len(devices)]):
            for d in devices[i + 1 :]:
                rows.fix(x[v, d], 0.0)
