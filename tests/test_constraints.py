"""Pins, forbidden devices and ops kept together are found by glob and refused when they clash."""

import fnmatch
import time
from pathlib import Path

import numpy as np
import pytest

from gdp.base.errors import InfeasibleError
from gdp.cluster.presets import cluster_preset
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import INPUT, OpGraph, make_graph
from gdp.placement.constraints import (
    Constraints,
    Names,
    Pin,
    allowed_mask,
    merge,
    parse_pin,
    read_constraints,
    together_ids,
)


def chain() -> OpGraph:
    """input -> enc/a -> enc/b -> dec/c, with scopes."""
    return make_graph(
        "chain", ["input:x", "enc/a", "enc/b", "dec/c"], [INPUT, "Relu", "Relu", "Relu"],
        [(0, 4), (1, 4), (2, 4)], [(0, 1), (1, 2), (2, 3)], scope=["", "enc", "enc", "dec"],
    )  # fmt: skip


def two() -> Cluster:
    return cluster_preset("2xcpu-core")


def test_a_pin_leaves_only_its_devices_and_not_the_inputs() -> None:
    allowed = allowed_mask(Constraints(pins=(Pin("*", ("core1",)),)), chain(), two())
    assert allowed.tolist() == [[True, True]] + [[False, True]] * 3


def test_a_scope_can_be_forbidden_a_device() -> None:
    allowed = allowed_mask(Constraints(forbid=(Pin("enc", ("core0",)),)), chain(), two())
    assert allowed[:, 0].tolist() == [True, False, False, True]


def test_ops_kept_together_share_an_id() -> None:
    ids = together_ids(Constraints(together=("enc/*",)), chain())
    assert ids is not None
    assert ids[1] == ids[2]
    assert len(np.unique(ids)) == 3


def test_clashing_demands_are_named() -> None:
    clash = Constraints(pins=(Pin("enc/a", ("core0",)),), forbid=(Pin("enc/*", ("core0",)),))
    with pytest.raises(InfeasibleError, match=r"pin enc/a=core0 and forbid enc/\*=core0 leave"):
        allowed_mask(clash, chain(), two())


@pytest.mark.parametrize("seed", range(30))
def test_globs_match_as_they_would_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def text(letters: str, most: int) -> str:
        return "".join(rng.choice(list(letters), int(rng.integers(0, most))))

    names = list(dict.fromkeys(text("ab./[]", 6) for _ in range(40)))
    scopes = [text("ab.", 4) for _ in names]
    graph = make_graph("g", names, ["X"] * len(names), [], [], scope=scopes)
    found = Names(graph)
    for glob in {text("ab.*?[]!", 6) for _ in range(60)} | {names[0], "*a*", "*.b", "a*b"}:
        wanted = [
            op for op, (name, scope) in enumerate(zip(names, scopes, strict=True))
            if fnmatch.fnmatchcase(name, glob) or (scope and fnmatch.fnmatchcase(scope, glob))
        ]  # fmt: skip
        if wanted:
            assert found.matching(glob).tolist() == wanted
        else:
            with pytest.raises(ValueError, match="no op or scope"):
                found.matching(glob)


@pytest.mark.parametrize(
    ("form", "count"),
    [("layer{}/op", 1_000), ("layer{}/*", 1_000), ("*er{}/op", 1_000), ("*er{}/*", 200)],
)
def test_a_thousand_demands_take_seconds_and_no_minute(form: str, count: int) -> None:
    """Of 20,000 ops; names times demands took 20 s. The clash says no other demand than its own."""
    names = [f"layer{i}/op" for i in range(20_000)]
    graph = make_graph("g", names, ["X"] * len(names), [], [])
    globs = [form.format(i) for i in range(count)]
    pins = tuple(Pin(glob, ("core1",)) for glob in globs)
    began_s = time.process_time()
    allowed = allowed_mask(Constraints(pins=pins), graph, two())
    ids = together_ids(Constraints(together=tuple(globs)), graph)
    assert time.process_time() - began_s < 5.0
    assert allowed[:count].tolist() == [[False, True]] * count
    assert allowed[10_000:].all()
    assert ids is not None
    assert len(np.unique(ids)) == len(names)
    clash = Constraints(pins=pins, forbid=(Pin("layer7/op", ("core1",)),))
    with pytest.raises(
        InfeasibleError, match=r"^pin \S*7/\S*=core1 and forbid layer7/op=core1 leave"
    ):
        allowed_mask(clash, graph, two())


def test_a_glob_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no op or scope .* matches 'attention/\*'"):
        allowed_mask(Constraints(pins=(Pin("attention/*", ("core0",)),)), chain(), two())


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(ValueError, match="names device 'gpu9'"):
        allowed_mask(Constraints(pins=(Pin("*", ("gpu9",)),)), chain(), two())


@pytest.mark.parametrize("text", ["x", "=core0", "a="])
def test_a_malformed_pin_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="must look like GLOB=DEVICE"):
        parse_pin(text)


def test_a_constraints_file_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('together = ["enc/*"]\n[[pin]]\nmatch = "dec"\ndevices = ["core1"]\n')
    assert read_constraints(path) == Constraints((Pin("dec", ("core1",)),), (), ("enc/*",))
    path.write_text('[[pin]]\nmatch = "dec"\ndevice = "core1"\n')
    with pytest.raises(ValueError, match="unknown field `device`"):
        read_constraints(path)


def test_replicas_are_forbidden_by_any_source(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("replicas = false\n")
    forbids = read_constraints(tmp_path / "c.toml")
    assert Constraints().replicas
    assert not forbids.replicas
    assert not merge([forbids, Constraints()]).replicas
