"""`gdp place models.toml`: the question, refusals, memory to the byte, and exports."""

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gdp
from gdp.api.box.answer import BoxAnswer
from gdp.api.box.export import export_box
from gdp.api.box.models import read_models
from gdp.api.box.pricing import Pricer
from gdp.cli.main import cli
from gdp.cluster.file import load_cluster
from gdp.cluster.reserve import GIB
from tests.generating_configs import generating_config
from tests.gguf_models import write_gguf

MIB = 1 << 20
CHAT: dict[str, Any] = {
    "spec": "chat.gguf", "context": 512, "traffic": "concurrency=2,prompt=256,new=100",
    "within": {"ttft": "2s", "tpot": "60ms"}, "weight": 3,
}  # fmt: skip
CODER: dict[str, Any] = {"spec": "coder.gguf", "context": 512, "residence": "on demand"}
EMBED: dict[str, Any] = {
    "spec": "embed.gguf", "context": 512, "residence": "idle after 5 min",
    "traffic": "rate=1,prompt=100,new=1,requests=20",
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "spec": "whisper", "engine": "other", "memory": "3GiB", "seconds": 2.0,
    "traffic": "rate=0.1,prompt=1,new=1,requests=20", "command": "whisper-server --port 8104",
    "devices": ["rtx3090:0", "rtx3090:1"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for name, layers in (("chat", 6), ("coder", 4), ("embed", 2)):
        write_gguf(made / f"{name}.gguf", layers=layers)
    (made / "box.toml").write_text(
        'disk_bytes_per_s = 1e9\n[[device]]\nname = "cpu"\npreset = "cpu"\n'
        '[[device]]\nname = "rtx3090:0"\npreset = "rtx3090"\n'
        '[[device]]\nname = "rtx3090:1"\npreset = "rtx3090"\n'
    )
    return made


def asked(folder: Path, *models: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Models whose files are in a folder."""
    return [
        {**m, "spec": str(folder / m["spec"]) if (folder / m["spec"]).exists() else m["spec"]}
        for m in models
    ]


@pytest.fixture(scope="module")
def answer(folder: Path) -> BoxAnswer:
    models = asked(folder, CHAT, CODER, EMBED, WHISPER)
    return gdp.place_models(models, folder / "box.toml")


def test_every_byte_has_an_engine(answer: BoxAnswer) -> None:
    """A device holds the sum of its engines, and each engine on a card its own context."""
    assert len(answer.models) == 4
    assert not answer.groups
    for use in answer.devices:
        assert use.loaded_bytes == sum(held.all_bytes for _, held in use.engines)
        assert use.room_bytes is not None
        assert use.loaded_bytes <= use.room_bytes
        for _, held in use.engines:
            assert held.context_bytes == (0 if use.device == "cpu" else GIB)
    whisper = answer.models[3]
    assert whisper.priced is not None
    assert sum(h.weights_bytes for h in whisper.priced.held) == 3 * GIB
    # 3 GiB from a disk of 1 GB/s, then over 16 lanes of PCIe 4.0.
    assert 3.22 < whisper.load_s < 3.5
    assert answer.disk.startswith("1 GB/s, by the machine's file")


def test_busy_is_never_quicker_than_alone(answer: BoxAnswer) -> None:
    for m in answer.models:
        alone, busy = m.alone, m.busy
        assert alone is not None
        assert busy is not None
        assert busy.ttft_s >= alone.ttft_s
        assert busy.tpot_s >= alone.tpot_s
        assert busy.tokens_per_s <= alone.tokens_per_s
        assert 0 < m.served <= 1


def test_a_file_and_mappings_answer_the_same(folder: Path, answer: BoxAnswer) -> None:
    file = folder / "models.toml"
    file.write_text(
        "".join(
            "[[model]]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in model.items())
            for model in (CHAT, CODER, EMBED, WHISPER)
        )
    )
    run = CliRunner().invoke(
        cli, ["place", str(file), "--cluster", str(folder / "box.toml"), "--json"]
    )
    assert run.exit_code == 0, run.output
    said = json.loads(run.stdout)
    mine = json.loads(json.dumps(answer.to_json()).replace("Infinity", "null"))
    for own in (said, mine):
        own.pop("pricing_s"), own.pop("packing_s")
    assert [m["commands"] for m in said["models"]] == [m["commands"] for m in mine["models"]]
    assert said["devices"] == mine["devices"]
    assert said["load"] == pytest.approx(mine["load"])


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def test_models_that_have_no_room_together_take_turns(folder: Path) -> None:
    """Two models of 3 GiB on a card of 6 GiB without a processor to fall back on: 2 (3 + 1) > 6."""
    two = [
        {"spec": name, "engine": "other", "memory": "3GiB", "seconds": 1.0, "devices": ["gpu"],
         "residence": "on demand", "command": name}
        for name in ("a", "b")
    ]  # fmt: skip
    cluster = gdp.make_cluster("small", [
        gdp.Device("cpu", "cpu", {"default": 1e11}, 1e10),
        gdp.Device("gpu", "t4", {"default": 1e13}, 3e11, 5 * GIB, reserve_bytes=GIB),
    ])  # fmt: skip
    turns = gdp.place_models(two, cluster)
    assert turns.groups == (("a", "b"),)
    assert turns.moved_bytes_per_s > 0
    assert turns.devices[-1].loaded_bytes == 4 * GIB
    resident = [{**m, "residence": "always"} for m in two]
    dropped = gdp.place_models(resident, cluster)
    assert [m.priced is None for m in dropped.models].count(True) == 1
    assert not dropped.keeps_limits_alone
    assert any(text.startswith("buy another t4: all limits are kept") for text in dropped.advice)


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    ([CHAT, {**CHAT}], r"2 models have the name 'chat'"),
    ([{**CHAT, "speed": 3}], r"unknown field `speed`"),
    ([{**CHAT, "engine": "vllm"}], r"engine 'vllm' is for hf: models"),
    ([{**CHAT, "engine": "onnxruntime"}], r"engine 'onnxruntime' cannot share a card"),
    ([{**CHAT, "engine": "tgi"}], r"engine 'tgi' is not known; there are llamacpp"),
    ([{**CHAT, "residence": "sometimes"}], r"residence is 'always', 'on demand' or 'idle after"),
    ([{**CHAT, "context": 100}], r"context 100 is less than the 356 tokens"),
    ([{**CHAT, "weight": -1}], r"weight must be a positive number"),
    ([{**CHAT, "traffic": "many"}], r"traffic: 'many' must look like"),
    ([{**CHAT, "within": {"ttft": "soon"}}], r"within must look like"),
    ([{**CHAT, "devices": ["gpu9"]}], r"no device 'gpu9'; there are cpu"),
    ([{"spec": "x", "engine": "other"}], r"give memory, such as '6GiB', and seconds"),
    ([{**CHAT, "memory": "1GiB"}], r"memory and seconds are of engine 'other' alone"),
    ([], r"has no \[\[model\]\]"),
]  # fmt: skip


@pytest.mark.parametrize(("models", "said"), REFUSED, ids=[said[:30] for _, said in REFUSED])
def test_refusals_are_one_sentence(folder: Path, models: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(gdp.ArgumentError, match=said) as error:
        gdp.place_models(asked(folder, *models), folder / "box.toml")
    assert "\n" not in str(error.value)


def test_a_model_that_fits_nowhere_is_said_with_bytes(folder: Path) -> None:
    huge = {**WHISPER, "memory": "40GiB"}
    said = r"'whisper' fits nowhere, alone on the box: it needs 40.00 GiB .*24.00 GiB"
    with pytest.raises(gdp.InfeasibleError, match=said):
        gdp.place_models([huge], folder / "box.toml")


def test_traffic_beyond_the_box_is_refused(folder: Path) -> None:
    busy = {**WHISPER, "traffic": "rate=3,prompt=1,new=1,requests=50"}
    with pytest.raises(gdp.InfeasibleError, match=r"requests/s are more than the 0.5 that"):
        gdp.place_models([busy], folder / "box.toml")


def test_more_requests_than_are_served_have_no_first_token_in_the_end(folder: Path) -> None:
    """Two seconds each, 0.6 of them a second; the few that are simulated do not show it."""
    rate = {"traffic": "rate=0.6,prompt=1,new=1,requests=2"}
    busy, calm = read_models([{**WHISPER, **rate}, {**WHISPER, "name": "calm"}])
    assert busy.rate == 0.6
    pricer = Pricer(load_cluster(folder / "box.toml"))
    assert {o.served.first_token.p95_s for o in pricer.options(busy)[0]} == {math.inf}
    assert all(o.served.first_token.p95_s < 60 for o in pricer.options(calm)[0])


def test_options_of_one_model_are_refused_beside_a_file_of_several(folder: Path) -> None:
    file = folder / "one.toml"
    file.write_text('[[model]]\nspec = "chat.gguf"\ncontext = 512\n')
    run = CliRunner().invoke(cli, ["place", str(file), "--for", "vllm"])
    assert run.exit_code == 2
    assert "says --for of each itself" in run.output


def test_exports_hold_every_engine(answer: BoxAnswer, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    names = export_box(answer, tmp_path / "out")
    assert set(names) <= {p.name for p in (tmp_path / "out").iterdir()}
    swap = yaml.safe_load((tmp_path / "out" / "llama-swap.yaml").read_text())
    assert list(swap["models"]) == ["chat", "coder", "embed", "whisper"]
    members = [name for group in swap["groups"].values() for name in group["members"]]
    assert sorted(members) == sorted(swap["models"])
    assert swap["models"]["embed"]["ttl"] == 300
    assert swap["hooks"]["on_startup"]["preload"] == ["chat", "whisper"]
    for name, entry in swap["models"].items():
        words = shlex.split(entry["cmd"])
        assert "=" not in words[0]
        port = words[words.index("--port") + 1]
        assert entry["proxy"] == f"http://127.0.0.1:{port}", name
    compose = yaml.safe_load((tmp_path / "out" / "compose.yaml").read_text())
    assert list(compose["services"]) == ["chat", "coder", "embed"]
    ports = [service["ports"][0] for service in compose["services"].values()]
    assert len(set(ports)) == 3
    ollama = (tmp_path / "out" / "ollama.env").read_text()
    assert "OLLAMA_MAX_LOADED_MODELS=3" in ollama
    assert re.search(r"# chat: num_gpu \d+, num_ctx 512, keep_alive -1", ollama)
    script = (tmp_path / "out" / "start.sh").read_text()
    assert all(line in script for m in answer.models for line in m.commands)


def test_a_model_of_any_name_has_a_file_of_its_own(folder: Path, tmp_path: Path) -> None:
    answer = gdp.place_models(asked(folder, {**CHAT, "name": "box"}), folder / "box.toml")
    export_box(answer, tmp_path / "out")
    document = json.loads((tmp_path / "out" / "box.json").read_text())
    assert [model["name"] for model in document["models"]] == ["box"]
    assert gdp.load_placement(tmp_path / "out" / "box.plan.json").op_names


def test_services_and_profiles_have_names_that_compose_takes(
    folder: Path, answer: BoxAnswer, tmp_path: Path
) -> None:
    """compose-spec: ^[a-zA-Z0-9._-]+$ of services, [a-zA-Z0-9][a-zA-Z0-9_.-]+ of profiles."""
    yaml = pytest.importorskip("yaml")
    names = ("chat:7b", "chat-7b", "7", "ü")
    odd = [replace(m.model, name=name) for m, name in zip(answer.models, names, strict=True)]
    turns = [replace(m, model=model, group=0) for m, model in zip(answer.models, odd, strict=True)]
    first = turns[0].priced
    assert first is not None
    turns[0] = replace(turns[0], priced=replace(first, slots=64))
    export_box(replace(answer, models=tuple(turns)), tmp_path / "out")
    services = yaml.safe_load((tmp_path / "out" / "compose.yaml").read_text())["services"]
    assert len(services) == 3
    assert "chat-7b" in services
    for name, service in services.items():
        assert re.fullmatch(r"[a-zA-Z0-9._-]+", name)
        assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", service["profiles"][0])
    swap = yaml.safe_load((tmp_path / "out" / "llama-swap.yaml").read_text())
    assert swap["healthCheckTimeout"] >= 15
    assert swap.keys() <= {"healthCheckTimeout", "hooks", "models", "groups"}
    known = {"cmd", "env", "proxy", "ttl", "concurrencyLimit"}
    assert all({"cmd"} <= entry.keys() <= known for entry in swap["models"].values())
    # llama-swap refuses the eleventh request of a model unless it is told of more.
    limits = [entry.get("concurrencyLimit") for entry in swap["models"].values()]
    assert limits == [64, None, None, None]


def test_groups_are_written_as_groups(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    two = [
        {"spec": name, "engine": "other", "memory": "3GiB", "seconds": 1.0, "devices": ["gpu"],
         "residence": "on demand", "command": f"serve --port {k}"}
        for k, name in enumerate("ab")
    ]  # fmt: skip
    cluster = gdp.make_cluster("small", [
        gdp.Device("cpu", "cpu", {"default": 1e11}, 1e10),
        gdp.Device("gpu", "t4", {"default": 1e13}, 3e11, 5 * GIB, reserve_bytes=GIB),
    ])  # fmt: skip
    export_box(gdp.place_models(two, cluster), tmp_path / "out")
    swap = yaml.safe_load((tmp_path / "out" / "llama-swap.yaml").read_text())
    assert swap["groups"] == {"turns-1": {"swap": True, "exclusive": False, "members": ["a", "b"]}}


def test_engines_that_keep_their_limits_on_half_of_a_card_get_half_of_its_sms(
    tmp_path: Path,
) -> None:
    yaml = pytest.importorskip("yaml")
    one, two = (
        {"spec": name, "engine": "other", "memory": "3GiB", "seconds": 1.0, "devices": ["t4"],
         "traffic": "rate=0.1,prompt=1,new=1,requests=20", "within": {"ttft": "30s"},
         "command": f"serve --port {k}"}
        for k, name in enumerate("ab")
    )  # fmt: skip
    answer = gdp.place_models([one, two], "cpu+t4")
    assert [m.sm_percent for m in answer.models] == [50, 50]
    assert answer.feasible
    alone, busy = answer.models[0].alone, answer.models[0].busy
    assert alone is not None
    assert busy is not None
    assert alone.ttft_s == busy.ttft_s  # prompts have half of the SMs whatever the other does
    assert 2 * alone.tpot_s == busy.tpot_s
    export_box(answer, tmp_path / "out")
    lines = (tmp_path / "out" / "start.sh").read_text().splitlines()
    assert lines.index("CUDA_DEVICE_ORDER=PCI_BUS_ID nvidia-cuda-mps-control -d") < next(
        k for k, line in enumerate(lines) if "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 serve" in line
    )
    swap = yaml.safe_load((tmp_path / "out" / "llama-swap.yaml").read_text())
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50" in swap["models"]["a"]["env"]
    for other, cluster in (({**two, "within": {}}, "cpu+t4"), (two, "cpu+mi300x")):
        both = [{**m, "devices": [cluster.removeprefix("cpu+")]} for m in (one, other)]
        answer = gdp.place_models(both, cluster)
        assert [m.sm_percent for m in answer.models] == [0, 0]


def test_one_memory_keeps_the_systems_part_once(folder: Path) -> None:
    answer = gdp.place_models(asked(folder, CHAT, CODER), "m4-max")
    (use,) = answer.devices
    assert [held.context_bytes for _, held in use.engines] == [0, 0]
    assert use.room_bytes == answer.cluster.devices[0].memory_bytes


@pytest.mark.slow
def test_shares_of_vllm_add_up_on_each_card(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(generating_config("llama")))
    models = [
        {"spec": f"hf:{tmp_path / name}", "name": name, "engine": engine, "devices": ["t4"],
         "traffic": "concurrency=4,prompt=64,new=16,requests=12"}
        for name, engine in (("a", "vllm"), ("b", "vllm"), ("c", "sglang"))
    ]  # fmt: skip
    answer = gdp.place_models(models, "cpu+t4")
    assert all(m.priced is not None for m in answer.models)
    words = [shlex.split(m.commands[0]) for m in answer.models]
    shares = [float(w[w.index("--gpu-memory-utilization") + 1]) for w in words[:2]]
    priced = [m.priced.share for m in answer.models if m.priced is not None]
    assert shares == priced[:2]
    assert sum(priced) <= 1
    assert "--mem-fraction-static" in words[2]
    assert len({w[w.index("--port") + 1] for w in words}) == 3
    held = [h.all_bytes for m in answer.models[:2] if m.priced for h in m.priced.held[1:]]
    total = answer.cluster.devices[1].total_bytes
    assert held == [pytest.approx(share * total, abs=2) for share in shares]


def test_defaults_are_said(folder: Path) -> None:
    """A model without traffic has one client that asks again; its name is that of its file."""
    (model,) = read_models(asked(folder, {"spec": "chat.gguf", "context": 400}))
    assert (model.name, model.engine, model.residence) == ("chat", "llamacpp", "always")
    assert model.traffic.concurrency == 1
    assert (model.traffic.prompt, model.traffic.new) == (200, 200)
    assert not model.swaps
