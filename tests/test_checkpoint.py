"""Checkpoints: whole or not there, checked, and for the right network."""

from pathlib import Path

import numpy as np
import pytest

from gdp.base import checkpoint
from gdp.base.files import writing
from gdp.base.files.writing import TargetError

TREE = {"a": {"kernel": np.arange(6.0).reshape(2, 3)}, "b": [np.ones(2), np.zeros((), np.int64)]}


def test_round_trip_with_recipe_and_meta(tmp_path: Path) -> None:
    digest = checkpoint.save(tmp_path / "ck", TREE, recipe='name = "x"', meta={"step": 7})
    found = checkpoint.load(tmp_path / "ck", TREE)
    np.testing.assert_array_equal(found["a"]["kernel"], TREE["a"]["kernel"])
    np.testing.assert_array_equal(found["b"][0], TREE["b"][0])
    assert (tmp_path / "ck" / "recipe.toml").read_text() == 'name = "x"'
    meta = checkpoint.read_meta(tmp_path / "ck")
    assert (meta["step"], meta["sha256"]) == (7, digest)


def test_saving_again_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "ck", TREE, meta={"step": 1})
    checkpoint.save(tmp_path / "ck", TREE, meta={"step": 2})
    assert checkpoint.read_meta(tmp_path / "ck")["step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]


def test_a_crash_while_weights_are_written_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "ck", TREE, meta={"step": 1})

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "replace_folder", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path / "ck", TREE, meta={"step": 2})
    assert checkpoint.read_meta(tmp_path / "ck")["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    model, folder = tmp_path / "model.onnx", tmp_path / "work"
    model.write_bytes(b"weights")
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(TargetError, match="is a file; give a folder"):
        checkpoint.save(model, TREE, force=True)
    with pytest.raises(TargetError, match="files that gdp did not write"):
        checkpoint.save(folder, TREE)
    checkpoint.save(folder, TREE, force=True)
    assert (folder / "thesis.txt").read_text() == "years of work"
    assert model.read_bytes() == b"weights"
    checkpoint.save(folder, TREE, meta={"step": 2})
    with pytest.raises(TargetError, match="another thing than the costs: state"):
        checkpoint.save(folder, TREE, kind="costs")
    (folder / "recipe.toml").write_text("mine = 1")
    with pytest.raises(TargetError, match=r"'recipe.toml' was changed since gdp wrote it"):
        checkpoint.save(folder, TREE)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint at"):
        checkpoint.load(tmp_path / "none", TREE)
    checkpoint.save(tmp_path / "ck", TREE)
    other = {"a": {"kernel": np.zeros((2, 4))}, "b": TREE["b"]}
    with pytest.raises(checkpoint.CheckpointError, match=r"another network: a/kernel is \(2, 3\)"):
        checkpoint.load(tmp_path / "ck", other)
    meta = (tmp_path / "ck" / "meta.json").read_text()
    digest = checkpoint.read_meta(tmp_path / "ck")["sha256"]
    (tmp_path / "ck" / "meta.json").write_text(meta.replace(digest, "0" * 64))
    with pytest.raises(checkpoint.CheckpointError, match="is damaged"):
        checkpoint.load(tmp_path / "ck", TREE)
