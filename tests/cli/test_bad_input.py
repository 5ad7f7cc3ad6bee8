"""Bad input, whatever it is: one line that names file and field, exit code 2; a bug is 3."""

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gdp import api
from gdp.cli import main
from gdp.cluster.types import Cluster
from gdp.errors import GdpError
from gdp.graph.file import save_graph
from gdp.graph.op_graph import OpGraph, make_graph
from gdp.learn.labels import load_labels
from gdp.models import load
from gdp.placement import make_placement, save_placement
from gdp.policy.placed import WIDE, Placed, pack, unpack
from gdp.policy.policy import default_checkpoint
from gdp.resources import data_path
from gdp.units import parse_bytes

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the program in this process: (exit code, stdout, stderr)."""

    def program(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gdp", *map(str, args)])
        with pytest.raises(SystemExit) as done:
            main.main()
        out, err = capfd.readouterr()
        return int(done.value.code or 0), out, err

    return program


def refused(run: Run, *args: str | Path) -> str:
    """The one line of a program that refuses its input."""
    code, out, err = run(*args)
    assert (code, out) == (2, ""), err
    assert err.startswith("gdp: ")
    assert err.count("\n") == 1, err
    return err


def small() -> OpGraph:
    return make_graph(
        "small", ["a", "b"], ["Conv", "Conv"], [(0, 100), (1, 100)], [(0, 1)], flop=[1e6, 1e6]
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_graph(small(), tmp_path / "small.json")
    return tmp_path / "small.json"


def changed(path: Path, **changes: Any) -> Path:
    document = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps(document))
    return path


CLUSTER = ("--cluster", "2xcpu-core")
QUICK = ("--evaluations", "10", "--method", "heft")
DEVICE = '[[device]]\nname = "a"\nflop_per_s = 1e9\nbytes_per_s = 1e9\n'


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
    assert "small.json is not a graph file: lists and tables are nested" in refused(
        run, "inspect", model
    )


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
        ("device = " + "[" * 3000, "nested more than 64 deep"),
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
        (("--max-memory", "0=1e999GiB"), "1e999GiB is too large for a size"),
        (("--max-memory", "²=1GiB"), "max memory names '²'"),
        (("--dim", "batch=²"), "must look like NAME=VALUE"),
        (("--dim", f"batch={'9' * 5000}"), "must look like NAME=VALUE"),
        (("--dim", "batch=2147483648"), "below 2**31"),
        (("--seed", str(2**70)), "seed must lie in"),
        (("--seed", "-1"), "seed must lie in"),
        (("--seconds", "nan"), "seconds must be >= 0"),
        (("--evaluations", "-1"), "evaluations must be >= 0"),
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


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    folder = tmp_path / "costs"
    shipped = data_path("checkpoints", "costs") / "cpu-core-avx2"
    folder.mkdir()
    for name in ("meta.json", "costs.npz"):
        shutil.copy(shipped / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": []}, r"$.device"),
        ({"device": {"kind": "x"}}, r"$.device"),
        ({"scale": 0}, r"$.scale"),
        ({"scale": 10**400}, "meta.json"),
        ({"types": "x"}, r"$.types"),
        ({"types": ["Conv"]}, "noise has shape (50,), (1,) wanted"),
        ({"versions": 3}, r"$.versions"),
        ({"transfer": [1.0]}, "transfer has 1 coefficients"),
        ({"arrays_sha256": "0"}, "costs.npz is damaged"),
        ({"costs_format": 9}, "no cost file of format 1"),
        ({"schema": "1"}, r"$.schema"),
    ],
)
def test_a_broken_meta_of_costs(
    run: Run, model: Path, costs: Path, changes: dict, field: str
) -> None:
    changed(costs / "meta.json", **changes)
    line = refused(run, "place", model, *CLUSTER, "--costs", costs)
    assert "costs" in line
    assert field in line


def test_a_meta_that_is_a_list(run: Run, model: Path, costs: Path) -> None:
    (costs / "meta.json").write_text("[1]")
    assert "meta.json" in refused(run, "place", model, *CLUSTER, "--costs", costs)
    (costs / "meta.json").write_text("{}")
    assert "no cost file of format" in refused(
        run, "place", model, *CLUSTER, "--costs", costs
    ) or "schema" in refused(run, "place", model, *CLUSTER, "--costs", costs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("layer_b2"), "array 'layer_b2' is missing"),
        (lambda a: a.pop("noise"), "array 'noise' is missing"),
        (lambda a: a.update(layer_b2=a["layer_b2"][:, :3]), "layer_b2 has shape"),
        (lambda a: a.update(layer_c1=a["layer_c1"][0]), "layer_"),
        (lambda a: a.update(other_mean=a["other_mean"][:5]), "other_mean has shape (5,)"),
        (lambda a: a.update(other_scale=0 * a["other_scale"]), "other_scale must be > 0"),
        (lambda a: a.update(layer_b1=a["layer_b1"] + np.nan), "not finite"),
        (lambda a: a.update(layer_b1=a["layer_b1"] + np.float32(1e30)), "weights beyond"),
        (lambda a: a.update(fusion_key=a["fusion_key"][::-1]), "fusion_key must be a sorted row"),
        (lambda a: a.update(fusion_yes=a["fusion_yes"][:3]), "fusion_yes has shape (3,)"),
        (lambda a: a.update(noise=a["noise"].astype("U3")), "array 'noise.npy'"),
    ],
)
def test_broken_arrays_of_costs(
    run: Run, model: Path, costs: Path, change: Callable[[dict], None], message: str
) -> None:
    import hashlib

    with np.load(costs / "costs.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    change(arrays)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    (costs / "costs.npz").write_bytes(buffer.getvalue())
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    changed(costs / "meta.json", arrays_sha256=digest)
    line = refused(run, "place", model, *CLUSTER, "--costs", costs)
    assert "costs.npz" in line
    assert message in line


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(default_checkpoint(), tmp_path / "policy"))


ROW = pack(np.zeros(2, np.int64), WIDE)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"placed": {"digest": "x", "device": "AAAA"}}, r"$.placed"),
        ({"placed": {"digest": "x", "device": "é"}}, r"$.placed"),
        ({"placed": {"digest": "x", "device": ROW, "rank": ROW[:-8]}}, r"$.placed"),
        ({"placed": 3}, r"$.placed"),
        ({"network": []}, r"$.network"),
        ({"network": {"heads": 0}}, "heads must lie in [1, 1024], got 0"),
        ({"network": {"sage_layers": 10**9}}, "sage_layers must lie in"),
        ({"network": {"witdh": 1}}, "unknown key 'witdh'"),
        ({"sha256": 3}, r"$.sha256"),
        ({"name": None}, r"$.name"),
    ],
)
def test_a_broken_meta_of_a_checkpoint(
    run: Run, model: Path, checkpoint: Path, changes: dict, field: str
) -> None:
    changed(checkpoint / "meta.json", **changes)
    line = refused(run, "place", model, *CLUSTER, "--method", "policy", "--checkpoint", checkpoint)
    assert "policy" in line
    assert field in line


def test_damaged_weights_are_told_before_they_are_read(checkpoint: Path) -> None:
    from gdp.policy.policy import load_policy

    (checkpoint / "weights.npz").unlink()  # which is read where it is there
    chosen = max((checkpoint / "weights").rglob("*"), key=lambda p: p.stat().st_size)
    data = bytearray(chosen.read_bytes())
    data[len(data) // 2] ^= 1
    chosen.write_bytes(data)
    with pytest.raises(GdpError, match="is damaged: a file of its weights"):
        load_policy(checkpoint)


def test_a_packed_row_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdp.policy import placed

    row = np.arange(1000)
    assert unpack(pack(row, WIDE), WIDE).tolist() == row.tolist()
    monkeypatch.setattr(placed, "MAX_PACKED_BYTES", 3999)
    with pytest.raises(ValueError, match="it is cut off, or too long"):
        unpack(pack(row, WIDE), WIDE)
    with pytest.raises(msgspec.ValidationError, match="is no packed placement"):
        msgspec.convert({"digest": "x", "device": "eJw="}, Placed)


def test_a_label_that_is_not_packed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "labels.jsonl"
    label = {
        "instance": {"graph": "g", "cluster": 1}, "digest": "0", "value_s": 1.0, "evaluations": 1,
        "device": "AAAA",
    }  # fmt: skip
    path.write_text(json.dumps(label | {"device": pack(np.zeros(2, np.int64), "u1")}) + "\n")
    assert len(load_labels(path)) == 1
    path.write_text(path.read_text() + json.dumps(label))
    with pytest.raises(GdpError, match=r"labels.jsonl, line 2, is not a label: .*packed"):
        load_labels(path)


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
        ("name = 'x'\na = " + "[" * 5000, "nested more than 64 deep"),
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
def text(): return "text"
def traced():
    def inner(x): return {}["missing"]
    return inner, (1.0,)
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("needs", "is called without arguments, but needs a, b"),
        ("fails", "the function raised KeyError: 'wanted'"),
        ("leaves", "the function raised SystemExit: 3"),
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
    assert message in refused(run, "inspect", f"python:users_module:{name}")
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
    monkeypatch.setattr(api, "place", broken)
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

    monkeypatch.setattr(api, "place", broken)
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
    assert (done.returncode, done.stderr) == (2, "gdp: No space left on device\n")


@pytest.mark.parametrize("text", ["1e999", "1e999GiB", "9" * 400, "5EiB", "8e18"])
def test_sizes_beyond_what_adds_up_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"too large for a size|not a size"):
        parse_bytes(text)
