"""llama.cpp in a process of its own: loads models by the flags of its command line, and times them.

    python worker.py [--core=0] [--lend=0,1]

`--core` pins the process; for every core of `--lend` a server of llama.cpp's RPC lends that core as
a device, which llama.cpp takes for a GPU. Requests are JSON lines on standard input, answers JSON
lines on standard output. Needs llama-cpp-python, built with -DGGML_RPC=ON to lend; no gdp.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

llama_cpp: Any = import_module("llama_cpp")  # its type stubs refuse pointers that it takes
LIBRARY = llama_cpp.llama_cpp._lib  # noqa: SLF001  # with all that it was linked with
LOG: list[str] = []
LISTENER = llama_cpp.llama_log_callback(lambda level, text, _: LOG.append(text.decode()))
WATCHER = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
NO_RPC = 3
"""Exit code where the library lends no devices."""


class Override(ctypes.Structure):
    """`llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p))


def function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml that llama_cpp does not wrap."""
    pointer = getattr(LIBRARY, name)
    pointer.restype, pointer.argtypes = result, arguments
    return pointer


def pin(core: int) -> None:
    """Keep this process, and the threads that it starts, on one core."""
    if core >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def serve(endpoint: str, core: int) -> None:
    """Lend a core as a device; never returns."""
    pin(core)
    pointer = ctypes.c_void_p
    cpu = function("ggml_backend_dev_by_type", pointer, ctypes.c_int)(0)
    start = function("ggml_backend_rpc_start_server", None, ctypes.c_char_p,
                     ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, pointer)  # fmt: skip
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the server talks
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent and parent.join(), os._exit(0)), daemon=True).start()
    start(endpoint.encode(), None, 1, 1, (pointer * 1)(cpu))


def lend(cores: list[int]) -> list[Any]:
    """Start a server for each core, and take their devices, in this order."""
    if not llama_cpp.llama_supports_rpc():
        sys.exit(NO_RPC)
    servers = []
    for core in cores:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        start = multiprocessing.get_context("spawn").Process
        server = start(target=serve, args=(endpoint, core), daemon=True)
        server.start()
        servers.append(server)
        borrow(endpoint)
    return servers


def borrow(endpoint: str) -> None:
    """Take a server's devices, once it answers."""
    host, _, port = endpoint.partition(":")
    for _ in range(400):
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                break
        time.sleep(0.05)
    add = function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    function("ggml_backend_register", None, ctypes.c_void_p)(add(endpoint.encode()))


def parse(arguments: list[str]) -> argparse.Namespace:
    """llama.cpp's flags of tensor placement, with its defaults for omitted flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit", default="off")
    parser.add_argument("--n-gpu-layers", type=int, default=-1)
    parser.add_argument("--tensor-split", default="")
    parser.add_argument("--override-tensor", default="")
    parser.add_argument("--ctx-size", type=int, default=0)
    parser.add_argument("--cache-type-k", default="f16")
    parser.add_argument("--cache-type-v", default="f16")
    parser.add_argument("--flash-attn", default="auto")
    parser.add_argument("--ubatch-size", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=2048)  # all of a prompt are given at once
    parser.add_argument("--no-op-offload", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def load_model(path: str, flags: argparse.Namespace) -> Any:
    """The model with the flags' settings."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = flags.n_gpu_layers if flags.n_gpu_layers >= 0 else 10_000
    shares = [float(x) for x in flags.tensor_split.split(",")] if flags.tensor_split else []
    shares += [0.0] * (llama_cpp.LLAMA_MAX_DEVICES - len(shares))
    parameters.tensor_split = (ctypes.c_float * len(shares))(*shares)
    rules = [rule.rpartition("=") for rule in filter(None, flags.override_tensor.split(","))]
    cpu = function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    overrides_given = [
        Override(pattern.encode(), {"CPU": cpu}[buffer]) for pattern, _, buffer in rules
    ]
    overrides = (Override * (len(overrides_given) + 1))(*overrides_given, Override(None, None))
    parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    if not model:
        raise RuntimeError(last_error("llama.cpp does not load the model"))
    return model


def context_of(model: Any, flags: argparse.Namespace, watch: Any = None) -> Any:
    """A context; `watch` is called for every node of the graph that is computed."""
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch = flags.ctx_size, max(flags.ctx_size, 32)
    parameters.n_ubatch = flags.ubatch_size
    parameters.n_threads = parameters.n_threads_batch = flags.threads
    kinds = {"on": 1, "off": 0, "auto": -1}
    if hasattr(parameters, "flash_attn_type"):
        parameters.flash_attn_type = kinds[flags.flash_attn]
    else:
        parameters.flash_attn = flags.flash_attn == "on"
    parameters.type_k, parameters.type_v = type_of(flags.cache_type_k), type_of(flags.cache_type_v)
    if hasattr(parameters, "op_offload"):
        parameters.op_offload = not flags.no_op_offload
    parameters.no_perf = False
    if watch is not None:
        parameters.cb_eval = ctypes.cast(watch, type(parameters.cb_eval))
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise RuntimeError(last_error("llama.cpp makes no context"))
    return context


def type_of(name: str) -> int:
    """ggml's number of a type of tensors."""
    return int(getattr(llama_cpp, f"GGML_TYPE_{name.upper()}"))


def last_error(what: str) -> str:
    """An error with the last line of llama.cpp's log about it."""
    lines = "".join(LOG).splitlines()
    faults = [line for line in lines if re.search(r"error|fail|cannot|unable", line, re.I)]
    return f"{what}: {(faults or lines or ['no reason given'])[-1].strip()}"


class NodeClock:
    """Seconds between the ends of some nodes of the graph, summed over passes."""

    def __init__(self, ends: list[str]) -> None:
        self.ends = {end.encode() for end in ends}
        self.seconds: dict[str, float] = {}
        self.since_s = 0.0
        self.name = function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self.read = function("ggml_backend_tensor_get", None, pointer, pointer, size, size)
        self.number = ctypes.create_string_buffer(4)
        self.callback = WATCHER(self.called)

    def called(self, tensor: int, ask: bool, _: int) -> bool:
        """Callback of llama.cpp: whether to report a node, and the report when it is computed."""
        name = self.name(tensor)
        if ask:
            return name in self.ends
        # RPC answers before it has computed; only what is read is there.
        self.read(tensor, self.number, 0, 4)
        now_s, key = time.perf_counter(), name.decode()
        self.seconds[key] = self.seconds.get(key, 0.0) + now_s - self.since_s
        self.since_s = now_s
        return True

    def begin(self) -> None:
        """Start the clock of a pass."""
        self.since_s = time.perf_counter()


class Loaded:
    """A model with a context whose passes llama.cpp times, and another whose nodes are watched."""

    def __init__(self, path: str, arguments: list[str], ends: list[str], seed: int) -> None:
        LOG.clear()
        self.flags = parse(arguments)
        self.model = load_model(path, self.flags)
        text = "".join(LOG)
        self.layers = re.findall(r"layer +\d+ assigned to device (\w+)", text)
        self.moved = dict(re.findall(r"tensor (\S+) .*overridden to (\w+)", text))
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        rng = random.Random(seed)
        self.tokens = [rng.randrange(self.size) for _ in range(self.flags.ctx_size)]
        self.context = context_of(self.model, self.flags)
        self.watch = NodeClock(ends) if ends else None
        self.watched = self.watch and context_of(self.model, self.flags, self.watch.callback)
        self.filled: dict[int, int] = {}  # tokens in the cache of a context

    def decode(self, context: Any, start: int, count: int) -> float:
        """Seconds of a pass over some tokens, by llama.cpp's own timings."""
        array = (llama_cpp.llama_token * count)(*self.tokens[start : start + count])
        llama_cpp.llama_perf_context_reset(context)
        if self.watch is not None and context is self.watched:
            self.watch.begin()
        done = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, count))
        if done:
            raise RuntimeError(last_error(f"llama_decode returned {done}"))
        llama_cpp.llama_synchronize(context)
        spent = llama_cpp.llama_perf_context(context)
        return float(spent.t_eval_ms if count == 1 else spent.t_p_eval_ms) / 1e3

    def cut(self, context: Any, kept: int) -> None:
        """Keep the first tokens of the cache."""
        memory = llama_cpp.llama_get_memory(context)
        if kept == 0:
            llama_cpp.llama_memory_clear(memory, False)
        else:
            llama_cpp.llama_memory_seq_rm(memory, 0, kept, -1)

    def sample(self, context: Any, prompt: int, new: int, depth: int) -> dict[str, float]:
        """Seconds of reading a prompt, if any, and of the steps behind it; without a prompt of one
        step behind `depth` tokens."""
        reads, start = 0.0, depth
        if prompt:
            self.cut(context, 0)
            reads, start = self.decode(context, 0, prompt), prompt
        elif self.filled.get(id(context)) != depth and depth:
            self.cut(context, 0)
            self.decode(context, 0, depth)
            self.filled[id(context)] = depth
        if self.watch is not None and context is self.watched and not prompt:
            self.watch.seconds.clear()
        steps = sum(self.decode(context, start + i, 1) for i in range(new))
        if not prompt:
            self.cut(context, depth)
        return {"prompt_s": reads, "steps_s": steps}

    def pieces(self, prompt: int, new: int, depth: int) -> dict[str, dict[str, float]]:
        """Seconds up to the end of each watched node, of the prompt and of all steps."""
        assert self.watch is not None
        seconds: dict[str, dict[str, float]] = {"prompt": {}, "steps": {}}
        self.watch.seconds.clear()
        if prompt:
            self.sample(self.watched, prompt, 0, 0)
            seconds["prompt"] = dict(self.watch.seconds)
            self.watch.seconds.clear()
            for i in range(new):
                self.decode(self.watched, prompt + i, 1)
        else:
            self.sample(self.watched, 0, new, depth)
        seconds["steps"] = dict(self.watch.seconds)
        return seconds

    def close(self) -> None:
        """Give the memory back."""
        for context in filter(None, (self.context, self.watched)):
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(self.model)

    def logits(self) -> list[float]:
        """Of the last token that was computed."""
        return list(llama_cpp.llama_get_logits_ith(self.context, -1)[: self.size])


def answers(requests: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """An answer to every request; an error is one."""
    loaded: dict[str, Loaded] = {}
    for request in requests:
        verb, name = request["verb"], request["name"]
        try:
            if verb == "load":
                if name in loaded:
                    loaded.pop(name).close()
                model = Loaded(request["model"], request["arguments"], request["ends"],
                              request["seed"])  # fmt: skip
                loaded[name] = model
                yield {"layers": model.layers, "moved": model.moved}
            elif verb == "sample":
                own = loaded[name]
                yield own.sample(own.context, *request["tokens"])
            elif verb == "pieces":
                yield loaded[name].pieces(*request["tokens"])
            else:
                yield {"logits": loaded[name].logits()}
        except (RuntimeError, KeyError) as error:
            yield {"error": str(error)}


def main() -> None:
    """Answer requests until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--core", type=int, default=-1)
    parser.add_argument("--lend", default="")
    asked = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    servers = lend([int(core) for core in asked.lend.split(",")]) if asked.lend else []
    pin(asked.core)
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(LISTENER, ctypes.c_void_p(0))
    for answer in answers(json.loads(line) for line in sys.stdin):
        print(json.dumps(answer), file=out, flush=True)
    for server in servers:
        server.kill()


if __name__ == "__main__":
    main()
