"""Plans under traffic: `gdp.serve` and `gdp place --traffic`."""

import dataclasses
import itertools
import json
import logging
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import gdp
from gdp.api.traffic.plan import served_on
from gdp.api.traffic.serve import is_worth_it, numbers_of_copies
from gdp.cli.main import cli
from gdp.cli.serving_text import compared_lines, serving_lines
from gdp.cli.text import result_text
from gdp.question.result import PrefillGroup, ServedPlan
from gdp.sim.serving import TwoGroups
from gdp.sim.traffic import Arrival, Spread
from gdp.sim.traffic_text import parse_traffic
from tests.generating_configs import generating_config

pytest.importorskip("transformers")
CLUSTER = "cpu+t4"
TEXT = "concurrency=4,prompt=64,new=16,requests=12"
NO_HOST = "trtllm"  # an engine whose steps have no host's part, which hides a model this small
MANY = "concurrency=16,prompt=64,new=16,requests=64"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(generating_config("llama")))
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def plan(config: str) -> ServedPlan:
    return gdp.serve(config, CLUSTER, TEXT)


def test_an_engines_passes_add_up_to_the_plans_seconds(plan: ServedPlan) -> None:
    engine, answer = plan.engine, plan.generation
    request = answer.request
    # Of four clients two wait for the host: a request of the engine takes as long as it.
    assert (request.prompt, request.new, request.batch) == (64, 16, 2)
    context = request.batch * (request.prompt + request.new / 2)
    assert engine.step_s + engine.context_s * context == pytest.approx(answer.token_s)
    assert engine.token_s * request.batch * request.prompt == pytest.approx(answer.first_token_s)
    assert 0 < engine.step_s < answer.token_s
    assert (engine.tokens_at_once, engine.requests_at_once, engine.stages) == (2048, 256, 1)


def test_python_and_the_command_line_answer_the_same(config: str, tmp_path: Path) -> None:
    """`gdp.place(traffic=)` is `gdp place --traffic`: the same figures, files and JSON."""
    result = gdp.place(config, CLUSTER, target="vllm", traffic=TEXT, within="first=1s")
    assert result.traffic is not None
    assert result.traffic.served.requests <= 12
    assert result.traffic.served.first_token.p95_s > 0
    assert result.traffic.room is not None
    path = tmp_path / "p.json"
    args = ["place", config, "--cluster", CLUSTER, "--for", "vllm", "--traffic", TEXT]
    done = CliRunner().invoke(cli, [*args, "--within", "first=1s", "--json", "-o", str(path)])
    assert done.exit_code == 0, done.output
    own, other = json.loads(json.dumps(result.to_json())), json.loads(done.stdout)
    assert set(other) - set(own) == {"start"}
    timed = {"seconds", "phases", "search_cpu_s", "candidates", "curve"}
    for name in own.keys() - timed:
        assert own[name] == other[name], name
    assert (gdp.load_placement(path).device == result.placement.device).all()
    plan = gdp.serve(config, CLUSTER, TEXT, within="first=1s")
    assert plan.traffic_json() == result.traffic.traffic_json()


def test_room_is_that_of_the_memory_that_is_left(plan: ServedPlan) -> None:
    row = next(row for row in plan.generation.memory if row.cache_bytes)
    of_token = row.cache_bytes / (plan.generation.request.batch * (64 + 16))
    assert row.free_bytes is not None
    assert plan.engine.cache_tokens * of_token == pytest.approx(row.cache_bytes + row.free_bytes)


@pytest.fixture(scope="module")
def two(config: str) -> ServedPlan:
    return gdp.serve(config, "cpu+2xt4-pcie4", MANY, costs=NO_HOST)


def test_copies_are_weighed_against_one_model_on_all_gpus(two: ServedPlan) -> None:
    """Of a model as small as this steps wait for launches: two copies serve twice as much."""
    one, copies, _ = two.compared_with
    assert (one.layout, copies.layout) == ("one GPU", "data 2")
    assert (two.layout, two.engine.copies, two.generation.copies) == ("data 2", 2, 2)
    assert two.result.placement.teams == ((1, 2),)
    assert one.request_s is not None
    assert two.served.request.mean_s == copies.request_s
    assert two.served.request.mean_s < one.request_s
    assert two.room == 2 * int(two.engine.cache_tokens / (64 + 16))
    assert any(line.startswith("plan     one GPU: ") for line in compared_lines(two))
    question, traffic = two.result.question, parse_traffic(MANY)
    assert numbers_of_copies(question, traffic) == [2]
    assert numbers_of_copies(question, replace(traffic, concurrency=1)) == []
    alone = replace(question, constraints=gdp.Constraints(replicas=False))
    assert numbers_of_copies(alone, traffic) == []
    unlike = replace(question, cluster=gdp.Cluster.load("cpu+t4+a100"))
    assert numbers_of_copies(unlike, traffic) == []


