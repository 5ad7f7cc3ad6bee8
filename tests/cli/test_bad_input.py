"""Bad input, whatever it is: one line that names file and field, exit code 2; a bug is 3."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from refusals import CLUSTER, DEVICE, Run, changed, refused, small

from gdp.api import first_run
from gdp.base.errors import GdpError
from gdp.base.units import parse_bytes
from gdp.cluster.types import Cluster
from gdp.placement.placement import make_placement, save_placement
from gdp.question import solve
from gdp.question.models import load


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"flop": [1, 10**400]}, r"$.flop[1]"),
        ({"flop": [1, 1e300]}, r"$.flop[1]"),
        ({"flop": [1, -1]}, r"$.flop[1]"),
        ({"flop": [float("nan"), 1]}, "small.json"),
        ({"tensor_bytes": [1, 2**63]}, r"$.tensor_bytes[1]"),
        ({"weight_bytes": [1, 2**64]}, r"$.weight_bytes[1]"),
        ({"colocate": [0, -(2**70)]}, r"$.colocate[1]"),
        ({"details": [{"attributes": {"a": 10**30}}], "detail": [0, 0]}, r"$.details[0]"),
        ({"use_op": [0, 1], "use_tensor": [1, 0]}, "cycle through or before op 'a'"),
    ],
)
def test_a_graph_file_out_of_range(run: Run, model: Path, changes: dict, field: str) -> None:
    changed(model, **changes)
    line = refused(run, "place", model, *CLUSTER)
    assert "small.json" in line
    assert field in line


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_deep_graph_file(run: Run, model: Path, opening: str) -> None:
    model.write_text(opening * 100_000)
    assert "small.json is not a graph file: " in refused(run, "inspect", model)


def test_a_gzip_bomb_is_refused_unread(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b" " * (1 << 20))
    assert path.stat().st_size < 2 << 20
    assert "bomb.json.gz holds more than 256.00 MiB" in refused(run, "inspect", path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rank": [2**63, 0]}, r"$.rank[0]"),
        ({"device": [0, -1]}, r"$.device[1]"),
        ({"device": [0, 7]}, "outside 0..1"),
        ({"device": [0]}, "equally long"),
        ({"devices": 3}, r"$.devices"),
    ],
)
def test_a_placement_out_of_range(
    run: Run, model: Path, tmp_path: Path, changes: dict, field: str
) -> None:
    path = tmp_path / "placed.json"
    graph = small()
    placed = make_placement(graph, Cluster.load("2xcpu-core"), np.zeros(2, np.int64))
    save_placement(placed, path)
    changed(path, **changes)
    line = refused(run, "simulate", model, path, *CLUSTER)
    assert "placed.json" in line
    assert field in line


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (DEVICE + 'memory_bytes = "1e999GiB"', "memory_bytes: 1e999GiB is too large"),
        (DEVICE + f"memory_bytes = {10**400}", "memory_bytes"),
        (DEVICE + "memory_bytes = -1", "memory_bytes"),
        (DEVICE + "dispatch_s = nan", "dispatch_s"),
        (DEVICE + "dispatch_s = inf", "dispatch_s"),
        (DEVICE.replace("flop_per_s = 1e9", "flop_per_s = inf"), "flop_per_s"),
        (DEVICE.replace("flop_per_s = 1e9", "flop_per_s = nan"), "flop_per_s"),
        (DEVICE.replace("flop_per_s = 1e9", "flop_per_s = 5e-324"), "flop_per_s"),
        ("default_latency_s = inf\n" + DEVICE, "default_latency_s"),
        ("default_bytes_per_s = nan\n" + DEVICE, "default_bytes_per_s"),
        ("host = 3\n" + DEVICE, "host"),
        ("device = " + "[" * 3000, "it is nested too deeply"),
        ("device." * 3000 + "a = 1", "more than 64 parts"),
        ("device = 3", r"$.device"),
        (DEVICE + "kind = 3", r"$.device[0].kind"),
        ("\n".join(DEVICE.replace('"a"', f'"d{i}"') for i in range(1025)), "at most 1024"),
    ],
)
def test_a_cluster_file_out_of_range(run: Run, tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    line = refused(run, "devices", "--cluster", path)
    assert "machine.toml" in line
    assert field in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--max-memory", "0=1e999GiB"), "--max-memory: 1e999GiB is too large for a"),
        (("--max-memory", "²=1GiB"), "--max-memory: max memory names '²'"),
        (("--max-memory", "1GiB"), "--max-memory: max memory '1GiB' must look like 0=20GiB"),
        (("--pin", "x"), "--pin: 'x' must look like GLOB=DEVICE"),
        (("--forbid", "x"), "--forbid: 'x' must look like GLOB=DEVICE"),
        (("--pin", "nothing=core0"), "pin: no op or scope of graph"),
        (("--forbid", "*=core9"), "forbid '*' names device 'core9'"),
        (("--together", "nothing"), "together: no op or scope of graph"),
        (("--batch", "0"), "'--batch': 0 is not in the range"),
        (("--sequence", str(2**31)), "'--sequence': 2147483648 is not in the range"),
        (("--dim", "batch=²"), "must look like NAME=VALUE"),
        (("--dim", f"batch={'9' * 5000}"), "must look like NAME=VALUE"),
        (("--dim", "batch=2147483648"), "below 2**31"),
        (("--seed", str(2**70)), "--seed must lie in"),
        (("--seed", "-1"), "--seed must lie in"),
        (("--seconds", "nan"), "--seconds must be >= 0"),
        (("--evaluations", "-1"), "--evaluations must be >= 0"),
        (("--cluster", "1000xcpu-core+1000xt4"), "too many devices, at most 1024"),
        (("--cluster", f"{'9' * 30}xt4"), "too many devices, at most 1024"),
    ],
)
def test_an_argument_out_of_range(run: Run, model: Path, args: tuple, message: str) -> None:
    assert message in refused(run, "place", model, *CLUSTER, *args)


def test_a_constraints_file_of_a_wrong_type(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "demands.toml"
    path.write_text("pin = 3")
    line = refused(run, "place", model, *CLUSTER, "--constraints", path)
    assert "demands.toml is not a constraints file" in line
    assert "$.pin" in line


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("name = 'x'\nnetwork = 3", r"$.network"),
        ("name = {a = 1}", r"$.name"),
        ("name = 'x'\nppo = []", r"$.ppo"),
        ("name = 'x'\n[ppo]\nclip = 'x'", r"$.ppo.clip"),
        ("name = 'x'\n[network]\nheads = 0", "heads must lie in"),
        ("name = 'x'\n[data]\ninstances = ['x']", r"$.data"),
        ("name = 'x'\n[data]\nfresh = nan", r"$.data"),
        ("seed = 3", "name"),
        ("name = 'x'\na = " + "[" * 5000, "it is nested too deeply"),
    ],
)
def test_a_recipe_of_a_wrong_type(run: Run, tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    line = refused(run, "pretrain", path, "-o", tmp_path / "out")
    assert "recipe.toml is not a recipe" in line
    assert field in line
    assert not (tmp_path / "out").exists()


def test_settings_of_a_fine_tuning_of_a_wrong_type(run: Run, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "tune.toml"
    path.write_text("samples = 'many'")
    line = refused(run, "finetune", model, *CLUSTER, "--recipe", path, "-o", tmp_path / "out")
    assert "tune.toml is not a recipe" in line
    assert "$.samples" in line


MODULE = """
def needs(a, b, c=3): ...
def fails(): raise KeyError("wanted")
def leaves(): raise SystemExit(3)
def leaves_quietly(): raise SystemExit
def text(): return "text"
def traced():
    def inner(x): return {}["missing"]
    return inner, (1.0,)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs", "the function needs a, b; give a=VALUE&b=VALUE behind a question mark"),
        ("needs?a=1&c=2.5", "the function needs b; give b=VALUE behind a question mark"),
        ("needs?a=1&b=2&d=2", "the function has no argument 'd'; it has a, b, c"),
        ("needs?a", "'a' must be NAME=VALUE, once for each argument"),
        ("fails", "the function raised KeyError: 'wanted'"),
        ("leaves", "the function raised SystemExit: 3"),
        ("leaves_quietly", "the function raised SystemExit\n"),
        ("text", "must return (function, arguments)"),
        ("traced", "KeyError"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_python_function_that_cannot_be_called(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "users_module.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    assert message in refused(run, "inspect", f"python:users_module:{name}") + "\n"
    assert "broken_module" in refused(run, "inspect", "python:broken_module:f")
    assert "cannot be imported" in refused(run, "inspect", "python:.x:f")


def test_the_cause_of_a_users_error_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_second_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(GdpError) as caught:
        load("python:users_second_module:fails")
    assert isinstance(caught.value.__cause__, KeyError)


def broken(*args: object, **kwargs: object) -> None:
    raise RuntimeError("no one\nforesaw this")


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_bug_is_one_line_with_exit_code_3(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, as_json: tuple
) -> None:
    monkeypatch.setattr(solve, "solve", broken)
    monkeypatch.setattr(first_run, "prepare", lambda *_: None)  # its notice is not of the bug
    code, out, err = run("place", model, *CLUSTER, *as_json)
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert "please report it" in err
    assert "RuntimeError: no one foresaw this" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("where", ["before", "after"])
def test_verbose_shows_the_traceback_of_a_bug(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    import logging

    monkeypatch.setattr(solve, "solve", broken)
    logger = logging.getLogger()
    level = logger.level
    try:
        args = ("place", model, *CLUSTER)
        code, out, err = run("-v", *args) if where == "before" else run(*args, "--verbose")
    finally:
        logger.setLevel(level)
    assert (code, out) == (3, "")
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("gdp: internal error")


def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "gdp", "devices", *CLUSTER, "--json"],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gdp", "devices", *CLUSTER, "--json"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "gdp: standard output: No space left on device\n")


@pytest.mark.parametrize("text", ["1e999", "1e999GiB", "9" * 400, "5EiB", "8e18"])
def test_sizes_beyond_what_adds_up_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"too large for a size|not a size"):
        parse_bytes(text)
