"""Everything that is worth knowing of a machine with a GPU, in one command and a few minutes.

    python -m benchmarks.gpu --minutes 8 -o OUT
    python -m benchmarks.gpu --device cpu --minutes 0.5 -o OUT     # a rehearsal, tiny models

Five torch models and two training steps of JAX, from configurations with random weights: profiled
op by op on the accelerator and on one core, costs calibrated, each model predicted by costs that
never saw its family, then executed: on the accelerator alone, and with less memory there than the
weights take, as gdp places it, as accelerate's own map has it, and offloaded by hand. Times are
medians with 95% intervals, warmed up and waited for; outputs are compared. OUT gets gpu.json, after
every step; a step that fails is recorded, and a step that runs when time is over is cut off.
"""

import argparse
import json
import os
import platform
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import JAX, TINY, TORCH, jax_function, torch_model
from benchmarks.offloaded import Machine, executed
from gdp.base.files.writing import write_atomic
from gdp.cluster.presets import device_names, device_preset
from gdp.cluster.types import Device
from gdp.costs.calibrate import calibrate
from gdp.costs.fit import FitConfig
from gdp.costs.learned import Calibration, LearnedCosts
from gdp.costs.profile import DeviceRecord, Overheads, Profile, merge, save_profile

SHARES = {"transfers": 0.03, "accelerator": 0.2, "core": 0.12, "jax": 0.12, "costs": 0.15}
"""Of the time; what is left is for executing."""
MEMORY_SHARE = 0.6
"""Of the weights, that fits into the accelerator under the artificial limit."""
FEW_S = 60.0
"""Below, costs are fitted once, to all models."""
STAND_IN = "rehearsal-gpu"
"""The kind of what stands for an accelerator in a rehearsal."""


MARGIN_S = 5.0
"""Kept for the last writing."""


