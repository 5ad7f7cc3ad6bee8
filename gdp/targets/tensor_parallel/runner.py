"""Runs the model of this folder with its ops divided among processes, checks it and times it.

    python run.py [--weights FOLDER] [--prompt N] [--new N] [--rounds N] [--cores 0 1]

starts a process for every rank of shards.json; `torchrun --nproc-per-node RANKS run.py` does, too.
Each rank loads its own part of every parameter: of the safetensors of FOLDER, or without it drawn
at random by names. The prompt is read, then tokens are written one by one. The first rank compares
all logits with those of the uncut model (not with --no-check). Needs torch, transformers and
safetensors; nothing of gdp.
"""

import argparse
import contextlib
import datetime
import inspect
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of the largest logit, by the type of the weights."""
LOOPBACK = "lo" if Path("/sys/class/net/lo").exists() else ""
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


class Checkpoint:
    """Parameters of a folder of safetensors."""

    def __init__(self, folder):
        from safetensors import safe_open

        self.file_of = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            self.file_of |= dict.fromkeys(file.keys(), file)
        if not self.file_of:
            raise SystemExit(f"{folder} holds no .safetensors file; save the model with "
                             "save_pretrained")  # fmt: skip

    def read(self, names, like, part):
        """The spans of a parameter that has any of some names; the whole one without a part."""
        name = next((n for n in names if n in self.file_of), None)
        if name is None:
            raise SystemExit(f"the checkpoint has no parameter {names[0]!r}; save the model with "
                             "this version of transformers (save_pretrained)")  # fmt: skip
        held = self.file_of[name].get_slice(name)
        if part is None:
            return held[:].to(like.dtype)
        before = (slice(None),) * part["axis"]
        pieces = [held[(*before, slice(*span))] for span in part["spans"]]
        return torch.cat(pieces, part["axis"]).to(like.dtype)


class Drawn:
    """Parameters drawn at random: by name, so that every rank has its part of the same."""

    def read(self, names, like, part):
        """The spans of a parameter; `like` has the shape of the whole one."""
        generator = torch.Generator().manual_seed(zlib.crc32(names[0].encode()))
        drawn = torch.randn(like.shape, generator=generator)
        drawn = drawn / like.shape[-1] ** 0.5 if like.dim() > 1 else 0.5 + 0.1 * drawn.abs()
        return sliced(drawn, part).to(like.dtype)


def sliced(tensor, part):
    """The spans of a tensor, joined; all of it without a part."""
    if part is None:
        return tensor
    pieces = [tensor.narrow(part["axis"], a, b - a) for a, b in part["spans"]]
    return torch.cat(pieces, part["axis"])


@contextlib.contextmanager
def parameters_on_meta():
    """Modules that are made here have parameters without values, and buffers with theirs."""
    register = torch.nn.Module.register_parameter

    def register_empty(self, name, param):
        register(self, name, param)
        if param is not None:
            empty = torch.nn.Parameter(param.to("meta"), requires_grad=False)
            self._parameters[name] = empty

    torch.nn.Module.register_parameter = register_empty
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def build():
    """The model of config.json without weights. Runs no code but that of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(FOLDER, local_files_only=True, trust_remote_code=False)
    with parameters_on_meta():
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()


def tied_names(model):
    """Names of every parameter, by its identity; tied ones have several."""
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def fill(model, source, device, shards=None, rank=0):
    """Give every parameter its values, where there are shards those of a rank."""
    filled = {}
    for names in tied_names(model).values():
        like = model.get_parameter(names[0])
        part = None if shards is None else part_of(shards, names, rank)
        if source is None:
            values = torch.empty_like(sliced(like, part))
        else:
            values = source.read(names, like, part).to(device)
        if shards is not None and rank and any(name in shards["first_only"] for name in names):
            values.zero_()
        filled |= dict.fromkeys(names, torch.nn.Parameter(values, requires_grad=False))
    for name, parameter in filled.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, parameter)
    if source is not None:
        model.to(device)


def part_of(shards, names, rank):
    """Axis and spans of a rank of a parameter, of all its names; None where it has all of it."""
    parts = [shards["parameters"][name] for name in names if name in shards["parameters"]]
    return {"axis": parts[0]["axis"], "spans": parts[0]["spans"][rank]} if parts else None


