"""The trace of a placement keeps the rules of its format, and shows the schedule."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from reports.shared import shown_view
from tiny import plain_graph, random_problem, unit_cluster

from gdp.cluster.types import NO_CHANNEL
from gdp.placement.placement import Split
from gdp.problem.problem import make_problem
from gdp.reports.trace import trace_events, write_trace
from gdp.reports.view import PlacementView
from gdp.sim.latency import simulate

COMMON = {"ph", "name", "pid"}
NEEDS = {
    "M": {"args"}, "X": {"tid", "ts", "dur", "cat"}, "C": {"ts", "args"},
    "s": {"tid", "ts", "id", "cat"}, "f": {"tid", "ts", "id", "cat", "bp"},
}  # fmt: skip


def violations(events: list[dict[str, Any]]) -> list[str]:
    """Everything that breaks the rules of the Trace Event Format, as far as gdp writes it."""
    found: list[str] = []
    slices, flows, named = defaultdict(list), defaultdict(list), set()
    for event in events:
        if missing := (COMMON | NEEDS.get(event["ph"], set())) - event.keys():
            found.append(f"{event['ph']} {event['name']} lacks {sorted(missing)}")
            continue
        if event["ph"] not in NEEDS:
            found.append(f"unknown phase {event['ph']}")
        if not all(np.isfinite(event[key]) and event[key] >= 0 for key in ("ts", "dur")
                   if key in event):  # fmt: skip
            found.append(f"{event['name']} has a time that is none")
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "sf":
            flows[event["cat"], event["name"], event["id"]].append(event)
        if event["ph"] == "M" and event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
        if event["ph"] == "C" and not all(isinstance(v, int) for v in event["args"].values()):
            found.append(f"counter {event['name']} is no number")
    found += [f"track {track} has no name" for track in slices.keys() - named]
    for track, spans in slices.items():
        ends: list[float] = []
        for start, end in sorted(spans, key=lambda s: (s[0], -s[1])):
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            if ends and end > ends[-1] + 1e-6:
                found.append(f"slices of {track} overlap without nesting at {start}")
            ends.append(end)
    for key, ends in flows.items():
        if [event["ph"] for event in ends] != ["s", "f"]:
            found.append(f"flow {key} is {[event['ph'] for event in ends]}")
        elif ends[0]["ts"] > ends[1]["ts"] + 1e-6:
            found.append(f"flow {key} ends before it starts")
        for event in ends:
            track = slices[event["pid"], event["tid"]]
            if not any(a - 1e-6 <= event["ts"] <= b + 1e-6 for a, b in track):
                found.append(f"flow {key} starts or ends outside of any slice")
    return found


def random_view(seed: int) -> PlacementView:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    rows = [rng.choice(np.flatnonzero(row)) for row in problem.group_allowed]
    device = np.array(rows)[problem.group]
    return PlacementView(problem.graph, problem, simulate(problem, device), device)


@pytest.mark.parametrize("seed", range(20))
def test_the_rules_of_the_format_hold(seed: int) -> None:
    view = random_view(seed)
    assert violations(trace_events(view)) == []


def test_the_rules_find_what_breaks_them() -> None:
    events = trace_events(shown_view())
    ops = [event for event in events if event["ph"] == "X"]
    assert violations([e for e in events if e.get("name") != "thread_name"])
    assert violations([*events, {**ops[0], "ts": ops[0]["ts"] + 1.0}])
    assert violations([e for e in events if e["ph"] != "f"])
    assert violations([e for e in events if e["ph"] != "X"])
    assert violations([{k: v for k, v in e.items() if k != "dur"} for e in events])


def test_ops_transfers_arrows_and_memory_are_those_of_the_schedule() -> None:
    events = trace_events(shown_view())
    by_phase = defaultdict(list)
    for event in events:
        by_phase[event["ph"]].append(event)
    slices = [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in by_phase["X"]]
    assert slices == [
        (0, 0, 0.0, 1e6), (0, 1, 2e6, 2e6), (0, 0, 5e6, 3e6), (1, 0, 1e6, 1e6), (1, 1, 4e6, 1e6)
    ]  # fmt: skip
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in by_phase["M"]
             if e["name"].endswith("_name")}  # fmt: skip
    assert names == {
        (0, None): "devices", (1, None): "channels", (0, 0): "d0", (0, 1): "d1",
        (1, 0): "d0 → d1", (1, 1): "d1 → d0",
    }  # fmt: skip
    arrows = [(s["tid"], s["ts"], f["tid"], f["ts"])
              for s, f in zip(by_phase["s"], by_phase["f"], strict=True)]  # fmt: skip
    # a (d0) to its transfer, the transfer to b (d1); b to its transfer, the transfer to c (d0).
    assert arrows == [(0, 0.0, 0, 1e6), (0, 1e6, 1, 2e6), (1, 2e6, 1, 4e6), (1, 4e6, 0, 5e6)]
    peak = {name: max(e["args"]["bytes"] for e in by_phase["C"] if e["name"] == name)
            for name in ("memory of d0", "memory of d1")}  # fmt: skip
    assert peak == {"memory of d0": 8, "memory of d1": 5}
    assert by_phase["X"][2]["args"]["fused_ops"] == 2


def test_the_file_says_what_it_is_of(tmp_path: Path) -> None:
    write_trace(shown_view(), tmp_path / "trace.json")
    document = msgspec.json.decode((tmp_path / "trace.json").read_bytes())
    about = document["otherData"]
    assert (about["generator"], about["model"], about["cluster"]) == ("gdp", "plain", "unit")
    assert about["latency_s"] == 8.0
    assert (about["ops"], about["kernels"]) == (4, 3)
    assert about["memory_bytes"] == {"d0": 10, "d1": 10}


def test_copies_that_overlap_are_on_tracks_of_their_own() -> None:
    """d0 sends 4 and 2 bytes from 0 s on and 1 byte from 3 s on: two tracks without a channel."""
    graph = plain_graph(6, [(0, 3), (1, 4), (2, 5)], [4, 2, 1, 1, 1, 1])
    cluster = unit_cluster(2)
    free = replace(cluster, channel=np.full((2, 2), NO_CHANNEL))
    compute_s = np.repeat([[0.0], [0.0], [3.0], [1.0], [1.0], [1.0]], 2, axis=1)
    device = np.array([0, 0, 0, 1, 1, 1])
    tracks, names = [], []
    for machine in (cluster, free):
        problem = make_problem(graph, machine, compute_s)
        view = PlacementView(graph, problem, simulate(problem, device), device)
        events = trace_events(view)
        assert violations(events) == []
        tracks.append([e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "transfer"])
        names.append([e["args"]["name"] for e in events
                      if e["name"] == "thread_name" and e["pid"] == 1])  # fmt: skip
    assert tracks == [[0, 0, 0], [0, 1, 1]]
    assert names == [["d0 → d1"], ["d0 → d1", "d0 → d1 (2)"]]


def test_ops_of_a_split_are_on_the_tracks_of_all_its_members() -> None:
    """All three kernels are computed by d0 and d1 together; d1 has twice the weights of d0."""
    view = shown_view()
    problem = view.problem
    own = replace(problem.graph, weight_bytes=problem.graph.weight_bytes * 2)
    exchange_s = np.array([[0.25, 7.0]] * 4)
    origin = replace(problem.origin, exchange_s=exchange_s, members={1: own})
    split = Split((0, 1), shares=(1, 2))
    device = np.zeros_like(view.device)
    schedule = simulate(problem, device)
    shared = PlacementView(
        view.model, replace(problem, origin=origin), schedule, device, splits=(split,)
    )
    events = trace_events(shared)
    assert violations(events) == []
    slices = [e for e in events if e["ph"] == "X"]
    by_track = {tid: [e for e in slices if e["tid"] == tid] for tid in (0, 1)}
    assert len(by_track[0]) == 3
    assert [(e["ts"], e["dur"]) for e in by_track[0]] == [(e["ts"], e["dur"]) for e in by_track[1]]
    for first, second in zip(by_track[0], by_track[1], strict=True):
        assert second["args"]["weight_bytes"] == 2 * first["args"]["weight_bytes"]
        assert first["args"]["members"] == second["args"]["members"] == ["d0", "d1"]
        assert second["args"]["exchange_us"] == 0.25e6
