"""`gdp.learn_runs`: a hidden engine's result files correct what is answered about its stack."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import gdp
from gdp.api.measured.learn import Learned, at_load, traffic_of
from gdp.api.traffic.plan import served_on
from gdp.base.errors import ArgumentError
from gdp.corrections import records
from gdp.corrections.passes import Times, scaled, served_times
from gdp.corrections.run import Load, MeasurementFileError
from gdp.costs.base import roofline
from gdp.question.passes import passes_of
from gdp.question.result import Result
from gdp.sim.serving import ServingEngine
from gdp.sim.traffic_text import parse_traffic
from tests.gguf_models import write_gguf
from tests.targets.measured.result_files import bench_row, sglang_serving, vllm_offline, vllm_serve

pytest.importorskip("transformers")
MODEL, CLUSTER = "hf:examples/llama-7b", "cpu+h100"
TRAFFIC = "concurrency=8,prompt=1000,new=200,requests=200"
OTHERS = ("concurrency=32,prompt=300,new=100,requests=300",
          "concurrency=8,prompt=100,new=200,requests=200")  # fmt: skip
PREFILL, DECODE = 0.35, 0.45
"""Hidden log residuals of the engine that is measured."""


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all that is remembered."""
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def planned(traffic: str = TRAFFIC, **parts: Any) -> Result:
    """The plan of the example under traffic."""
    return gdp.place(MODEL, CLUSTER, target="vllm", traffic=traffic, **parts)


@pytest.fixture(scope="module")
def plan() -> Result:
    return planned()


def hidden_times(engine: ServingEngine, traffic: str) -> Times:
    """Times of the slower engine."""
    return served_times(scaled(engine, PREFILL, DECODE), parse_traffic(traffic))


def times_of(result: Result) -> tuple[float, float]:
    """TTFT and TPOT of an answer."""
    assert result.traffic is not None
    served = result.traffic.served
    return served.first_token.mean_s, served.token.mean_s


def serve_file(path: Path, times: Times, **changed: Any) -> Path:
    """A result file of `vllm bench serve` of 200 requests of 1000 + 200 tokens, 8 at once."""
    seconds = 200 / 8 * (times.ttft_s + 199 * times.tpot_s)
    own = vllm_serve(
        model_id="made/up-llama-7b", num_prompts=200, completed=200, max_concurrency=8,
        total_input_tokens=200_000, total_output_tokens=40_000, duration=seconds,
        output_throughput=40_000 / seconds, mean_ttft_ms=1e3 * times.ttft_s,
        median_ttft_ms=1e3 * times.ttft_s, mean_tpot_ms=1e3 * times.tpot_s,
        median_tpot_ms=1e3 * times.tpot_s,
    )  # fmt: skip
    path.write_text(json.dumps(own | changed))
    return path


@pytest.fixture
def measured(plan: Result, tmp_path: Path) -> Path:
    """The file of the slower engine."""
    assert plan.traffic is not None
    times = hidden_times(plan.traffic.engine, f"{TRAFFIC},start=together")
    return serve_file(tmp_path / "serve.json", times)


def test_a_run_corrects_the_same_load_and_others(plan: Result, measured: Path) -> None:
    """Nearly all that the engine takes longer is found, for this load and for others."""
    before = {text: served_on(plan, text) for text in (TRAFFIC, *OTHERS)}
    hidden = {text: hidden_times(own.engine, text) for text, own in before.items()}
    found = gdp.learn_runs([measured], plan=plan.placement)
    assert found.known == 1
    assert found.off < 0.3 * found.off_before
    assert found.words[0].startswith("prefill passes take 1.4")
    for text, own in before.items():
        after = planned(text)
        plain_s, after_s = own.served.token.mean_s, times_of(after)[1]
        assert abs(after_s / hidden[text].tpot_s - 1) < 0.07
        assert abs(plain_s / hidden[text].tpot_s - 1) > 0.3
        assert abs(math.log(times_of(after)[0] / hidden[text].ttft_s)) < 0.25
        assert after.of_request().correction is not None
        assert after.traffic is not None
        low, high = after.traffic.intervals["token_s"]
        assert low < hidden[text].tpot_s < high
        quick, slow = own.intervals["token_s"]
        assert high / low < 0.8 * slow / quick


