"""Trials of an engine by result files: `gdp tune --for`, with a simulated engine that gdp's own
order is wrong about."""

import json
import math
import re
import shlex
import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gdp
from gdp.api.measured.settings import (
    END,
    Figures,
    Setting,
    SettingPlan,
    figures_of,
    served_settings,
)
from gdp.api.measured.trial_files import EngineTrial
from gdp.api.measured.trials import Trials, _Asked, next_trial
from gdp.api.traffic.plan import engine_on
from gdp.base.errors import ArgumentError
from gdp.base.files.writing import TargetError
from gdp.cluster.file import load_cluster
from gdp.corrections.run import MeasurementFileError
from gdp.sim.serving import serve
from gdp.sim.traffic import ServedTraffic
from gdp.sim.traffic_text import NO_LIMITS, parse_traffic
from tests.generating_configs import generating_config
from tests.gguf_models import write_gguf

pytest.importorskip("transformers")
CLUSTER = "cpu+2xt4-pcie4"
TRAFFIC = "concurrency=12,prompt=1000,new=16,requests=24"
TOGETHER = parse_traffic(f"{TRAFFIC},start=together")
Program = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(
        json.dumps(generating_config("llama") | {"max_position_embeddings": 2048})
    )
    return f"hf:{folder}"


@pytest.fixture(autouse=True)
def nothing_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDP_DATA_DIR", str(tmp_path / "data"))


class SimulatedEngine:
    """An engine whose steps wait for one host that all copies share, which gdp does not know."""

    def __init__(self, settings: list[SettingPlan], copies_s: float) -> None:
        self.served: dict[Setting, ServedTraffic] = {}
        for row in settings:
            _, engine = engine_on(row.result, None)
            late = copies_s * (row.setting.copies - 1)
            slow = engine._replace(step_s=engine.step_s + late, launch_s=engine.launch_s + late)
            self.served[row.setting] = serve(TOGETHER, slow)

    def figures(self, setting: Setting) -> Figures:
        """The truth."""
        return figures_of(self.served[setting], NO_LIMITS)

    @property
    def best_s(self) -> float:
        """Seconds of a request under the best setting."""
        return min(served.request.mean_s for served in self.served.values())

    def document(self, setting: Setting, factor: float = 1.0) -> dict[str, Any]:
        """A file of `vllm bench serve`."""
        served, count = self.served[setting], len(TOGETHER.requests)
        seconds = served.seconds * factor
        first, token = served.first_token, served.token
        return {
            "backend": "vllm", "model_id": "llama", "num_prompts": count, "completed": count,
            "failed": 0, "duration": seconds, "request_rate": "inf", "max_concurrency": 12,
            "total_input_tokens": count * 1000, "total_output_tokens": count * 16,
            "request_throughput": count / seconds, "output_throughput": count * 16 / seconds,
            "mean_ttft_ms": first.mean_s * 1e3 * factor,
            "median_ttft_ms": first.median_s * 1e3 * factor,
            "p95_ttft_ms": first.p95_s * 1e3 * factor,
            "mean_tpot_ms": token.mean_s * 1e3 * factor,
            "median_tpot_ms": token.median_s * 1e3 * factor,
            "p95_tpot_ms": token.p95_s * 1e3 * factor,
        }  # fmt: skip

    def run(self, trial: EngineTrial, factor: float = 1.0, name: str = "result.json") -> Path:
        """The result file of a trial."""
        path = trial.folder / name
        path.write_text(json.dumps(self.document(trial.record.setting, factor)))
        return path


@pytest.fixture(scope="module")
def settings(config: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SettingPlan]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDP_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        parts = {"cluster": load_cluster(CLUSTER), "target": "vllm"}
        yield served_settings(parts, config, TOGETHER, NO_LIMITS).rows


def pending(step: Trials) -> EngineTrial:
    """The trial that is to be measured."""
    assert step.next is not None
    return step.next


def begun(config: str, folder: Path, **more: Any) -> Trials:
    return next_trial(config, CLUSTER, "vllm", traffic=TRAFFIC, folder=folder, **more)


