"""Runs the pipeline in this folder with torch.distributed.pipelining, checks it and times it.

    python run.py [--microbatches N] [--rounds N] [--device cpu] [--weights FOLDER]

starts a process for every stage; `torchrun --nproc-per-node STAGES run.py` does, too. One
microbatch is as large as the inputs that the model was placed with; the first axis of every input
is the batch. The module of a python: model must be importable. The model of a configuration has
random weights, unless --weights names a folder of transformers.
"""

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import ScheduleGPipe, pipe_split, pipeline
from torch.utils._pytree import tree_flatten, tree_unflatten

PLAN = json.loads((Path(__file__).resolve().parent / "pipeline.json").read_text(encoding="utf-8"))
STAGES = PLAN["stages"]
TOLERANCE = 1e-4
"""Of the largest magnitude of an output."""


class Tensors(torch.nn.Module):
    """The module from tensors to tensors: pipelines hand over nothing else."""

    def __init__(self, module, args, kwargs):
        super().__init__()
        self.module = module
        self.leaves, self.tree = tree_flatten((args, kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors):
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        outputs = tree_flatten(self.module(*args, **kwargs))[0]
        return tuple(leaf for leaf in outputs if isinstance(leaf, torch.Tensor))


def load(weights):
    """The model with weights; RuntimeError where its module has only their shapes."""
    torch.manual_seed(0)
    model: Any
    # By name: this file lies among the exporters, which know no importers, and runs elsewhere.
    if PLAN["model"].startswith("hf:"):
        hub = importlib.import_module("gdp.importers.huggingface.model")
        model = hub.huggingface_model(PLAN["model"], device="meta" if weights else "cpu")
        kind = type(model.module)
        module = kind.from_pretrained(weights, local_files_only=True) if weights else model.module
    else:
        model = importlib.import_module("gdp.question.models").traced_model(PLAN["model"])
        module = model.module
    if any(p.is_meta for p in (*module.parameters(), *module.buffers())):
        raise RuntimeError(f"{PLAN['model']}: the weights are on the meta device; load them")
    return Tensors(module.eval(), model.args, dict(model.kwargs))


def draw(like, generator):
    """Another value of this shape: normal floats, whole numbers 0 or 1, as any vocabulary has."""
    if like.dtype.is_floating_point:
        return torch.randn(like.shape, generator=generator).to(like.dtype)
    return torch.randint(2, like.shape, generator=generator).to(like.dtype)


def microbatches(whole, count):
    """Inputs of as many microbatches, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    examples = [whole.leaves[place] for place in whole.places]
    return [[draw(example, generator) for example in examples] for _ in range(count)]


def bind_to_device(rank, world, on_cpu):
    """Select the device of this process; pin it to a core if the device is one and there are
    enough."""
    if not on_cpu:
        return torch.device(STAGES[rank]["torch_device"])
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= world:
            os.sched_setaffinity(0, {cores[rank]})
            torch.set_num_threads(1)
    return torch.device("cpu")


def sendable(traced):
    """The program with copies of tensors that cross a split and are not contiguous, such as
    expanded masks: ranks can send and receive nothing else. `SplitPoint`s alone would need no
    copies."""
    stage, stage_of = 0, {}
    for node in traced.graph.nodes:
        stage += "pipe_split" in str(node.target)
        stage_of[node] = stage
    for node, own in stage_of.items():
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        later = [user for user in node.users if stage_of[user] > own and user.op != "output"]
        if later and not value.is_contiguous():
            with traced.graph.inserting_after(node):
                copy = traced.graph.call_function(torch.ops.aten.contiguous.default, (node,))
            copy.meta = {**node.meta, "val": value.contiguous()}
            for user in later:
                user.replace_input_with(node, copy)
    traced.recompile()
    return traced


def finish(device):
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call, rounds, device, before=lambda: None):
    """Seconds of each round, behind one that is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        before()
        finish(device)
        start_s = time.perf_counter()
        call()
        finish(device)
        seconds.append(time.perf_counter() - start_s)
    return seconds[1:]


def largest_differences(computed, wanted):
    """(absolute, as a share of the largest magnitude) over all outputs."""
    pairs = [(f.double(), w.double()) for f, w in zip(computed, wanted, strict=True)]
    absolute = [float((f - w).abs().max()) if f.numel() else 0.0 for f, w in pairs]
    scale = [max(float(w.abs().max()), 1e-30) if w.numel() else 1.0 for _, w in pairs]
    return max(absolute), max(a / s for a, s in zip(absolute, scale, strict=True))


def work(rank, world, init, options):
    """One stage; the last one checks, times and prints."""
    device = bind_to_device(rank, world, options.device == "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=world)
    last = rank == world - 1
    whole = load(options.weights)
    samples = microbatches(whole, options.microbatches)
    joined = [torch.cat(parts).to(device) for parts in zip(*samples, strict=True)]
    wanted, uncut_s = [], []
    with torch.no_grad():
        if last:  # before the module is marked
            whole.to(device)
            moved = [[tensor.to(device) for tensor in sample] for sample in samples]
            outputs = [whole(*sample) for sample in moved]
            wanted = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
            uncut_s = seconds_of(lambda: [whole(*s) for s in moved], options.rounds, device)
            whole.to("cpu")
        for path in PLAN["split_spec"]:
            whole.module.get_submodule(path).register_forward_pre_hook(lambda *_: pipe_split())
        cut = pipeline(whole, tuple(samples[0]), split_policy=sendable)
        schedule = ScheduleGPipe(cut.build_stage(rank, device), options.microbatches)
        answers = []

        def step():
            answers[:] = [schedule.step(*joined) if rank == 0 else schedule.step()]

        times = seconds_of(step, options.rounds, device, before=dist.barrier)
    if last:
        computed = answers[0] if isinstance(answers[0], list | tuple) else [answers[0]]
        absolute, relative = largest_differences(computed, wanted)
        print(json.dumps({
            "stages": world, "microbatches": options.microbatches, "device": device.type,
            "outputs_equal": relative <= TOLERANCE,
            "max_abs_diff": absolute, "max_relative_diff": relative,
            "batch_s": statistics.median(times), "rounds_s": times,
            "uncut_s": statistics.median(uncut_s),
        }))  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def main():
    """Run the pipeline that this folder holds."""
    parser = argparse.ArgumentParser(description="Run the pipeline in this folder.")
    parser.add_argument("--microbatches", type=int, default=PLAN["microbatches"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu"], help="all stages on cores, with gloo")
    parser.add_argument("--weights", help="folder for from_pretrained")
    options = parser.parse_args()
    if all(stage["torch_device"] == "cpu" for stage in STAGES):
        options.device = "cpu"
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", options)
        return
    if "torchrun" in PLAN:
        raise SystemExit(
            "the stages are on several machines: run on each its line of 'torchrun' in "
            "pipeline.json, with the address of a machine in the place of its name"
        )
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are here
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{folder}/ranks"
        spawn = torch.multiprocessing.spawn  # pyright: ignore[reportPrivateImportUsage]
        spawn(work, (len(STAGES), init, options), nprocs=len(STAGES))


if __name__ == "__main__":
    main()
