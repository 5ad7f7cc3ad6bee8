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
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.models import JAX, TINY, TORCH, jax_function, torch_model
from benchmarks.gpu.plans import Machine, executed
from benchmarks.gpu.record import Record
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


class Run:
    """What the steps share."""

    def __init__(
        self, device: str, size: str, record: Record, names: Sequence[str] = TORCH
    ) -> None:
        from gdp.runtime.profile.pytorch import torch_device

        self.device, self.size, self.record = torch_device(device), size, record
        self.names, self.total_s = tuple(names), record.left_s
        self.parts: dict[str, list[Profile]] = {"accelerator": [], "core": [], "jax": []}
        self.costs: dict[str, LearnedCosts] = {}  # that never saw this family, where time allowed

    def all(self) -> None:
        """Every step in its order."""
        from gdp.runtime.profile.jax import profile_functions
        from gdp.runtime.profile.pytorch import profile_modules

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
        """What a part may take."""
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
        from gdp.runtime.profile.pytorch import SIZES_BYTES, copy_seconds

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
    """What was measured on."""
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
