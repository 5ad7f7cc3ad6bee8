"""The benchmark of large graphs: which problems it has, what is kept, what its intervals are of."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax")

from benchmarks.policy.instances import problems
from benchmarks.policy.large import (
    ADVISERS,
    AUTO,
    RANDOM,
    SIZES,
    Entry,
    Rows,
    bootstrap,
    compared,
    keep,
    kept,
    load,
    logs,
    of_split,
    pairs_of,
    parts_of,
    row_text,
)
from benchmarks.policy.regimes import Made
from gdp.cluster.file import load_cluster


def test_problems_are_all_large_graphs_of_families_that_are_held_out() -> None:
    entries, graphs = load(), problems(*SIZES)
    reported, chosen_by = (of_split(entries, x, graphs) for x in ("test", "validation"))
    assert {x.graph for x in reported} == set(graphs.test)
    assert {x.graph for x in chosen_by} == set(graphs.validation)
    assert len(reported) >= 10
    families = [{graphs.family(x.graph) for x in part} for part in (reported, chosen_by)]
    assert not families[0] & families[1]
    assert {load_cluster(x.cluster).num_devices for x in entries} == {4, 8}


def two_graphs() -> tuple[list[Entry], Rows]:
    """Graph a on two clusters, b on one; best known 1, 2 and 4."""
    entries = [Entry("a", "x", 1.0), Entry("a", "y", 2.0), Entry("b", "x", 4.0)]
    rows: Rows = {}
    for entry, first, second in zip(entries, (1.1, 2.2, 8.0), (1.0, 2.0, 4.0), strict=True):
        case = (entry.graph, entry.cluster, 0)
        rows[*case, "one"] = {"one": Made(first, 1.0, 10)}
        rows[*case, "two"] = {"two": Made(second, 3.0, 10)}
    return entries, rows


def test_clusters_of_a_graph_do_not_count_as_graphs() -> None:
    """10% above the best on both clusters of a, 100% on b: the mean over graphs is the root of
    2.2, and intervals of two graphs reach from one to the other."""
    entries, rows = two_graphs()
    assert row_text(entries, rows, "one", 1) == (
        "1.483 (1.100 to 2.000), worst 2.00, CPU 1.0 s, 3 runs"
    )
    assert compared(entries, rows, "two", "one", 1) == "-32.6 (-50.0 to -9.1)%, lower on 3 of 3"


def test_misfits_and_runs_that_are_missing_stand_apart() -> None:
    entries, rows = two_graphs()
    rows["b", "x", 0, "one"] = {"one": Made(float("inf"), 1.0, 10)}
    assert row_text(entries, rows, "one", 2) == (
        "1.100 (1.100 to 1.100), worst 1.10, misfits 1, CPU 1.0 s, 3 runs"
    )
    assert compared(entries, rows, "two", "one", 2) == "-9.1 (-9.1 to -9.1)%, lower on 2 of 2"
    assert compared(entries, rows, "two", "nothing", 2) == "nan"


def test_an_interval_holds_the_mean_and_narrows_with_the_graphs() -> None:
    means = np.array([0.0, 0.1, 0.2, 0.3])
    low, high = bootstrap(means)
    assert 0.0 <= low < means.mean() < high <= 0.3
    less, more = bootstrap(np.tile(means, 16))
    assert more - less < 0.5 * (high - low)


def test_a_decoded_placement_counts_as_what_was_read_where_that_is_better() -> None:
    entry = Entry("a", "x", 1.0)
    rows: Rows = {
        ("a", "x", 0, "heuristics"): {ADVISERS: Made(1.5, 1.0, 5)},
        ("a", "x", 0, "decoded:w"): {
            "greedy, w": Made(2.0, 1.2, 1), "17 decodes, w": Made(1.2, 2.0, 17),
        },
    }  # fmt: skip
    values = {
        row: float(np.exp(logs([entry], rows, row, 1)[0, 0]))
        for row in ("greedy, w", "greedy or read, w", "17 decodes or read, w")
    }
    assert values == pytest.approx(
        {"greedy, w": 2.0, "greedy or read, w": 1.5, "17 decodes or read, w": 1.2}
    )


def test_cells_are_kept_line_by_line(tmp_path: Path) -> None:
    file, cells = tmp_path / "rows.jsonl", {"row": Made(1.5, 0.25, 7)}
    assert kept(file) == kept(None) == {}
    keep(file, ("a", "x", 0, "part"), cells)
    keep(file, ("a", "x", 1, "part"), cells)
    assert kept(file) == {("a", "x", 0, "part"): cells, ("a", "x", 1, "part"): cells}


def test_every_part_comes_behind_those_that_it_needs() -> None:
    parts = parts_of(["v", "w"])
    assert parts[0] == "heuristics"
    assert parts.index("with:v") < parts.index("auto:v")
    assert len([part for part in parts if part.startswith("auto:")]) == 1
    assert parts_of(["v"], ["auto"]) == ["heuristics", "with:v", "auto:v"]
    assert parts_of(["v"], ["policy"]) == [f"policy:{RANDOM}", "policy:v"]
    pairs = pairs_of(["v", "w"])
    assert ("policy, w", "policy, v") in pairs
    assert ("policy, v", f"policy, {RANDOM}") in pairs
    assert ("auto with the policy, w", AUTO) in pairs
