"""Pages of placements made elsewhere, of results and of executions."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
from tiny import plain_graph, unit_cluster

from gdp.api import report as reporting
from gdp.costs.base import roofline
from gdp.measure.measuring import Measuring
from gdp.measure.report import Row, measured_fields
from gdp.methods.base import Search
from gdp.placement.placement import make_placement
from gdp.question import solve
from gdp.question.question import Question
from gdp.reports.html import report_html

GRAPH = plain_graph(6, [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (4, 5)], flop=[1, 8, 8, 1, 1, 1])
CLUSTER = unit_cluster(2)


def test_a_placement_is_shown_beside_what_the_heuristics_find(tmp_path: Path) -> None:
    """All ops on d0 are the best single device: 20 s. Heuristics split the two branches."""
    placement = make_placement(GRAPH, CLUSTER, np.zeros(6, np.int64), made_by="a hand")
    reporting.report(GRAPH, placement, CLUSTER, tmp_path / "r.html", costs=roofline)
    text = (tmp_path / "r.html").read_text()
    assert "<b>1.00</b>" in text
    assert "Method a hand" in text
    for name in ("single", "blocks", "heft"):
        assert f"<td>{name}</td>" in text


def test_a_result_keeps_its_candidates_and_the_course_of_its_search(tmp_path: Path) -> None:
    search = Search(seconds=None, evaluations=300)
    result = solve.solve(
        Question(GRAPH, CLUSTER, method="local_search", costs=roofline, search=search)
    )
    values = [value for _, value in result.curve]
    assert values == sorted(values, reverse=True)
    assert values[-1] == result.value_s
    assert result.to_json()["curve"][-1][1] == result.value_s


def test_an_execution_stands_beside_its_prediction_in_rows_and_words() -> None:
    placed = Row(0.01, (0.009, 0.011), 50.0, (49.0, 51.0), 500, False, 8)
    alone = Row(0.02, (0.019, 0.021), 40.0, (39.0, 41.0), 500, False, 8)
    fields = measured_fields(
        "throughput", (0.01, 0.02), placed, {"single_device": alone}, Measuring()
    ) | {"baselines": {"single_device": asdict(alone)}}
    segment = {"device": "d0", "ops": 3, "predicted_s": 0.01, "measured_s": 0.02}
    found = reporting.measured_view(
        fields | {"note": "mind", "outputs_equal": False, "segments": [segment]}
    )
    assert [row["name"] for row in found["rows"]] == ["placed", "single device"]
    assert found["rows"][0]["predicted_rate"] == 50.0
    assert found["rows"][1]["predicted_latency_s"] is None
    assert found["lines"][0].startswith("Outputs DIFFER from the uncut model's.")
    assert "mind" in found["lines"]
    assert "run the placement" in found["lines"][-1]
    placement = make_placement(GRAPH, CLUSTER, np.zeros(6, np.int64))
    view = solve.view_of(Question(GRAPH, CLUSTER, costs=roofline), placement)
    result = solve.evaluate(Question(GRAPH, CLUSTER, costs=roofline), placement).to_json()
    assert "Outputs DIFFER" in report_html(view, result, found)