def test_no_interval_reaches_below_bytes_over_bandwidth() -> None:
    """Without a run intervals are wide; a card cannot read its weights and caches any faster."""
    request = gdp.Generation(MODEL, prompt=256, new=64)
    found = gdp.place(request, "cpu+rtx3090", target="vllm").generation
    assert found is not None
    low_s, high_s = found.intervals["token_s"]
    held = sum(row.weights_bytes for row in found.memory)
    assert 0.95 * held / 936.2e9 <= low_s <= found.token_s < high_s
    assert found.correction is not None
    assert low_s > found.token_s / found.correction.far


def test_without_keeping_it_nothing_is_remembered(plan: Result, measured: Path, data: Path) -> None:
    found = gdp.learn_runs([measured], plan=plan.placement, keep=False)
    assert found.folder is None
    assert not data.exists()
    assert times_of(planned()) == times_of(plan)
    kept = gdp.learn_runs([measured], plan=plan.placement)
    assert (kept.words, kept.off, kept.known) == (found.words, found.off, 1)
    assert gdp.learn_runs([measured], plan=plan.placement).known == 1  # read twice


def test_answers_are_as_before_once_runs_are_forgotten(plan: Result, measured: Path) -> None:
    gdp.learn_runs([measured], plan=plan.placement)
    assert times_of(planned()) != times_of(plan)
    assert records.forget() == 1
    assert times_of(planned()) == times_of(plan)


def test_a_model_and_a_cluster_say_what_ran_as_well_as_a_plan(plan: Result, measured: Path) -> None:
    by_plan = gdp.learn_runs([measured], plan=plan.placement, keep=False)
    found = gdp.learn_runs([measured], model=MODEL, cluster=CLUSTER, target="vllm", keep=False)
    assert found.words == by_plan.words
    assert found.stack == by_plan.stack
    with pytest.raises(ArgumentError, match="say what ran: --plan"):
        gdp.learn_runs([measured], model=MODEL)


def test_what_is_kept_says_nothing_of_the_user(
    plan: Result, measured: Path, tmp_path: Path
) -> None:
    gdp.learn_runs([measured], plan=plan.placement)
    text = records.exported(list(records.remembered().values())).decode()
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    assert "/" not in json.loads(text)["runs"][0]["model"]
    assert Path.cwd().name not in text
    (run,) = records.remembered().values()
    assert (run.model, run.tool, run.prompt, run.new) == (
        "llama-7b", "vllm bench serve", 1000.0, 200.0
    )  # fmt: skip


def test_costs_of_ones_own_are_never_corrected(plan: Result, measured: Path) -> None:
    before = planned(costs="datasheet")
    assert before.of_request().correction is None
    assert before.of_request().intervals == {}
    gdp.learn_runs([measured], plan=plan.placement)
    assert times_of(planned(costs="datasheet")) == times_of(before)
    with pytest.raises(ArgumentError, match="leave --costs out"):
        gdp.learn_runs([measured], plan=before.placement)


def test_a_cost_model_that_has_no_hash_is_one_of_ones_own() -> None:
    class Costs:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, graph: gdp.OpGraph, cluster: gdp.Cluster) -> Any:
            return roofline(graph, cluster)

    answer = gdp.place(f"{MODEL}?prompt=16&new=4", CLUSTER, target="vllm", costs=Costs())
    assert answer.of_request().correction is None


def _refusal(path: Path, plan: Result) -> str:
    with pytest.raises((MeasurementFileError, ArgumentError)) as refused:
        gdp.learn_runs([path], plan=plan.placement)
    assert records.remembered() == {}
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_files_of_another_model_engine_or_machine_are_refused(
    plan: Result, measured: Path, tmp_path: Path
) -> None:
    times, path = Times(0.2, 0.015), tmp_path / "other.json"
    assert "other.json is of made/up-70b, and the plan is of" in _refusal(
        serve_file(path, times, model_id="made/up-70b"), plan
    )
    path.write_text(json.dumps([bench_row(512, 0, 0.5)]))
    assert "is of llamacpp, and the plan is for vllm; give the plan that ran" in _refusal(
        path, plan
    )
    assert "1.500 ms for a token is less than" in _refusal(
        serve_file(path, Times(0.2, 0.0015)), plan
    )
    # The prompt of 1000 tokens takes 13 TFLOP.
    fast = _refusal(serve_file(path, Times(0.005, 0.015)), plan)
    assert "5.000 ms to the first token is less than" in fast
    assert "--no-enable-prefix-caching" in fast
    path.write_text(json.dumps(sglang_serving()))
    with pytest.raises(MeasurementFileError, match="files are of sglang and vllm"):
        gdp.learn_runs([measured, path], plan=plan.placement)


