"""The real llama.cpp, told by flags as its command line has them; a program of its own.

    python llama_cpp_program.py MODEL.gguf FLAGS...    # --devices 2: CPU devices in GPUs' place

Prints JSON: the device of each layer, the tensors that were moved and where to, by the loader's own
log, and the logits of the last of three tokens. Devices are those of llama.cpp's RPC server, which
lends what it has, here the processor, to a program that takes it for a GPU; so the library must be
built with -DGGML_RPC=ON, else it exits with 3.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from typing import Any

import llama_cpp

TOKENS = (3, 14, 15)
LIBRARY = llama_cpp.llama_cpp._lib  # with what it was linked with: files of ggml are there twice
LOG: list[str] = []
LISTENER = llama_cpp.llama_log_callback(lambda level, text, _: LOG.append(text.decode()))


class Override(ctypes.Structure):
    """`llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p))


def function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml that llama_cpp does not wrap."""
    found = getattr(LIBRARY, name)
    found.restype, found.argtypes = result, arguments
    return found


def serve(endpoint: str, count: int) -> None:
    """Lend the processor as so many devices; never returns."""
    pointer = ctypes.c_void_p
    cpu = function("ggml_backend_dev_by_type", pointer, ctypes.c_int)(0)
    start = function("ggml_backend_rpc_start_server", None, ctypes.c_char_p,
                     ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, pointer)  # fmt: skip
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the server talks
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent and parent.join(), os._exit(0)), daemon=True).start()
    start(endpoint.encode(), None, 1, count, (pointer * count)(*[cpu] * count))


def borrow(endpoint: str) -> None:
    """Take a server's devices, once it answers."""
    host, _, port = endpoint.partition(":")
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                break
        time.sleep(0.05)
    add = function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    function("ggml_backend_register", None, ctypes.c_void_p)(add(endpoint.encode()))


def load(path: str, flags: argparse.Namespace) -> Any:
    """The model as the flags say."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = flags.n_gpu_layers
    shares = [float(x) for x in flags.tensor_split.split(",")] if flags.tensor_split else []
    shares += [0.0] * (llama_cpp.LLAMA_MAX_DEVICES - len(shares))
    parameters.tensor_split = (ctypes.c_float * len(shares))(*shares)
    rules = [rule.rpartition("=") for rule in filter(None, flags.override_tensor.split(","))]
    cpu = function("ggml_backend_cpu_buffer_type", ctypes.c_void_p)()
    told = [Override(pattern.encode(), {"CPU": cpu}[buffer]) for pattern, _, buffer in rules]
    overrides = (Override * (len(told) + 1))(*told, Override(None, None))
    parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    model = llama_cpp.llama_model_load_from_file(path.encode(), parameters)
    if not model:
        sys.exit("".join(LOG))
    return model


def logits(model: Any, ctx_size: int) -> list[float]:
    """Of the last token, which is decoded after the others, with their cache."""
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = ctx_size, 1, 1
    context = llama_cpp.llama_init_from_model(model, parameters)
    assert context, "no context"
    for tokens in (TOKENS[:-1], TOKENS[-1:]):
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        done = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens)))
        assert done == 0, f"llama_decode returned {done}"
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    return llama_cpp.llama_get_logits_ith(context, -1)[:size]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--n-gpu-layers", type=int)
    parser.add_argument("--tensor-split", default="")
    parser.add_argument("--override-tensor", default="")
    parser.add_argument("--ctx-size", type=int)
    parser.add_argument("--devices", type=int, default=0)
    flags = parser.parse_known_args()[0]
    server = None
    if flags.devices:
        if not llama_cpp.llama_supports_rpc():
            sys.exit(3)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        start = multiprocessing.get_context("spawn").Process
        server = start(target=serve, args=(endpoint, flags.devices), daemon=True)
        server.start()
        borrow(endpoint)
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(LISTENER, ctypes.c_void_p(0))
    model = load(flags.model, flags)
    text = "".join(LOG)
    print(json.dumps({
        "layers": re.findall(r"layer +\d+ assigned to device (\w+)", text),
        "moved": dict(re.findall(r"tensor (\S+) .*overridden to (\w+)", text)),
        "logits": logits(model, flags.ctx_size),
    }), flush=True)  # fmt: skip
    if server is not None:
        server.kill()


if __name__ == "__main__":
    main()