@pytest.fixture(scope="module")
def limit_us(two: ServedPlan) -> int:
    """Microseconds a token that a GPU for tokens alone keeps, and others do not."""
    *joint, apart = two.compared_with
    assert apart.layout == "prefill on one GPU, decode on one GPU"
    assert apart.token is not None
    least_s = min(row.token.p95_s for row in joint if row.token is not None)
    assert apart.token.p95_s < 0.95 * least_s
    return round(1e6 * (apart.token.p95_s + least_s) / 2)


def test_prompts_share_gpus_where_no_limit_wants_it_otherwise(two: ServedPlan) -> None:
    apart = two.compared_with[-1]
    assert two.prefill is None
    assert apart.request_s is not None
    assert two.served.request.mean_s < apart.request_s
    equal = replace(two, served=replace(two.served))
    assert not is_worth_it(equal, two)  # as good is not enough
    nearly = Spread(1.09 * two.served.request.mean_s, 0.0, 0.0)
    assert not is_worth_it(two, replace(two, served=replace(two.served, request=nearly)))
    slower = Spread(1.2 * two.served.request.mean_s, 0.0, 0.0)
    assert is_worth_it(two, replace(two, served=replace(two.served, request=slower)))


def test_two_groups_in_words(two: ServedPlan) -> None:
    sent = Spread(0.002, 0.002, 0.002)
    group = PrefillGroup(
        two.result, TwoGroups(two.engine, two.engine, 0.0, 0.0), 3 << 20, 0.001, sent
    )
    apart = replace(two, prefill=group)
    assert apart.layout == "prefill on data 2, decode on data 2"
    assert (
        "groups   prefill on t4:0, t4:1, decode on t4:0, t4:1: the KV cache of a prompt, "
        "3.00 MiB, is sent in 1.000 ms (2.000 ms with waiting for the link)"
    ) in serving_lines(apart)


def test_memory_is_that_of_both_groups(two: ServedPlan) -> None:
    """On GPUs that prefill it is that of their own plan; before, they held nothing."""

    def holding(*gpus: str) -> gdp.Result:
        answer = two.result.of_request()
        rows = tuple(replace(row, weights_bytes=7 * (row.device in gpus)) for row in answer.memory)
        return replace(two.result, generation=replace(answer, memory=rows))

    prefill = PrefillGroup(
        holding("t4:0"), TwoGroups(two.engine, two.engine, 0.0, 0.0), 3 << 20, 0.001,
        Spread(0.0, 0.0, 0.0),
    )  # fmt: skip
    apart = replace(two, result=holding("t4:1"), prefill=prefill)
    assert [row.weights_bytes for row in apart.memory] == [0, 7, 7]
    of_prefill = prefill.to_json()["memory"]
    assert [row["weights_bytes"] for row in of_prefill] == [0, 7, 0]
    shown = str(result_text(replace(apart.result, traffic=apart)))
    assert len(re.findall(r"^t4:[01] +7 B ", shown, re.MULTILINE)) == 2


