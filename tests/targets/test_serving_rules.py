"""What an engine refuses is no plan: rules of vLLM, SGLang and their quantised weights."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gdp.base.errors import InfeasibleError, ModelError
from gdp.cli.main import cli
from gdp.cluster.presets import cluster_preset, device_preset, presets
from gdp.cluster.table import compute_capability
from gdp.costs.base import roofline
from gdp.graph.op_graph import WEIGHT_BLOCK, OpGraph
from gdp.importers.pytorch.quantised import SCHEMES
from gdp.question.question import Question
from gdp.splits.division import division_of
from gdp.splits.sharding import Shares, member_graph
from gdp.targets.engine import kind_of, legal_devices, unknown_method, why_not_on
from gdp.targets.sglang.rules import SGLANG
from gdp.targets.table import PLANNERS
from gdp.targets.vllm.export import VllmOptions
from gdp.targets.vllm.rules import VLLM
from tests.decoders import Sizes, decoder

OLD = ("k80", "m40", "p100", "p4", "v100", "v100-pcie")
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("preset", sorted(name for name in OLD if name in presets()))
@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_cards_before_turing_run_no_engine(engine: object, preset: str) -> None:
    told = why_not_on(engine, "", device_preset(preset))  # pyright: ignore[reportArgumentType]
    assert f"{preset.removesuffix('-pcie')}" in told
    assert "7.5" in told
    with pytest.raises(InfeasibleError, match=r"0\.33\.0 needs 7\.5 for GPUs"):
        legal_devices(VLLM, None, cluster_preset(f"cpu+2x{preset}"))


@pytest.mark.parametrize("engine", [VLLM, SGLANG])
@pytest.mark.parametrize("preset", ["t4", "v100", "rtx3090", "h100", "mi300x"])
def test_a_card_that_is_refused_has_less_than_the_row_says(engine: object, preset: str) -> None:
    card = device_preset(preset) if preset in presets() else device_preset("rtx4090")
    own = compute_capability(card)
    for kind, row in engine.methods.items():  # pyright: ignore[reportAttributeAccessIssue]
        least = max(row.capability, engine.least.capability)  # pyright: ignore[reportAttributeAccessIssue]
        refused = why_not_on(engine, kind, card)  # pyright: ignore[reportArgumentType]
        assert bool(refused) == (0 < own < least)


def test_a_card_of_unknown_capability_is_refused_by_no_rule() -> None:
    card = replace(device_preset("p100"), kind="made-up", compute_capability=0.0)
    assert why_not_on(VLLM, "mxfp4", card) == ""
    assert why_not_on(VLLM, "mxfp4", replace(card, compute_capability=7.5)) != ""


def test_cards_that_can_are_planned_without_those_that_cannot() -> None:
    cluster, note = legal_devices(VLLM, None, cluster_preset("cpu+v100+2xrtx3090"))
    assert [d.name for d in cluster.devices if d.supported == frozenset()] == ["v100"]
    assert note.startswith("left out: v100 has compute capability 7.0")


@pytest.mark.parametrize(
    ("group", "kind"),
    [({"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}, "int4/16"),
     ({"weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8}},
      "float8/8"),
     ({"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"},
       "input_activations": {"num_bits": 4}}, "float4/4"),
     ({"weights": {"num_bits": 4, "type": "float", "strategy": "group"},
       "input_activations": {"num_bits": 4}}, "mxfp4/4")],
)  # fmt: skip
def test_kinds_of_compressed_tensors(group: object, kind: str) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    assert kind_of(config) == f"compressed-tensors {kind}"
    assert kind_of(config) in VLLM.methods


def test_methods_that_left_are_told() -> None:
    assert "has no quantisation 'hqq'" in unknown_method(VLLM, "hqq")
    assert unknown_method(VLLM, "bitsandbytes") == ""
    told = VllmOptions((4,), (0,), 0.9, 64, quantize="nf4", kind="bitsandbytes").why()
    assert "pip install vllm-bnb-plugin" in told["plugin"]
    assert "plugin" not in VllmOptions((4,), (0,), 0.9, 64, quantize="fp8", kind="fp8").why()
    assert unknown_method(SGLANG, "bitsandbytes") == ""


def test_methods_that_vllm_is_about_to_drop_are_allowed_by_an_option() -> None:
    assert unknown_method(VLLM, "fbgemm_fp8") == ""
    option = "--allow-deprecated-quantization"
    assert option in VllmOptions((4,), (0,), 0.9, 64, kind="fbgemm_fp8").arguments()
    assert option not in VllmOptions((4,), (0,), 0.9, 64, kind="fp8").arguments()


def quantised(sizes: Sizes, block: tuple[int, int]) -> OpGraph:
    """A decoder all of whose products but the head have blocks."""
    graph = decoder(sizes)
    held = ("linear", "_grouped_mm")
    details = tuple(
        replace(d, attributes={**d.attributes, WEIGHT_BLOCK: block})
        if kind in held and scope != "head" and "router" not in scope else d
        for d, kind, scope in zip(graph.detail, graph.op_types, graph.scope, strict=True)
    )  # fmt: skip
    return replace(graph, detail=details)


def divides(graph: OpGraph, size: int, *, experts: bool = False) -> bool:
    try:
        member_graph(division_of(graph), Shares((1,) * size, experts), 0)
    except ModelError:
        return False
    return True


@pytest.mark.parametrize("inner", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (1, 32), (8, 64), (64, 1), (1, 1)])
@pytest.mark.parametrize("experts", [0, 8])
def test_columns_divide_in_whole_blocks(inner: int, block: tuple[int, int], experts: int) -> None:
    """By hand: outputs of gate and up, and inputs of down, of each GPU are whole blocks; so are
    its heads of 16 numbers, of 8 with 4 of keys."""
    sizes = Sizes(inner=inner, experts=experts)
    for count in (2, 4):
        heads = all(
            part % own == 0
            for part, own in ((8 // count * 16, block[0]), (8 // count * 16, block[1]),
                              (4 // count * 16, block[0]))
        )  # fmt: skip
        columns = inner // count % block[0] == 0 == inner // count % block[1]
        graph = quantised(sizes, block)
        assert divides(graph, count) == (heads and columns)
        if experts:
            assert divides(graph, count, experts=True) == heads


def test_whole_experts_are_planned_where_their_columns_have_blocks() -> None:
    graph = quantised(Sizes(experts=8, inner=96, hidden=512, vocabulary=1024), (16, 32))
    cluster = replace(cluster_preset("cpu+4xh100-nvlink"), name="four")
    result = PLANNERS["vllm"].plan(Question(graph, cluster, costs=roofline, target="vllm"))
    named = [row.method for row in result.candidates]
    assert "tensor 4" not in named
    assert any(name.startswith("tensor") for name in named)


@pytest.mark.parametrize(
    ("config", "block"),
    [({"quant_method": "fp8", "weight_block_size": [128, 128]}, (128, 128)),
     ({"quant_method": "fp8"}, (1, 1)),
     ({"quant_method": "awq", "bits": 4, "group_size": 64}, (8, 64)),
     ({"quant_method": "gptq", "bits": 4, "group_size": -1}, (8, 1)),
     ({"quant_method": "compressed-tensors", "config_groups": {
         "g": {"weights": {"strategy": "block", "block_structure": [64, 128]}}}}, (64, 128)),
     ({"quant_method": "compressed-tensors", "config_groups": {
         "g": {"weights": {"strategy": "group", "group_size": 32}}}}, (1, 32)),
     ({"quant_method": "bitsandbytes", "load_in_4bit": True}, (1, 1))],
)  # fmt: skip
def test_blocks_are_those_of_the_configuration(config: dict, block: tuple[int, int]) -> None:
    assert SCHEMES[config["quant_method"]].block(config, False) == block


@pytest.mark.parametrize(("vocabulary", "sizes"), [(1024, {1, 2, 4}), (192, {1, 2, 3, 4, 6})])
def test_the_padded_vocabulary_and_heads_divide_evenly(vocabulary: int, sizes: set[int]) -> None:
    """Words are padded to 64: 1024 divide among 3 no more than 16 pieces do; 192 make 3 pieces, and
    so 192 words."""
    from gdp.targets.vllm.layouts import _divided_evenly

    shape = Sizes(heads=12, keys=12, inner=240, vocabulary=vocabulary - 1)
    wholes = _divided_evenly(decoder(shape))
    assert {n for n in range(1, 7) if not any(whole % n for whole in wholes)} == sizes


def placed(folder: Path, config: dict, cluster: str, *more: str) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    command = ["place", f"hf:{folder}", "--generate", "prompt=8,new=4", "--cluster", cluster,
               "--for", "vllm", "-o", str(folder / "p.json"), *more]  # fmt: skip
    done = CliRunner().invoke(cli, command)
    return f"{done.output}{done.exception or ''}"


def test_from_a_configuration_to_a_refusal_or_the_flags(tmp_path: Path) -> None:
    """mxfp4 needs Ampere; columns of 48 are no whole groups of 32; T4 beside RTX 3090 has a type of
    its own; Gemma 2 is no pipeline for SGLang."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    awq = {**CONFIG, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32,
                                             "zero_point": True}}  # fmt: skip
    assert "v100 has compute capability 7.0" in placed(tmp_path, CONFIG, "cpu+2xv100")
    assert "tensor 2" not in placed(tmp_path, awq, "cpu+2xrtx3090")
    assert "context" in placed(tmp_path, CONFIG, "cpu+rtx3090+t4")
    done = CliRunner().invoke(
        cli, ["export", str(tmp_path / "p.json"), "--to", "vllm", "-o", str(tmp_path / "v")]
    )
    assert done.exit_code == 0, done.output
    assert "--dtype float16" in (tmp_path / "v" / "arguments.txt").read_text()


