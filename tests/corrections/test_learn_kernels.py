"""Measured kernels of a user's own card: read strictly, fitted, remembered, used by `place`."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import gdp
from gdp.api.measured.kernels import learn_kernels
from gdp.base.errors import ArgumentError
from gdp.cluster.presets import device_preset
from gdp.corrections.run import MeasurementFileError
from gdp.costs.default import resolve_costs
from gdp.costs.measured import own
from gdp.costs.measured.kernels import descriptor_of, floor_s
from gdp.costs.measured.network import VECTOR, shipped_network

Run = Callable[..., tuple[int, str, str]]
HEADER = "kind,b,m,n,k,dtype,seconds"
CARD = "rtx4090"
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all that is remembered."""
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def rows(factor: float, dtype: str = "float16", card: str = CARD) -> list[own.KernelRow]:
    """Products, attention and norms that take so many times the network's seconds on a card."""
    shapes = [
        *(("product", 1, m, n, k) for m in (1, 64, 2048) for n, k in
          ((4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096), (2048, 2048))),
        *(("token attention", 256, 1, context, 128) for context in (512, 1024, 4096)),
        *(("normalisation", 1, 2048, width, 1) for width in (4096, 8192)),
        ("prompt attention", 32, 2048, 2048, 128), ("batched product", 32, 1024, 1024, 128),
    ]  # fmt: skip
    names = ("kind", "b", "m", "n", "k")
    told = [dict(zip(names, shape, strict=True)) for shape in shapes]
    asked = [msgspec.convert(x | {"dtype": dtype, "seconds": 1.0}, own.KernelRow) for x in told]
    network, _ = shipped_network() or pytest.fail("no kernel network ships")
    kernels, silicon = own.kernels_of(asked), descriptor_of(device_preset(card))
    zeros = np.zeros(len(asked), dtype=np.int64)
    seconds = np.exp(network.log_seconds(kernels, [silicon], np.zeros((1, VECTOR)), zeros))
    return [
        msgspec.structs.replace(row, seconds=float(factor * s))
        for row, s in zip(asked, seconds, strict=True)
    ]


def write(path: Path, kernels: list[own.KernelRow]) -> Path:
    lines = [HEADER]
    for row in kernels:
        lines.append(",".join([row.kind, *(f"{x:g}" for x in (row.b, row.m, row.n, row.k)),
                               row.dtype, f"{row.seconds:.6g}"]))  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return path


def test_work_and_bytes_of_each_class_by_hand() -> None:
    made = own.kernels_of([
        own.KernelRow("product", 1, 2, 8, 4, "float16", 1.0),
        own.KernelRow("product", 1, 2, 8, 4, "float8", 1.0),
        own.KernelRow("batched product", 3, 2, 8, 4, "float32", 1.0),
        own.KernelRow("prompt attention", 2, 6, 3, 4, "bfloat16", 1.0),
        own.KernelRow("token attention", 2, 4, 10, 8, "float16", 1.0),
        own.KernelRow("softmax", 1, 2, 5, 1, "float32", 1.0),
        own.KernelRow("elementwise", 1, 2, 5, 2, "float16", 1.0),
    ])  # fmt: skip
    # Of a prompt of 3 tokens, two query heads for each of two key heads: pairs 1 + 2 + 3 a head.
    assert made.flop.tolist() == [128, 128, 384, 4 * 2 * 2 * 6 * 4, 4 * 2 * 4 * 10 * 8, 50, 10]
    assert made.held_bytes.tolist() == [64, 32, 0, 2 * 2 * 3 * 4 * 2, 2 * 2 * 10 * 8 * 2, 0, 0]
    assert made.moved_bytes.tolist() == [
        2 * 2 * (4 + 8), 2 * (4 + 16), 4 * 3 * (8 + 32 + 16), 4 * 2 * 6 * 4, 4 * 2 * 4 * 8,
        2 * 2 * 5 * 4, 3 * 2 * 5 * 2,
    ]  # fmt: skip


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_a_card_that_is_slower_is_learned(factor: float) -> None:
    """Unseen layers are predicted to a few percent where they were 33% and 67% off; no kernel is
    faster than its roofline."""
    network, _ = shipped_network() or pytest.fail("no kernel network ships")
    silicon, measured = descriptor_of(device_preset(CARD)), rows(factor)
    kernels, seconds = own.kernels_of(measured), np.array([row.seconds for row in measured])
    before, after = own.held_out_error(network, kernels, silicon, seconds)
    assert before == pytest.approx(1 - 1 / factor, abs=1e-3)
    assert after < 0.35 * before
    vector = own.fit_vector(network, kernels, silicon, seconds)[None]
    logs = network.log_seconds(kernels, [silicon], vector, np.zeros(len(kernels), dtype=np.int64))
    assert np.abs(np.exp(logs) / seconds - 1).mean() < 0.15
    peaks = np.array(silicon.flop_per_s)[kernels.arithmetic]
    least = floor_s(kernels, peaks, np.full(len(kernels), silicon.bytes_per_s))
    assert (np.exp(logs) >= least * (1 - 1e-12)).all()


