"""Exported programs of several devices, executed: tiny random pipelines that processes compute
together make what one process makes."""

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("diffusers")

from gdp.api.diffusion.export import export_pipeline
from gdp.api.diffusion.parallel import ParallelDegrees
from gdp.api.diffusion.place import place_pipeline
from gdp.api.diffusion.runner import arguments
from tests.diffusion.test_plans import machine
from tests.diffusion.test_runner import made

PROGRAM = Path(__file__).with_name("on_processors.py")
PROMPT = "a lighthouse at dusk"


def tokenizer() -> Any:
    """Words by number; unknown ones share one."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<unk>", "</s>", *PROMPT.split()])}
    own = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_max_length=77,
    )  # fmt: skip


class Case(NamedTuple):
    """A pipeline and the devices that compute it."""

    pipeline: str
    degrees: ParallelDegrees
    request: str = "64x64,steps=2"

    @property
    def name(self) -> str:
        """For a folder."""
        return f"{self.pipeline} {self.degrees}".replace(" ", "-")


CASES = (
    Case("FluxPipeline", ParallelDegrees(ulysses=2, ring=2)),
    Case("FluxPipeline", ParallelDegrees(ulysses=2, copies=2), "64x64,steps=2,batch=4"),
    # Prompts as long as they are, whose tokens two devices cannot share equally.
    Case("QwenImagePipeline", ParallelDegrees(ring=2)),
    Case("QwenImagePipeline", ParallelDegrees(ulysses=2, guidance=2)),
    Case("WanPipeline", ParallelDegrees(ulysses=2, guidance=2), "64x48x9,steps=2"),
    Case("StableDiffusionXLPipeline", ParallelDegrees(guidance=2), "64x64,steps=2,batch=2"),
)


@functools.cache
def folder_of(name: str, at: Path) -> Path:
    """A tiny random pipeline as diffusers saves it."""
    pipe = made(name)
    parts = [key for key in pipe.config if key.startswith("tokenizer")]
    pipe.register_modules(**{key: tokenizer() for key in parts})
    pipe.save_pretrained(at / name)
    return at / name


def exported(case: Case, at: Path) -> dict[str, Any]:
    """The job of a plan that is exported for processors."""
    folder, is_video = folder_of(case.pipeline, at), case.pipeline == "WanPipeline"
    request: dict[str, Any] = {"video" if is_video else "image": case.request}
    gpus = machine(*[1 << 30] * case.degrees.cards)
    answer = place_pipeline(f"hf:{folder}", gpus, costs="datasheet", **request)
    assert answer.plan is not None
    plan = next(p for p in (answer.plan, *answer.others) if p.degrees == case.degrees)
    devices = tuple(replace(d, kind="cpu") for d in gpus.devices)
    own = replace(answer, plan=plan, cluster=replace(gpus, devices=devices), dtype="float32")
    out = at / case.name
    assert "run.py" in export_pipeline(own, out)
    written = json.loads((out / "plan.json").read_text())
    assert set(written["cards"]) == {"cpu"}
    written["call"]["output_type"] = "pt"
    (out / "plan.json").write_text(json.dumps(written))
    return {
        "folder": str(out), "model": str(folder), "prompt": PROMPT, "to": str(out / "made"),
        "processes": case.degrees.cards,
    }  # fmt: skip


def alone(case: Case, job: dict[str, Any], seed: int) -> Any:
    """Images of one process."""
    import diffusers
    import torch

    pipe = getattr(diffusers, case.pipeline).from_pretrained(job["model"])
    plan = json.loads((Path(job["folder"]) / "plan.json").read_text())
    generator = torch.Generator("cpu").manual_seed(seed)
    return pipe(PROMPT, generator=generator, **arguments(pipe, plan))[0]


def check(case: Case, job: dict[str, Any]) -> None:
    import torch

    batch = int(case.request.partition("batch=")[2] or 1)
    share = batch // case.degrees.copies
    for first in range(0, batch, share):
        whole = alone(case, job, 3 + first)
        together = torch.load(f"{job['to']}.{first}")
        torch.testing.assert_close(together, whole, rtol=1e-4, atol=1e-5)
        assert whole.std() > 0


@pytest.mark.slow
def test_devices_make_together_what_one_makes(tmp_path: Path) -> None:
    jobs = [exported(case, tmp_path) for case in CASES]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(PROGRAM), str(tmp_path / "jobs.json")]
    subprocess.run(command, check=True)
    for case, job in zip(CASES, jobs, strict=True):
        check(case, job)


@pytest.mark.slow
def test_torchrun_starts_the_program(tmp_path: Path) -> None:
    case = Case("FluxPipeline", ParallelDegrees(ulysses=2))
    job = exported(case, tmp_path)
    (tmp_path / "job.json").write_text(json.dumps([job]))
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([sys.executable, *run, str(PROGRAM), str(tmp_path / "job.json")], check=True)
    check(case, job)
