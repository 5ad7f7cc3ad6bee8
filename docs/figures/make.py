"""Draws the figures of the README and of the documentation, from the simulator and from logs.

    python docs/figures/make.py              # all
    python docs/figures/make.py before_after # one

Searches have a seed and a budget in evaluations, no clock, so that the same version draws the same.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from svg import BLUE, FAINT, GREEN, GREY, INK, ORANGE, Canvas

HERE = Path(__file__).resolve().parent
TOP = HERE.parent.parent
CORPUS = TOP / "data" / "corpus"
EVALUATIONS = 2000


def before_after() -> str:
    """A training step on three GPUs: on one, in turn, and as gdp places it."""
    import gdp
    from gdp.question.solve import view_of

    graph = gdp.load(CORPUS / "multi_modal" / "multi_modal-layers2-training.json.gz")
    cluster = gdp.Cluster.load("3xt4-pcie4")
    panels = []
    for title, method in (
        ("one GPU", "single"), ("round robin", "round_robin"), ("gdp place", "auto"),
    ):  # fmt: skip
        search = gdp.Search(seed=0, seconds=None, evaluations=EVALUATIONS, simplicity=0.0)
        result = gdp.place(graph, cluster, method=method, search=search)
        view = view_of(graph, result.placement, cluster)
        panels.append((title, view.problem, view.schedule, view.device))
    longest_s = max(schedule.latency_s for _, _, schedule, _ in panels)
    left, top, row, gap = 165.0, 64.0, 20.0, 34.0
    scale = (900 - left - 90) / longest_s
    height = top + len(panels) * (row * 3 + gap) + 22
    canvas = Canvas(900, height)
    canvas.text(20, 28, f"A training step of a multi-modal network ({graph.num_ops} ops) on three "
                "T4, simulated", bold=True, size=15)  # fmt: skip
    canvas.key(20, 48, [(BLUE, "forward"), (ORANGE, "backward"), (GREEN, "tensor sent")], 100)
    for at, (title, problem, schedule, device) in enumerate(panels):
        y = top + at * (row * 3 + gap)
        canvas.text(20, y + row * 1.2, title, bold=True)
        canvas.text(20, y + row * 2.1, f"{schedule.latency_s * 1e3:.2f} ms", fill=GREY)
        _lanes(canvas, problem, schedule, device, (left, y, row, scale))
        end = left + schedule.latency_s * scale
        canvas.line([(end, y - 4), (end, y + row * 3)], INK, 1.5)
    base = top + len(panels) * (row * 3 + gap) - gap + 14
    for ms in range(math.floor(longest_s * 1e3) + 1):
        canvas.text(left + ms * 1e-3 * scale, base + 16, f"{ms} ms", anchor="middle", size=11,
                    fill=GREY)  # fmt: skip
    return canvas.svg("Ops over time on three devices, before and after placing")


def _lanes(canvas: Canvas, problem: Any, schedule: Any, device: np.ndarray,
           place: tuple[float, float, float, float]) -> None:  # fmt: skip
    """One lane per device: ops above, what it sends as a thin line below."""
    left, y, row, scale = place
    for d, name in enumerate(problem.cluster.device_names):
        lane = y + d * row
        canvas.line([(left, lane + row - 3), (820, lane + row - 3)])
        canvas.text(left - 8, lane + 13, name.replace("t4:", "GPU "), anchor="end", size=11,
                    fill=GREY)  # fmt: skip
    graph = problem.graph
    for op in np.flatnonzero(~graph.is_io & (schedule.finish_s > schedule.start_s)):
        start, end = schedule.start_s[op] * scale, schedule.finish_s[op] * scale
        colour = ORANGE if graph.is_backward[op] else BLUE
        canvas.box(
            left + start, y + device[op] * row + 2, max(end - start - 0.3, 0.3), row - 9, colour
        )
    sent = schedule.transfers
    for source, start_s, arrive_s in zip(sent.source, sent.start_s, sent.arrive_s, strict=True):
        canvas.box(left + start_s * scale, y + source * row + row - 6.5,
                   (arrive_s - start_s) * scale, 3, GREEN)  # fmt: skip


def simulator() -> str:
    """Five ops on two devices whose transfers queue on one channel."""
    from gdp.cluster.types import Device, Link, make_cluster
    from gdp.graph.op_graph import make_graph
    from gdp.problem.problem import make_problem
    from gdp.sim.latency import simulate

    names = ["x", "a", "b", "c", "d", "e"]
    # x feeds a and b; c and d on the other device read one each; e reads both.
    tensors = [(0, 0), (1, 30_000_000), (2, 30_000_000), (3, 10_000_000), (4, 10_000_000)]
    uses = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]
    graph = make_graph("five", names, ["Input", *["Conv"] * 5], tensors, uses)
    one, two = (Device(n, "gpu", {"default": 1e12}, 1e12) for n in ("GPU 0", "GPU 1"))
    cluster = make_cluster("two", [one, two], [Link("GPU 0", "GPU 1", 1e10, channel="bus")])
    seconds = np.repeat(np.array([[0.0], [2.0], [2.0], [3.0], [2.0], [2.0]]) * 1e-3, 2, axis=1)
    device = np.array([0, 0, 0, 1, 1, 0])
    schedule = simulate(make_problem(graph, cluster, seconds, "latency"), device)
    left, row = 90.0, 46.0
    scale = 720 / schedule.latency_s
    canvas = Canvas(860, 250)
    canvas.text(20, 28, "A device runs one op at a time; a channel carries one tensor at a time",
                bold=True, size=15)  # fmt: skip
    for lane, name in enumerate(("GPU 0", "tensors", "GPU 1")):
        canvas.text(20, 72 + lane * row, name, fill=GREY)
        canvas.line([(left, 84 + lane * row), (left + 730, 84 + lane * row)])

    def bar(lane: int, start_s: float, end_s: float, words: str, colour: str) -> None:
        x, width = left + start_s * scale, (end_s - start_s) * scale
        canvas.box(x, 54 + lane * row, width - 1.5, 26, colour, 'rx="2"')
        canvas.text(x + width / 2, 72 + lane * row, words, anchor="middle", fill="#ffffff")

    for op in range(1, 6):
        bar(2 * int(device[op]), schedule.start_s[op], schedule.finish_s[op], names[op], BLUE)
    sent = schedule.transfers
    for tensor, start_s, arrive_s in zip(sent.tensor, sent.start_s, sent.arrive_s, strict=True):
        bar(1, start_s, arrive_s, names[graph.producer[tensor]], GREEN)
    for ms in range(0, math.floor(schedule.latency_s * 1e3) + 1, 2):
        canvas.text(left + ms * 1e-3 * scale, 206, f"{ms} ms", anchor="middle", size=11, fill=GREY)
    canvas.text(20, 236, f"b's output is ready at {schedule.finish_s[2] * 1e3:.0f} ms and waits "
                f"for the channel; e starts when both of its inputs have come back. Latency "
                f"{schedule.latency_s * 1e3:.1f} ms.", size=12, fill=GREY)  # fmt: skip
    return canvas.svg("The event simulation of five ops on two devices")


BOUND_GRAPHS = (
    ("inception", "inception-blocks3-training"), ("multi_modal", "multi_modal-layers2-training"),
    ("rnnlm", "rnnlm-layers1-steps8-training"), ("mobilenet", "mobilenet-width8-forward"),
    ("gru_encoder", "gru_encoder-layers1-steps10-training"),
)  # fmt: skip


def bounds() -> str:
    """What was found beside what is proven, for both objectives."""
    import gdp

    rows = []
    for family, name in BOUND_GRAPHS:
        graph, cluster = (
            gdp.load(CORPUS / family / f"{name}.json.gz"),
            gdp.Cluster.load("3xt4-pcie4"),
        )
        for objective in ("latency", "throughput"):
            search = gdp.Search(seed=0, seconds=None, evaluations=EVALUATIONS, simplicity=0.0)
            result = gdp.place(
                graph, cluster, objective=objective, search=search,
                constraints=gdp.Constraints(replicas=False),
            )  # fmt: skip
            rows.append((f"{family}, {objective}", result.bound_s, result.value_s))
    canvas = Canvas(860, 76 + 26 * len(rows) + 20)
    canvas.text(20, 28, "No placement lies in the green; the answer is the black line",
                bold=True, size=15)  # fmt: skip
    canvas.key(20, 50, [(GREEN, "proven: not faster than this"), (FAINT, "where the optimum is")],
               210)  # fmt: skip
    left, width = 230.0, 520.0
    for at, (words, bound_s, value_s) in enumerate(rows):
        y, share = 68 + 26 * at, bound_s / value_s
        canvas.text(20, y + 14, words, size=12)
        canvas.box(left, y, width, 18, FAINT)
        canvas.box(left, y, width * share, 18, GREEN)
        canvas.line([(left + width, y - 2), (left + width, y + 20)], INK, 2)
        canvas.text(left + width + 10, y + 14, f"{value_s * 1e3:.3g} ms", size=12)
    return canvas.svg("Proven bounds beside the values of placements")


def policy() -> str:
    """Validation of the two runs that made the shipped policy, from their logs."""
    runs = (("pretrain/runs/base", "first run"), ("checkpoints/default", "second run, shipped"))
    canvas = Canvas(860, 330)
    canvas.text(20, 28, "Validation families (unseen): time over the best known, by update",
                bold=True, size=15)  # fmt: skip
    canvas.key(20, 50, [(BLUE, "greedy"), (ORANGE, "best of greedy and 16 samples")], 90)
    for panel, (folder, title) in enumerate(runs):
        lines = [json.loads(x) for x in (TOP / folder / "metrics.jsonl").read_text().splitlines()]
        left, width = 60 + panel * 410, 360.0
        canvas.text(left, 82, title, size=12, fill=GREY)
        points = [x for x in lines if "val_greedy" in x]
        last = max(x["step"] for x in points)
        for level in (1.0, 1.1, 1.2, 1.3):
            y = _level(level)
            canvas.line([(left, y), (left + width, y)])
            canvas.text(left - 8, y + 4, f"{level:.1f}", anchor="end", size=11, fill=GREY)
        for key, colour in (("val_greedy", BLUE), ("val_best", ORANGE)):
            seen = [
                (x["step"] / last, x[key]) for x in points if x[key] < 1.35
            ]  # the rest is above
            canvas.line([(left + at * width, _level(ratio)) for at, ratio in seen], colour, 2)
        for step in range(0, last + 1, 1000):
            canvas.text(left + step / last * width, 316, f"{step:,}", anchor="middle", size=11,
                        fill=GREY)  # fmt: skip
    return canvas.svg("Validation during pre-training")


def _level(ratio: float) -> float:
    return 296 - (ratio - 1.0) / 0.35 * 200


def costs() -> str:
    """Whole models of families held out from fitting: predicted over measured seconds."""
    meta = json.loads((TOP / "checkpoints/costs/cpu-core-avx2/meta.json").read_text())
    models: Sequence[dict[str, Any]] = meta["report"]["models"]
    measured = [m["measured_s"] for m in models]
    low, high = math.log10(min(measured)) - 0.1, math.log10(max(measured)) + 0.1
    canvas = Canvas(860, 360)
    canvas.text(20, 28, f"{len(models)} models of {len(meta['report']['held_out_families'])} "
                "families held out: error of the prediction", bold=True, size=15)  # fmt: skip
    canvas.key(20, 50, [(BLUE, "learned from profiles"), (ORANGE, "roofline")], 170)

    def across(seconds: float) -> float:
        return 70 + (math.log10(seconds) - low) / (high - low) * 760

    def down(error: float) -> float:
        return 195 - error * 300

    canvas.box(70, down(0.1), 760, down(-0.1) - down(0.1), "#eaf2e8")
    for percent in (-40, -20, 0, 20, 40):
        y = down(percent / 100)
        canvas.line([(70, y), (830, y)])
        canvas.text(
            62, y + 4, f"{percent:+d}%" if percent else "0", anchor="end", size=11, fill=GREY
        )
    for m in models:
        canvas.dot(across(m["measured_s"]), down(m["roofline_error"]), ORANGE)
        canvas.dot(across(m["measured_s"]), down(m["error"]), BLUE)
    for ms in (3, 10, 30, 100, 300, 1000):
        if low <= math.log10(ms / 1e3) <= high:
            canvas.text(across(ms / 1e3), 340, f"{ms} ms", anchor="middle", size=11, fill=GREY)
    return canvas.svg("Predicted against measured seconds of whole models")


FIGURES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (before_after, simulator, bounds, policy, costs)
}


def main(names: Sequence[str]) -> None:
    """Write the named figures beside this file, all where none is named."""
    for name in names or FIGURES:
        (HERE / f"{name}.svg").write_text(FIGURES[name]())
        print(HERE / f"{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