def test_place_uses_what_is_learned_of_a_card(run: Run, tmp_path: Path, data: Path) -> None:
    pytest.importorskip("transformers")
    model = f"hf:{ROOT / 'examples' / 'llama-7b'}"
    machine = f"cpu+{CARD}"

    def step_s(costs: str | None = None) -> float:
        asked = f"{model}?prompt=64&new=8"
        return gdp.place(asked, machine, target="vllm", costs=costs).of_request().token_s

    before_s, file = step_s(), write(tmp_path / "kernels.csv", rows(3.0))
    code, out, _ = run("learn", file, "--cluster", machine, "--no-keep")
    assert code == 0
    assert out.startswith("predictions of these 22 kernels of rtx4090 were 67% off; ")
    assert not data.exists()
    assert run("learn", file, "--cluster", machine)[0] == 0
    assert step_s() > 1.3 * before_s
    assert step_s(costs="shipped") == pytest.approx(before_s)
    label = resolve_costs(None, gdp.Cluster.load(machine))[1]
    assert "rtx4090: learned from 22 measured kernels of your own" in label
    cards = json.loads(run("learn", "--list", "--json")[1])["cards"]
    assert [(card["card"], card["kernels"]) for card in cards] == [(CARD, 22)]
    # Read again, a shape counts once; the file is exchanged.
    assert run("learn", file, "--cluster", machine, "--json")[0] == 0
    exported = tmp_path / "all.json"
    assert run("learn", "--export", exported)[1] == f"22 measured kernels written to {exported}\n"
    assert run("learn", "--forget", CARD)[1] == "forgot 22 measured kernels\n"
    assert step_s() == pytest.approx(before_s)
    assert run("learn", "--import", exported)[0] == 0
    assert len(own.remembered()[CARD].kernels) == 22
    assert run("learn", "--forget", "all")[1] == "forgot 22 measured kernels\n"
    assert not own.remembered()


def test_a_card_of_a_family_that_nobody_measured_gets_costs_of_its_own(tmp_path: Path) -> None:
    machine = gdp.Cluster.load("cpu+rx7900xtx")
    assert "roofline" in resolve_costs(None, machine)[1]
    learn_kernels([write(tmp_path / "k.csv", rows(1.5, card="rx7900xtx"))], machine)
    label = resolve_costs(None, machine)[1]
    assert "rx7900xtx: learned from 22 measured kernels of your own" in label


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("product,1,64,4096,4096,float16,1e-6", "product in 1.000 us cannot be, as 33.0"),
        ("product,1,8192,8192,8192,float16,1e-3", "1.1e+03 GFLOP at 165 TFLOP/s take 6.6"),
        ("product,1,64,4096,4096,float17,1e-3", "float17"),
        ("produce,1,64,4096,4096,float16,1e-3", "produce"),
        ("product,0,64,4096,4096,float16,1e-3", ">= 1"),
        ("product,1,64,4096,4096,float16,nan", "seconds"),
        ("product,1,64,4096,4096,float16,-1", "seconds"),
        ("product,1,64,4096,4096,float16,5000", "seconds"),
        ("product,1,64,4096,4096,float16,", "seconds"),
        ("prompt attention,32,100,2048,128,float16,1", "m = n x query heads"),
        ("product,1,64,4096,4096,float16", "cut short"),
    ],
)
def test_a_row_that_cannot_be_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "k.csv", rows(1.5))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(MeasurementFileError) as caught:
        learn_kernels([path], f"cpu+{CARD}")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not own.remembered()


def test_other_columns_few_rows_and_other_machines_are_refused(run: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "k.csv", rows(1.5))
    for machine, reason in (("cpu", "no accelerator"), ("cpu+rtx4090+h100", "rtx4090, h100")):
        with pytest.raises(ArgumentError, match=reason):
            learn_kernels([path], machine)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5]) + "\n")
    with pytest.raises(MeasurementFileError, match="has 4 kernels; measure 10 or more"):
        learn_kernels([path], f"cpu+{CARD}")
    path.write_text("\n".join([lines[0] + ",note", *(line + ",x" for line in lines[1:])]))
    with pytest.raises(MeasurementFileError, match="columns must be kind,b,m,n,k,dtype,seconds"):
        learn_kernels([path], f"cpu+{CARD}")
    code, _, err = run("learn", path, "--cluster", f"cpu+{CARD}", "--plan", "p.json")
    assert code == 2
    assert "kernels of a card need --cluster" in err


def test_a_damaged_file_costs_knowledge_and_no_answer(tmp_path: Path, data: Path) -> None:
    learn_kernels([write(tmp_path / "k.csv", rows(1.5))], f"cpu+{CARD}")
    (data / "kernels" / f"{CARD}.json").write_text("{")
    assert own.remembered() == {}
    assert "other accelerators" in resolve_costs(None, gdp.Cluster.load(f"cpu+{CARD}"))[1]
