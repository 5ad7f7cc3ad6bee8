"""Devices that are one processor, such as the CPU devices of XLA: what they do adds up.

The simulator lets all devices work side by side. Where some of them share their cores, a run takes
at least as long as they compute in all, copies between them included, which the same cores make.
"""

import numpy as np

from gdp.problem.problem import Problem
from gdp.sim.latency import Schedule


def shares_processor(problem: Problem) -> bool:
    """Whether two devices are one processor."""
    named = [device.processor for device in problem.cluster.devices if device.processor]
    return len(set(named)) < len(named)


def serial_s(problem: Problem, schedule: Schedule) -> float:
    """Seconds that the busiest shared processor is busy for; 0 where there is none."""
    if not shares_processor(problem):
        return 0.0
    name = np.array([device.processor for device in problem.cluster.devices])
    sent = schedule.transfers
    found = 0.0
    for own in set(name.tolist()) - {""}:
        inside = (name[sent.source] == own) & (name[sent.destination] == own)
        copies_s = float((sent.arrive_s - sent.start_s)[inside].sum())
        found = max(found, float(schedule.busy_s[name == own].sum()) + copies_s)
    return found