class Record:
    """Results of a run so far, as `gpu.json`, complete also when time ends in the middle of a
    step."""

    def __init__(self, folder: Path, minutes: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.started_s = time.monotonic()
        self.end_s = self.started_s + 60 * minutes - min(MARGIN_S, 6 * minutes)
        self.found: dict[str, Any] = {"minutes": minutes, "steps": {}, "results": {}}
        self.lock = threading.RLock()
        self.over = threading.Event()
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    @property
    def left_s(self) -> float:
        """Seconds until everything must be written."""
        return self.end_s - time.monotonic()

    def step(self, name: str, seconds: float, run: Callable[[float], Any]) -> Any:
        """The result of `run(seconds)`, None where it failed or no time is left for it.

        Seconds are what is asked of the step, and at most what is left.
        """
        seconds = min(seconds, self.left_s)
        if seconds <= 0:
            return self._note(name, "left out: no time left", 0.0)
        began_s = time.monotonic()
        self._note(name, "cut off: time was over", None)
        try:
            found = run(seconds)
        except Exception as error:
            with self.lock:
                self.found["steps"].setdefault(name, {})["trace"] = traceback.format_exc()
            return self._note(
                name, f"failed: {type(error).__name__}: {error}", time.monotonic() - began_s
            )
        with self.lock:
            if isinstance(found, dict | list):
                self.found["results"][name] = found
        self._note(name, "done", time.monotonic() - began_s)
        return found

    def keep(self, name: str, value: Any) -> None:
        """Put something beside the steps."""
        with self.lock:
            self.found[name] = value

    def close(self) -> None:
        """Write everything for the last time."""
        with self.lock:
            self.over.set()
            self._write()

    def _note(self, name: str, said: str, seconds: float | None) -> None:
        with self.lock:
            entry = self.found["steps"].setdefault(name, {})
            entry |= {"status": said, "seconds": seconds}
            self._write()

    def _write(self) -> None:
        self.found["seconds"] = time.monotonic() - self.started_s
        data = json.dumps(self.found, indent=1, default=str)
        write_atomic(self.folder / "gpu.json", data.encode())

    def _watch(self) -> None:
        """Ends the process when time is over: a step may be in the middle of a kernel."""
        if not self.over.wait(max(self.left_s, 0.0)):
            try:
                with self.lock:
                    self._write()
            finally:
                os._exit(0)


class Run:
    """The steps, and models, profiles and costs that they share."""

    def __init__(
        self, device: str, size: str, record: Record, names: Sequence[str] = TORCH
    ) -> None:
        from gdp.targets.pytorch.profile import torch_device

        self.device, self.size, self.record = torch_device(device), size, record
        self.names, self.total_s = tuple(names), record.left_s
        self.parts: dict[str, list[Profile]] = {"accelerator": [], "core": [], "jax": []}
        self.costs: dict[str, LearnedCosts] = {}  # that never saw this family, where time allowed

    def all(self) -> None:
        """Every step in its order."""
        from gdp.targets.jax.profile import profile_functions
        from gdp.targets.pytorch.profile import profile_modules

        step, rounds = self.record.step, 2 if self.size == TINY else 5
        step("transfers", self.seconds("transfers"), self.transfers)
        places = {"accelerator": self.device.type}
        if self.device.type != "cpu":
            places["core"] = "cpu"
        for part, place in places.items():
            for name in self.names:
                self.profile(
                    part, name, self.seconds(part) / len(self.names),
                    lambda seconds, name=name, place=place: profile_modules(
                        [(name, name, torch_model(name, self.size))], place, rounds=rounds,
                        seconds=seconds, overheads=name == self.names[0],
                    ),
                )  # fmt: skip
        platform_name = "gpu" if self.device.type == "cuda" else "cpu"
        for name in JAX:
            self.profile(
                "jax", name, self.seconds("jax") / len(JAX),
                lambda seconds, name=name: profile_functions(
                    [(name, name, *jax_function(name, self.size))], platform_name,
                    rounds=rounds, seconds=seconds,
                ),
            )  # fmt: skip
        step("calibrate jax", self.seconds("costs") / 4, self.calibrate_jax)
        step("calibrate torch", self.seconds("costs"), self.calibrate_torch)
        for i, name in enumerate(self.names):
            share = max(self.record.left_s, 0.0) / (len(self.names) - i)
            step(f"execute {name}", share, lambda seconds, name=name: self.execute(name, seconds))

    def seconds(self, part: str) -> float:
        """Of a part at most."""
        return SHARES[part] * self.total_s

    def profile(
        self, part: str, name: str, seconds: float, run: Callable[[float], Profile]
    ) -> None:
        """Measure one model, and keep the profile on disk."""

        def measured(seconds: float) -> dict[str, Any]:
            # Tracing and loading take the other half.
            made = run(max(seconds / 2, 0.05))
            self.parts[part].append(made)
            save_profile(merge(self.parts[part]), self.record.folder / f"{part}.json.gz")
            own = made.models[0]
            return {
                "latency_s": own.latency_s, "kernels": len(own.kernels), "kernel_s": own.kernel_s,
                "ops": own.graph.num_ops, "runs": own.runs,
            }  # fmt: skip

        self.record.step(f"profile {part} {name}", seconds, measured)

    def transfers(self, seconds: float) -> dict[str, Any]:
        """Copies between the host and the accelerator, as executed placements make them."""
        from gdp.targets.pytorch.profile import SIZES_BYTES, copy_seconds

        del seconds  # five sizes, both ways, 0.2 s each
        return {
            "bytes": list(SIZES_BYTES), "to_device_s": copy_seconds(self.device),
            "from_device_s": copy_seconds(self.device, back=True),
        }  # fmt: skip

    def calibrate_jax(self, seconds: float) -> dict[str, Any]:
        """Costs of JAX's segments, fitted on one training step and tried on the other."""
        profile = merge(self.parts["jax"])
        rows: list[dict[str, Any]] = []
        for name in JAX[: 2 if seconds * 4 > FEW_S else 1]:
            _, report = calibrate(
                profile, self.accelerator(profile.device), held_out=[name], config=self.fit()
            )
            rows += [vars(row) for row in report.models if row.model == name]
        return {"models": rows}

    def calibrate_torch(self, seconds: float) -> dict[str, Any]:
        """Costs of both devices; each model's by a fit without it, where there is time for two."""
        profiles = {part: merge(self.parts[part]) for part in ("accelerator", "core")
                    if self.parts[part]}  # fmt: skip
        names = sorted({m.family for m in profiles["accelerator"].models})
        folds = [names[::2], names[1::2]] if seconds > FEW_S and len(names) > 1 else [[]]
        rows: list[dict[str, Any]] = []
        for held in folds:
            fitted: list[Calibration] = []
            for part, profile in profiles.items():
                reference = self.accelerator(profile.device)
                made, report = calibrate(profile, reference, held_out=held or [], config=self.fit())
                rows += [{"device": part} | vars(row) for row in report.models]
                kind = made.device.kind if self.device.type == "cuda" else STAND_IN
                if part == "accelerator":
                    fitted.append(replace(made, device=DeviceRecord(kind, ""), segment_s=None))
                if part == "core" or len(profiles) == 1:
                    fitted.append(replace(made, device=DeviceRecord("cpu-core", "")))
            for name in held or names:
                self.costs[name] = LearnedCosts(tuple(fitted))
        return {"folds": len(folds), "models": rows}

    def fit(self) -> FitConfig:
        """Short fits in a rehearsal."""
        if self.size == TINY:
            return FitConfig(members=2, steps=20, min_rows=1)
        return FitConfig(members=4, steps=600)

    def accelerator(self, record: DeviceRecord) -> Device:
        """A device of this record with datasheet numbers, of the nearest preset where it has
        none."""
        kind = record.kind
        nearest = "cpu-core" if kind.startswith("cpu") else "a100"
        preset = device_preset(kind if kind in device_names() else nearest)
        own = STAND_IN if self.device.type == "cpu" else kind
        return replace(preset, name="gpu", kind=own, dispatch_s=0.0, dispatch_per="op")

    def machine(self) -> Machine:
        """The accelerator with its link, and one core."""
        profiles = self.parts["accelerator"]
        found = next((p.overheads for p in profiles if p.overheads.session_s), Overheads())
        host = replace(device_preset("cpu-core"), name="cpu")
        return Machine(
            self.device, host, self.accelerator(profiles[0].device),
            found.handover_s or 1e-6, found.handover_bytes_per_s or 1e10, self.record.folder,
        )  # fmt: skip

    def execute(self, name: str, seconds: float) -> dict[str, Any]:
        """One model with too little memory."""
        return executed(
            lambda: torch_model(name, self.size), self.machine(), self.costs[name],
            MEMORY_SHARE, seconds,
        )  # fmt: skip


def about(device: str) -> dict[str, Any]:
    """The machine, and versions of its libraries."""
    import jax
    import torch
    import transformers

    cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "rehearsal": not cuda, "machine": platform.machine(), "python": platform.python_version(),
        "versions": {"torch": str(torch.__version__), "jax": jax.__version__,
                     "transformers": transformers.__version__, "numpy": np.__version__},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["full", TINY], help="default: full on cuda, else tiny")
    parser.add_argument("--models", default=",".join(TORCH), metavar="A,B")
    options = parser.parse_args()
    if unknown := sorted(set(options.models.split(",")) - set(TORCH)):
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(TORCH)}")
    if (options.output / "gpu.json").exists():
        parser.error(f"{options.output} holds a run already; name another folder")
    size = options.size or ("full" if options.device == "cuda" else TINY)
    record = Record(options.output, options.minutes)
    record.keep("about", about(options.device) | {"size": size})
    Run(options.device, size, record, options.models.split(",")).all()
    record.close()
    print(options.output / "gpu.json")


if __name__ == "__main__":
    main()
