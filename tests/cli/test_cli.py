"""Every verb answers; bad input is one line on stderr with exit code 2, infeasible is 1."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import Run
from tiny import TOY, branches

from gdp.api.first_run import MESSAGE
from gdp.graph.file import save_graph


def program(*args: str | Path) -> tuple[int, str, str]:
    """Run the program as a user does: (exit code, stdout, stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "gdp", *args], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def told(run: Run, *args: str, code: int = 0) -> str:
    """What the program prints; of a refusal its one line on stderr."""
    found, out, err = run(*args)
    assert found == code, err
    if not code:
        return out
    # What is compiled first says so, once on a machine.
    (line,) = [line for line in err.splitlines() if MESSAGE not in line]
    assert line.startswith("gdp: ")
    return line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "branches.json"
    save_graph(branches(), path)
    return str(path)


CLUSTER = ("--cluster", "2xcpu-core")


QUICK = ("--seconds", "0.2")


def test_the_bare_command_explains_itself() -> None:
    code, out, err = program()
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ")
    for kind in (".onnx", "onnx:NAME", ".gguf", "hf:CONFIG", "python:package.module:function"):
        assert kind in err


def test_place_prints_one_json_object(model: str, tmp_path: Path) -> None:
    output, cluster = tmp_path / "p.json", tmp_path / "toy.toml"
    cluster.write_text(TOY)
    toy = ("--cluster", str(cluster))
    found = json.loads(told(program, "place", model, *toy, *QUICK, "--json", "-o", str(output)))
    assert found["feasible"] is True
    # a, then b beside c, then d, at 70 GFLOP/s and with a hand-over each way.
    assert 7e9 / 70e9 < found["latency_s"] < 7.1e9 / 70e9
    assert 0 < found["bound_s"] <= found["latency_s"]
    assert sum(found["devices"].values()) == 4
    again = told(program, "simulate", model, str(output), *toy, "--json")
    assert json.loads(again)["latency_s"] == pytest.approx(found["latency_s"])


def test_the_same_seed_and_evaluations_give_the_same_placement(
    run: Run, model: str, tmp_path: Path
) -> None:
    """In two processes, whose hashes of strings differ."""
    files = []
    for process in (program, run):
        files.append(tmp_path / str(len(files)))
        told(
            process, "place", model, *CLUSTER, "--seconds", "60", "--evaluations", "200",
            "--seed", "3", "-o", str(files[-1]),
        )  # fmt: skip
    assert files[0].read_bytes() == files[1].read_bytes()


def test_pins_hold(run: Run, model: str, tmp_path: Path) -> None:
    output = tmp_path / "p.json"
    pins = ("--pin", "b=core1", "--pin", "c=core1")
    told(run, "place", model, *CLUSTER, *QUICK, *pins, "-o", str(output))
    found = json.loads(output.read_text())
    assert [found["device"][found["ops"].index(op)] for op in "bc"] == [1, 1]


@pytest.mark.slow
def test_compare_has_a_row_per_method(run: Run, model: str) -> None:
    out = told(run, "compare", model, *CLUSTER, *QUICK, "--json")
    rows = {row["method"]: row for row in json.loads(out)["rows"]}
    assert {"single", "blocks", "heft", "local_search", "auto"} <= set(rows)
    heuristics = [rows[name]["latency_s"] for name in ("single", "blocks", "heft", "etf")]
    assert rows["auto"]["latency_s"] <= min(heuristics)


def test_inspect_devices_and_views(run: Run, model: str, tmp_path: Path) -> None:
    found = json.loads(told(run, "inspect", model, "--ops", "--json"))
    assert found["flop"] == 12e9
    assert [op["name"] for op in found["ops"]] == ["a", "b", "c", "d"]
    cluster = tmp_path / "c.toml"
    told(run, "devices", *CLUSTER, "-o", str(cluster))
    trace, report = tmp_path / "t.json", tmp_path / "r.html"
    told(
        run, "place", model, "--cluster", str(cluster), *QUICK,
        "--trace", str(trace), "--report", str(report),
    )  # fmt: skip
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X" and e["pid"] == 0} == set("abcd")
    assert "Memory over time</h2>" in report.read_text()
    assert "<td>single</td>" in report.read_text()


