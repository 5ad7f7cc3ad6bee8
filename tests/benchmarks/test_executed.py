"""The table of models x runtimes: what a row says."""

from benchmarks.executed import HEADER, RUNTIMES, text


def row(**changed: object) -> dict[str, object]:
    return {
        "model": "bert", "runtime": "PyTorch", "executed": "throughput: 2 pieces", "equal": True,
        "apart": 3e-6, "predicted_s": 0.012, "measured_s": 0.010, "interval_s": [0.009, 0.011],
        "one_core_s": 0.02, **changed,
    }  # fmt: skip


def test_a_row_has_a_cell_for_every_heading() -> None:
    cells = [cell.strip() for cell in text(row()).strip("|").split("|")]
    assert cells == ["bert", "PyTorch", "throughput: 2 pieces", "yes, 3e-06", "12.00",
                     "10.00 (9.00 to 11.00)", "+20%", "20.00"]  # fmt: skip
    assert len(cells) == len(HEADER.splitlines()[0].strip("|").split("|"))


def test_what_is_not_predicted_has_no_error_and_unequal_outputs_shout() -> None:
    cells = [c.strip() for c in text(row(predicted_s=None, equal=False)).strip("|").split("|")]
    assert cells[3:7] == ["NO, 3e-06", "-", "10.00 (9.00 to 11.00)", "-"]
    assert set(RUNTIMES) == {"ONNX Runtime", "JAX", "PyTorch", "pipelining", "accelerate"}
