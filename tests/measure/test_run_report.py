"""What `gdp run` says in the end."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from bursts import Busy
from tiny import plain_graph, unit_cluster

from gdp.cli.text import run_text
from gdp.measure.measuring import Measuring
from gdp.measure.plan import replicas_s, too_large_alone, uncut_s
from gdp.measure.report import (
    PLACED,
    Row,
    RunReport,
    SegmentTime,
    advice,
    measured_fields,
    rescaled,
    verdict,
    with_prediction,
    without_rivals,
)
from gdp.measure.statistics import estimate
from gdp.placement.placement import Assignment
from gdp.problem.problem import make_problem
from gdp.sim.prediction import Prediction


def row(rate: float, half: float, latency_s: float = 0.1, *, is_capped: bool = False) -> Row:
    """A contender of so many samples/s, give or take a half width."""
    interval = (latency_s * (1 - half / rate), latency_s * (1 + half / rate))
    return Row(latency_s, interval, float(rate), (rate - half, rate + half), 500, is_capped, 8)


def fields(placed: Row, baselines: dict[str, Row], objective: str = "throughput") -> dict:
    return measured_fields(objective, (0.1, 0.05), placed, baselines, Measuring())  # type: ignore[arg-type]


def plain(found: dict) -> dict:
    """The fields as `gdp run` prints them."""
    rows = {name: asdict(entry) for name, entry in found["baselines"].items()}
    return found | {"baselines": rows}


def test_the_fastest_is_told_beyond_the_intervals() -> None:
    """26 +- 0.2 against 20 +- 0.2: 30% faster, 25.8 / 20.2 = 27.7% beyond."""
    found = verdict("throughput", {"single_device": row(12, 0.1), "replicas": row(20, 0.2),
                                   PLACED: row(26, 0.2)})  # fmt: skip
    assert (found.fastest, found.runner_up, found.prefer) == (PLACED, "replicas", PLACED)
    assert found.advantage == pytest.approx(0.3)
    assert found.beyond_interval == pytest.approx(25.8 / 20.2 - 1)
    assert found.significant


def test_where_intervals_meet_the_simplest_is_preferred() -> None:
    found = verdict("throughput", {"single_device": row(12, 0.1), "runtime_default": row(19.8, 0.3),
                                   "replicas": row(19.9, 0.2), PLACED: row(20, 0.2)})  # fmt: skip
    assert found.fastest == PLACED
    assert not found.significant
    assert found.prefer == "runtime_default"


def test_a_wide_interval_behind_the_runner_up_counts_too() -> None:
    found = verdict("throughput", {PLACED: row(20, 0.1), "replicas": row(18, 0.1),
                                   "runtime_default": row(17, 4.0)})  # fmt: skip
    assert not found.significant
    assert found.prefer == ""


def test_noise_that_hides_the_difference_leaves_no_verdict() -> None:
    """What a loaded laptop said: 33.9 samples/s of replicas, 31.5 placed, 23.9 of one device."""
    rows = {"single_device": row(23.9, 4.5), "replicas": row(33.9, 21.3)}
    found = fields(row(31.5, 20.4), rows)
    assert (found["fastest"], found["prefer"], found["significant"]) == ("replicas", "", False)
    assert advice(plain(found)) == (
        "no verdict: too noisy to tell; close other programs or add --measure-seconds"
    )
    assert not [said for said in found["warnings"] if "speed of" in said]


@pytest.mark.parametrize(("half", "prefer"), [(0.49, "single_device"), (0.51, "")])
def test_level_is_told_from_noisy_at_intervals_of_a_twentieth(half: float, prefer: str) -> None:
    """Of 20 and 20.2 samples/s, with intervals of 4.9% and of 5.1%."""
    rows = {PLACED: row(20.2, half), "single_device": row(20, half)}
    assert verdict("throughput", rows).prefer == prefer


def test_noise_far_behind_the_fastest_hides_nothing() -> None:
    rows = {PLACED: row(20, 0.1), "single_device": row(10, 3.0)}
    found = verdict("throughput", rows)
    assert (found.significant, found.prefer) == (True, PLACED)
    assert "run the placement" in advice(plain(fields(rows[PLACED], {"single_device": row(10, 3)})))


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize(("share", "burst_s"), [(0.1, 0.5), (0.3, 0.3), (0.6, 0.3)])
def test_twins_on_a_busy_machine_are_seldom_told_apart(
    objective: str, share: float, burst_s: float
) -> None:
    """Two contenders of equal speed under bursts, 100 times: a wrong verdict at most four times."""
    wrong = 0
    for seed in range(100):
        rows = {}
        for k, name in enumerate((PLACED, "single_device")):
            rate = estimate(Busy(share, burst_s, 2 * seed + k).blocks(10))
            latency_s = (1 / rate.high, 1 / rate.low)
            rows[name] = Row(1 / rate.value, latency_s, rate.value, (rate.low, rate.high), 99,
                             is_capped=True, rounds=10)  # fmt: skip
        wrong += verdict(objective, rows).significant
    assert wrong <= 4


def test_replicas_do_not_compete_for_the_latency_of_one_sample() -> None:
    rows = {"single_device": row(10, 0.1, 0.10), "replicas": row(20, 0.1, 0.05),
            PLACED: row(10, 0.1, 0.08)}  # fmt: skip
    assert verdict("latency", rows).fastest == PLACED
    assert verdict("latency", rows).advantage == pytest.approx(0.25)


def test_one_contender_alone_has_no_runner_up() -> None:
    found = fields(row(20, 0.1), {})
    assert found["runner_up"] == ""
    assert "nothing else was measured" in advice(found)


def test_a_quiet_run_that_meets_its_prediction_warns_of_nothing() -> None:
    assert fields(row(20, 0.1), {"single_device": row(12, 0.1)})["warnings"] == ()


def test_noise_and_shortfalls_are_said_in_words() -> None:
    found = fields(row(10, 0.1), {"single_device": row(12, 0.9, is_capped=True)})
    said = "\n".join(found["warnings"])
    assert "the 95% interval of single" in said
    assert "close other programs or add --measure-seconds" in said
    assert "runs at 0.50 of its predicted speed" in said
    assert "runs at 0.83 of the speed of single device" in said


def test_a_shortfall_that_noise_explains_is_not_remarked_on() -> None:
    """The prediction is 20 samples/s."""
    assert "predicted" not in "".join(fields(row(17, 3.5), {})["warnings"])
    assert "runs at 0.85 of its predicted speed" in "".join(fields(row(17, 2.5), {})["warnings"])


def test_the_text_shows_intervals_and_ends_with_advice() -> None:
    found = fields(row(20, 0.2), {"single_device": row(12, 0.1), "replicas": row(26, 0.2)})
    report = found | {
        "baselines": {name: asdict(entry) for name, entry in found["baselines"].items()},
        "model": "m", "cluster": "c", "outputs_equal": True, "max_abs_diff": 0.0, "note": "",
        "samples_in_flight": 3,
    }  # fmt: skip
    lines = run_text(report).splitlines()
    assert "19.8 to 20.2" in lines[2]
    assert (
        "medians of 8 rounds, measured for at most 10 s in all, 3 samples in flight"
        in "\n".join(lines)
    )
    assert lines[-1] == (
        "fastest: replicas, 26.0 samples/s, 30.0% faster than the placement and 27.7% beyond the "
        "95% intervals: run a copy of the whole model on every device"
    )


def test_a_placement_slower_than_one_device_is_told_so_with_the_way_out() -> None:
    """10 against 20 samples/s: twice as fast; the costs say 19 for one device, 5% off, or 8."""
    right, wrong = (with_prediction(row(20, 0.2), (0.1, 1 / rate)) for rate in (19.9, 8.0))
    said = fields(row(10, 0.2), {"single_device": right})["warnings"]
    (slow,) = [text for text in said if "slower than one device" in text]
    assert "which is 2.00 times as fast" in slow
    assert "gdp place --method single" in slow
    assert "the cut itself costs more" in slow
    said = fields(row(10, 0.2), {"single_device": wrong})["warnings"]
    (slow,) = [text for text in said if "slower than one device" in text]
    assert "the costs are off by 150% even there: measure this machine (gdp profile" in slow
    level = fields(row(19.9, 0.2), {"single_device": right})["warnings"]
    assert not [text for text in level if "slower than one device" in text]


def test_the_prediction_of_a_baseline_stands_beside_its_measurement() -> None:
    single = with_prediction(row(20, 0.2), (0.04, 0.05))
    report = {
        **fields(row(10, 0.2), {"single_device": single, "runtime_default": row(15, 0.2)}),
        "model": "m", "cluster": "c", "samples_in_flight": 1, "outputs_equal": True,
        "max_abs_diff": 0.0, "note": "",
    }  # fmt: skip
    report["baselines"] = {name: asdict(entry) for name, entry in report["baselines"].items()}
    lines = {line.split("  ")[0]: line.split() for line in run_text(report).splitlines()}
    assert lines["single device"][2] == "40.000"
    assert lines["single device"][7] == "20.0"
    assert lines["runtime default"][2] == "-"
    assert lines["placed"][1] == "100.000"


def test_the_whole_model_on_a_device_and_on_all_is_predicted() -> None:
    """a -> b, each 1 s on d0 and 3 s on d1: alone 2 or 6 s, together 1/2 + 1/6 samples a second."""
    problem = make_problem(
        plain_graph(2, [(0, 1)]), unit_cluster(2), np.array([[1.0, 3.0]] * 2), "throughput"
    )
    predict = Prediction(problem, Assignment(np.array([0, 1])))
    assert uncut_s(predict, "throughput", 1) == (6.0, 6.0)
    assert replicas_s(predict, "throughput") == (2.0, pytest.approx(1.5))
    problem.compute_s[1, 1] = np.inf
    assert uncut_s(predict, "throughput", 1) is None
    assert replicas_s(predict, "throughput") == (2.0, 2.0)


def a_report(predicted: float, single: Row, objective: str) -> RunReport:
    """A placement that is predicted to take as long as one device."""
    placed = row(20, 0.2)
    found = measured_fields(
        objective, (predicted, predicted), placed, {"single_device": single}, Measuring(),
        {"single_device": (predicted, predicted)},
    )  # fmt: skip
    rest = {
        "model": "m", "outputs_equal": True, "max_abs_diff": 0.0, "max_relative_diff": 0.0,
        "compared_tensors": 1, "random_weights": False, "samples_in_flight": 2, "cores": (0,),
        "pinned": True, "note": "", "versions": {},
        "segments": (SegmentTime("core0", 1, 1, 1, predicted, 0.1),),
    }  # fmt: skip
    return RunReport(**found, **rest)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_predictions_are_scaled_to_the_uncut_model(objective: str) -> None:
    """One device took 0.1 s and 10 samples/s, predicted were 0.2 s and 5: half of everything."""
    before = a_report(0.2, row(10, 0.1, 0.1), objective)
    after = rescaled(before)
    assert after.predicted_latency_s == pytest.approx(0.1)
    assert after.predicted_throughput_per_s == pytest.approx(10.0)
    single = after.baselines["single_device"]
    assert single.predicted_latency_s == pytest.approx(single.latency_s)
    assert single.predicted_throughput_per_s == pytest.approx(single.throughput_per_s)
    assert after.segments[0].predicted_s == pytest.approx(0.1)
    assert after.measured_latency_s == before.measured_latency_s
    assert any("scaled by 0.50" in text and "gdp tune" in text for text in after.warnings)


def test_right_predictions_and_unpredicted_devices_are_left_alone() -> None:
    right = a_report(0.1, row(10, 0.1, 0.1), "latency")
    assert rescaled(right) is right
    unknown = replace(right, baselines={"single_device": row(10, 0.1, 0.01)})
    assert rescaled(unknown) is unknown


@pytest.mark.parametrize(("room", "fits"), [((7, 7), False), ((7, 8), True), ((6, 5), False)])
def test_a_model_that_no_device_holds_alone_is_said_to_be_so(
    room: tuple[int, int], fits: bool
) -> None:
    """Two weights of four bytes: the device that lacks least is named."""
    graph = plain_graph(2, [(0, 1)], 0, weight_bytes=[4, 4])
    cluster = unit_cluster(2)
    devices = tuple(
        replace(device, memory_bytes=size)
        for device, size in zip(cluster.devices, room, strict=True)
    )
    cluster = replace(cluster, devices=devices)
    problem = make_problem(graph, cluster, np.ones((2, 2)), "latency")
    told = too_large_alone(Prediction(problem, Assignment(np.array([0, 1]))))
    assert (told == "") == fits
    assert fits or f"(8 B of {room[0]} B on {cluster.device_names[0]})" in told


def test_a_placement_without_which_nothing_fits_has_no_rival() -> None:
    """One core is twice as fast, and would be the verdict if it had the memory."""
    before = a_report(0.05, row(40, 0.1), "throughput")
    report = without_rivals(before, "no device alone has memory").to_json()
    assert before.fastest == "single_device"
    assert advice(report).startswith("fastest: the placement, ")
    assert advice(report).endswith("nothing else here fits in memory")
    assert report["warnings"][-1] == "no device alone has memory"
