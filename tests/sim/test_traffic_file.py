"""Traffic from a table of requests."""

from pathlib import Path

import pytest

from gdp.base.errors import ArgumentError
from gdp.sim.traffic import Arrival
from gdp.sim.traffic_file import read_traffic
from gdp.sim.traffic_text import parse_traffic


def test_requests_come_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("at_s,user, prompt ,new\n1.5,b,100,20\n0,a,7,1\n")
    traffic = parse_traffic(str(path))
    assert traffic.requests == (Arrival(0.0, 7, 1, line=3), Arrival(1.5, 100, 20, line=2))
    assert traffic.concurrency == 0


def test_without_times_all_arrive_at_once(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("prompt,new\n5,2\n3,4\n")
    assert read_traffic(path).requests == (Arrival(0.0, 5, 2, line=2), Arrival(0.0, 3, 4, line=3))


def test_requests_of_one_time_keep_the_order_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = [(1, 9, 9), (0, 8, 2), (1, 3, 7), (0, 8, 1), (1, 3, 6)]
    path.write_text("at_s,prompt,new\n" + "\n".join(",".join(map(str, row)) for row in rows))
    found = [tuple(map(int, request[:3])) for request in read_traffic(path).requests]
    assert found == [(0, 8, 2), (0, 8, 1), (1, 9, 9), (1, 3, 7), (1, 3, 6)]


@pytest.mark.parametrize("name", ["at", "AT_S", "at_ms", "ats", "time", "timestamp", "arrival_s"])
def test_a_column_of_times_has_one_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(f"{name},prompt,new\n0,1,1\n")
    with pytest.raises(ArgumentError, match=f"times must be called at_s, not {name}$"):
        read_traffic(path)
    path.write_text(f"at_s,{name},prompt,new\n0,7,1,1\n")
    assert read_traffic(path).requests == (Arrival(0.0, 1, 1, line=2),)


@pytest.mark.parametrize(("text", "said"), [
    ("", "first row must name the columns at_s, prompt, new; prompt misses"),
    ("prompt,at_s\n1,1\n", "new misses, found prompt, at_s"),
    ("a,new\n", "prompt misses, found a, new"),
    ("new,prompt,new\n1,2,3\n", "names new twice"), ("prompt,new\n", "has 0 requests"),
    ("prompt,new\n1,x\n", "line 2: a request needs"), ("prompt,new\n1,2\n0,1\n", "line 3"),
    ("at_s,prompt,new\n-1,1,1\n", "line 2"), ("at_s,prompt,new\nnan,1,1\n", "line 2"),
    ("prompt,new\n" + "1" * 200_000 + ",1\n", "field larger"),
    ("prompt" + "1" * 200_000, "field larger"),
    ("prompt,new\n1\n", "line 2: the row has not as many cells"),
    ("prompt,new\n1,2,3\n", "line 2: the row has not as many cells"),
    ("at_s,prompt,new\n0,1,1\n,1,1\n", "line 3"), ("at_s,prompt,new\n inf,1,1\n", "line 2"),
    ("prompt,new\n9000000,1\n", "line 2"),
])  # fmt: skip
def test_tables_of_another_form_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=said):
        read_traffic(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"nowhere\.csv"):
        parse_traffic(str(tmp_path / "nowhere.csv"))