def tuned(config: str, engine: SimulatedEngine, folder: Path, **more: Any) -> list[Trials]:
    """All steps of the loop."""
    steps: list[Trials] = []
    while not steps or steps[-1].next is not None:
        if steps:
            engine.run(pending(steps[-1]))
        steps.append(begun(config, folder, **more))
        assert len(steps) < 10
    return steps


@pytest.fixture(scope="module")
def first(config: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose first trial is to be measured."""
    folder = tmp_path_factory.mktemp("first") / "tune"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDP_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        begun(config, folder)
    return folder


@pytest.fixture
def folder(first: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(first, tmp_path / "tune"))


class Loop(NamedTuple):
    folder: Path
    steps: list[Trials]
    engine: SimulatedEngine


@pytest.fixture(scope="module")
def loop(
    config: str, first: Path, settings: list[SettingPlan], tmp_path_factory: pytest.TempPathFactory
) -> Loop:
    """A loop up to its end, on an engine that gdp is wrong about by 3 ms a step."""
    engine, base = SimulatedEngine(settings, 3e-3), tmp_path_factory.mktemp("loop")
    folder = Path(shutil.copytree(first, base / "tune"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDP_DATA_DIR", str(base / "data" / "machine"))
        return Loop(folder, tuned(config, engine, folder), engine)


@pytest.mark.slow
@pytest.mark.parametrize("copies_s", [3e-3, 3e-4, 0.0], ids=["much", "little", "right"])
def test_the_loop_ends_with_the_best_setting(
    config: str, loop: Loop, settings: list[SettingPlan], folder: Path, copies_s: float
) -> None:
    """Copies share a host, which gdp does not know: its first trial has two of them. The loop finds
    one copy faster, within 2% of the best of all settings, in at most three trials."""
    engine = SimulatedEngine(settings, copies_s)
    steps = loop.steps if copies_s == 3e-3 else tuned(config, engine, folder)
    last, first = steps[-1], pending(steps[0])
    assert first.record.setting.copies == 2
    is_wrong = engine.figures(first.record.setting).request_s > 1.05 * engine.best_s
    assert is_wrong == (copies_s > 0)
    assert last.best is not None
    assert engine.figures(last.best.record.setting).request_s <= 1.02 * engine.best_s
    assert last.best.record.setting.copies == (2 if copies_s == 0 else 1)
    assert len(last.trials) <= 3
    assert len(last.trials) < len(settings) == 5
    assert last.untried == len(settings) - len(last.trials)
    assert last.expected_gain is not None
    assert last.expected_gain < last.spread == 0.02
    if copies_s:
        assert any("the host adds" in word for word in steps[1].learned)


def test_a_run_narrows_the_interval_of_other_settings(loop: Loop) -> None:
    widths = []
    for trial in loop.steps[-1].trials:
        low, middle, high = trial.record.predicted
        assert low.request_s < middle.request_s < high.request_s
        widths.append(high.request_s / low.request_s)
    assert widths[1] < 0.7 * widths[0]


def test_the_same_call_again_changes_nothing(config: str, folder: Path, tmp_path: Path) -> None:
    """A trial that waits for its result is told again; another folder gets the same one."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    told = begun(config, folder).to_json()
    assert begun(config, folder).to_json() == told
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    other = json.dumps(begun(config, tmp_path / "other").to_json())
    again = json.loads(other.replace(str(tmp_path / "other"), str(folder)))
    assert again["next"].pop("benchmark") != told["next"].pop("benchmark")  # a copied folder's
    assert again == told


def test_an_end_is_told_again_wherever_the_folder_is_moved(
    config: str, loop: Loop, tmp_path: Path
) -> None:
    """What a trial taught is in its folder: another machine's memory of runs answers the same."""
    moved = Path(shutil.copytree(loop.folder, tmp_path / "moved"))
    own = json.dumps(loop.steps[-1].to_json()).replace(str(loop.folder), str(moved))
    for _ in range(2):
        again = json.loads(json.dumps(begun(config, moved).to_json()))
        wanted = json.loads(own)
        for trials in (again["trials"], wanted["trials"]):
            for trial in trials:
                del trial["benchmark"]  # names the folder where it was written
        assert again == wanted


def test_a_result_from_elsewhere_is_copied(
    config: str, settings: list[SettingPlan], folder: Path, tmp_path: Path
) -> None:
    engine, far = SimulatedEngine(settings, 3e-3), tmp_path / "far.json"
    with pytest.raises(ArgumentError, match="no trial yet"):
        begun(config, tmp_path / "new", result=far)
    trial = pending(begun(config, folder))
    far.write_text(json.dumps(engine.document(trial.record.setting)))
    second = begun(config, folder, result=far)
    assert trial.result.read_bytes() == far.read_bytes()
    assert (len(second.trials), pending(second).record.trial) == (1, 2)
    with pytest.raises(MeasurementFileError, match="the result of trial 1 already; give that of t"):
        begun(config, folder, result=far)


def test_repetitions_say_the_spread(config: str, settings: list[SettingPlan], folder: Path) -> None:
    """Two runs of a trial 20% apart: a gain below 13%, their deviation, is none."""
    engine = SimulatedEngine(settings, 0.0)
    trial = pending(begun(config, folder))
    own = engine.figures(trial.record.setting)
    engine.run(trial)
    engine.run(trial, 1 / 1.2, "result-2.json")
    step = begun(config, folder)
    assert step.spread == pytest.approx(math.log(1.2) / math.sqrt(2))
    assert step.trials[0].mean.request_s == pytest.approx(11 / 12 * own.request_s)
    assert step.next is None
    assert step.expected_gain is not None
    assert 0.02 < step.expected_gain < step.spread


def refusals(engine: SimulatedEngine, setting: Setting) -> dict[str, tuple[str, str]]:
    good = engine.document(setting)
    return {
        "cut short": (json.dumps(good)[:-40], "cut short"),
        "being written": ("", "is empty"),
        "other lengths": (
            json.dumps(good | {"total_input_tokens": 24 * 600}),
            "of requests of 600 .* and trial 1 asks for 1000",
        ),
        "other clients": (
            json.dumps(good | {"max_concurrency": 9}), "9 at once, and trial 1 asks .* 12 at once"
        ),
        "failed requests": (json.dumps(good | {"completed": 12}), "12 of 24 requests failed"),
    }  # fmt: skip


def test_bad_results_are_refused_in_a_sentence(
    config: str, settings: list[SettingPlan], folder: Path
) -> None:
    engine = SimulatedEngine(settings, 0.0)
    trial = pending(begun(config, folder))
    for text, message in refusals(engine, trial.record.setting).values():
        trial.result.write_text(text)
        with pytest.raises(MeasurementFileError, match=message) as raised:
            begun(config, folder)
        assert str(trial.result) in str(raised.value)
        assert "\n" not in str(raised.value)
    assert not (folder / "trial-2").exists()


def test_folders_of_other_arguments_and_of_users_are_kept(
    config: str, folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    for more, name in (
        ({"traffic": "concurrency=8,prompt=1000,new=16"}, "traffic"),
        ({"within": "first=1s"}, "limits"), ({"cluster": "cpu+t4"}, "cluster"),
        ({"engine": "sglang"}, "engine and costs"),
    ):  # fmt: skip
        asked = {"model": config, "cluster": CLUSTER, "engine": "vllm", "traffic": TRAFFIC}
        with pytest.raises(ArgumentError, match=f"holds trials of another {name}; give another f"):
            next_trial(**(asked | more), folder=folder)  # pyright: ignore[reportArgumentType]
    (own / "trial-1").mkdir(parents=True)
    notes = own / "trial-1" / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(TargetError, match="files that gdp did not write"):
        begun(config, own)
    begun(config, own, force=True)
    assert notes.read_text() == "mine"
    (folder / "trial-1" / "trial.json").write_text("{}")
    with pytest.raises(MeasurementFileError, match="not a record of a trial"):
        begun(config, folder)


@pytest.mark.parametrize(("more", "message"), [
    ({"engine": "vllm", "traffic": None}, "without --traffic"),
    ({"engine": "vllm", "model": "m.gguf"}, "to an hf: model"),
    ({"engine": "llamacpp"}, "to a .gguf model"),
    ({"engine": "trtllm"}, "no engine 'trtllm' to tune; there are vllm, sglang, llamacpp"),
    ({"traffic": "concurrency=4,prompt=64..128,new=16"}, "requests of one length"),
    ({"costs": "datasheet"}, "leave out --costs"),
    ({"engine": "llamacpp", "model": "m.gguf?prompt=8&new=8&batch=2", "traffic": None},
     "one request at a time"),
])  # fmt: skip
def test_what_no_benchmark_measures_is_refused(
    config: str, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    asked: dict[str, Any] = {
        "model": config, "cluster": CLUSTER, "engine": "vllm", "traffic": TRAFFIC,
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=message):
        next_trial(**(asked | more), folder=tmp_path / "tune")
    assert not (tmp_path / "tune").exists()


def test_copies_that_are_servers_of_their_own_are_left_out(tmp_path: Path) -> None:
    """Copies of a mixture are two servers, of which a benchmark asks one: the next best is taken,
    and a note says why."""
    config = generating_config("mixtral") | {"max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    step = next_trial(
        f"hf:{tmp_path}?max_num_batched_tokens=2048", CLUSTER, "vllm", traffic=TRAFFIC,
        folder=tmp_path / "tune",
    )  # fmt: skip
    assert pending(step).record.setting == Setting(1, 2048)
    (note,) = step.notes
    assert note.startswith("data 2, at most 2,048 tokens a pass: its copies are 2 servers")


@pytest.mark.parametrize(("model", "name"), [
    ("hf:meta/Llama-3.1-8B", "Llama-3.1-8B"), ("hf:models/up/config.json", "up"),
    ("hf:models/up.v2?quantize=fp8", "up.v2"),
])  # fmt: skip
def test_a_folder_is_named_after_its_model(model: str, name: str) -> None:
    assert _Asked.of(model, CLUSTER, "vllm", TRAFFIC, None, {}).name == name


# Expected improvement.


def log_normal(setting: SettingPlan, middle: float, deviation: float, share: float = 0.0) -> Any:
    ends = (math.exp(k * deviation * END) for k in (-1, 0, 1))
    rows = [Figures(0.1, 0.01, middle * end, share * end) for end in ends]
    return setting._replace(predicted=tuple(rows), layout="another")


def test_gain_is_the_expected_improvement(settings: list[SettingPlan]) -> None:
    """Against the closed form of a log-normal X: F(d) - E[X] F(d - s), d = ln(1 / m) / s."""
    cdf = statistics.NormalDist().cdf
    for middle, deviation in ((0.9, 0.1), (1.0, 0.1), (1.2, 0.2), (1.5, 0.5), (0.7, 0.05)):
        d = -math.log(middle) / deviation
        mean = middle * math.exp(deviation**2 / 2)
        exact = cdf(d) - mean * cdf(d - deviation)
        own = log_normal(settings[0], middle, deviation)
        assert own.gain(Figures(0, 0, 1.0), [], 0.02) == pytest.approx(exact, rel=0.02, abs=1e-4)


def test_limits_come_before_seconds(settings: list[SettingPlan]) -> None:
    keeps, exceeds = (log_normal(settings[0], 0.5, 1e-4, share) for share in (0.8, 1.6))
    within, beyond = Figures(0, 0, 1.0, 0.9), Figures(0, 0, 0.1, 2.0)
    assert keeps.gain(within, [], 0.02) == pytest.approx(0.5, abs=1e-3)
    assert exceeds.gain(within, [], 0.02) == 0.0  # twice as fast, but beyond the limits
    assert keeps.gain(beyond, [], 0.02) == pytest.approx(0.5, abs=1e-3)  # of the excess
    assert exceeds.gain(beyond, [], 0.02) == pytest.approx(0.2, abs=1e-3)


def test_measured_settings_with_equal_passes_are_the_better_witness(
    settings: list[SettingPlan],
) -> None:
    """Predicted at 0.8 of a setting that was measured at twice its prediction: 0.8 of that."""
    tried, other = (log_normal(settings[0], middle, 0.3) for middle in (1.0, 0.8))
    seen = Figures(0, 0, 2.0)
    apart = other._replace(layout="a third")
    assert other.gain(seen, [(tried, seen)], 0.02) == pytest.approx(0.2, abs=0.03)
    assert apart.gain(seen, [(tried, seen)], 0.02) > 0.5
    equal = log_normal(settings[0], 1.0, 0.3)
    assert equal.gain(seen, [(tried, seen)], 0.02) < 0.01


def test_limits_hold_for_the_percentiles_of_the_file(
    config: str, settings: list[SettingPlan], tmp_path: Path
) -> None:
    engine = SimulatedEngine(settings, 0.0)
    trial = pending(begun(config, tmp_path, within="first=10ms,token=1s"))
    document = engine.document(trial.record.setting)
    trial.result.write_text(json.dumps(document | {"p95_ttft_ms": 50.0}))
    told = begun(config, tmp_path, within="first=10ms,token=1s").trials[0].mean
    assert told.share == pytest.approx(5.0)
    del document["p95_ttft_ms"], document["p95_tpot_ms"]  # then they are as predicted
    trial.result.write_text(json.dumps(document))
    told = begun(config, tmp_path, within="first=10ms,token=1s").trials[0].mean
    predicted = trial.record.predicted[1]
    late = predicted.first_p95_s / predicted.first_token_s
    assert told.share == pytest.approx(told.first_token_s * late / 10e-3)


# Commands.


def options_of(line: str) -> dict[str, str]:
    words = shlex.split(line)
    return {a: b for a, b in zip(words, [*words[1:], ""], strict=True) if a.startswith("-")}


def test_lines_start_vllm_and_measure_this_traffic(config: str, first: Path) -> None:
    trial = pending(begun(config, first))
    (start,) = trial.record.start
    assert f"vllm serve {config.removeprefix('hf:')} " in start.command
    given = options_of(start.command)
    assert given["--data-parallel-size"] == "2"
    assert given["--max-num-batched-tokens"] == str(trial.record.setting.tokens)
    sent = options_of(trial.record.benchmark)
    assert trial.record.benchmark.startswith("vllm bench serve --backend vllm ")
    assert (sent["--random-input-len"], sent["--random-output-len"]) == ("1000", "16")
    assert (sent["--num-prompts"], sent["--max-concurrency"]) == ("24", "12")
    assert "--ignore-eos" in sent
    assert Path(sent["--result-dir"], sent["--result-filename"]) == trial.result
    placed = gdp.load_placement(trial.folder / "placement.json")
    assert placed.teams == ((1, 2),)


def test_lines_start_sglang_and_measure_a_rate(config: str, tmp_path: Path) -> None:
    step = next_trial(
        config,
        CLUSTER,
        "sglang",
        traffic="rate=2.5,prompt=1000,new=16,requests=40",
        folder=tmp_path,
    )
    record = pending(step).record
    assert "python -m sglang.launch_server --model-path " in record.start[0].command
    given = options_of(record.start[0].command)
    assert given["--chunked-prefill-size"] == str(record.setting.tokens)
    sent = options_of(record.benchmark)
    assert (sent["--request-rate"], sent["--num-prompts"]) == ("2.5", "40")
    assert (sent["--random-range-ratio"], sent["--dataset-name"]) == ("1", "random-ids")
    assert sent["--output-file"] == str(pending(step).result)
    assert "--max-concurrency" not in sent
    middle = record.predicted[1]
    seconds = 40 / 2.5 + middle.request_s
    pending(step).result.write_text(json.dumps({
        "backend": "sglang", "completed": 40, "num_prompts": 40, "duration": seconds,
        "request_rate": 2.5, "total_input_tokens": 40_000, "total_output_tokens": 640,
        "request_throughput": 40 / seconds, "total_output_tokens_retokenized": 640,
        "mean_ttft_ms": 1500 * middle.first_token_s, "mean_tpot_ms": 1500 * middle.token_s,
    }) + "\n")  # fmt: skip
    step = next_trial(
        config, CLUSTER, "sglang", traffic="rate=2.5,prompt=1000,new=16,requests=40",
        folder=tmp_path,
    )  # fmt: skip
    assert step.trials[0].mean.token_s == pytest.approx(1.5 * middle.token_s)
    assert any(word.startswith("decode passes take 1.") for word in step.learned)


def rows_of_bench(prompt: int, new: int, prompt_s: float, token_s: float) -> str:
    rows = []
    for read, written, depth, seconds in (
        (prompt, 0, 0, prompt_s), (0, new, prompt, new * token_s)
    ):  # fmt: skip
        rows.append({
            "build_commit": "abcdef12", "build_number": 6789, "backends": "CUDA",
            "model_filename": "m.gguf", "model_type": "llama ?B Q4_K - Medium", "n_prompt": read,
            "n_gen": written, "n_depth": depth, "avg_ns": seconds * 1e9,
            "samples_ns": [seconds * 1e9],
        })  # fmt: skip
    return "\n".join(map(json.dumps, rows))


def test_llama_bench_measures_a_gguf_model(tmp_path: Path) -> None:
    """Every micro-batch is equally fast where it is run: the first trial is the last one."""
    spec = f"{write_gguf(tmp_path / 'm.gguf')}?prompt=4096&new=64"
    step = next_trial(spec, "cpu+rtx4090", "llamacpp", folder=tmp_path / "tune")
    trial = pending(step)
    assert trial.record.start[0].command.startswith("llama-server --model ")
    prefill, decode = trial.record.benchmark.split(" && ")
    read, written = options_of(prefill), options_of(decode)
    assert (read["-p"], read["-n"], written["-p"], written["-n"]) == ("4096", "0", "0", "64")
    assert (written["-d"], written["-ub"]) == ("4096", options_of(trial.record.start[0].command)
                                               ["--ubatch-size"])  # fmt: skip
    middle = trial.record.predicted[1]
    text = rows_of_bench(4096, 64, 1.5 * middle.first_token_s, 1.5 * middle.token_s)
    trial.result.write_text(text.splitlines()[0])
    with pytest.raises(MeasurementFileError, match="lacks a prompt of 4096 tokens, or 64 tokens"):
        next_trial(spec, "cpu+rtx4090", "llamacpp", folder=tmp_path / "tune")
    trial.result.write_text(text)
    step = next_trial(spec, "cpu+rtx4090", "llamacpp", folder=tmp_path / "tune")
    assert step.trials[0].mean.request_s == pytest.approx(1.5 * middle.request_s)
    assert step.learned


# The command line.


def test_the_command_line_says_it_in_words_and_in_json(
    run: Program, config: str, loop: Loop, folder: Path, tmp_path: Path
) -> None:
    line = ["tune", config, "--cluster", CLUSTER, "--for", "vllm", "--traffic", TRAFFIC, "-o"]
    code, out, _ = run(*line, folder)
    assert code == 0
    assert "next: trial 1, data 2, at most " in out
    assert "\nmeasure  vllm bench serve " in out
    far = tmp_path / "far.json"
    far.write_text(json.dumps(loop.engine.document(loop.steps[-1].trials[0].record.setting)))
    code, out, _ = run(*line, folder, "--result", far)
    assert code == 0
    assert "1 request" in out
    assert "learned: decode passes take" in out
    assert "next: trial 2, one GPU, " in out
    ended = shutil.copytree(loop.folder, tmp_path / "ended")
    code, out, _ = run(*line, ended)
    assert code == 0
    assert re.search(r"answer: trial 2, one GPU, .* a request; none of \d further settings", out)
    code, out, _ = run(*line, ended, "--json")
    told = json.loads(out)
    assert (code, told["finished"], told["next"]) == (0, True, None)
    best = told["trials"][told["best"] - 1]
    assert best["copies"] == 1
    assert best["intervals"]["request_s"][0] < best["predicted"]["request_s"]
    assert best["measured"]["request_s"] == pytest.approx(
        loop.engine.figures(Setting(1, best["tokens"])).request_s
    )


@pytest.mark.parametrize(("more", "message"), [
    (["--for", "vllm", "--runs", "3"], "--runs is for models that gdp runs itself"),
    (["--for", "vllm", "--no-keep"], "--no-keep is for models that gdp runs itself"),
    (["--traffic", TRAFFIC], "--traffic is for an engine"),
    (["--result", "r.json"], "--result is for an engine"),
])  # fmt: skip
def test_options_of_the_other_kind_of_tuning_are_refused(
    run: Program, config: str, more: list[str], message: str
) -> None:
    code, out, err = run("tune", config, "--cluster", CLUSTER, *more)
    assert (code, out) == (2, "")
    assert message in err
