"""Runs exported programs on processors, a process for each device of the plan.

    python tests/diffusion/on_processors.py JOBS.json      several, each in processes forked here
    torchrun ... tests/diffusion/on_processors.py JOB.json one, in the processes of torchrun

A job has the folder of the program, its pipeline, the file of the result and the number of
processes. The programs run as they are; torch lends what diffusers expects of accelerators alone:
their number, their kind, which a torch built for CUDA names without a GPU, and the attention that
returns a log-sum-exp, which torch has for processors by another name.
"""

import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist

LIBRARY = torch.library.Library("aten", "IMPL")


def flash(query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
          return_debug_mask: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    """Attention of processors in the form of that of CUDA."""
    del return_debug_mask
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    none = torch.empty(0)
    return out, lse, none, none, query.shape[2], key.shape[2], none, none, none


def run(job: dict[str, Any]) -> None:
    """Run a program whose processes and ranks the environment names."""
    sys.path.insert(0, job["folder"])
    sys.modules.pop("runner", None)
    import runner  # pyright: ignore[reportMissingImports]

    def save(result: Any, output: str, first: int = 0) -> None:
        torch.save(result[0], f"{output}.{first}")

    runner.save = save
    sys.argv = ["run.py", job["model"], "--prompt", job["prompt"], "--seed", "3", "-o", job["to"]]
    runpy.run_path(str(Path(job["folder"]) / "run.py"), run_name="__main__")


def forked(job: dict[str, Any]) -> None:
    """Run a program in processes of its own; raises `RuntimeError` where one fails."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(job["processes"]):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank), "WORLD_SIZE": str(job["processes"]), "MASTER_PORT": str(port),
                "MASTER_ADDR": "localhost", "LOCAL_RANK": str(rank),
            }  # fmt: skip
            code = 1
            try:
                run(job)
                code = 0
            except BaseException:  # whatever a program raises; the fork ends here
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    failures = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    if failures:
        raise RuntimeError(f"a process of {job['folder']} failed")


def main() -> None:
    """Run the jobs."""
    torch.set_num_threads(1)
    assert dist.is_gloo_available()
    assert diffusers.__version__
    torch.accelerator.device_count = lambda: 1
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cpu")
    LIBRARY.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    jobs = json.loads(Path(sys.argv[1]).read_text())
    for job in jobs:
        if "RANK" in os.environ:
            run(job)
        else:
            forked(job)


if __name__ == "__main__":
    main()