def test_prompts_get_a_gpu_of_their_own_where_a_limit_wants_it(
    config: str, limit_us: int, tmp_path: Path
) -> None:
    """Two placements, each with its servers, and the caches of a prompt between them."""
    path, machine = tmp_path / "p.json", "cpu+2xt4-pcie4"
    args = ["place", config, "--cluster", machine, "--for", "vllm", "--traffic", MANY, "--json"]
    args += ["--costs", NO_HOST]
    done = CliRunner().invoke(cli, [*args, "--within", f"token={limit_us}us", "-o", str(path)])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    traffic = answer["traffic"]
    assert traffic["token"]["p95_s"] <= 1e-6 * limit_us
    within = {"first_s": None, "token_s": pytest.approx(1e-6 * limit_us)}
    assert traffic["within"] == within
    # Two layers have keys and values of two heads of 12 numbers of two bytes.
    prefill, sent_bytes = traffic["prefill"], 2 * 2 * 2 * 12 * 2 * 64
    assert prefill["sent_bytes"] == sent_bytes
    cluster = gdp.Cluster.load(machine)
    link_s = cluster.link_latency_s[1, 2] + sent_bytes / cluster.link_bytes_per_s[1, 2]
    assert prefill["transfer_s"] == pytest.approx(link_s)
    assert prefill["sent"]["mean_s"] >= link_s
    assert traffic["layout"] == traffic["compared"][-1]["layout"]
    _check_servers(tmp_path)
    assert answer["start"] == [
        {"command": _served(tmp_path / f"{part} vllm", config), "machine": "", "role": role}
        for part, role in (("p.prefill", "prefill"), ("p", "decode"))
    ]
    page = str(tmp_path / "p.html")
    done = CliRunner().invoke(cli, ["report", str(path), "--traffic", MANY, "-o", page])
    assert done.exit_code == 1
    assert "of the decode GPUs alone" in str(done.exception)


def _served(folder: Path, config: str) -> str:
    """The line for a shell that files of an export for vLLM describe."""
    environment, arguments = (
        (folder / f"{name}.txt").read_text().strip() for name in ("environment", "arguments")
    )
    return f"{environment} vllm serve {config.removeprefix('hf:')} {arguments}"


def _check_servers(folder: Path) -> None:
    """What is exported of the placements of two groups: a server each."""
    parts = (("p", "8200", "1", "decode"), ("p.prefill", "8100", "0", "prefill"))
    for (part, port, gpu, mode), runtime in itertools.product(parts, ("vllm", "sglang")):
        to = folder / f"{part} {runtime}"
        args = ["export", str(folder / f"{part}.json"), "--to", runtime, "-o", str(to)]
        done = CliRunner().invoke(cli, args)
        assert done.exit_code == 0, done.output
        words = shlex.split((to / "arguments.txt").read_text())
        given = dict(itertools.pairwise(words))
        assert given["--port"] == port
        assert f"CUDA_VISIBLE_DEVICES={gpu}" in (to / "environment.txt").read_text().split()
        if runtime == "vllm":
            assert given["--kv-transfer-config.kv_connector"] == "NixlConnector"
            assert given["--kv-transfer-config.kv_role"] == "kv_both"
        else:
            assert given["--disaggregation-mode"] == mode


def test_limits_that_nothing_keeps_are_told(config: str) -> None:
    plan = gdp.serve(config, CLUSTER, TEXT, within="first=1us")
    assert plan.value[0] == pytest.approx(plan.served.first_token.p95_s / 1e-6)
    line = next(line for line in serving_lines(plan) if line.startswith("limits"))
    assert f"{plan.value[0]:.2f} times as long" in line


def test_requests_wait_for_caches_only_where_these_are_full(plan: ServedPlan) -> None:
    waiting = replace(plan.served, waiting_s=plan.served.first_token.mean_s)
    few = replace(plan, served=waiting)
    (line,) = (line for line in serving_lines(few) if line.startswith("queue"))
    assert line.endswith("prompts before theirs, 2048 tokens a pass at most")
    room = 80 * plan.served.running
    for engine in (
        plan.engine._replace(cache_tokens=room),
        plan.engine._replace(requests_at_once=round(plan.served.running)),
    ):
        (line,) = (x for x in serving_lines(replace(few, engine=engine)) if x.startswith("queue"))
        assert "before they start: caches hold" in line


def test_requests_beyond_the_models_context_are_refused(config: str, tmp_path: Path) -> None:
    """vLLM starts with no longer context, of the mean request or of the longest one."""
    folder = Path(config.removeprefix("hf:"))
    limited = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(limited))
    model, said = f"hf:{tmp_path}", "longer than the 128 that the model was made for"
    for text in ("concurrency=2,prompt=100..200,new=16", "rate=1,prompt=120,new=9,requests=4"):
        with pytest.raises(gdp.ArgumentError, match=said):
            gdp.serve(model, CLUSTER, text)
    with pytest.raises(gdp.InfeasibleError, match=said):
        gdp.place(gdp.Generation(model, 120, 9), CLUSTER, target="vllm")
    fitting = gdp.serve(model, CLUSTER, "concurrency=2,prompt=120,new=8,requests=4")
    with pytest.raises(gdp.ArgumentError, match=said):
        served_on(fitting.result, "concurrency=1,prompt=120,new=9")


