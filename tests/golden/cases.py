"""What the golden answers are answers to: commands, and calls of the public names of gdp.

Everything here goes through `python -m gdp` (run in this process, so that libraries are loaded and
kernels read once) or through `gdp.NAME`; nothing inside the package is imported. Budgets are
evaluations: the seconds are so many that no clock ends anything.
"""
# ruff: noqa: E501  (a row, a line)

from typing import NamedTuple

CLUSTERS = {
    # Three devices of unequal speed, one of which cannot add; the way back is slower.
    "unequal.toml": """
name = "unequal"
host = "slow"
default_bytes_per_s = 8e9
[[device]]
name = "fast"
flop_per_s = { default = 2.4e11, float16 = 8e11 }
bytes_per_s = 4e11
dispatch_s = 5e-6
[[device]]
name = "slow"
flop_per_s = 1e11
bytes_per_s = 5e10
[[device]]
name = "other"
flop_per_s = 2e11
bytes_per_s = 2e11
dispatch_s = 2e-6
[[link]]
src = "fast"
dst = "slow"
bytes_per_s = 2e9
latency_s = 2e-5
one_way = true
[[link]]
src = "fast"
dst = "other"
bytes_per_s = 2e10
contention = false
""",
    # Three devices on one bus, with too little memory for most models here on one of them.
    "bus.toml": """
name = "bus"
[[device]]
name = "host"
kind = "cpu"
flop_per_s = 5e10
bytes_per_s = 2e10
memory_bytes = "5MiB"
[[device]]
name = "a"
kind = "gpu"
flop_per_s = 3e11
bytes_per_s = 2e11
memory_bytes = "4.5MiB"
dispatch_s = 4e-6
[[device]]
name = "b"
kind = "gpu"
flop_per_s = 3e11
bytes_per_s = 2e11
memory_bytes = "4.5MiB"
dispatch_s = 4e-6
[[link]]
src = "host"
dst = "a"
bytes_per_s = 6e9
latency_s = 1e-5
channel = "bus"
[[link]]
src = "host"
dst = "b"
bytes_per_s = 6e9
latency_s = 1e-5
channel = "bus"
[[link]]
src = "a"
dst = "b"
bytes_per_s = 6e9
latency_s = 1e-5
channel = "bus"
""",
}
"""Cluster files by name; other clusters are presets."""


class Placed(NamedTuple):
    """A run of `gdp place`."""

    name: str
    model: str  # with what is asked of it
    cluster: str  # with its memory limits
    objective: str = "latency"
    options: str = "--evaluations 200"
    needs: tuple[str, ...] = ()  # modules of optional extras


class Followed(NamedTuple):
    """Another verb, told the model, the cluster and the placement of a case of `PLACED`."""

    name: str
    of: str  # that case
    verb: str  # with its options; what it writes is in the folder `out`


TORCH, HF, GGUF = ("torch",), ("torch", "transformers"), ("gguf",)
CORES, GPUS, NVLINK = "2xcpu-core", "cpu+2xt4-pcie4", "4xa100-nvlink"
UNEQUAL, BUS = "unequal.toml", "bus.toml"
JAX, PYTORCH = "python:golden.models:jax_", "python:golden.models:torch_"