def test_what_cannot_fit_exits_1_and_says_how_much_is_missing(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    save_graph(branches(weight_bytes=10 * 2**30), path)
    for limits in (["0=4GiB,1=8GiB"], ["0=4GiB", "1=8GiB"]):
        flags = [flag for limit in limits for flag in ("--max-memory", limit)]
        line = told(run, "place", str(path), *CLUSTER, *flags, code=1)
        assert "GiB" in line
        assert "missing" in line


def test_clashing_pins_exit_1_and_are_named(run: Run, model: str) -> None:
    pins = ("--pin", "b=core1", "--forbid", "b=core1")
    assert "'b'" in told(run, "place", model, *CLUSTER, *pins, code=1)


def test_fine_tuning_and_reports_know_memory_limits_and_constraints(
    run: Run, model: str, tmp_path: Path
) -> None:
    tune = ("finetune", model, *CLUSTER, "-o", str(tmp_path / "out"))
    assert "'b'" in told(run, *tune, "--pin", "b=core1", "--forbid", "b=core1", code=1)
    assert not (tmp_path / "out").exists()
    placement, page = str(tmp_path / "p.json"), tmp_path / "r.html"
    told(run, "place", model, *CLUSTER, *QUICK, "-o", placement)
    for limits, is_full in (("0=1GiB", False), ("0=20KiB,1=20KiB", True)):
        told(
            run, "report", placement, "--model", model, *CLUSTER, "--max-memory", limits,
            "-o", str(page),
        )  # fmt: skip
        shares = re.findall(r"<td>(\d+)%(?: <strong>over</strong>)?</td></tr>", page.read_text())
        assert any(int(share) > 0 for share in shares) == is_full


BAD = [
    (("place", "none.onnx"), "no "),
    (("place", "none"), "no model 'none'"),
    (("place", "onnx:none"), "light_resnet50"),
    (("place", "python:nothing"), "python:package.module:function"),
    (("place", "python:no.such:f"), "cannot be imported"),
    (("place", "MODEL", "--cluster", "2xbad"), "devices are a10, a100"),
    (("place", "MODEL", "--cluster", "none.toml"), "no cluster file"),
    (("place", "MODEL", "--method", "magic"), "no method 'magic'"),
    (("place", "MODEL", "--max-memory", "20GiB"), "0=20GiB"),
    (("place", "MODEL", "--seconds", "-1"), "seconds must be >= 0"),
    (("place", "MODEL", "--pin", "b"), "GLOB=DEVICE"),
    (("place", "MODEL", "--pin", "zzz=core0"), "matches 'zzz'"),
    (("place", "MODEL", "--constraints", "none.toml"), "no constraints file"),
    (("place", "MODEL", "--dim", "batch"), "NAME=VALUE"),
    (("place", "MODEL", "--costs", "none"), "none"),
    (("place", "MODEL", "--objective", "beauty"), "'beauty' is not one of"),
    (("simulate", "MODEL", "none.json"), "no placement file"),
    (("finetune", "MODEL", "-o", "out", "--max-memory", "20GiB"), "0=20GiB"),
    (("finetune", "MODEL", "-o", "out", "--pin", "zzz=core0"), "matches 'zzz'"),
    (("finetune", "MODEL", "-o", "out", "--constraints", "none.toml"), "no constraints file"),
    (("place",), "Missing argument"),
    (("wheel",), "No such command"),
]


@pytest.mark.parametrize(("args", "message"), BAD)
def test_bad_input_is_one_line(run: Run, model: str, args: tuple[str, ...], message: str) -> None:
    full = [model if arg == "MODEL" else arg for arg in args]
    if len(full) > 1 and "--cluster" not in full:
        full += CLUSTER
    assert message in told(run, *full, code=2)


def test_bad_input_is_one_line_of_the_program(model: str) -> None:
    line = told(program, "place", model, *CLUSTER, "--method", "magic", code=2)
    assert "no method 'magic'" in line


def test_a_placement_for_another_graph_or_cluster_is_refused(
    run: Run, model: str, tmp_path: Path
) -> None:
    output = tmp_path / "p.json"
    told(run, "place", model, *CLUSTER, "--method", "single", "-o", str(output))
    other = tmp_path / "other.json"
    save_graph(branches(weight_bytes=7), other)
    line = told(run, "simulate", str(other), str(output), *CLUSTER, code=2)
    assert "another version" in line
    line = told(run, "simulate", model, str(output), "--cluster", "2xt4", code=2)
    assert "devices core0, core1, not" in line
