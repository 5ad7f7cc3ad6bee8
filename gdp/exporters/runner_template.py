"""Runs the model in this folder: one session and one pinned thread per segment.

    python run.py INPUTS.npz OUTPUTS.npz [SAMPLES]

or, in a program, `for outputs in run(samples)` with a dict of arrays per sample.
"""

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path

import numpy as np

# Before the import: ONNX Runtime would send telemetry and keep a device id in the user's cache.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
import onnxruntime as ort

HERE = Path(__file__).resolve().parent
MANIFEST = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))


def open_session(segment):
    device = MANIFEST["devices"][segment["device"]]
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    provider = (device["provider"], device["provider_options"])
    session = ort.InferenceSession(HERE / segment["file"], options, providers=[provider])
    if session.get_providers()[0] != device["provider"]:
        raise RuntimeError(f"{device['name']}: this onnxruntime has no {device['provider']}")
    return session


def feed(samples, sources, sinks):
    for sample in samples:
        values = {n: ort.OrtValue.ortvalue_from_numpy(sample[n]) for n in MANIFEST["inputs"]}
        for sink in sinks:
            sink.put(values)


def work(segment, session, sources, sinks):
    core = MANIFEST["devices"][segment["device"]]["core"]
    if core is not None and hasattr(os, "sched_setaffinity"):  # only Linux pins threads
        os.sched_setaffinity(0, {core})
    for parts in zip(*(iter(source.get, None) for source in sources), strict=False):
        values = {name: value for part in parts for name, value in part.items()}
        feeds = {name: values[name] for name in segment["inputs"]}
        made = session.run_with_ort_values(segment["outputs"], feeds)
        for sink in sinks:
            sink.put(dict(zip(segment["outputs"], made, strict=True)))


def run(samples):
    """The outputs of every sample, in order; bounded queues hold the samples in flight."""
    segments, failures = MANIFEST["segments"], []
    tasks = {s["name"]: (work, s, open_session(s)) for s in segments} | {"feed": (feed, samples)}
    sources, sinks = {"result": []} | {n: [] for n in tasks}, {n: [] for n in tasks}
    for maker, reader in MANIFEST["links"]:
        sinks[maker].append(queue.Queue(MANIFEST["queue_depth"]))
        sources[reader].append(sinks[maker][-1])

    def start(task, *arguments, name):
        try:
            task(*arguments, sources[name], sinks[name])
        except BaseException as error:
            failures.append(error)
        for sink in sinks[name]:
            sink.put(None)

    for name, task in tasks.items():
        threading.Thread(target=start, args=task, kwargs={"name": name}, daemon=True).start()
    for parts in zip(*(iter(source.get, None) for source in sources["result"]), strict=False):
        values = {name: value for part in parts for name, value in part.items()}
        yield {name: values[name].numpy() for name in MANIFEST["outputs"]}
    if failures:
        raise failures[0]


if __name__ == "__main__":
    inputs, count = dict(np.load(sys.argv[1])), int(sys.argv[3]) if len(sys.argv) > 3 else 1
    stamps = []
    outputs = {}
    for outputs in run(inputs for _ in range(count)):  # noqa: B007
        stamps.append(time.perf_counter())
    np.savez(sys.argv[2], **outputs)
    if count > 1:
        print(f"{(count - 1) / (stamps[-1] - stamps[0]):.2f} samples/s")
