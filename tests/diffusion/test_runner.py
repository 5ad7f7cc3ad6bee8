"""Exported programs: tiny random pipelines that are cut make what uncut ones make."""

import copy
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

from gdp.api.diffusion import runner
from gdp.importers.diffusers.classes import PIPELINES
from tests.importers.diffusion_pipelines.tiny_pipelines import TINY, Tiny

MADE = ["FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline", "StableDiffusionXLPipeline"]
HOME, OTHER = "cpu:0", "cpu:1"
"""Names of devices; torch has one processor, whatever its number."""


@functools.cache
def tiny(name: str) -> Tiny:
    import torch

    torch.manual_seed(0)
    return TINY[name]()


def made(name: str) -> Any:
    """A pipeline with copies of the tiny components and a scheduler of its own."""
    import diffusers

    cls = getattr(diffusers, name)
    wanted = inspect.signature(cls.__init__).parameters
    parts: dict[str, Any] = {
        key: None for key in wanted if key not in ("self", "args", "kwargs", "scheduler")
        and wanted[key].default is inspect.Parameter.empty
    }  # fmt: skip
    parts |= {k: copy.deepcopy(m).eval() for k, m in tiny(name).components.items()}
    flows = ("FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline", "QwenImagePipeline")
    kind = "FlowMatchEulerDiscreteScheduler" if name in flows else "DDIMScheduler"
    if name == "WanPipeline":
        parts["boundary_ratio"] = 0.5
    return cls(**parts, scheduler=getattr(diffusers, kind)())


def result(pipe: Any, name: str) -> Any:
    """Latents or pixels that a pipeline makes of given embeddings, decoder included."""
    import torch

    own = tiny(name)
    width, height, frames = own.size
    call: dict[str, Any] = dict(own.call) | {"width": width, "height": height}
    known = inspect.signature(pipe.__call__).parameters
    if "num_frames" in known:
        call["num_frames"] = frames
    generator = torch.Generator("cpu").manual_seed(1)
    out = pipe(
        prompt=None, num_inference_steps=2, output_type="pt", generator=generator, **call
    )  # fmt: skip
    return out[0]


def plan(name: str, **residence: dict[str, Any]) -> dict[str, Any]:
    """A plan with every component whole at home, apart from those that are said."""
    row = PIPELINES[name]
    entries = []
    for key in tiny(name).components:
        entry = {
            "name": key, "method": "decode" if key == "vae" else "forward", "residence": "whole",
            "devices": [HOME], "blocks": {},
        }  # fmt: skip
        role = "denoiser" if key in row.denoisers else "vae" if key == "vae" else "encoder"
        entries.append(entry | residence.get(role, {}))
    return {"home": HOME, "tiling": False, "slicing": False, "components": entries, "call": {}}


