"""Executes a tensor-parallel placement by the program that `gdp export` writes.

A process for every rank computes its shard (`runner.py`), another one the uncut model on the
fastest of the devices, a third one on all cores; they run one after the other. Weights are random.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gdp.base.cores import usable_cores
from gdp.base.errors import MeasurementError, ModelError
from gdp.base.units import format_bytes, format_seconds
from gdp.costs.measured.collectives import collective_s
from gdp.graph.request import DECODE
from gdp.measure.async_execution import versions
from gdp.measure.compare import compare
from gdp.measure.measuring import Quota, measure, one_at_a_time
from gdp.measure.report import DEFAULT, PLACED, SINGLE, RunReport, SegmentTime, row
from gdp.measure.request import RunRequest
from gdp.measure.statistics import Trace
from gdp.placement.placement import Split, make_placement
from gdp.targets.tensor_parallel.export import planned, write
from gdp.targets.torch_devices import named_arrays, torch_devices

HF = "hf:"
FLOAT32 = 4  # bytes


@dataclass(eq=False)
class Ranks:
    """Processes that compute one model together, or one that computes it whole."""

    folder: Path
    count: int
    cores: Sequence[Sequence[int]]  # of each rank; of none where it is an accelerator
    whole: int | None = None  # the rank whose device has the uncut model
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    phases: list[tuple[float, float]] = field(default_factory=list)  # of the prompt, and of all
    slots: int = 1

    def start(self) -> None:
        """Start the processes and wait until their weights are there."""
        ranks = range(self.count) if self.whole is None else (self.whole,)
        name = f"{self.whole}-{len(self.cores[0])}"
        for rank in ranks:
            command = [sys.executable, str(self.folder / "run.py"), "--serve"]
            command += ["--whole"] if self.whole is not None else []
            command += ["--cores", *(",".join(map(str, own)) for own in self.cores)]
            environment = {
                **os.environ, "RANK": str(rank), "INIT": f"file://{self.folder}/ranks",
                # Of torchrun, if gdp itself was started by it.
                "WORLD_SIZE": str(self.count),
            }  # fmt: skip
            with (self.folder / f"errors-{name}-{rank}").open("w") as errors:
                self.processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                        text=True, env=environment,
                    )
                )  # fmt: skip
        self._answers()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of the first rank to a request that all get, with the longest seconds.

        Raises:
            MeasurementError: A process ended.
        """
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
        answers = self._answers()
        seconds = {k: max(a[k] for a in answers) for k in answers[0] if k.endswith("_s")}
        return answers[0] | seconds

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                code = process.wait()
                texts = [path.read_text().strip() for path in sorted(self.folder.glob("errors-*"))]
                last = [text.splitlines()[-1] for text in texts if text]
                reason = last[0] if last else "no reason given"
                raise MeasurementError(f"a rank ended with exit code {code}: {reason}")
            answers.append(json.loads(line))
        return answers

    def run(self, quota: Quota) -> tuple[Trace, ...]:
        """Samples back to back until the quota is met, by the seconds of the ranks."""

        def sample_s() -> float:
            answer = self.ask()
            self.phases.append((answer["prompt_s"], answer["request_s"]))
            return answer["request_s"]

        return one_at_a_time(quota, sample_s)

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            process.wait()


