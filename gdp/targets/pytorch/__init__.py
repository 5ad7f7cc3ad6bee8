"""PyTorch: executes placements of modules in pieces."""

from gdp.targets.target import Runtime, Target


def _devices() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))]


def _refusals() -> tuple[type[Exception], ...]:
    import torch

    # What else torch raises is a plain RuntimeError, which pieces tell apart themselves.
    named = (getattr(torch, name, None) for name in ("OutOfMemoryError", "AcceleratorError"))
    return tuple(kind for kind in named if kind is not None)


TARGET = Target(
    "torch",
    Runtime(
        "PyTorch", "torch", "torch", "gdp.targets.pytorch.run:run_torch", _devices,
        refusals=_refusals, divided="gdp.targets.tensor_parallel.run:run_divided",
    ),
)  # fmt: skip