def divide(model, shards, rank, world, exchange=True):
    """Make modules compute a rank's part, with sums and joins of all ranks behind them.

    Without `exchange` nothing is sent, which tells whether the shapes of a rank fit each other.
    """
    for path, heads in shards["heads"].items():
        module = model.get_submodule(path)
        own, keys = heads[rank]
        for names, count in ((HEADS, own), (KEYS, keys), (("num_key_value_groups",), own // keys)):
            for name in names:
                if isinstance(getattr(module, name, None), int):
                    setattr(module, name, count)

    def add(_, __, output):
        if exchange:
            dist.all_reduce(output)
        return output

    def join(module, _, output):
        if not exchange:
            return output
        spans = [s[0] for s in shards["parameters"][f"{module.gdp_path}.weight"]["spans"]]
        widths = [b - a for a, b in spans]
        # Tensors of one size alone can be gathered.
        padded = torch.nn.functional.pad(output, (0, max(widths) - output.shape[-1]))
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded.contiguous())
        return torch.cat([p[..., :w] for p, w in zip(parts, widths, strict=True)], -1)

    for path in shards["sums"]:
        model.get_submodule(path).register_forward_hook(add)
    for path in shards["joins"]:
        model.get_submodule(path).gdp_path = path
        model.get_submodule(path).register_forward_hook(join)
    for path in shards["look_ups"]:
        ((first, last),) = shards["parameters"][f"{path}.weight"]["spans"][rank]
        look_up(model.get_submodule(path), first, last, exchange)


def look_up(table, first, last, exchange):
    """Rows that this rank holds, zeros for others; the sum of all ranks is the whole."""
    inner, table.padding_idx = table.forward, None

    def forward(ids):
        mine = (ids >= first) & (ids < last)
        rows = inner(torch.where(mine, ids - first, 0))
        rows = torch.where(mine[..., None], rows, torch.zeros((), dtype=rows.dtype))
        if exchange:
            dist.all_reduce(rows)
        return rows

    table.forward = forward


def generate(model, ids, new, tokens=None, on_prompt=lambda: None):
    """(logits of the last position of the prompt and of each step, tokens that were taken).

    Each step takes the likeliest token, or those that are given; the last one is not read.
    """
    takes = inspect.signature(model.forward).parameters
    cache = "cache" if "cache" in takes else "past_key_values"
    last = {"logits_to_keep": 1} if "logits_to_keep" in takes and new else {}
    answer = model(input_ids=ids, use_cache=new > 0, **last)
    logits, taken = [answer.logits[:, -1] if new else answer.logits], []
    on_prompt()
    for i in range(new):
        token = logits[-1].argmax(-1, keepdim=True) if tokens is None else tokens[i]
        taken.append(token)
        kept = getattr(answer, cache, None) or answer.past_key_values
        answer = model(input_ids=token, use_cache=True, **{cache: kept})
        logits.append(answer.logits[:, -1])
    return torch.stack(logits), taken


class Rank:
    """A model, or a rank's part of one, that computes a sample again and again."""

    def __init__(self, shards, options, rank, world, device):
        self.device, self.new = device, options.new
        source = Checkpoint(options.weights) if options.weights else Drawn()
        self.model = build()
        fill(self.model, source, device, shards if world > 1 else None, rank)
        if world > 1:
            divide(self.model, shards, rank, world)
        generator = torch.Generator().manual_seed(0)
        shape = (shards["batch"], options.prompt)
        self.ids = torch.randint(shards["words"], shape, generator=generator).to(device)

    def sample(self, tokens=None):
        """(logits, tokens, seconds of the prompt, seconds of all)."""
        start_s, marks = time.perf_counter(), []

        def mark():
            finish(self.device)
            marks.append(time.perf_counter() - start_s)

        with torch.inference_mode():
            logits, taken = generate(self.model, self.ids, self.new, tokens, mark)
        finish(self.device)
        return logits, taken, marks[0], time.perf_counter() - start_s


def finish(device):
    """Wait until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bind(shards, rank, world, options):
    """The device of this process, pinned to a core if it is one and there are enough."""
    name = shards["ranks"][rank]["torch_device"]
    if options.device != "cpu" and name != "cpu":
        return torch.device(name)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        given = [[int(c) for c in text.split(",") if c] for text in options.cores or ()]
        own = given[rank] if given else [cores[rank]] if len(cores) >= world else cores
        os.sched_setaffinity(0, own)
        torch.set_num_threads(len(own))
    return torch.device("cpu")


def reduce_s(shards, device, rounds=50):
    """Median seconds of adding up one token's hidden state, as the ranks do behind each layer."""
    tensor, spent = torch.zeros(shards["batch"], 1, shards["width"], device=device), []
    for _ in range(rounds):
        start_s = time.perf_counter()
        dist.all_reduce(tensor)
        finish(device)
        spent.append(time.perf_counter() - start_s)
    return statistics.median(spent)


def work(rank, world, init, options):
    """One rank; the first one checks, times and prints."""
    shards = json.loads((FOLDER / "shards.json").read_text(encoding="utf-8"))
    device = bind(shards, rank, world, options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init, rank=rank, world_size=world)
    own = Rank(shards, options, rank, world, device)
    logits, taken, *_ = own.sample()
    times = []
    for _ in range(options.rounds):
        dist.barrier()
        times.append(own.sample()[2:])
    exchange_s = reduce_s(shards, device)
    dist.barrier()
    if rank == 0:
        prompt_s, all_s = (statistics.median(column) for column in zip(*times, strict=True))
        steps = max(options.new, 1)
        print(json.dumps({
            "ranks": world, "shares": [r["share"] for r in shards["ranks"]],
            "weights": options.weights or "random", "tokens": [int(t[0]) for t in taken],
            "prompt_s": prompt_s, "step_s": (all_s - prompt_s) / steps, "request_s": all_s,
            "all_reduce_s": exchange_s,
            **({} if options.no_check else checked(shards, options, device, logits, taken)),
        }))  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def checked(shards, options, device, logits, taken):
    """Compare logits with those of the uncut model on the same tokens."""
    whole = Rank(shards, options, 0, 1, device)
    wanted = whole.sample(taken)[0]
    scale = max(float(wanted.abs().max()), 1e-30)
    off = float((logits.float() - wanted.float()).abs().max()) / scale
    dtype = next(whole.model.parameters()).dtype
    return {"outputs_equal": off <= TOLERANCE.get(dtype, 1e-4), "max_relative_diff": off}


def serve(rank, world, init, options):
    """Samples by request, for `gdp run`: a line of JSON in, a line out."""
    shards = json.loads((FOLDER / "shards.json").read_text(encoding="utf-8"))
    device = bind(shards, rank, world, options)
    if options.whole:
        rank, world = 0, 1
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
        # No rank waits for long where another one has ended.
        wait = datetime.timedelta(minutes=10)
        dist.init_process_group(
            backend, init_method=init, rank=rank, world_size=world, timeout=wait
        )
    own = Rank(shards, options, rank, world, device)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "exchange" in asked:
            print(json.dumps({"all_reduce_s": reduce_s(shards, device)}), flush=True)
            continue
        tokens = [torch.tensor(t) for t in asked["tokens"]] if "tokens" in asked else None
        logits, taken, prompt_s, all_s = own.sample(tokens)
        if "save" in asked:
            torch.save(logits.cpu(), asked["save"])
        answer = {"prompt_s": prompt_s, "request_s": all_s, "tokens": [t.tolist() for t in taken]}
        print(json.dumps(answer), flush=True)


def main():
    """Run the model that this folder holds."""
    shards = json.loads((FOLDER / "shards.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description="Run the model in this folder, divided.")
    parser.add_argument("--weights", default="", help="folder with .safetensors; else random")
    parser.add_argument("--prompt", type=int, default=shards["prompt"], help="tokens to read")
    parser.add_argument("--new", type=int, default=shards["new"], help="tokens to write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=["cpu"], help="all ranks on cores, with gloo")
    parser.add_argument("--cores", nargs="+", help="those of each rank, such as 0,1 2")
    parser.add_argument("--no-check", action="store_true", help="the uncut model does not fit")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    options, world = parser.parse_args(), len(shards["ranks"])
    if options.cores and len(options.cores) != world:
        parser.error(f"--cores has {len(options.cores)} entries; each of {world} ranks needs one")
    if LOOPBACK and ("RANK" not in os.environ or options.serve):  # all processes are here
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    if options.serve:
        serve(int(os.environ["RANK"]), world, os.environ["INIT"], options)
    elif "RANK" in os.environ:
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", options)
    elif "torchrun" in shards:
        parser.error(
            "the ranks are on several machines: run on each its line of 'torchrun' in "
            "shards.json, with the address of a machine in the place of its name"
        )
    else:
        with tempfile.TemporaryDirectory() as folder:
            init = f"file://{folder}/ranks"
            spawn = torch.multiprocessing.spawn  # pyright: ignore[reportPrivateImportUsage]
            spawn(work, (world, init, options), nprocs=world)


if __name__ == "__main__":
    main()