def run_divided(request: RunRequest) -> RunReport:
    """Execute a placement with a split, and the uncut model on one rank and on all cores.

    Raises:
        ModelError: The model is no configuration of transformers.
        PlacementError: Its modules cannot be divided so.
        ClusterError: The devices are not here.
        MeasurementError: A rank failed.
    """
    spec, cluster, (split,) = request.model.name, request.cluster, request.splits[:1]
    if not spec.startswith(HF):
        raise ModelError(
            f"{spec}: only models of a configuration (hf:) are divided among processes; place it "
            "again without --for tensor-parallel"
        )
    core_of = torch_devices(cluster)[1]
    cores = [[] if (core := core_of[d]) is None else [core] for d in split.devices]
    placement = make_placement(request.graph, cluster, request.device, splits=request.splits)
    plan, _, config = planned(spec, request.graph, placement, cluster)
    uncut = request.uncut or request.prediction
    whole_s = uncut.problem.compute_s[~uncut.problem.graph.is_io].sum(axis=0)
    best = int(np.argmin(whole_s[list(split.devices)]))
    with _running(plan, config, cores, best, baselines=request.baselines) as contenders:
        request.measuring.say("comparing the logits with those of the uncut model")
        comparison = _compared(contenders)
        measured = {k: one for k, one in contenders.items() if k == PLACED or request.baselines}
        times = measure(measured, request.measuring)
        rows = {name: row(measured) for name, measured in times.items()}
        phases = contenders[PLACED].phases
        exchange_s = contenders[PLACED].ask(exchange=True)["all_reduce_s"]
    size = plan["batch"] * plan["width"] * FLOAT32
    by_links_s = float(collective_s(cluster, split.devices, "all_reduce", size))
    return replace(request, predict=uncut).report(
        request.plan,
        rows,
        comparison,
        single=split.devices[best],
        random_weights=True,
        segments=_phases(request, split, phases),
        samples_in_flight=1,
        cores=tuple(-1 if not own else own[0] for own in cores),
        pinned=hasattr(os, "sched_setaffinity"),
        note=f"{len(split.devices)} processes; the single device is "
        f"{cluster.device_names[split.devices[best]]}; "
        f"an all-reduce of {format_bytes(size)} takes {format_seconds(exchange_s)}, by the "
        f"cluster's links {format_seconds(by_links_s)}",
        versions=versions("torch", "transformers", "numpy"),
    )  # fmt: skip


@contextlib.contextmanager
def _running(
    plan: dict[str, Any], config: dict[str, Any], cores: Sequence[Sequence[int]], best: int,
    *, baselines: bool,
) -> Iterator[dict[str, Ranks]]:  # fmt: skip
    """The tensor-parallel model and the uncut ones, each in separate processes."""
    with tempfile.TemporaryDirectory() as name:
        folder, count = Path(name), len(cores)
        write(folder, plan, config)
        everything = [usable_cores()] * count
        contenders = {
            PLACED: Ranks(folder, count, cores),
            SINGLE: Ranks(folder, count, cores, best),
        }
        if baselines and all(cores):
            contenders[DEFAULT] = Ranks(folder, count, everything, best)
        try:
            for ranks in contenders.values():
                ranks.start()
            yield contenders
        finally:
            for ranks in contenders.values():
                ranks.close()


def _compared(contenders: dict[str, Ranks]) -> Any:
    """Compare logits of the tensor-parallel model with the uncut one's on the same tokens."""
    import torch

    from gdp.targets.tensor_parallel.runner import TOLERANCE

    folder = contenders[PLACED].folder
    files = {name: folder / f"{name}.pt" for name in (PLACED, SINGLE)}
    answer = contenders[PLACED].ask(save=str(files[PLACED]))
    contenders[SINGLE].ask(save=str(files[SINGLE]), tokens=answer["tokens"])
    computed, wanted = (torch.load(files[name], weights_only=True) for name in (PLACED, SINGLE))
    comparison = compare(named_arrays([wanted]), named_arrays([computed]))
    # Sums of parts are rounded once more than sums of whole rows, layer by layer.
    is_equal = comparison.max_relative_diff <= TOLERANCE.get(wanted.dtype, 1e-4)
    return replace(comparison, equal=is_equal)


def _phases(
    request: RunRequest, split: Split, phases: Sequence[tuple[float, float]]
) -> tuple[SegmentTime, ...]:
    """Seconds of prefill and decode, medians of all samples."""
    problem, where = request.prediction.problem, request.prediction.assignment.device
    graph, names = problem.graph, request.cluster.device_names
    op_s = problem.compute_s[np.arange(graph.num_ops), where]
    stepping = (graph.phase == DECODE) & ~graph.is_io
    prompt_s, all_s = (float(np.median(column)) for column in zip(*phases, strict=True))
    measured = ((~stepping & ~graph.is_io, prompt_s), (stepping, all_s - prompt_s))
    devices = ", ".join(names[d] for d in split.devices)
    return tuple(
        SegmentTime(devices, int(ops.sum()), 0, 0, float(op_s[ops].sum()), seconds)
        for ops, seconds in measured
        if ops.any()
    )
