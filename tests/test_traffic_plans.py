"""Plans under traffic: `gdp.serve` and `gdp place --traffic`."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import gdp
from gdp.api.traffic import ServedPlan, served_on
from gdp.cli.main import cli
from gdp.sim.traffic import Arrival
from tests.generating_configs import generating_config

pytest.importorskip("transformers")
CLUSTER = "cpu+t4"
TEXT = "concurrency=4,prompt=64,new=16,requests=12"


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


def test_room_is_that_of_the_memory_that_is_left(plan: ServedPlan) -> None:
    row = next(row for row in plan.generation.memory if row.cache_bytes)
    of_token = row.cache_bytes / (plan.generation.request.batch * (64 + 16))
    assert row.free_bytes is not None
    assert plan.engine.cache_tokens * of_token == pytest.approx(row.cache_bytes + row.free_bytes)


def test_copies_are_weighed_against_one_model_on_all_gpus(config: str) -> None:
    """Of a model as small as this steps wait for launches: two copies serve twice as much."""
    two = gdp.serve(config, "cpu+2xt4-pcie4", "concurrency=16,prompt=64,new=16,requests=64")
    one, copies = two.compared_with
    assert (one.layout, copies.layout) == ("one GPU", "data 2")
    assert (two.layout, two.engine.copies, two.generation.copies) == ("data 2", 2, 2)
    assert two.result.placement.teams == ((1, 2),)
    assert one.request_s is not None
    assert two.served.request.mean_s == copies.request_s < one.request_s
    assert two.room == 2 * int(two.engine.cache_tokens / (64 + 16))
    assert any(line.startswith("plans    one GPU: ") for line in two.lines())
    rule = gdp.Constraints(replicas=False)
    alone = gdp.serve(
        config, "cpu+2xt4-pcie4", "concurrency=16,prompt=64,new=16,requests=64", constraints=rule
    )
    assert (alone.layout, alone.compared_with) == ("one GPU", ())
    assert alone.compared() == one


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
    assert served.first_token.p95_s == pytest.approx(engine.scheduling.request_s + least)
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
    assert "traffic  first token after" in done.output
    assert path.is_file()
    room = re.search(r"requests at once \(memory has room for (\d+)\); 9 requests", done.output)
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
    assert not [line for line in told.lines() if line.startswith("passes")]
    wrong = dataclasses.replace(told, passes_of=batch)
    assert [line for line in wrong.lines() if line.startswith(f"passes   are those of {batch} ")]


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
    ],
)
def test_traffic_that_cannot_be_is_one_line(config: str, args: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, ["place", config, "--cluster", CLUSTER, *args])
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("cluster", "most"), [("cpu+t4", 256), ("cpu+a100", 256), ("cpu+h100", 1024)]
)
def test_requests_at_once_are_those_of_the_cards_whatever_a_pass_computes(
    config: str, cluster: str, most: int
) -> None:
    spec = f"{config}?max_num_batched_tokens=4096"
    engine = gdp.serve(spec, cluster, "concurrency=1,prompt=64,new=16,requests=1").engine
    assert (engine.tokens_at_once, engine.requests_at_once) == (4096, most)
