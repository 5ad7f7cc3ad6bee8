"""Runs the model in this folder: one session and one pinned thread per segment, or several of
both, which take the samples in turn, where the placement replicates it.

    python run.py INPUTS.npz OUTPUTS.npz [SAMPLES]

or, in a program, `for outputs in run(samples)` with a dict of arrays per sample.
"""

import itertools
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


def open_session(segment, device):
    """A session: one thread on a core, the runtime's own number on other devices. RuntimeError
    where the device's provider is missing."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 0 if device["core"] is None else 1
    options.inter_op_num_threads = 1
    provider = (device["provider"], device["provider_options"])
    session = ort.InferenceSession(HERE / segment["file"], options, providers=[provider])
    if session.get_providers()[0] != device["provider"]:
        raise RuntimeError(f"{device['name']}: this onnxruntime has no {device['provider']}")
    return session


def hand_over(values, sample, sinks):
    """Put what a sample needs into one queue of every reader: that of whose turn it is."""
    for sink in sinks:  # one queue for each of those that take the reader's samples in turn
        sink[sample % len(sink)].put(values)


def collect(sample, sources):
    """The values of one sample from all sources, None behind the last one."""
    parts = [source[sample % len(source)].get() for source in sources]
    if any(part is None for part in parts):
        return None
    return {name: value for part in parts for name, value in part.items()}


def feed(samples, sources, sinks):
    """The thread of the model's inputs: one sample after the other, as OrtValues."""
    for i, sample in enumerate(samples):
        values = {n: ort.OrtValue.ortvalue_from_numpy(sample[n]) for n in MANIFEST["inputs"]}
        hand_over(values, i, sinks)


def work(segment, device, turns, session, sources, sinks):
    """The thread of one segment: runs the samples whose turn it is, until the stream ends."""
    if device["core"] is not None and hasattr(os, "sched_setaffinity"):  # only Linux pins threads
        os.sched_setaffinity(0, {device["core"]})
    for i in turns:
        if (values := collect(i, sources)) is None:
            break
        feeds = {name: values[name] for name in segment["inputs"]}
        results = session.run_with_ort_values(segment["outputs"], feeds)
        hand_over(dict(zip(segment["outputs"], results, strict=True)), i, sinks)


def plan(samples):
    """Tasks of the threads, by (segment, its place among those that take turns)."""
    tasks: dict[tuple[str, int], tuple] = {("feed", 0): (feed, samples)}
    for segment in MANIFEST["segments"]:
        own = [MANIFEST["devices"][d] for d in (segment["device"], *segment["others"])]
        for k, device in enumerate(own):
            session = open_session(segment, device)
            turns = itertools.count(k, len(own))
            tasks[segment["name"], k] = (work, segment, device, turns, session)
    return tasks


def run(samples):
    """The outputs of every sample, in order; bounded queues hold the samples in flight."""
    tasks, failures = plan(samples), []
    places = {name: [t for t in tasks if t[0] == name] for name, _ in tasks}
    places["result"] = [("result", 0)]
    sources, sinks = {("result", 0): []} | {t: [] for t in tasks}, {t: [] for t in tasks}
    for maker, reader in MANIFEST["links"]:
        depth = MANIFEST["queue_depth"]
        pairs = {(m, r): queue.Queue(depth) for m in places[maker] for r in places[reader]}
        for m in places[maker]:
            sinks[m].append([pairs[m, r] for r in places[reader]])
        for r in places[reader]:
            sources[r].append([pairs[m, r] for m in places[maker]])

    def start(task, *arguments, place):
        try:
            task(*arguments, sources[place], sinks[place])
        except BaseException as error:
            failures.append(error)
        for sink in (q for queues in sinks[place] for q in queues):
            sink.put(None)

    for place, task in tasks.items():
        threading.Thread(target=start, args=task, kwargs={"place": place}, daemon=True).start()
    for i in itertools.count():
        if (values := collect(i, sources["result", 0])) is None:
            break
        yield {name: values[name].numpy() for name in MANIFEST["outputs"]}
    if failures:
        raise failures[0]


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    inputs, count = dict(np.load(sys.argv[1])), int(sys.argv[3]) if len(sys.argv) > 3 else 1
    stamps = []
    outputs = {}
    for outputs in run(inputs for _ in range(count)):  # noqa: B007
        stamps.append(time.perf_counter())
    np.savez(sys.argv[2], **outputs)
    if count > 1:
        print(f"{(count - 1) / (stamps[-1] - stamps[0]):.2f} samples/s")