@pytest.mark.usefixtures("traces_anew")
def test_a_row_beyond_the_models_context_is_named_before_anything_is_traced(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gdp.importers.pytorch import model

    monkeypatch.setattr(model, "exported", None)
    table = tmp_path / "requests.csv"
    table.write_text("at_s,prompt,new\n0,100,8\n0.5,250,8\n0.2,10,8\n")
    with pytest.raises(gdp.ArgumentError, match=r"line 3 of the table: .* longer than the 256"):
        gdp.serve(config, CLUSTER, str(table))


def test_figures_of_one_batch_stand_below_those_of_traffic(
    config: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each line is either of the traffic or below the heading that says what it is of."""
    words = ["place", config, "--cluster", CLUSTER, "--for", "vllm", "--traffic", TEXT]
    brief = CliRunner().invoke(cli, words)
    assert "without other traffic" not in brief.stdout
    with caplog.at_level(logging.INFO, logger="gdp"):
        done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    of_traffic, heading, of_batch = done.stdout.partition("without other traffic, a batch of ")
    assert heading
    assert of_traffic.count("\nlatency  TTFT ") == 1
    assert "tokens/s, batch of " in of_batch
    assert "tokens/s, batch of " not in of_traffic
    for name in ("decode ", "bound ", "candidate", "note"):
        assert f"\n{name}" not in of_traffic
    assert "\nnote:" not in of_batch


def test_caches_of_requests_in_flight_are_room_for_as_many(config: str) -> None:
    """A plan for throughput keeps caches of several requests: room is that of the same memory."""
    latency, throughput = (
        gdp.serve(config, CLUSTER, TEXT, objective=name) for name in ("latency", "throughput")
    )
    assert throughput.engine.cache_tokens == pytest.approx(latency.engine.cache_tokens, rel=0.02)


def test_one_client_waits_for_nobody(config: str) -> None:
    alone = gdp.serve(config, CLUSTER, "concurrency=1,prompt=64,new=16,requests=3")
    answer, served = alone.generation, alone.served
    # A pass reads the weights at least once, and its kernels are launched one by one.
    engine = alone.engine
    assert engine.launch_s > 0
    least = max(answer.first_token_s, engine.step_s, engine.launch_s)
    assert served.first_token.p95_s == pytest.approx(engine.scheduler.request_s + least)
    assert served.token.mean_s == pytest.approx(answer.token_s, rel=0.05)
    assert served.running == pytest.approx(
        (least + 15 * served.token.mean_s) / (least + 0.02 + 15 * served.token.mean_s)
    )


def test_given_requests_are_served(config: str) -> None:
    requests = tuple(Arrival(0.001 * i, 32 + i, 8) for i in range(6))
    plan = gdp.serve(config, CLUSTER, gdp.Traffic(requests))
    assert plan.served.requests == 6
    assert plan.served.seconds >= 0.005


def test_the_command_says_traffic_and_writes_the_placement(config: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    args = ["place", config, "--cluster", CLUSTER, "--for", "vllm", "--traffic", TEXT]
    done = CliRunner().invoke(cli, [*args, "-o", str(path)])
    assert done.exit_code == 0, done.output
    assert re.search(r"^latency  TTFT .* \(p95 .*\), TPOT .* \(p95 ", done.output, re.MULTILINE)
    assert f"written to {path}; next: gdp export {path} --to vllm" in done.output
    assert path.is_file()
    room = re.search(
        r"at a concurrency of .* \(KV cache for (\d+) at full length\); 9 requests", done.output
    )
    assert room
    told = json.loads(CliRunner().invoke(cli, [*args, "--json"]).stdout)
    traffic = told["traffic"]
    assert traffic["requests"] == 9  # the first of three clients begin before
    assert 0 < traffic["first_token"]["median_s"] <= traffic["first_token"]["p95_s"] < math.inf
    assert traffic["engine"]["tokens_at_once"] == 2048
    assert traffic["room"] == int(room[1]) == int(traffic["engine"]["cache_tokens"] / (64 + 16))
    assert told["generation"]["caches_s"] > 0


def test_pages_show_the_traffic_on_a_plan(config: str, tmp_path: Path) -> None:
    """That of `gdp place --traffic --report`, and of a placement that was made before."""
    plan, pages = tmp_path / "p.json", [tmp_path / "a.html", tmp_path / "b.html"]
    args = ["place", config, "--cluster", CLUSTER, "--for", "vllm", "--traffic", TEXT]
    for words in (
        [*args, "-o", str(plan), "--report", str(pages[0])],
        ["report", str(plan), "--traffic", TEXT, "-o", str(pages[1])],
    ):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
    found = [re.search(r'<section id="traffic".*?</section>', p.read_text(), re.S) for p in pages]
    assert found[0]
    assert found[1]
    assert found[0][0] == found[1][0]
    again = ["report", str(plan), "-o", str(pages[1]), "--force"]
    assert CliRunner().invoke(cli, again).exit_code == 0
    assert 'id="traffic"' not in pages[1].read_text()


@pytest.mark.parametrize(("batch", "concurrency"), [(64, 1), (1, 64)])
def test_passes_are_those_of_as_many_requests_as_run(
    config: str, batch: int, concurrency: int
) -> None:
    """A plan for 64 requests tells one request as a plan for one does, and the other way round."""
    text = f"concurrency={concurrency},prompt=64,new=16,requests={3 * concurrency}"
    own = gdp.serve(config, CLUSTER, text)
    other = gdp.place(gdp.Generation(config, 64, 16, batch), CLUSTER, target="vllm")
    told = served_on(other, text)
    count = own.generation.request.batch
    assert own.passes_of == count
    assert told.passes_of == pytest.approx(count, rel=0.5)
    assert told.served.token.mean_s == pytest.approx(own.served.token.mean_s, rel=0.05)
    assert told.served.first_token.mean_s == pytest.approx(own.served.first_token.mean_s, rel=0.05)
    assert told.engine.cache_tokens > 0
    assert told.traffic_json()["passes_of"] == told.passes_of
    assert not [line for line in serving_lines(told) if line.startswith("passes")]
    wrong = dataclasses.replace(told, passes_of=batch)
    said = f"passes   are those of a batch of {batch}, "
    assert [line for line in serving_lines(wrong) if line.startswith(said)]


def test_traffic_on_what_is_no_plan_for_vllm_is_one_line(config: str, tmp_path: Path) -> None:
    plan = tmp_path / "p.json"
    args = ["place", config, "--generate", "prompt=64,new=16", "--cluster", CLUSTER, "-o"]
    assert CliRunner().invoke(cli, [*args, str(plan)]).exit_code == 0
    page = str(tmp_path / "p.html")
    done = CliRunner().invoke(cli, ["report", str(plan), "--traffic", TEXT, "-o", page])
    assert done.exit_code == 1
    assert "traffic is for plans of hf: models for vllm (--for vllm)" in str(done.exception)
    done = CliRunner().invoke(
        cli, ["report", str(plan), "--traffic", "rate=x,prompt=1,new=1", "-o", page]
    )
    assert (done.exit_code, "--traffic: rate must be" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--for", "llamacpp", "--traffic", TEXT], "--traffic is for hf: models --for vllm"),
        (["--traffic", TEXT], "--traffic is for hf: models --for vllm"),
        (["--for", "vllm", "--traffic", TEXT, "--batch", "2"], "leave out --batch"),
        (["--for", "vllm", "--traffic", "rate=x,prompt=1,new=1"], "--traffic: rate must be"),
        (["--for", "vllm", "--traffic", TEXT, "--within", "token=3"], "--within: 'token=3' must"),
        (["--for", "vllm", "--traffic", TEXT, "--within", "token=0s"], "must look like first="),
        (["--for", "vllm", "--traffic", TEXT, "--within", "first=1s,first=2s"], "--within"),
        (["--for", "vllm", "--no-disaggregation"], "--no-disaggregation is for requests of"),
        (["--for", "vllm", "--within", "token=3ms"], "is for requests of --traffic"),
    ],
)
def test_traffic_that_cannot_be_is_one_line(
    config: str, args: list[str], message: str, run: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = run("place", config, "--cluster", CLUSTER, *args)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("cluster", "most"), [("cpu+t4", 256), ("cpu+a100", 256), ("cpu+h100", 1024)]
)
def test_requests_at_once_are_those_of_the_cards_whatever_a_pass_computes(
    config: str, cluster: str, most: int
) -> None:
    spec = f"{config}?max_num_batched_tokens=4096"
    engine = gdp.serve(spec, cluster, "concurrency=1,prompt=64,new=16,requests=1").engine
    assert (engine.tokens_at_once, engine.requests_at_once) == (4096, most)