def blocks(name: str, devices: list[str]) -> dict[str, str]:
    """The blocks of the denoiser in turn on the devices."""
    module = tiny(name).components[PIPELINES[name].denoisers[0]]
    lists = [
        (path, part) for path, part in module.named_modules()
        if type(part).__name__ == "ModuleList" and path.count(".") == 0
    ]  # fmt: skip
    paths = [f"{path}.{i}" for path, part in lists for i in range(len(part))]
    return {path: devices[i % len(devices)] for i, path in enumerate(paths)}


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices that tensors were moved to."""
    seen: list[str] = []
    inner = runner.moved

    def recorded(value: Any, device: str) -> Any:
        seen.append(device)
        return inner(value, device)

    monkeypatch.setattr(runner, "moved", recorded)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("way", ["apart", "by turns", "split", "partly sent", "sent"])
def test_a_cut_pipeline_makes_the_same(name: str, way: str, moves: list[str]) -> None:
    import torch

    ways: dict[str, dict[str, dict[str, Any]]] = {
        "apart": {"encoder": {"devices": [OTHER]}, "vae": {"devices": [OTHER]}},
        "by turns": {
            key: {"residence": "moved"} for key in ("encoder", "vae", "denoiser")
        },
        "split": {
            "denoiser": {
                "residence": "split", "devices": [HOME, OTHER],
                "blocks": blocks(name, [HOME, OTHER]),
            }
        },
        "partly sent": {
            "denoiser": {
                "residence": "split", "devices": [HOME], "blocks": blocks(name, [HOME, "host"])
            }
        },
        "sent": {"denoiser": {"residence": "blocks sent"}},
    }  # fmt: skip
    whole = result(made(name), name)
    pipe = made(name)
    runner.place(pipe, plan(name, **ways[way]))
    cut = result(pipe, name)
    torch.testing.assert_close(cut, whole, rtol=0, atol=0)
    assert (OTHER in moves) == (way in ("apart", "split"))


def test_weights_at_rest_leave_the_device() -> None:
    import torch

    module = torch.nn.Linear(2, 2)
    rest = runner.Resting(module)
    places = [p.data_ptr() for p in module.parameters()]
    rest.bring("cpu")
    assert not set(places) & {p.data_ptr() for p in module.parameters()}
    rest.leave()
    assert [p.data_ptr() for p in module.parameters()] == places


def test_a_component_that_moved_leaves_when_any_other_is_called() -> None:
    import torch

    parts = [torch.nn.Linear(2, 2) for _ in range(3)]
    places = [part.weight.data_ptr() for part in parts[:2]]

    class Pipe:
        a, b, c = parts

    pipe = Pipe()
    ways = {"a": "moved", "b": "moved", "c": "whole"}
    entries = [
        {"name": n, "method": "forward", "residence": way, "devices": [HOME], "blocks": {}}
        for n, way in ways.items()
    ]
    own = {"home": HOME, "tiling": False, "slicing": False, "components": entries, "call": {}}
    runner.place(pipe, own)
    x = torch.ones(1, 2)

    def away() -> list[bool]:
        return [p.weight.data_ptr() != place for p, place in zip(parts, places, strict=False)]

    parts[0](x)
    there = parts[0].weight.data_ptr()
    parts[0](x)
    assert parts[0].weight.data_ptr() == there  # it is brought once
    assert away() == [True, False]
    parts[1](x)
    assert away() == [False, True]
    parts[2](x)
    assert away() == [False, False]


def test_tensors_are_found_in_every_kind_of_value() -> None:
    import torch
    from transformers.modeling_outputs import BaseModelOutput

    x = torch.ones(1)
    made_of = BaseModelOutput(last_hidden_state=x, hidden_states=(x, x))
    there = runner.moved({"a": [x, (x,)], "b": made_of, "c": 3, "d": None}, "meta")
    assert there["a"][0].is_meta
    assert there["a"][1][0].is_meta
    assert there["b"].last_hidden_state.is_meta
    assert there["b"].hidden_states[1].is_meta
    assert (there["c"], there["d"]) == (3, None)


def test_files_of_an_export(tmp_path: Path) -> None:
    from gdp.api.diffusion.export import export_pipeline
    from gdp.api.diffusion.place import place_pipeline
    from tests.diffusion.test_plans import machine, pipeline

    answer = place_pipeline(pipeline(), machine(7_000_000, 5_500_000), costs="datasheet")
    names = export_pipeline(answer, tmp_path / "out")
    assert set(names) >= {"plan.json", "run.py", "comfyui.json", "answer.json"}
    written = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert [c["name"] for c in written["components"]] == ["text_encoder", "transformer", "vae"]
    compile((tmp_path / "out" / "run.py").read_text(), "run.py", "exec")
    for entry, placed in zip(written["components"], answer.plan.placed, strict=True):  # pyright: ignore[reportOptionalMemberAccess]
        assert entry["residence"] == placed.way.residence
        assert entry["devices"] == [f"cuda:{d - 1}" if d else "cpu" for d in placed.way.devices]


def test_the_program_runs_a_saved_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its file, as exported beside a plan, on a pipeline that another one loads."""
    from PIL import Image

    class Pipe:
        def __call__(self, prompt: str, *, generator: Any, width: int, steps: int = 1) -> Any:
            assert (prompt, width, steps) == ("a house", 64, 1)
            assert generator.initial_seed() == 3
            return type("Made", (), {"images": [Image.new("RGB", (2, 2))] * 2})()

    own = {"seconds": 1.5, "call": {"width": 64, "num_frames": 9}}
    words = ["run.py", "model", "--prompt", "a house", "--seed", "3", "-o", str(tmp_path / "x.png")]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(runner, "loaded", lambda _: (Pipe(), own))
    monkeypatch.setattr(runner, "place", lambda *_: None)
    runner.main()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x-1.png", "x.png"]
    assert "predicted 1.50 s" in capsys.readouterr().out


def test_programs_that_load_16_bits_are_not_written_for_fewer(tmp_path: Path) -> None:
    from gdp.api.diffusion.export import export_pipeline
    from gdp.api.diffusion.place import place_pipeline
    from tests.diffusion.test_plans import machine, pipeline

    answer = place_pipeline(pipeline(), machine(1 << 30), costs="datasheet", quantize="nf4")
    assert set(export_pipeline(answer, tmp_path / "out")) == {
        "plan.json", "answer.json", "comfyui.json"
    }  # fmt: skip


def test_a_parallel_export_needs_no_gdp(tmp_path: Path) -> None:
    from dataclasses import replace

    from gdp.api.diffusion.export import export_pipeline
    from gdp.api.diffusion.place import place_pipeline
    from tests.diffusion.test_plans import graph, machine, pipeline

    made = pipeline()
    parts = tuple(
        replace(c, graph=graph(heads=8), class_name="WanTransformer3DModel")
        for c in made.components
    )
    own = replace(made, components=parts, name="Wan2.1-T2V-14B")
    answer = place_pipeline(own, machine(1 << 30, 1 << 30, link=1e12), costs="datasheet")
    assert {"run.py", "runner.py", "xdit.sh"} <= set(export_pipeline(answer, tmp_path / "out"))
    start = "exec env CUDA_VISIBLE_DEVICES=0,1 xdit --model Wan-AI/Wan2.1-T2V-14B-Diffusers "
    assert start in (tmp_path / "out" / "xdit.sh").read_text()
    unknown = replace(answer, pipeline=replace(own, name="mine"))
    assert "xdit.sh" not in export_pipeline(unknown, tmp_path / "mine")
    for name in ("run.py", "runner.py"):
        text = (tmp_path / "out" / name).read_text()
        compile(text, name, "exec")
        assert "gdp." not in text
    assert "from runner import" in (tmp_path / "out" / "run.py").read_text()
