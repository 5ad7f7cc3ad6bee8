"""Broken cost folders, checkpoints and labels: one line that names file and field."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from refusals import CLUSTER, Run, changed, refused

from gdp.base.errors import GdpError
from gdp.base.files.reading import data_path
from gdp.learn.labels import load_labels
from gdp.policy.policy import WIDE, KeptPlacement, default_checkpoint, pack, unpack


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
        ({"types": ["Conv"]}, "layer_embed has shape (8, 148, 12), (8, 50, 12) wanted"),
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
        (lambda a: a.pop("other_mean"), "array 'other_mean' is missing"),
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


def test_damaged_weights_are_told(checkpoint: Path) -> None:
    from gdp.policy.policy import load_policy

    weights = checkpoint / "weights.npz"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    with pytest.raises(GdpError, match=r"weights\.npz is not a file of weights: Bad CRC-32"):
        load_policy(checkpoint)


def test_a_packed_row_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdp.policy import policy

    row = np.arange(1000)
    assert unpack(pack(row, WIDE), WIDE).tolist() == row.tolist()
    monkeypatch.setattr(policy, "MAX_PACKED_BYTES", 3999)
    with pytest.raises(ValueError, match="it is cut off, or too long"):
        unpack(pack(row, WIDE), WIDE)
    with pytest.raises(msgspec.ValidationError, match="is no packed placement"):
        msgspec.convert({"digest": "x", "device": "eJw="}, KeptPlacement)


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
