"""Readers of result files: every form is recognised, gives the loads that were put in, and is
refused in a sentence where it is damaged."""

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.corrections.run import Load, MeasuredRun, MeasurementFileError
from gdp.targets.measured_files import read_runs, readers
from tests.targets.measured.result_files import (
    EXAMPLES,
    LOADGEN,
    Example,
    Keys,
    aiperf,
    answer,
    batched,
    bench_row,
    guide_0_2,
    one_batch_server,
    own_run,
    sglang_serving,
    vllm_offline,
    vllm_serve,
)

NUMBERS = (
    "prompt", "new", "concurrency", "rate", "requests", "context", "ttft_s", "ttft_median_s",
    "tpot_s", "tpot_median_s", "tokens_per_s", "seconds",
)  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """A function that writes a file whose name tells nothing, and returns its path."""

    def written(content: str | bytes) -> Path:
        path = tmp_path / "out"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


def same(found: list[MeasuredRun], expected: list[MeasuredRun]) -> None:
    """Assert that runs agree in all but rounding."""
    assert len(found) == len(expected)
    for run, wanted in zip(found, expected, strict=True):
        assert len(run.loads) == len(wanted.loads)
        for name in run.__dataclass_fields__.keys() - {"loads"}:
            assert getattr(run, name) == getattr(wanted, name), name
        for load, other in zip(run.loads, wanted.loads, strict=True):
            assert load.together is other.together
            for name in NUMBERS:
                value, number = getattr(load, name), getattr(other, name)
                assert value == (number if number is None else pytest.approx(number)), name


