"""Predictions beside public measurements: which rows are read, and what is asked for them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import gdp
from benchmarks.measured_world.box import layouts, tokens_per_s
from benchmarks.measured_world.box import told as box_told
from benchmarks.measured_world.per_device import choices, told_per_device
from benchmarks.measured_world.servers import (
    TensorRtScheduler,
    asked_of,
    cache_bits,
    collectives_of,
    host_of,
    set_up,
)
from benchmarks.measured_world.serving import (
    as_measured,
    errors,
    layouts_in_order,
    machine,
    room,
    spec_of,
    told,
)
from benchmarks.measured_world.serving_runs import Predicted, Run, measured_runs
from benchmarks.measured_world.traffic import arrivals
from benchmarks.measured_world.traffic import told as traffic_told
from gdp.cluster.types import Device, make_cluster
from gdp.costs.measured.collectives import collective_s
from gdp.costs.measured.host import HOSTS
from gdp.graph.op_graph import INPUT, OUTPUT, GraphBuilder
from gdp.question.models import load
from gdp.sim.scheduling import Scheduler
from gdp.sim.serving import ServingEngine, serve
from gdp.sim.traffic import Arrival, Traffic
from gdp.targets.sglang.scheduler import SglangScheduler
from gdp.targets.table import PLANNERS
from gdp.targets.vllm.scheduler import VllmScheduler

COLUMNS = (
    "id,backend,model_path,system,precision,mode,isl,osl,batch_size,tp_size,pp_size,"
    "attention_dp_size,moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms,"
    "silicon_data_source"
)
SPLIT = "id,split,mode,judged,suspect"


def _row(name: str, tensors: int = 1, experts: str = "1", token: str = "10") -> str:
    return f"{name},vllm,o/m,h100_sxm,fp8,agg,64,8,4.0,{tensors}.0,1.0,,{experts},0.0,50,{token},x"


def _run(token_s: float) -> Run:
    return Run("r", "o/m", "h100_sxm", "vllm", "fp8", 64, 8, 4, 0.05, token_s)


def test_rows_that_are_held_back_doubtful_or_of_several_gpus_are_not_read(tmp_path: Path) -> None:
    split = {
        "mine": "develop,agg,True,", "again": "develop,agg,True,", "held": "held,agg,True,",
        "unjudged": "develop,agg,False,", "odd": "develop,agg,True,slow",
        "two": "develop,agg,True,", "spread": "develop,agg,True,", "parts": "develop,disagg,True,",
    }  # fmt: skip
    rows = tmp_path / "split.csv"
    rows.write_text("\n".join([SPLIT, *(f"{name},{rest}" for name, rest in split.items())]) + "\n")
    (tmp_path / "systems").mkdir()
    # What is held back is no number here: it would fail if it were read.
    held = [_row(name, token="secret") for name in ("held", "unjudged", "odd", "parts")]
    lines = [
        COLUMNS, _row("mine"), _row("again", token="30"), *held, _row("two", 2),
        _row("spread", experts="4.0"),
    ]  # fmt: skip
    (tmp_path / "systems" / "silicon_sample.csv").write_text("\n".join(lines) + "\n")
    (run,) = measured_runs(tmp_path, rows)
    assert (run.name, run.token_s, run.first_s, run.batch) == ("mine", 0.02, 0.05, 4)
    assert not run.sweep
    assert measured_runs(tmp_path, rows, ["other"]) == []


@pytest.mark.parametrize(
    ("precision", "own", "changes", "options"),
    [
        ("", None, {}, ""), ("bf16", None, {}, ""),
        ("fp8", None, {}, "?quantize=fp8&kv_cache_dtype=fp8"), ("fp8", "fp8", {}, ""),
        ("fp4", "fp8", {}, "?quantize=nvfp4&kv_cache_dtype=fp8"), ("fp4", "mxfp4", {}, ""),
        ("fp8", "fp8", {"model": "o/MiniMax-M2.5"}, ""),
        ("fp8", "fp8", {"model": "o/MiniMax-M2.5", "system": "h200_sxm"}, "?kv_cache_dtype=fp8"),
        ("fp8", None, {"model": "o/Llama"}, "?quantize=fp8"),
    ],
)  # fmt: skip
def test_weights_and_caches_are_stored_by_the_precision(
    precision: str, own: str | None, changes: dict[str, str], options: str, tmp_path: Path
) -> None:
    run = replace(_run(0.01), precision=precision, **changes)
    model = {"model_type": "llama"} | (
        {"quantization_config": {"quant_method": own}} if own else {}
    )
    path = tmp_path / f"{run.model.replace('/', '--')}_config.json"
    path.write_text(json.dumps(model))
    assert spec_of(run, [tmp_path]) == f"{path}{options}"


def test_a_system_is_a_preset_or_the_numbers_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems" / "x1_sxm.yaml").write_text(
        "gpu:\n  mem_bw: 7000000000000 # 7 TB/s\n  mem_capacity: 288400343040\n"
        "  bfloat16_tc_flops: 2250000000000000\n  fp8_tc_flops: 4500000000000000\n"
    )
    assert machine(tmp_path, "h200_sxm", tmp_path).device_names[1:] == ("h200",)
    other = machine(tmp_path, "x1_sxm", tmp_path).devices[1]
    assert (other.bytes_per_s, other.speed("float8")) == (7e12, 4.5e15)
    assert other.total_bytes == 288400343040


def test_room_is_that_of_caches_beside_weights_and_tensors() -> None:
    """By hand: 900 usable bytes less 300 of weights and 100 of tensors hold 25 caches of 20."""
    code = GraphBuilder()
    x = code.make_tensor(code.add_op("x", INPUT), 0)
    op = code.add_op("op", "linear", reads=[x], weight_bytes=300 + 40 * 20, cache_bytes=40 * 20)
    code.add_op("y", OUTPUT, reads=[code.make_tensor(op, 100)])
    gpu = Device("g", "g", {"default": 1e9}, 1e9, 1000 - 100, reserve_bytes=100)
    cluster = make_cluster("c", [Device("cpu", "cpu", {"default": 1e9}, 1e9, 1 << 20), gpu])
    assert room(code.build("m"), cluster, 40) == 25


def test_layouts_of_one_server_are_compared() -> None:
    """2 GPUs take 10 ms, 4 take 6 and 8 take 5; 4 are predicted to be the fastest: 2 of 3 pairs."""
    runs = [replace(_run(s), tensor=t) for s, t in ((0.01, 2), (0.006, 4), (0.005, 8))]
    answers = [Predicted(4, 0.05, s) for s in (0.011, 0.004, 0.0045)]
    told = layouts_in_order(runs, answers)
    assert told.startswith("67% of 3 pairs of layouts in the right order")
    assert "loses 20.0% in the mean of 1 loads" in told


def test_rows_of_several_gpus_divide_every_layer(tmp_path: Path) -> None:
    names = ("alone", "two", "experts", "both", "odd")
    rows = tmp_path / "split.csv"
    rows.write_text("\n".join([SPLIT, *(f"{name},develop,agg,True," for name in names)]) + "\n")
    (tmp_path / "systems").mkdir()
    lines = [COLUMNS, _row("alone"), _row("two", 2), _row("experts", 4).replace(",0.0,", ",4.0,"),
             _row("both", 4, "2").replace(",0.0,", ",2.0,"), _row("odd", 4, "2")]  # fmt: skip
    (tmp_path / "systems" / "silicon_sample.csv").write_text("\n".join(lines) + "\n")
    found = measured_runs(tmp_path, rows, several=True)
    assert [(run.name, run.tensor, run.experts) for run in found] == [
        ("two", 2, False), ("experts", 4, True),
    ]  # fmt: skip
    assert measured_runs(tmp_path, rows, several=None)[0].name == "alone"


def test_errors_and_what_waits_are_told() -> None:
    runs = [_run(0.01), _run(0.01), _run(0.01)]
    answers = [Predicted(4, 0.05, 0.012), Predicted(2, 0.02, 0.008), Predicted(0)]
    pairs = list(zip(runs[:2], answers[:2], strict=True))
    assert errors(pairs, "token_s").startswith("off by 20.0% in the median, 20.0% in the mean")
    assert errors(pairs, "token_s").endswith("1.00")
    lines = list(told(runs, answers))
    assert lines[-1] == "infeasible: 1"
    assert lines[-2] == "1 runs have no room for all requests at once"


def _engine() -> ServingEngine:
    return ServingEngine(0.01, 1e-4, 0.0, 2048, 256, 1e9)


def test_clients_ask_as_the_measuring_programs_do() -> None:
    drawn = asked_of(replace(_run(0.01), prompt=1000, new=100))
    assert (len(drawn.requests), drawn.concurrency, drawn.together) == (40, 4, True)
    assert {r.at_s for r in drawn.requests} == {0.0}
    sizes = [r.prompt for r in drawn.requests]
    assert 800 <= min(sizes) < 840
    assert 960 < max(sizes) <= 1000
    assert 80 <= min(r.new for r in drawn.requests) < max(r.new for r in drawn.requests) <= 100
    equal = asked_of(replace(_run(0.01), prompt=1000, new=100, sweep=True))
    assert {(r.prompt, r.new) for r in equal.requests} == {(1000, 100)}


@pytest.mark.parametrize(
    ("changes", "tokens", "expected"),
    [
        ({"engine": "vllm"}, 8192, VllmScheduler()),
        ({"engine": "vllm", "sweep": True, "prompt": 4096}, 6108,
         VllmScheduler(async_scheduling=False)),
        ({"engine": "sglang", "sweep": True}, 8192, SglangScheduler(request_s=0.02)),
        ({"engine": "sglang", "system": "h200_sxm"}, 32768, SglangScheduler(request_s=0.02)),
        ({"engine": "sglang", "system": "b200_sxm", "batch": 16, "tensor": 8}, 32768,
         SglangScheduler(request_s=0.02, admission_interval=30)),
        ({"engine": "trtllm"}, 8192, TensorRtScheduler(request_s=0.02)),
        ({"engine": "trtllm", "model": "o/Llama", "prompt": 1024, "new": 1024}, 16384,
         TensorRtScheduler(request_s=0.02, wait_iterations=20, wait_tokens=14746)),
        ({"engine": "trtllm", "sweep": True, "prompt": 1024}, 3040,
         TensorRtScheduler(request_s=0.02)),
    ],
)  # fmt: skip
def test_servers_are_set_up_as_their_scripts_say(
    changes: dict[str, object], tokens: int, expected: Scheduler
) -> None:
    engine = set_up(_engine(), replace(_run(0.01), **changes))
    assert engine.tokens_at_once == tokens
    assert engine.scheduler == expected


@pytest.mark.parametrize(
    ("changes", "bits", "collectives"),
    [
        ({}, None, ("vllm", "vllm")),
        ({"model": "o/Llama"}, 16, ("vllm", "vllm")),
        ({"model": "o/Llama", "system": "b200_sxm"}, None, ("vllm", "trtllm")),
        ({"model": "o/Llama", "engine": "trtllm"}, None, ("trtllm", "trtllm")),
        ({"model": "o/MiniMax", "system": "b300_sxm"}, 8, ("vllm", "vllm")),
        ({"model": "o/DeepSeek-V3", "engine": "sglang"}, None, ("sglang", "sglang")),
        ({"model": "o/DeepSeek-V3", "engine": "trtllm"}, 8, ("trtllm", "trtllm")),
        ({"model": "o/MiniMax", "system": "b200_sxm"}, 8, ("vllm", "vllm")),
    ],
)  # fmt: skip
def test_caches_and_collectives_are_those_of_the_server(
    changes: dict[str, object], bits: int | None, collectives: tuple[str, str]
) -> None:
    run = replace(_run(0.01), **changes)
    assert (cache_bits(run), collectives_of(run)) == (bits, collectives)
    assert run.question[-1] == bits  # on one GPU there are no collectives
    assert replace(run, tensor=2).question[-2:] == collectives


@pytest.mark.slow
def test_collectives_of_a_server_take_the_place_of_those_of_vllm(tmp_path: Path) -> None:
    """Of one layer with two all-reduces, and one behind the embedding; the logits are gathered."""
    pytest.importorskip("transformers")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 256, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    cluster = machine(tmp_path, "h200_sxm", tmp_path, 8)
    run = replace(_run(0.01), tensor=8, batch=64)
    request = gdp.Generation(str(tmp_path), prompt=run.prompt, new=run.new, batch=run.batch)
    graph = load(PLANNERS["vllm"].model(request, cluster))
    assert as_measured(_engine(), graph, cluster, run, 64) == _engine()
    theirs = as_measured(_engine(), graph, cluster, replace(run, engine="trtllm"), 64)
    gpus = range(1, 9)

    def longer_s(operation: str, size: int) -> float:
        both = [collective_s(cluster, gpus, operation, size, name) for name in ("trtllm", "vllm")]
        return float(both[0] - both[1])

    step_s = 3 * longer_s("all_reduce", 64 * 4096 * 2) + longer_s("all_gather", 64 * 256 * 2)
    assert step_s > 1e-5  # TensorRT-LLM's take 24 us on eight GPUs where vLLM's take 15
    step_s += HOSTS["trtllm"].seconds(64, 64 * 256) - HOSTS["vllm"].seconds(64, 64 * 256)
    assert theirs.step_s - _engine().step_s == pytest.approx(step_s, rel=1e-6)
    whole = 3 * longer_s("all_reduce", 64 * 64 * 4096 * 2)
    whole += longer_s("all_gather", 64 * 256 * 2)
    assert theirs.token_s - _engine().token_s == pytest.approx(whole / 64 / 64, rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({}, "vllm"), ({"sweep": True}, "vllm-sync"), ({"engine": "sglang"}, "sglang"),
        ({"engine": "trtllm"}, "trtllm"), ({"engine": "trtllm", "sweep": True}, "trtllm-1.0"),
    ],
)  # fmt: skip
def test_steps_are_those_of_the_engine_that_was_measured(
    changes: dict[str, object], host: str
) -> None:
    assert host_of(replace(_run(0.01), **changes)) == host
    assert host in HOSTS


def test_passes_that_are_replayed_as_graphs_wait_for_no_launches() -> None:
    engine, run = _engine()._replace(launch_s=0.03), replace(_run(0.01), system="b300_sxm")
    short = replace(run, model="o/MiniMax", prompt=1024)
    assert set_up(engine, short).launch_s == 0.0
    assert set_up(engine, replace(short, prompt=8192)).launch_s == 0.03
    assert set_up(engine, run).launch_s == 0.03
    many = replace(run, engine="trtllm", model="o/DeepSeek-V3", system="b200_sxm", batch=64)
    assert set_up(engine, many).launch_s == 0.0
    assert set_up(engine, replace(many, new=8192)).launch_s == 0.03
    assert set_up(engine, replace(many, batch=32)).launch_s == 0.03


def test_the_best_value_per_device_under_a_limit_is_counted_by_hand() -> None:
    """Requests of 11 tokens, a first token after 0.1 s: 1, 2, 4, 8 at once take 10, 20, 30, 40 ms a
    token, so 55, 73, 110 and 176 tokens/s. The limit is 25 ms, which two rows keep."""
    runs = [
        replace(_run(s), batch=b, new=11, first_s=0.1)
        for b, s in ((1, 0.01), (2, 0.02), (4, 0.03), (8, 0.04))
    ]
    right = [Predicted(r.batch, r.first_s, r.token_s) for r in runs]
    (best,) = choices(runs, right)
    assert best.limit_s == pytest.approx(0.025)
    assert (best.broken, best.loss, best.regret, best.most_gpus_loss) == (False, 0.0, 0.0, 1.0)
    slow = [replace(a, token_s=1.3 * a.token_s) for a in right]
    (careful,) = choices(runs, slow)
    assert careful.loss == pytest.approx(1 - 55 / 73.33, abs=1e-3)
    fast = [replace(a, token_s=0.8 * a.token_s) for a in right]
    (broken,) = choices(runs, fast)
    assert (broken.broken, broken.loss) == (True, 1.0)
    lines = list(told_per_device(runs, slow))
    assert lines[-1].startswith("vllm: 1 loads; with the limit 0.0% break it, loss 25.0%; most")
    assert not list(choices(runs[:3], right[:3]))


def test_layouts_of_a_box_are_compared_under_one_load(tmp_path: Path) -> None:
    """Rows of another engine, with stages, of one layout alone, or without lengths do not count.
    Two copies, of one client each, write twice the tokens of one."""
    columns = (
        "run,engine,model,quantisation,tp,pp,replicas,metric,concurrency,prompt_tokens,"
        "output_tokens,context_reserved,power_limit_w,tokens_per_s"
    )
    model = "vllm,Qwen3.6-27B,fp8-static"
    rows = [
        columns, f"a,{model},2,1,1,m,2.0,64.0,8.0,1,220,50",
        f"b,{model},4,1,1,m,2.0,64.0,8.0,1,220,30", f"c,{model},2,1,2,m,2.0,64.0,8.0,1,220,80",
        f"d,{model},2,1,2,m,2.0,64.0,8.0,1,220,90", f"e,{model},2,2,1,m,2.0,64.0,8.0,1,220,99",
        f"f,{model},2,1,1,m,4.0,64.0,8.0,1,220,99", f"g,{model},2,1,1,m,2.0,,8.0,1,220,99",
        "h,llama.cpp,Qwen3.6-27B,gguf-q6_k,2,1,1,m,2.0,64.0,8.0,1,220,99",
    ]  # fmt: skip
    path = tmp_path / "box.csv"
    path.write_text("\n".join(rows) + "\n")
    found = layouts(path)
    assert [(one.name, one.tokens_per_s) for one in found] == [
        ("tensor 2", 50), ("tensor 4", 30), ("2 x tensor 2", 85),
    ]  # fmt: skip
    engine = ServingEngine(0.01, 1e-5, 0.0, 2048, 256, 1e9)
    one, _, copies = found
    alone = tokens_per_s(replace(one, clients=1), engine)
    assert tokens_per_s(copies, engine) == pytest.approx(2 * alone)
    lines = list(box_told(found, {found[0]: 3.0, found[1]: 2.0, found[2]: 1.0}))
    assert lines[1].endswith("2 x tensor 2: 85, 1 | 41.2% |")
    assert lines[-1].startswith("more: 1 loads; 33% of 3 pairs in the right order; the first loses")
    assert not layouts(path, ["bf16"])


def test_requests_of_real_runs_are_read_and_told_beside_the_measurement(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(
        "run,arrival_s,input_tokens,output_tokens\na/m,0.5,10,3\na/m,0.0,20,4\nb/n,1,2,3\n"
    )
    runs = arrivals(path)
    assert sorted(runs["a/m"]) == [Arrival(0.0, 20, 4), Arrival(0.5, 10, 3)]
    engine = ServingEngine(0.01, 0.001, 0.0, 64, 8, 1e9)
    served = serve(Traffic(tuple(sorted(runs["a/m"]))), engine)
    measured = {
        "model": "m", "device": "a (b)", "output_tokens_per_s": "14", "duration_s": "0.54",
        "tpot_mean_ms": "20", "tpot_median_ms": "10", "ttft_mean_ms": "15", "ttft_median_ms": "15",
    }  # fmt: skip
    lines = list(traffic_told(measured, served))
    assert lines[2] == "| m | a | ms per token, mean | 10.0 | 20.0 | -50% |"
    assert lines[4] == "| m | a | first token ms, mean | 15.0 | 15.0 | +0% |"