def test_a_run_that_tells_no_time_of_a_pass_teaches_nothing(plan: Result, tmp_path: Path) -> None:
    """It must not count as a run, which makes intervals narrower."""
    record = vllm_offline("tokens_per_second", [2000.0], {
        "elapsed_time": 160.0, "num_requests": 500, "total_num_tokens": 320_000,
    })  # fmt: skip
    path = tmp_path / "throughput.pytorch.json"
    path.write_text(json.dumps([record]))
    with pytest.raises(MeasurementFileError, match="measure TTFT and TPOT"):
        gdp.learn_runs([path], plan=plan.placement)
    assert records.remembered() == {}


def test_requests_that_all_come_at_once_teach_as_a_batch(plan: Result, tmp_path: Path) -> None:
    """A file of `vllm bench latency`: 16 requests of 512 + 128 tokens, as whole seconds."""
    load = Load(512, 128, concurrency=0, rate=math.inf, requests=16)
    assert plan.traffic is not None
    engine = served_on(plan, "concurrency=16,prompt=512,new=128,requests=64").engine
    times = served_times(scaled(engine, PREFILL, DECODE), traffic_of(load))
    seconds = times.ttft_s + 127 * times.tpot_s
    path = tmp_path / "latency.pytorch.json"
    path.write_text(json.dumps([vllm_offline("latency", [seconds], {})]))
    found = gdp.learn_runs([path], plan=plan.placement, keep=False)
    (lesson,) = [x for x in found.runs[0].passes if not x.asked.prefill]
    correction = plan.of_request().correction
    assert correction is not None
    wanted = DECODE + math.log(correction.decode.factor)
    assert lesson.residual == pytest.approx(wanted, abs=0.12)
    assert found.runs[0].measured["tpot_s"] == pytest.approx(seconds / 127, rel=0.01)


@pytest.mark.parametrize("rate", [2.0, "inf"])
def test_requests_at_a_rate_are_learned_from(
    rate: float | str, plan: Result, tmp_path: Path
) -> None:
    """Also without an end of the rate, which is the default of the benchmark."""
    times = Times(0.5, 0.02)
    path = serve_file(tmp_path / "r.json", times, max_concurrency=None, request_rate=rate)
    found = gdp.learn_runs([path], plan=plan.placement, keep=False)
    assert found.runs[0].measured == {"ttft_s": 0.5, "tpot_s": 0.02}
    assert found.runs[0].concurrency == 0
    sequences = {x.asked.sequences for x in found.runs[0].passes}
    assert sequences == {9 if rate == 2.0 else 50}  # caches of more have no room


def test_runs_of_sglang_correct_its_answers_and_not_those_of_vllm(
    plan: Result, measured: Path, tmp_path: Path
) -> None:
    own = planned(costs="sglang")
    vllm = json.loads(measured.read_text())
    record = sglang_serving() | {
        k: v for k, v in vllm.items() if k in sglang_serving() and k != "backend"
    }
    record["server_info"]["model_path"] = "made/up-llama-7b"
    path = tmp_path / "sglang.jsonl"
    path.write_text(json.dumps(record) + "\n")
    found = gdp.learn_runs([path], plan=plan.placement)
    assert found.stack.engine == "sglang"
    assert times_of(planned()) == times_of(plan)
    after = planned(costs="sglang").of_request().correction
    assert after is not None
    assert after.runs == 1
    assert times_of(planned(costs="sglang")) != times_of(own)


