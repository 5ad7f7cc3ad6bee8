"""The page of a placement: figures, tables and data are those of the schedule; names escaped."""

import base64
import hashlib
import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from reports.shared import NASTY, RESULT, shown_view

from gdp.placement.placement import Split
from gdp.reports.html import report_html
from gdp.sim.latency import simulate


class Page(HTMLParser):
    """Headings, the rows of every table, scripts, and the tags met outside of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.scripts: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.policy = ""
        self.stack: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.add(tag)
        self.references += [str(found[k]) for k in ("src", "href") if k in found]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(found["content"])
        if tag not in ("meta", "input"):
            self.stack.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.stack:
            return
        if self.stack[-1] in ("h1", "h2"):
            self.headings.append(data)
        elif self.stack[-1] == "script":
            self.scripts[-1] += data
        elif "td" in self.stack or "th" in self.stack:
            self.tables[-1][-1][-1] = (self.tables[-1][-1][-1] + data).strip()


@pytest.fixture(scope="module")
def text() -> str:
    return report_html(shown_view(), RESULT)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


@pytest.fixture(scope="module")
def data(page: Page) -> dict[str, Any]:
    return json.loads(page.scripts[0])


def test_the_page_has_its_parts_in_order(page: Page) -> None:
    assert page.headings == [
        "plain on unit", "Timeline", "Memory over time", "Modules", "The cut",
        "Where the time goes", "Candidates", "Costliest ops",
    ]  # fmt: skip


def test_devices_show_how_busy_and_how_full_they_are(page: Page) -> None:
    """d0 works 4 of 8 s and holds weights of 6 bytes and two tensors; d1 2 s, 3 bytes and two.
    c is two ops of the model; the input is none."""
    assert page.tables[0] == [
        ["device", "ops", "kernels", "busy", "of the run", "peak memory", "limit", "full"],
        ["d0", "3", "2", "4.000 s", "50%", "8 B", "10 B", "80%"],
        ["d1", "1", "1", "2.000 s", "25%", "5 B", "10 B", "50%"],
    ]


def test_groups_show_shares_and_the_seconds_of_their_exchange() -> None:
    """On d0, a exchanges 0.25 s once and c 0.5 s in each of two runs: 1.25 of 4 s of work. What b
    would exchange if it were on d0 does not count."""
    view = shown_view()
    graph, exchange_s = view.problem.graph, np.zeros((4, 2))
    exchange_s[:, 0] = 8.0, 0.25, 7.0, 0.5
    origin = replace(view.problem.origin, exchange_s=exchange_s)
    graph = replace(graph, repeats=np.array([1, 1, 1, 2]))
    problem = replace(view.problem, graph=graph, origin=origin)
    splits = (Split((0, 1), shares=(3, 1)),)
    page = Page(report_html(replace(view, problem=problem, splits=splits), RESULT))
    assert "Devices that compute each op together" in page.headings
    assert page.tables[0][1] == [
        "d0, d1", "heads and columns", "3:1", "1.250 s", "31%", ""
    ]  # fmt: skip
    assert "computes each op together with d1" in page.tables[1][1][0]
    assert 'title="d1: 25%"' in report_html(replace(view, splits=splits), RESULT)


def test_members_of_a_group_are_as_busy_and_as_full_as_the_first() -> None:
    """All ops on d0, which d1 computes with it: 6 s of kernels. Its own graph holds 30 bytes more
    than the 9 of d0."""
    view, device = shown_view(), np.zeros(4, dtype=np.int64)
    graph = view.problem.graph
    more = replace(graph, weight_bytes=graph.weight_bytes + np.array([0, 30, 0, 0]))
    origin = replace(view.problem.origin, members={1: more})
    problem = replace(view.problem, origin=origin)
    view = replace(
        view, problem=problem, device=device, schedule=simulate(problem, device),
        splits=(Split((0, 1), shares=(1, 2)),),
    )  # fmt: skip
    page = Page(report_html(view, RESULT))
    assert [row[1:5] for row in page.tables[1][1:]] == [["4", "3", "6.000 s", "100%"]] * 2
    data = json.loads(page.scripts[0])
    alone, other = (curve["bytes"] for curve in data["memory"])
    assert [size + 30 for size in alone] == other
    assert [d["lead"] for d in data["devices"]] == [None, 0]
    assert [d["peak"] for d in data["devices"]] == [max(alone), max(other)]
    assert data["devices"][0]["together"] == ["d0", "d1"]
    assert data["devices"][0]["busy"] == data["devices"][1]["busy"]


def test_what_has_no_bound_says_so() -> None:
    text = report_html(shown_view(), {**RESULT, "bound_s": 0.0, "bound_by": "", "gap": 1.0})
    assert "no bound is known" in text
    assert "no value is below" not in text


def test_traffic_says_latencies_rate_and_room() -> None:
    traffic = {
        "first_token": {"mean_s": 0.06, "median_s": 0.05, "p95_s": 0.15},
        "token": {"mean_s": 0.0155, "median_s": 0.015, "p95_s": 0.0162},
        "tokens_per_s": 1985.84, "requests": 280, "seconds": 20.0, "running": 32.04,
        "waiting_s": 0.001, "room": 1234, "engine": {"requests_at_once": 256},
    }  # fmt: skip
    text = report_html(shown_view(), RESULT, traffic=traffic)
    assert "Traffic" in Page(text).headings
    for part in (
        "<b>60.000 ms</b>", "95% within 150.000 ms", "<b>15.500 ms</b>", "95% within 16.200 ms",
        "<b>1985.8 tokens/s</b>", "<b>32.0 requests</b>", "memory allows 1,234, the engine 256",
    ):  # fmt: skip
        assert part in text
    assert "memory allows" not in report_html(
        shown_view(), RESULT, traffic={**traffic, "room": None}
    )


def test_the_timeline_is_the_schedule_in_nanoseconds(data: dict[str, Any]) -> None:
    ops, sent = data["ops"], data["transfers"]
    assert data["latency"] == 8_000_000_000
    found = zip(ops["label"], ops["device"], ops["start"], ops["length"], ops["count"], strict=True)
    assert list(found) == [
        ("m.one / a", 0, 0, 1_000_000_000, 1),
        (f"m.two / {NASTY}", 1, 2_000_000_000, 2_000_000_000, 1),
        ("m.two / c", 0, 5_000_000_000, 3_000_000_000, 2),
    ]
    assert sent["channels"] == ["d0 → d1", "d1 → d0"]
    assert sent["channel"] == [0, 1]
    assert sent["start"] == [1_000_000_000, 4_000_000_000]
    assert sent["label"] == ["t1", "t2"]


def test_modules_are_a_tree_with_the_kernels_as_leaves(data: dict[str, Any]) -> None:
    assert data["modules"] == {
        "name": ["plain", "m", "one", "two"], "parent": [0, 0, 1, 1], "by_type": False
    }  # fmt: skip
    assert data["ops"]["module"] == [2, 3, 3]
    assert [data["ops"]["layers"][i] for i in data["ops"]["layer"]] == ["m.one", "m.two", "m.two"]


def test_memory_reaches_its_peak(data: dict[str, Any]) -> None:
    assert [max(curve["bytes"]) for curve in data["memory"]] == [8, 5]
    assert [device["limit"] for device in data["devices"]] == [10, 10]


def test_the_cut_names_who_makes_and_who_reads_each_tensor(page: Page) -> None:
    assert page.tables[1][1:] == [
        ["m.one / a", "d0", "d1", "1 B", "1.000 s", "0.000 us", f"m.two / {NASTY}"],
        [f"m.two / {NASTY}", "d1", "d0", "1 B", "1.000 s", "0.000 us", "m.two / c"],
    ]


def test_time_by_type_and_by_module(page: Page) -> None:
    by_type, by_module = page.tables[2], page.tables[3]
    assert [row[:3] for row in by_type[1:]] == [["Conv", "2", "4.000 s"], [NASTY, "1", "2.000 s"]]
    assert [row[:3] for row in by_module[1:]] == [["m.two", "2", "5.000 s"],
                                                  ["m.one", "1", "1.000 s"]]  # fmt: skip


def test_candidates_say_what_they_found_or_why_not(page: Page) -> None:
    assert page.tables[4][1] == ["single", "18.000 ms", "8.000 ms", "yes", "0.12 s"]
    assert page.tables[4][4] == ["metis", "\u2013", "\u2013", "no <b>over memory</b>", "0.50 s"]


def test_the_costliest_ops_come_first(page: Page) -> None:
    rows = page.tables[5][1:]
    assert [row[0] for row in rows] == ["m.two / c", f"m.two / {NASTY}", "m.one / a"]
    assert rows[0] == ["m.two / c", "Conv", "d0", "3.000 s", "3.000", "4 B", "2 ops"]


def test_the_headline_says_what_was_asked_and_found(text: str) -> None:
    """9 ms are twice as fast as one device and 1.5 times as the best heuristic, which policy is
    not."""
    for part in (
        "<b>9.000 ms</b>", "gap ≤ 25.0%", "no value is below 6.000 ms", "<b>2.00</b>",
        "1.50 times as fast as the best heuristic, heft", "Method auto, seed 7, 1,234 evaluations",
        "critical path of &lt;4&gt; ops", "mind &lt;this&gt;", "<b>4 ops</b>", "run as 3 kernels",
    ):  # fmt: skip
        assert part in text
    assert "<b>optimal</b>" in report_html(shown_view(), {**RESULT, "proven_optimal": True})
    full = report_html(shown_view(), {**RESULT, "objective": "throughput", "value": 7e-3})
    assert "<b>7.000 ms</b>" in full
    over = report_html(shown_view(), {**RESULT, "feasible": False, "overflow_bytes": 2048})
    assert "Does not fit: 2.00 KiB over" in over


def test_what_fits_on_no_single_device_says_so() -> None:
    alone = [{**RESULT["candidates"][0], "feasible": False, "value_s": None}]
    text = report_html(shown_view(), {**RESULT, "candidates": alone})
    assert "where no single device has the memory" in text


def test_the_search_curve_falls_from_the_first_value_to_the_last(text: str) -> None:
    assert 'points="300.0,0.0 300.0,0.0 450.0,0.0 450.0,80.0 600.0,80.0 600.0,120.0' in text


def test_a_measured_run_stands_beside_its_prediction() -> None:
    row = {"name": "placed", "predicted_latency_s": 1e-3, "latency_s": 2e-3,
           "latency_interval_s": (1.5e-3, 2.5e-3), "predicted_rate": 10.0, "rate": 8.0,
           "rate_interval": (7.0, 9.0)}  # fmt: skip
    alone = {**row, "name": "single device", "predicted_latency_s": None, "predicted_rate": None}
    segment = {"device": "d<0", "ops": 3, "predicted_s": 1e-3, "measured_s": 2e-3}
    measured = {"rows": [row, alone], "lines": ["equal <1>"], "segments": [segment]}
    page = Page(report_html(shown_view(), RESULT, measured))
    assert "Measured" in page.headings
    assert page.tables[5][1] == [
        "placed", "1.000 ms", "2.000 ms", "1.500 ms to 2.500 ms", "10.0/s", "8.0/s", "7.0 to 9.0/s"
    ]  # fmt: skip
    assert page.tables[5][2][1:3] == ["\u2013", "2.000 ms"]
    assert page.tables[6][1][1:5] == ["d<0", "3", "1.000 ms", "2.000 ms"]


def test_names_cannot_become_markup(text: str, page: Page) -> None:
    assert "<script>alert" not in text
    assert text.count("<script") == 2
    assert "</script>&" not in text


def test_nothing_is_fetched_and_no_other_script_runs(page: Page) -> None:
    """The policy lets nothing be loaded, and one script run: the one with this hash."""
    assert all(reference.startswith("#") for reference in page.references)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert page.policy.split("; ") == [
        "default-src 'none'", "style-src 'unsafe-inline'", f"script-src 'sha256-{digest}'"
    ]  # fmt: skip


def test_kernels_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdp.reports.payload.MAX_DRAWN", 2)
    data = json.loads(Page(report_html(shown_view(), RESULT)).scripts[0])
    assert data["left_out"] == 1
    assert data["ops"]["length"] == [2_000_000_000, 3_000_000_000]


def test_a_long_memory_curve_keeps_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    def curves() -> list[dict[str, list[int]]]:
        return json.loads(Page(report_html(shown_view(), RESULT)).scripts[0])["memory"]

    whole = curves()
    longest = max(len(curve["time"]) for curve in whole)
    monkeypatch.setattr("gdp.reports.payload.MAX_STEPS", longest - 2)
    for cut, curve in zip(curves(), whole, strict=True):
        assert len(cut["time"]) <= longest - 2
        assert max(cut["bytes"]) == max(curve["bytes"])
