"""The page of a placement: figures, bars and tables are those of the schedule; names escaped."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from tiny import plain_graph, unit_cluster

from gdp.graph.op_graph import INPUT
from gdp.problem.problem import Problem, make_problem
from gdp.report import html as module
from gdp.report.html import report_html
from gdp.sim.latency import Schedule, simulate

NASTY = "a<script>alert('x')</script>&\"b"
DEVICE = np.array([0, 0, 1, 0])
RESULT: dict[str, Any] = {
    "objective": "latency", "latency_s": 9e-3, "period_s": 7e-3, "bound_s": 6e-3,
    "bound_by": "critical path of <4> ops", "proven_optimal": False, "gap": 0.25, "method": "auto",
    "seed": 7, "costs": "datasheet", "candidates": [
        {"method": "single", "latency_s": 8e-3, "period_s": 8e-3, "feasible": True,
         "seconds": 0.125, "reason": ""},
        {"method": "metis", "latency_s": None, "period_s": None, "feasible": False,
         "seconds": 0.5, "reason": "<b>over memory</b>"},
    ],
}  # fmt: skip


def posed() -> tuple[Problem, Schedule]:
    """in -> a -> b on d1 -> c: a 1 s, 1 s to send, b 2 s, 1 s to send, c 3 s; weights 2, 3, 4."""
    graph = plain_graph(
        4, [(0, 1), (1, 2), (2, 3)], 1, op_types=[INPUT, "Conv", NASTY, "Conv"],
        weight_bytes=[0, 2, 3, 4], flop=[0.0, 1e9, 2e9, 3e9],
    )  # fmt: skip
    from dataclasses import replace

    graph = replace(graph, op_names=("in", "a", NASTY, "c"))
    compute_s = np.array([[0.0, np.inf], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    problem = make_problem(graph, unit_cluster(2, memory_bytes=10), compute_s)
    return problem, simulate(problem, DEVICE)


class Page(HTMLParser):
    """Headings, the rows of every table, and the tags met outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.scripts: list[str] = []
        self.tags: set[str] = set()
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open = tag
        self.tags.add(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open in ("h1", "h2"):
            self.headings.append(data)
        elif self.open in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def page() -> Page:
    problem, schedule = posed()
    return Page(report_html(problem, schedule, DEVICE, RESULT))


def bars(page: Page) -> list[dict[str, Any]]:
    """The traces that plotly is given."""
    (call,) = [s for s in page.scripts if "Plotly.newPlot(" in s and '"type":"bar"' in s]
    text = call[call.index("Plotly.newPlot(") :]
    return json.JSONDecoder().raw_decode(text[text.index("[") :])[0]


def test_the_page_has_its_parts_in_order(page: Page) -> None:
    assert page.headings == ["plain on unit", "Devices", "Timeline", "Candidates", "Costliest ops"]


def test_devices_show_how_busy_and_how_full_they_are(page: Page) -> None:
    """d0 works 4 of 8 s and holds weights of 6 bytes and two tensors; d1 2 s, 3 bytes and two."""
    _, schedule = posed()
    assert schedule.latency_s == 8.0
    assert page.tables[0] == [
        ["device", "ops", "busy", "of the run", "peak memory", "full"],
        ["d0", "3", "4.000 s", "50%", "8 B", "80%"],
        ["d1", "1", "2.000 s", "25%", "5 B", "50%"],
    ]


def test_bars_are_the_ops_and_transfers_of_the_schedule(page: Page) -> None:
    ops, transfers = bars(page)
    found = sorted(zip(ops["y"], ops["base"], ops["x"], strict=True))
    assert found == [("d0", 0.0, 1000.0), ("d0", 5000.0, 3000.0), ("d1", 2000.0, 2000.0)]
    sent = sorted(zip(transfers["y"], transfers["base"], transfers["x"], strict=True))
    assert sent == [("d0 to d1", 1000.0, 1000.0), ("d1 to d0", 4000.0, 1000.0)]
    assert set(transfers["hovertext"]) == {"t1", "t2"}
    assert ops["hovertext"] == ["c (Conv)", f"{NASTY} ({NASTY})", "a (Conv)"]


def test_candidates_say_what_they_found_or_why_not(page: Page) -> None:
    assert page.tables[1][1:] == [
        ["single", "8.000 ms", "8.000 ms", "yes", "0.12 s"],
        ["metis", "-", "-", "no <b>over memory</b>", "0.50 s"],
    ]


def test_the_costliest_ops_come_first(page: Page) -> None:
    rows = page.tables[2][1:]
    assert [row[0] for row in rows] == ["c", NASTY, "a", "in"]
    assert rows[0] == ["c", "Conv", "d0", "3.000 s", "3.000"]


def test_names_cannot_become_markup(page: Page) -> None:
    assert "b" not in page.tags
    problem, schedule = posed()
    text = report_html(problem, schedule, DEVICE, RESULT)
    assert "<script>alert" not in text
    assert not re.search(r"</script>&", text)


def test_the_headline_says_what_was_asked_and_found() -> None:
    problem, schedule = posed()
    text = report_html(problem, schedule, DEVICE, RESULT)
    for part in (
        "latency: latency 9.000 ms, period 7.000 ms per sample", "proven bound 6.000 ms",
        "gap at most 25.0%", "Method auto, seed 7", "critical path of &lt;4&gt; ops",
    ):  # fmt: skip
        assert part in text
    assert "gap at most" not in report_html(
        problem, schedule, DEVICE, {**RESULT, "proven_optimal": True}
    )


def test_bars_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BARS", 2)
    problem, schedule = posed()
    text = report_html(problem, schedule, DEVICE, RESULT)
    assert "1 shorter ops are not drawn." in text
    ops = bars(Page(text))[0]
    assert sorted(ops["x"]) == [2000.0, 3000.0]