def test_every_time_of_a_corrected_answer_moves_along(plan: Result, measured: Path) -> None:
    at, _, plain = at_load(
        plan.question, plan.placement, Load(1000, 200, concurrency=8, ttft_s=1.0)
    )
    assert plain.correction is None
    gdp.learn_runs([measured], plan=plan.placement)
    answer = gdp.place(
        f"{MODEL}?prompt=1000&new=200&batch=8&context=4096", CLUSTER, target="vllm"
    ).of_request()
    found = answer.correction
    assert found is not None
    steps = answer.request.steps
    assert answer.first_token_s == pytest.approx(plain.first_token_s * found.prefill.factor)
    assert answer.token_s == pytest.approx(plain.token_s * found.decode.factor)
    assert answer.request_s == pytest.approx(
        answer.first_token_s + steps * answer.token_s, rel=0.01
    )
    assert answer.caches_s == pytest.approx(plain.caches_s * found.decode.factor)
    assert 0 < answer.caches_s <= answer.token_s
    assert answer.tokens_per_s == pytest.approx(8 * 200 / steps / answer.token_s)
    assert answer.all_tokens_per_s == pytest.approx(8 * 200 / answer.request_s, rel=0.01)
    assert answer.full_tokens_per_s is not None
    assert answer.full_tokens_per_s < answer.tokens_per_s
    for name, (low, high) in answer.intervals.items():
        assert low < getattr(answer, name) < high
    written = json.loads(json.dumps(answer.to_json()))
    assert written["correction"]["text"] == "1 measured run of this stack"
    assert written["intervals"].keys() == {"first_token_s", "token_s", "tokens_per_s"}
    assert passes_of(at, plain, plan.placement)[0].tokens <= 8192  # of one pass of vLLM


def test_a_corrected_engine_is_a_scaled_one_in_all_parts(plan: Result, measured: Path) -> None:
    """Launches of prompts, too: learning took them as a part of prefill."""
    gdp.learn_runs([measured], plan=plan.placement)
    before, after = plan.traffic, planned().traffic
    assert before is not None
    assert after is not None
    old, new = before.generation.correction, after.generation.correction
    assert old is not None
    assert new is not None
    prefill = math.log(new.prefill.factor / old.prefill.factor)
    decode = math.log(new.decode.factor / old.decode.factor)
    wanted = scaled(before.engine, prefill, decode)
    for name in ("step_s", "token_s", "context_s", "launch_s"):
        assert getattr(after.engine, name) == pytest.approx(getattr(wanted, name), rel=1e-6), name
    assert before.engine.launch_s > 0


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "up.gguf", context=8192)


def bench_file(path: Path, gguf: Path, factor: float, cluster: str = "cpu") -> Path:
    """llama-bench of a prompt, of answers with and without depth, and of both at once."""
    rows, size = [], gguf.stat().st_size
    for prompt, new, depth in ((512, 0, 0), (0, 128, 0), (0, 128, 4096), (512, 128, 0)):
        spec = f"{gguf}?prompt={max(prompt + depth, 1)}&new={max(new, 1)}"
        answer = gdp.place(spec, cluster).of_request()
        prompt_s = answer.first_token_s if prompt else 0.0
        seconds = factor * (prompt_s + new * answer.token_s)
        rows.append(bench_row(prompt, new, seconds, n_depth=depth) | {"model_size": size})
    path.write_text(json.dumps(rows))
    return path


def test_llama_bench_teaches_both_phases(gguf: Path, tmp_path: Path) -> None:
    """A small model: its seconds are above those of the datasheet, however much slower it runs."""
    spec = f"{gguf}?prompt=512&new=128"
    before = gdp.place(spec, "cpu")
    assert before.of_request().correction is not None
    path = bench_file(tmp_path / "bench.json", gguf, 1.6)
    found: Learned = gdp.learn_runs([path], plan=before.placement)
    assert found.stack.engine == "llamacpp"
    assert len(found.runs) == 4
    for run in found.runs:
        for one in run.passes:
            # Of both at once it is not told which took longer.
            if one.shown > 0.5:
                assert one.residual == pytest.approx(math.log(1.6), abs=0.08)
    after = gdp.place(spec, "cpu").of_request()
    assert after.correction is not None
    assert (after.correction.runs, after.correction.far) == (4, 0.0)
    assert after.token_s / before.of_request().token_s == pytest.approx(1.6, rel=0.1)
    low, high = after.intervals["token_s"]
    assert low < 1.6 * before.of_request().token_s < high


def test_files_of_another_gguf_are_refused_by_their_bytes(gguf: Path, tmp_path: Path) -> None:
    plan = gdp.place(f"{gguf}?prompt=512&new=128", "cpu")
    path = tmp_path / "bench.json"
    path.write_text(json.dumps([bench_row(512, 0, 0.5) | {"model_size": 4_000_000_000}]))
    assert "of weights, and the plan's model has" in _refusal(path, plan)
