"""Runs a checkpoint by the tensor parallel plan of transformers in this folder, and checks it.

    torchrun --nproc-per-node RANKS tp_run.py --weights FOLDER [--prompt N] [--new N]

transformers divides the parameters over a device mesh, as DTensor, and reads its own part of the
checkpoint in each process. The first rank compares the tokens with those of the uncut model.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

FOLDER = Path(__file__).resolve().parent


def load(weights, plan, world):
    """The divided model, by the argument that this version of transformers has."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig

        how = {"distributed_config": DistributedConfig(tp_plan=plan, tp_size=world)}
    except ImportError:
        how = {"tp_plan": plan}
    model: Any = AutoModelForCausalLM.from_pretrained(weights, local_files_only=True, **how)
    return model


def main():
    """Write some tokens, divided and uncut."""
    shards = json.loads((FOLDER / "shards.json").read_text(encoding="utf-8"))
    plan = json.loads((FOLDER / "tp_plan.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description="Run a checkpoint by tp_plan.json.")
    parser.add_argument("--weights", required=True, help="folder for from_pretrained")
    parser.add_argument("--prompt", type=int, default=shards["prompt"], help="tokens to read")
    parser.add_argument("--new", type=int, default=shards["new"] or 1, help="tokens to write")
    options, rank = parser.parse_args(), int(os.environ["RANK"])
    on_cpu = any(r["torch_device"] == "cpu" for r in shards["ranks"])
    dist.init_process_group("gloo" if on_cpu else "nccl")
    ids = torch.arange(options.prompt).remainder(shards["words"]).repeat(shards["batch"], 1)
    model = load(options.weights, plan, len(shards["ranks"]))
    written = {"max_new_tokens": options.new, "do_sample": False}
    with torch.inference_mode():
        tokens = model.generate(ids.to(model.device), **written)[:, options.prompt :].cpu()
        if rank == 0:
            whole: Any = AutoModelForCausalLM.from_pretrained(
                options.weights, local_files_only=True
            )
            wanted = whole.generate(ids, **written)[:, options.prompt :]
            equal = bool(torch.equal(tokens, wanted))
            print(json.dumps({"tokens": tokens.tolist(), "outputs_equal": equal}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
