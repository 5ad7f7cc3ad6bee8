"""Devices of a cluster as torch names them here, and its tensors as arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gdp.base.cores import usable_cores
from gdp.base.errors import ClusterError
from gdp.cluster.machines import numbers_on_machine
from gdp.cluster.types import CORE_KIND, Cluster


def torch_devices(cluster: Cluster) -> tuple[list[Any], list[int | None]]:
    """The torch device of each device of a cluster, and the core of each that is one: a whole
    processor computes on all of them."""
    import torch

    usable = usable_cores()
    wanted = sum(device.kind == CORE_KIND for device in cluster.devices)
    accelerators = sum(not device.is_cpu for device in cluster.devices)
    cards = torch.cuda.device_count()
    if wanted > len(usable) or accelerators > cards:
        raise ClusterError(
            f"cluster {cluster.name!r} has {wanted} cores and {accelerators} accelerators, torch "
            f"has {len(usable)} cores and {cards} CUDA devices here; name a cluster that fits"
        )
    free = iter(usable)
    cores = [next(free) if device.kind == CORE_KIND else None for device in cluster.devices]
    return [torch.device(name) for name in torch_names(cluster)], cores


def torch_names(cluster: Cluster) -> list[str]:
    """Name that torch has for each device of a cluster: accelerators of a machine are numbered in
    order."""
    return ["cpu" if n is None else f"cuda:{n}" for n in numbers_on_machine(cluster)]


def require_devices(cluster: Cluster, used: Sequence[int]) -> None:
    """Raise `ClusterError` with the first of some devices of a cluster that torch lacks here."""
    import torch

    cards = torch.cuda.device_count()
    for d in used:
        number = numbers_on_machine(cluster)[d]
        if number is not None and number >= cards:
            raise ClusterError(
                f"the placement uses {cluster.device_names[d]!r} as cuda:{number}, and torch has "
                f"{cards} CUDA devices here"
            )


def named_arrays(tensors: Sequence[Any]) -> Mapping[str, np.ndarray]:
    """Results as arrays of their own types, by name."""
    import ml_dtypes
    import torch

    whole = {1: torch.uint8, 2: torch.int16}

    def plain(tensor: Any) -> np.ndarray:
        """The tensor in its own type, by which outputs are compared: NumPy lacks some of torch."""
        tensor = tensor.detach().cpu().contiguous()
        own = str(tensor.dtype).removeprefix("torch.")
        if not tensor.dtype.is_floating_point or not hasattr(ml_dtypes, own):
            return tensor.numpy()
        return tensor.view(whole[tensor.itemsize]).numpy().view(getattr(ml_dtypes, own))

    return {f"output {i}": plain(tensor) for i, tensor in enumerate(tensors)}