def refused(path: Path) -> str:
    """The refusal of a file: one sentence that names it."""
    with pytest.raises(MeasurementFileError) as caught:
        read_runs(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def read_or_refused(path: Path) -> list[MeasuredRun]:
    """The runs of a file, none where it is refused."""
    with contextlib.suppress(MeasurementFileError):
        return read_runs(path)
    return []


def set_at(record: Any, keys: Keys, value: Any) -> Any:
    """A copy of a record with another value at a path; a function makes it of the old one."""
    copied = copy.deepcopy(record)
    place = copied
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value(place[keys[-1]]) if callable(value) else value
    return copied


def without(record: Any, keys: Keys) -> Any:
    """A copy of a record without the value at a path."""
    copied = copy.deepcopy(record)
    place = copied
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    return copied


def numbers_of(value: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Paths of all numbers in a record."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_of(inner, (*keys, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from numbers_of(inner, (*keys, i))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield keys


def each(*names: str) -> Any:
    """Parameters: every example with every path of these of its fields."""
    return pytest.mark.parametrize(
        ("example", "keys"),
        [
            pytest.param(example, keys, id=f"{example.name}: {'.'.join(map(str, keys))}")
            for example in EXAMPLES
            for name in names
            for keys in getattr(example, name)
        ],
    )


every = pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)


@every
def test_loads_are_those_of_the_file(example: Example, write: Any) -> None:
    same(read_runs(write(example.text())), example.runs)


@every
def test_one_reader_knows_it(example: Example) -> None:
    known = [r.title for r in readers() if all(r.knows(record) for record in example.records)]
    assert known == [example.title]


def test_every_reader_has_an_example() -> None:
    titles = {example.title for example in EXAMPLES}
    refuses_all = {"vllm bench latency and throughput --output-json"}
    assert {reader.title for reader in readers()} - titles == refuses_all


@every
def test_files_that_are_cut_short_say_so(example: Example, write: Any) -> None:
    whole = example.text().rstrip("\n")
    ends = {len(whole) * i // 7 for i in range(1, 7)} | {len(whole) - 1, len(whole) - 2}
    if example.form in ("jsonl", "csv"):  # whose first lines are a file, too
        last = whole.rfind("\n") + 1
        ends = {end for end in ends if end > last} | {last + 3}
    for end in sorted(ends):
        assert "cut short" in refused(write(whole[:end])), whole[:end][-40:]


def damaged(example: Example, keys: Keys, value: Any) -> str:
    """The file with another value at a path of its first record."""
    return example.text([set_at(example.records[0], keys, value), *example.records[1:]])


@each("numbers", "times")
@pytest.mark.parametrize(
    "value",
    [math.nan, "fast", -3.0, -math.inf, [1.0], {"a": 1}, 1e300, 10**30],
    ids=["nan", "text", "negative", "-inf", "list", "object", "huge", "long"],
)
def test_numbers_that_cannot_be_are_refused(
    example: Example, keys: Keys, value: Any, write: Any
) -> None:
    refused(write(damaged(example, keys, value)))


@each("times")
def test_times_of_another_unit_are_refused(example: Example, keys: Keys, write: Any) -> None:
    refused(write(damaged(example, keys, lambda old: float(old) * 1e9)))


@each("needed")
def test_keys_that_are_missing_are_refused(example: Example, keys: Keys, write: Any) -> None:
    records = [without(example.records[0], keys), *example.records[1:]]
    refused(write(example.text(records)))


@every
def test_no_other_damage_ends_in_another_exception(example: Example, write: Any) -> None:
    """Each number of the file replaced, read or not: the same loads, others, or a refusal."""
    numbers = [*numbers_of(example.records[0])]
    for keys in numbers[:: 1 + len(numbers) // 40]:
        for value in (math.nan, "1", -1, None, True, [], 10**400):
            for run in read_or_refused(write(damaged(example, keys, value))):
                assert all(math.isfinite(load.prompt + load.new) for load in run.loads)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        (b"\x7fELF\x02\x01\x01\x00\xff\xfe\x80", "no text"),
        (b"\x1f\x8b\x08\x00broken", "damaged gzip"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ("{'a': 1}", "not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ("[]", "no records"),
        ("[1, 2]", "no records"),
        ('{"a": 1}\n[2]\n', "no records"),
        ('{"a": 1}\n{"b" 2}\n{"c": 3}\n', "line 2 is not JSON"),
        ("model | size\n--- | ---\n", "neither JSON nor a table"),
        ("build_commit,n_prompt\n", "neither JSON nor a table"),
        ('build_commit,n_prompt\n"a"\n', "row 2 has 1 of 2 columns"),
        ('{"hello": 1}', "of no form that gdp knows"),
        ("[" + "{}," * 100_000 + "{}]", "more than 100000"),
        ("[" + "1," * (1 << 24) + "1]", "too much"),
    ],
)  # fmt: skip
def test_other_files_are_refused(content: str | bytes, told: str, write: Any) -> None:
    assert told in refused(write(content))


def test_tools_are_listed_where_nothing_fits(write: Any) -> None:
    text = refused(write('{"hello": 1}'))
    assert "hello" in text
    assert all(reader.title in text for reader in readers())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no result file" in refused(tmp_path / "none.json")
    assert "Is a directory" in refused(tmp_path)


def test_records_of_two_tools_are_not_one_file(write: Any) -> None:
    lines = [json.dumps(sglang_serving()), json.dumps(vllm_serve())]
    assert "mixes records" in refused(write("\n".join(lines)))


def test_files_of_a_windows_shell_are_read(write: Any) -> None:
    example = next(e for e in EXAMPLES if e.name == "llama-bench array")
    for encoding in ("utf-16", "utf-8-sig"):
        same(read_runs(write(example.text().encode(encoding))), example.runs)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (vllm_serve(completed=90, failed=10), "10 of 100 requests failed"),
        (vllm_serve(completed=90, failed=0), "10 of 100 requests failed"),
        (vllm_serve(errors=["", "timeout"] * 50), "50 of 150 requests failed"),
        (vllm_serve(completed=0), "no request was served"),
        (vllm_serve(total_output_tokens=40_000), "output tokens per second are 335"),
        (vllm_serve(ramp_up_strategy="linear"), "rate that rises"),
        (vllm_serve(request_rate=0), "teach nothing"),
        (vllm_serve(mean_ttft_ms=9e4), "90 s cannot be a part of a run of 60 s"),
        (vllm_serve(mean_ttft_ms=0.0), "first token cannot be 0"),
        (vllm_serve(mean_tpot_ms=0.00002), "seconds of a token cannot be 2e-08"),
        (vllm_serve(max_concurrency=2, mean_tpot_ms=20.0), "cannot be: at most 100"),
        ({"avg_latency": 1.0, "latencies": [1.0], "percentiles": {}}, ".pytorch.json beside it"),
        ({"elapsed_time": 1.0, "num_requests": 2, "total_num_tokens": 9, "requests_per_second": 2.0,
          "tokens_per_second": 9.0}, ".pytorch.json beside it"),
        ({k: v for k, v in vllm_serve().items() if "output" not in k}, "benchmark of vectors"),
        (vllm_offline("latency", [], {}), "seconds of its runs are missing"),
        (vllm_offline("memory", [1.0], {}), "no times of vllm"),
        (sglang_serving(num_prompts=70), "6 of 70 requests failed"),
        (sglang_serving(errors=["x"] * 8), "8 of 72 requests failed"),
        (sglang_serving(request_rate="trace"), "teach nothing"),
        (one_batch_server() | {"cache_hit_rate": 0.4}, "40% of the prompts"),
        (bench_row(0, 0, 1.0), "no tokens"),
        (bench_row(512, 0, 0.1, avg_ns=5 * 10**8), "nanoseconds of a run are 5e+08"),
        (batched(1, 0.1, 1.0) | {"t": 5.0}, "seconds of the run are 5"),
        (answer(predicted_n=0, prompt_n=0), "no tokens"),
        ({"benchmarks": []}, "no benchmark"),
        ({"benchmarks": [guide_0_2({"type_": "concurrent", "streams": 4}, errored=9)]},
         "9 of 69 requests failed"),
        ({"benchmarks": [guide_0_2({"type_": "incremental"})]}, "'incremental' teach nothing"),
        (aiperf(LOADGEN, error_request_count={"unit": "requests", "avg": 4.0}),
         "4 of 44 requests failed"),
        (aiperf(LOADGEN, was_cancelled=True), "interrupted"),
        (aiperf({"endpoint": {}}), "neither requests in flight nor one rate"),
        (aiperf({"phases": [{"kind": "profiling", "type": "fixed_schedule", "concurrency": 4}]}),
         "neither requests in flight nor one rate"),
        (aiperf({"phases": [{"kind": "profiling"}, {"kind": "profiling"}]}), "2 phases"),
        (aiperf(LOADGEN, time_to_first_token={"unit": "furlong", "avg": 1.0}), "'furlong'"),
        (own_run(generation=None), "gdp tune learns"),
    ],
)  # fmt: skip
def test_what_teaches_nothing_is_refused(record: dict[str, Any], told: str, write: Any) -> None:
    assert told in refused(write(json.dumps(record)))


def test_a_few_failures_are_a_note(write: Any) -> None:
    (run,) = read_runs(write(json.dumps(vllm_serve(num_prompts=101, failed=1))))
    assert run.notes == ("1 of 101 requests failed",)


def load_of(path: Path) -> tuple[Load, tuple[str, ...]]:
    """The one load of a file, and its notes."""
    (run,) = read_runs(path)
    (load,) = run.loads
    return load, run.notes


@pytest.mark.parametrize(
    ("rate", "most", "concurrency", "arrivals", "told"),
    [
        ("inf", None, 0, math.inf, ""),
        ("inf", 8, 8, 0.0, ""),
        ("inf", 100, 0, math.inf, ""),  # all of them at once: none waits for another
        (1.6, None, 0, 1.6, ""),
        (1.6, 8, 0, 1.6, "7.2 of at most 8 requests"),  # 1.6 times 0.5 + 200 times 0.02 s
        (1.8, 8, 8, 0.0, "8.1 in flight"),
        (50.0, 8, 8, 0.0, "that limit binds"),
    ],
)
def test_rate_or_concurrency_whichever_binds(
    rate: float | str, most: int | None, concurrency: int, arrivals: float, told: str, write: Any
) -> None:
    record = vllm_serve(request_rate=rate, max_concurrency=most)
    load, notes = load_of(write(json.dumps(record)))
    assert (load.concurrency, load.rate) == (concurrency, arrivals)
    assert told in " ".join(notes)


def test_drafts_and_odd_arrivals_are_noted(write: Any) -> None:
    record = vllm_serve(spec_decode_acceptance_length=2.5, burstiness=0.5)
    _, notes = load_of(write(json.dumps(record)))
    assert any("made 2.5 tokens" in note for note in notes)
    assert any("burstiness of 0.5" in note for note in notes)
    _, notes = load_of(write(json.dumps(answer(draft_n=40, draft_n_accepted=30))))
    assert "75% of its drafted tokens were accepted" in notes


def test_answers_of_one_token_have_no_time_of_a_token(write: Any) -> None:
    """numpy makes 0 of the mean of none."""
    record = vllm_serve(
        total_output_tokens=100, output_throughput=100 / 60, mean_tpot_ms=0.0, median_tpot_ms=0.0
    )
    load, _ = load_of(write(json.dumps(record)))
    assert (load.new, load.tpot_s, load.tpot_median_s) == (1.0, None, None)


@pytest.mark.parametrize(
    ("backend", "engine"),
    [("vllm", "vllm"), ("vllm-chat", "vllm"), ("openai-chat", ""), ("tgi", ""),
     ("sglang", "sglang"), ("llama.cpp", "llamacpp")],
)  # fmt: skip
def test_an_engine_is_named_where_the_file_does(backend: str, engine: str, write: Any) -> None:
    for record in (vllm_serve(backend=backend), vllm_serve(backend="", endpoint_type=backend)):
        (run,) = read_runs(write(json.dumps(record)))
        assert run.engine == engine


def test_rows_of_other_options_are_another_run(write: Any) -> None:
    rows = [bench_row(512, 0, 0.1), bench_row(512, 0, 0.2, n_gpu_layers=10), bench_row(0, 8, 0.4)]
    runs = read_runs(write(json.dumps(rows)))
    assert [len(run.loads) for run in runs] == [2, 1]
    assert dict(runs[1].settings)["--n-gpu-layers"] == "10"


def test_benchmarks_with_failures_are_left_out_of_others(write: Any) -> None:
    report = {"benchmarks": [
        guide_0_2({"type_": "concurrent", "streams": 4}),
        guide_0_2({"type_": "throughput"}, errored=30),
    ]}  # fmt: skip
    (run,) = read_runs(write(json.dumps(report)))
    assert len(run.loads) == 1
    assert "30 of 90 requests failed" in run.notes[0]
    assert run.notes[0].startswith("left out: ")


@pytest.mark.parametrize(
    ("strategy", "concurrency", "rate"),
    [
        ({"type_": "synchronous"}, 1, 0.0),
        ({"type_": "throughput"}, 0, math.inf),
        ({"type_": "throughput", "max_concurrency": 16}, 16, 0.0),
        ({"type_": "constant", "rate": 2.0}, 0, 2.0),
        ({"type_": "constant", "rate": 2.0, "max_concurrency": 3}, 3, 0.0),  # 2 times 1.9 s
        ({"type_": "constant", "rate": 2.0, "max_concurrency": 512}, 0, 2.0),
    ],
)
def test_strategies_of_guidellm(
    strategy: dict[str, Any], concurrency: int, rate: float, write: Any
) -> None:
    one = guide_0_2(strategy)
    one["metrics"]["inter_token_latency_ms"]["successful"] |= {"mean": 8.0, "median": 8.0}
    one["metrics"]["time_to_first_token_ms"]["successful"] |= {"mean": 1500.0, "median": 1500.0}
    load, _ = load_of(write(json.dumps({"benchmarks": [one]})))
    assert (load.concurrency, load.rate) == (concurrency, rate)


def test_units_are_those_that_the_file_names(write: Any) -> None:
    seconds = {"unit": "sec", "avg": 0.15, "p50": 0.14}
    nano = {"unit": "ns", "avg": 25e6, "p50": 24e6}
    record = aiperf(LOADGEN, time_to_first_token=seconds, inter_token_latency=nano)
    load, _ = load_of(write(json.dumps(record)))
    assert load.ttft_s == pytest.approx(0.15)
    assert load.tpot_s == pytest.approx(0.025)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(sorted({str(k) for e in EXAMPLES for k in e.records[0]})), inner, max_size=6
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(value=VALUES)
def test_random_json_is_read_or_refused(value: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "out"
    path.write_text(json.dumps(value))
    read_or_refused(path)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_examples_with_random_values_are_read_or_refused(data: Any, tmp_path_factory: Any) -> None:
    example = data.draw(st.sampled_from([e for e in EXAMPLES if e.form != "csv"]))
    record = example.records[0]
    for _ in range(data.draw(st.integers(1, 3))):
        keys: Keys = ()
        place = record
        while isinstance(place, dict | list) and place and data.draw(st.booleans()) | (not keys):
            names = sorted(place) if isinstance(place, dict) else range(len(place))
            keys = (*keys, data.draw(st.sampled_from(names)))
            place = place[keys[-1]]
        record = set_at(record, keys, data.draw(VALUES)) if keys else record
    path = tmp_path_factory.mktemp("fuzz") / "out"
    path.write_text(example.text([record]))
    read_or_refused(path)


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60))
def test_random_bytes_are_refused(content: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "out"
    path.write_bytes(content)
    with pytest.raises(MeasurementFileError):
        read_runs(path)