PLACED = (
    # Every method: where the fastest device is too small, those of pipelines and loads elsewhere
    *(
        Placed(f"method-{method}", "fork_join.json", f"{UNEQUAL} --max-memory fast=6MiB",
               "latency", f"--method {method} --evaluations 1500 --simplicity 0", needs)
        for method, needs in (
            ("single", ()), ("round_robin", ()), ("modules", ()), ("blocks", ()),
            ("metis", ("pymetis",)), ("heft", ()), ("etf", ()), ("critical_path", ()),
            ("multilevel", ()), ("local_search", ()), ("auto", ()), ("policy", ()),
        )
    ),
    Placed("method-hsdag", "small.json", f"{CORES} --max-memory core0=2MB,core1=2MB", "latency", "--method hsdag --evaluations 40"),
    Placed("method-exact", "small.json", f"{CORES} --max-memory core0=2MB,core1=2MB", "latency", "--method exact --evaluations 200 --simplicity 0", ("ortools",)),
    Placed("method-pipeline_dp", "fork_join.json", CORES, "throughput",
           "--method pipeline_dp --evaluations 200 --no-replicas"),
    Placed("exact-pipeline", "small.json", BUS, "throughput", "--method exact --evaluations 200 --no-replicas"),
    Placed("exact-loads", "small.json", CORES, "max_load", "--method exact --evaluations 200 --simplicity 0"),
    # ONNX
    Placed("squeezenet", "onnx:light_squeezenet", CORES),
    Placed("squeezenet-throughput", "onnx:light_squeezenet", CORES, "throughput"),
    Placed("squeezenet-not-simplified", "onnx:light_squeezenet", CORES, "latency",
           "--evaluations 200 --simplicity 0 --seed 7"),
    Placed("inception-tight", "onnx:light_inception_v1",
           f"{GPUS} --max-memory 0=24MiB,1=24MiB,cpu=24MiB", "latency",
           "--method local_search --evaluations 400"),
    Placed("alexnet-stages", "onnx:light_bvlc_alexnet", NVLINK, "throughput",
           "--evaluations 100 --no-replicas"),
    Placed("towers", "towers.onnx --dim batch=512", CORES),
    Placed("towers-stages", "towers.onnx --dim batch=512", CORES, "throughput",
           "--evaluations 200 --no-replicas"),
    Placed("towers-tight", "towers.onnx --dim batch=512",
           f"{CORES} --max-memory core0=3MiB,core1=2MiB"),
    Placed("attention", "attention.onnx", UNEQUAL),
    Placed("attention-bus", "attention.onnx", BUS, "throughput"),
    # JAX
    Placed("jax-cnn", f"{JAX}cnn", CORES),
    Placed("jax-mixers", f"{JAX}mixers", NVLINK),
    Placed("jax-mixers-throughput", f"{JAX}mixers", NVLINK, "throughput", "--evaluations 100"),
    Placed("jax-step", f"{JAX}step", GPUS),
    Placed("jax-step-bus", f"{JAX}step", BUS, "throughput"),
    # PyTorch
    Placed("torch-towers", f"{PYTORCH}towers", CORES, needs=TORCH),
    Placed("torch-step", f"{PYTORCH}step", UNEQUAL, needs=TORCH),
    Placed("pipelining", f"{PYTORCH}row", "3xt4-pcie4", "throughput", "--for pipelining --evaluations 200", TORCH),
    Placed("llama", "hf:llama --task causal-lm --sequence 256", GPUS, "latency",
           "--evaluations 100", HF),
    Placed("llama-decode", "hf:llama --sequence 256 --batch 2 --decode", GPUS, "latency",
           "--method heft --evaluations 200", HF),
    Placed("accelerate", "hf:bert --task masked-lm --sequence 64", GPUS, "latency",
           "--evaluations 100 --for accelerate", HF),
    Placed("accelerate-offload", "hf:llama --sequence 256", f"{GPUS} --max-memory 0=26MB,1=8MB",
           "latency", "--evaluations 60 --for accelerate", HF),
    Placed("accelerate-disk", "hf:llama --sequence 256",
           f"{GPUS} --max-memory 0=26MB,1=8MB,cpu=6MB", "latency",
           "--evaluations 60 --for accelerate --granularity layer --offload disk", HF),
    # GGUF
    Placed("gguf", "blocks.gguf --sequence 64", GPUS, "latency",
           "--evaluations 100 --costs datasheet", GGUF),
    Placed("gguf-bus", "blocks.gguf --sequence 64 --decode", BUS, "throughput",
           "--evaluations 100", GGUF),
    Placed("llamacpp", "experts.gguf --sequence 512",
           f"{GPUS} --max-memory 0=6MB,1=6MB", "latency",
           "--for llamacpp --pin blk.1.experts=cpu", GGUF),
    # Graph files: replicas, little memory, demands
    Placed("wide-nvlink", "wide.json", NVLINK, "throughput", "--evaluations 150"),
    Placed("wide-replicas", "wide.json", CORES, "throughput", "--evaluations 150"),
    Placed("wide-bus", "wide.json", BUS, "throughput"),
    Placed("fork-join-bus", "fork_join.json", BUS),
    Placed("infeasible", "fork_join.json", f"{CORES} --max-memory core0=1MiB,core1=1MiB"),
    Placed("training", "training.gdpgraph", UNEQUAL),
    Placed("training-tight", "training.gdpgraph", f"{CORES} --max-memory core0=2.2MB,core1=2.2MB"),
    Placed("pinned", "fork_join.json", UNEQUAL, "latency",
           "--evaluations 150 --pin net.block0*=fast,other --pin b1_0=slow"),
    Placed("forbidden", "fork_join.json", UNEQUAL, "latency",
           "--evaluations 150 --forbid net.block2*=fast"),
    Placed("together", "fork_join.json", UNEQUAL, "throughput",
           "--evaluations 150 --together net.block1.branch* --together net.block3*"),
    Placed("clashing", "small.json", CORES, "latency",
           "--evaluations 50 --pin b0_0=core1 --forbid b0_0=core1"),
)  # fmt: skip
"""What `gdp place` answers."""

FOLLOWED = (
    Followed("simulate", "towers", "simulate"),
    Followed("simulate-throughput", "squeezenet-throughput", "simulate --objective throughput"),
    Followed("simulate-overflow", "jax-mixers", "simulate --max-memory 0=1MiB"),
    Followed("trace", "towers", "simulate --trace out/trace.json"),
    Followed("explain", "fork-join-bus", "explain --op b1_*"),
    Followed("explain-module", "pinned", "explain --scope net.block2"),
    Followed("report", "attention", "report -o out/report.html"),
    Followed("inspect-onnx", "towers", "inspect"),
    Followed("inspect-jax", "jax-step", "inspect"),
    Followed("inspect-torch", "torch-towers", "inspect"),
    Followed("inspect-gguf", "gguf", "inspect"),
    Followed("compare", "attention",
             "compare --methods single,heft,etf,local_search --evaluations 100"),
    Followed("devices", "attention", "devices"),
    Followed("export-onnxruntime", "attention", "export --to onnxruntime -o out/x"),
    Followed("export-onnxruntime-replicas", "squeezenet-throughput",
             "export --to onnxruntime -o out/x"),
    Followed("export-openvino", "towers", "export --to openvino -o out/x"),
    Followed("export-accelerate", "accelerate", "export --to accelerate -o out/x"),
    Followed("export-accelerate-disk", "accelerate-disk", "export --to accelerate -o out/x"),
    Followed("export-pipelining", "pipelining", "export --to pipelining -o out/x"),
    Followed("export-llamacpp", "llamacpp", "export --to llamacpp -o out/x"),
    Followed("export-jax", "jax-mixers", "export --to jax -o out/x"),
)  # fmt: skip
"""What other verbs say of these placements."""
