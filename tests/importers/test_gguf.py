"""GGUF headers as graphs: bytes by quantisation, what a token reads, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from gguf_models import HEADS, INNER, KEY_HEADS, VOCABULARY, WIDTH, stored_bytes, write_gguf

import gdp
from gdp.base.errors import ModelError
from gdp.cli.main import cli
from gdp.graph.op_graph import OpGraph
from gdp.graph.request import Request
from gdp.importers.gguf_spec import parse_gguf_spec
from gdp.question.models import load, source_files
from gdp.targets.llamacpp.flags import flags_of
from tests.fuzz import gguf_files

BITS = {"Q4_K": 4.5, "Q8_0": 8.5, "Q6_K": 6.5625, "F16": 16.0}  # of a weight, scales included
KEY_WIDTH = WIDTH * KEY_HEADS // HEADS
ATTENTION = 2 * WIDTH * WIDTH + 2 * WIDTH * KEY_WIDTH  # weights of one block
FEED_FORWARD = 3 * WIDTH * INNER


def op(graph: OpGraph, name: str) -> int:
    return graph.op_index[name]


def made_bytes(graph: OpGraph) -> dict[str, int]:
    """Bytes that memory holds of the tensor of each op."""
    names = (graph.op_names[op] for op in graph.producer)
    return dict(zip(names, graph.held_bytes.tolist(), strict=True))


@pytest.mark.parametrize("kind", sorted(BITS))
def test_weights_have_the_bytes_of_their_type(kind: str, tmp_path: Path) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', kind=kind)}?decode&sequence=100")
    quantised = 3 * (ATTENTION + FEED_FORWARD) + 2 * VOCABULARY * WIDTH
    norms = 7 * WIDTH * 4
    cache = 3 * 2 * KEY_WIDTH * 100 * 2
    assert stored_bytes(graph) == quantised * BITS[kind] / 8 + norms + cache


def test_a_decoded_token_reads_every_weight_once_and_one_row_of_the_embedding(
    tmp_path: Path,
) -> None:
    graph = load(f"{write_gguf(tmp_path / 'm.gguf')}?decode")
    products = [i for i, kind in enumerate(graph.op_types) if kind == "MatMul"]
    weights = 3 * (ATTENTION + FEED_FORWARD) + VOCABULARY * WIDTH
    gates = 3 * INNER * 6  # the activations, counted beside the products
    assert sum(graph.flop[products]) == 2 * weights + gates
    row = WIDTH * 4.5 / 8
    embedding = op(graph, "token_embd")
    assert graph.memory_traffic_bytes[embedding] == row + 4 + WIDTH * 4
    head = op(graph, "output")
    assert graph.memory_traffic_bytes[head] == graph.weight_bytes[head] + 4 * (WIDTH + VOCABULARY)


def test_one_token_reads_its_experts_and_many_read_nearly_all(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", experts=8, used=2)
    one, many = load(f"{path}?decode"), load(f"{path}?sequence=512")
    gate = op(one, "blk.1.ffn_gate_exps")
    assert one.scope[gate] == "blk.1.experts"
    held = 8 * WIDTH * INNER * 4.5 / 8
    assert one.weight_bytes[gate] == held
    read = 4 * (WIDTH + 8) + 4 * 2 * INNER  # its input, the router's choice, and what it makes
    assert one.memory_traffic_bytes[gate] == pytest.approx(held / 4 + read)
    assert one.flop[gate] == 2 * 2 * WIDTH * INNER
    assert many.memory_traffic_bytes[op(many, "blk.1.ffn_gate_exps")] > held
    assert many.flop[op(many, "blk.1.ffn_gate_exps")] == 512 * one.flop[gate]


def test_tied_embeddings_biases_and_other_families(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "q.gguf", tied=True, architecture="qwen2")
    graph = load(path)
    head, embedding = op(graph, "output"), op(graph, "token_embd")
    assert graph.weight_id[head] == graph.weight_id[embedding]
    assert graph.weight_bytes[head] == graph.weight_bytes[embedding]
    queries = op(graph, "blk.0.attn_q")
    assert graph.weight_bytes[queries] == WIDTH * WIDTH * 4.5 / 8 + 4 * WIDTH
    assert source_files(f"{path}?decode") == [path]


def test_a_request_holds_weights_once_and_its_cache_to_the_end(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tied=True)
    graph, step = load(f"{path}?prompt=60&new=40"), load(f"{path}?decode&sequence=100")
    assert graph.request == Request(60, 40)

    def held(graph: OpGraph) -> tuple[int, int]:
        once = np.unique(graph.weight_id, return_index=True)[1]
        once, cache = once[~graph.is_buffer[once]], int(graph.cache_bytes[~graph.is_buffer].sum())
        return int(graph.weight_bytes[once].sum()) - cache, cache

    assert held(graph) == held(step)
    assert graph.name == "m 1x60+40"
    repeats = {name: int(n) for name, n in zip(graph.op_names, graph.repeats, strict=True)}
    assert (repeats["blk.1.attn_q"], repeats["step/blk.1.attn_q"]) == (1, 40)
    mean = load(f"{path}?decode&sequence=80")
    attention = op(mean, "blk.0.attention")
    assert graph.flop[op(graph, "step/blk.0.attention")] == mean.flop[attention]


def test_tokens_are_cached_of_all_sequences_and_requests() -> None:
    assert parse_gguf_spec("m.gguf?prompt=60&new=40&batch=2&requests=3").cached_tokens == 600
    assert parse_gguf_spec("m.gguf?sequence=64&batch=2&decode").cached_tokens == 128


def test_a_prompt_holds_the_tensors_of_one_micro_batch(tmp_path: Path) -> None:
    """Of 2 x 640 tokens llama.cpp computes 512 at once, in three parts; logits are of the last."""
    path = write_gguf(tmp_path / "m.gguf", experts=4)
    prompt = load(f"{path}?batch=2&sequence=640")
    request = load(f"{path}?batch=2&prompt=640&new=8")
    for graph in (prompt, request):
        held = dict(
            zip((graph.op_names[op] for op in graph.producer), graph.held_bytes, strict=True)
        )
        assert held["token_embd"] == held["blk.1.attn_add"] == -(-4 * WIDTH * 1280 // 3)
        assert held["output"] == 4 * VOCABULARY * 2
    at_once = dict(
        zip((request.op_names[op] for op in request.producer), request.held_bytes, strict=True)
    )
    assert at_once["step/token_embd"] == 4 * WIDTH * 2
    short = load(f"{path}?sequence=512")
    assert (short.held_bytes == short.tensor_bytes).all()


def test_a_long_prompt_fits_where_its_weights_and_caches_do(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    graph = load(f"{path}?prompt=8192&new=4096")
    machine = gdp.Cluster.load("cpu+t4")
    weights = int(graph.weight_bytes[graph.weight_holders()].sum())
    batch_bytes = 512 * 4 * (2 * INNER + 4 * WIDTH)  # of one micro-batch, a block's largest
    devices = tuple(
        replace(d, bytes_per_s=1e9) if d.is_cpu else replace(d, memory_bytes=weights + batch_bytes)
        for d in machine.devices
    )
    placement = gdp.place(
        graph, replace(machine, devices=devices), target="llamacpp", costs="datasheet",
        search=gdp.Search(seconds=0.2),
    ).placement  # fmt: skip
    assert flags_of(graph, placement, machine).n_gpu_layers == 4


def test_a_request_is_told_in_tokens_on_the_command_line(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", experts=4))
    words = ["place", path, "--generate", "prompt=64,new=16", "--cluster", "cpu+2xt4-pcie4"]
    for more in (["--seconds", "0.2"], ["--for", "llamacpp"]):
        done = CliRunner().invoke(cli, [*words, *more, "--json"])
        assert done.exit_code == 0, done.output
        answer = json.loads(done.stdout)["generation"]
        assert answer["request"] == {"prompt": 64, "new": 16, "batch": 1}
        cache = 3 * 80 * 2 * KEY_WIDTH * 2
        assert sum(row["cache_bytes"] for row in answer["memory"]) == cache
        assert answer["first_token_s"] + 16 * answer["token_s"] == pytest.approx(
            answer["request_s"], rel=0.1
        )
    done = CliRunner().invoke(cli, ["fit", path, "--cluster", "cpu+t4", "--prompt", "64",
                                    "--new", "4", "--seconds", "0.1", "--json"])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows"][0]["tokens_per_s"] > 0
    asked = gdp.Generation(path, prompt=64, new=16)
    assert gdp.load(asked).digest == load(f"{path}?prompt=64&new=16").digest


def test_simulate_writes_a_line_for_each_answer(tmp_path: Path) -> None:
    path, placed = str(write_gguf(tmp_path / "m.gguf")), str(tmp_path / "p.json")
    asked = [path, "--generate", "prompt=8,new=4"]
    done = CliRunner().invoke(
        cli, ["place", *asked, "--cluster", "cpu+t4", "--for", "llamacpp", "-o", placed]
    )
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(cli, ["simulate", placed])
    assert done.exit_code == 0, done.output
    assert "\\n" not in done.output
    assert len(done.output.splitlines()) > 3


def test_caches_have_the_type_that_is_asked_for(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    plain, packed = (load(f"{path}?decode&sequence=64{q}") for q in ("", "&cache=q8_0"))
    full, less = (int(g.cache_bytes[~g.is_buffer].sum()) for g in (plain, packed))
    assert (full, less) == (3 * 2 * KEY_WIDTH * 64 * 2, full * 34 // 64)
    with pytest.raises(ModelError, match=r"no type of cache 'q3'; llama\.cpp has f32, f16"):
        load(f"{path}?cache=q3")


def test_no_tensor_data_is_needed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    wanted, size = load(path), path.stat().st_size
    header = path.read_bytes()[: size - stored_bytes(wanted) // 2]
    path.write_bytes(header)
    with path.open("r+b") as file:
        file.truncate(size)  # a hole where tensors were
    assert load(path).digest == wanted.digest


def test_what_is_not_known_is_refused_in_one_line(tmp_path: Path) -> None:
    strange = write_gguf(
        tmp_path / "s.gguf", architecture="mamba", extra={"ssm_in.weight": (WIDTH, WIDTH)}
    )
    with pytest.raises(ModelError, match=r"no blocks of .* 'mamba' with .*blk\.0\.ssm_in"):
        load(strange)
    with pytest.raises(ModelError, match="got 'task'"):
        load(f"{strange}?task=x")
    with pytest.raises(ModelError, match="sequence must be a positive whole number"):
        load(f"{strange}?sequence=0")
    broken = tmp_path / "b.gguf"
    broken.write_bytes(b"GGUF" + bytes(30))
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        load(broken)
    with pytest.raises(ModelError, match=r"no model .*; all parts of a split model"):
        load(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(ModelError, match=r"no model '[^;]*m\.gguf'$"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("fields", "tensors", "said"),
    [
        ({"llama.attention.head_count": 0}, {}, r"attention.head_count must be from 1 to 2147"),
        ({"llama.expert_used_count": 2**40}, {}, r"expert_used_count must be from 1 to 2147483647"),
        ({"llama.attention.key_length": 0}, {}, r"attention.key_length must be from 1"),
        (
            {
                "llama.block_count": 2**31 - 1,
                "llama.attention.head_count_kv": 0,
                "llama.feed_forward_length": 0,
            },
            {},
            r"has blocks \[0, 1\], not 0, 1, 2",
        ),
        ({}, {"blk.1.ffn_up_exps.weight": [[16, 16, 0], 0]}, r"has the shape \[16, 16, 0\]"),
        ({}, {"blk.1.ffn_up_exps.weight": [[16, 16], 0]}, r"ffn_up_exps.weight has the shape \[16"),
        ({}, {"blk.0.attn_q.weight": [[4, 4, 16], 0]}, r"attn_q.weight has .* two axes are wanted"),
        (
            {},
            {"blk.0.attn_q.weight": None, "blk.0.attn_q.bias": [[16], 0]},
            "no tensor blk.0.attn_q.w",
        ),
        (
            {},
            {"token_embd.weight": None, "token_embd.bias": [[16], 0]},
            "no tensor token_embd.weight",
        ),
        ({}, {"blk.0.attn_q.weight": [[], 0]}, "cannot be read as GGUF|has the shape"),
    ],
)
def test_a_damaged_header_is_one_line(
    fields: dict, tensors: dict, said: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="needs the gguf package")
    document = gguf_files.document()
    document["fields"] |= fields
    document["tensors"] = {
        name: shape for name, shape in (document["tensors"] | tensors).items() if shape
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_files.encode(document))
    with pytest.raises(ModelError, match=said) as found:
        load(str(path))
    assert str(path) in str(found.value)


def test_the_gate_of_a_shared_expert_is_a_vector(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the gguf package")
    document = gguf_files.document()
    for name in ("gate", "up", "down"):
        document["tensors"][f"blk.1.ffn_{name}_shexp.weight"] = [[16, 16], 0]
    document["tensors"]["blk.1.ffn_gate_inp_shexp.weight"] = [[16], 0]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_files.encode(document))
    graph = load(f"{path}?sequence=8")
    assert graph.flop[op(graph, "blk.1.ffn_gate_inp_shexp")] == 2 * 8 * 16


def test_sizes_that_no_model_has_name_the_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the gguf package")
    document = gguf_files.document()
    document["fields"]["llama.attention.key_length"] = 2**31 - 1
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_files.encode(document))
    with pytest.raises(
        ModelError, match=r"m.gguf: op '.*' would take .* bytes; the file is damaged"
    ):
        load(f"{path}?batch=2147483647&sequence=2147483647")
    with pytest.raises(ModelError, match=r"m.gguf: graph 'm 1x\d+': .*e\+\d+"):
        load(f"{path}?sequence=1000000")