def test_numbers_of_the_options_reach_both_engines() -> None:
    from gdp.targets.sglang.export import arguments

    mixed = VllmOptions((2, 2), (0, 1), 0.9, 64, dtype="float16", mixed=True)
    words = mixed.arguments()
    assert words[words.index("--dtype") + 1] == "float16"
    assert words[words.index("--attention-backend") + 1] == "TRITON_ATTN"
    assert {"--dtype", "--attention-backend"} <= set(mixed.why())
    assert arguments(mixed)[-2:] == ["--dtype", "float16"]
    assert np.isin(["--dtype"], VllmOptions((4,), (0,), 0.9, 64).arguments()).sum() == 0


@pytest.mark.parametrize("other", [False, True])
def test_a_plan_that_drafts_keeps_its_draft_in_both_engines(other: bool) -> None:
    from gdp.placement.placement import DraftModel
    from gdp.targets.sglang.export import arguments, why

    options = VllmOptions((4,), (0, 1), 0.9, 64, tensor=2, draft=DraftModel("hf:small", 4),
                          other_words=other)  # fmt: skip
    words = options.arguments()
    assert ("--speculative-config.use_heterogeneous_vocab" in words) == other
    assert ("use_heterogeneous_vocab" in options.why()) == other
    told = arguments(options)
    flags = dict(zip(told[::2], told[1::2], strict=True))
    assert flags["--speculative-draft-model-path"] == "small"
    assert flags["--speculative-num-steps"] == "4"
    assert flags["--speculative-num-draft-tokens"] == "5"
    assert "--speculative-algorithm" in why(options)


@pytest.mark.parametrize(("words", "same"), [(128, True), (256, False)])
def test_vocabularies_are_compared(words: int, same: bool, tmp_path: Path) -> None:
    from gdp.targets.vllm.plan import _words

    for name, size in (("large", 128), ("small", words)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": size}))
    assert (_words(str(tmp_path / "large")) == _words(f"hf:{tmp_path / 'small'}")) == same
    assert _words("no/such-model") is None
