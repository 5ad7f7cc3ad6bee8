"""Writes a trained kernel network as a checkpoint of gdp."""

from datetime import date
from pathlib import Path

import msgspec
import numpy as np

from gdp.base import checkpoint
from gdp.costs.measured.kernels import ARITHMETIC
from gdp.costs.measured.network import KernelNetwork, MeasuredDevice, NetworkMeta
from pretrain.costs.tables import Rows

SOURCE = (
    "kernels of AIConfigurator 0.12 (NVIDIA, Apache-2.0; vLLM 0.24, SGLang 0.5.14, TensorRT-LLM "
    "1.3, and 0.14, 0.5.10, 1.0 on A100), NeuSight (MIT; PyTorch, float32) and LLMServingSim (MIT)"
)


def save_network(path: Path, network: KernelNetwork, meta: NetworkMeta, recipe: str) -> str:
    """Write a network as a checkpoint; its SHA-256 (hex)."""
    tree = {"weights": dict(network.weights), "vectors": dict(network.vectors)}
    shapes = {
        f"{part}/{name}": array.shape for part, own in tree.items() for name, array in own.items()
    }
    document = msgspec.to_builtins(msgspec.structs.replace(meta, shapes=shapes))
    return checkpoint.save(
        path, tree, recipe=recipe, meta=document, kind="kernel network", force=True
    )


def ship(
    network: KernelNetwork,
    output: Path,
    rows: Rows,
    errors: dict[str, float],
    unseen_error: float,
    recipe: str,
) -> None:
    """Write the network with its recipe, its sources and its errors.

    Args:
        network: The network.
        output: Folder to write.
        rows: All rows, of which it counts those of each device.
        errors: Error on layers that were held out, by device.
        unseen_error: Mean of the errors on devices that were left out whole.
        recipe: Text of `recipe.toml`, with the curve of the training.
    """
    counts = np.bincount(rows.device, minlength=len(rows.devices))
    devices = {}
    for d, (name, count) in enumerate(zip(rows.devices, counts.tolist(), strict=True)):
        if name in network.vectors:
            types = np.unique(rows.kernels.arithmetic[rows.device == d])
            devices[name] = MeasuredDevice(
                count, round(errors[name], 4) if name in errors else None,
                tuple(ARITHMETIC[t] for t in types.tolist()),
            )  # fmt: skip
    meta = NetworkMeta({}, devices, unseen_error, SOURCE, date.today().isoformat())
    save_network(output, network, meta, recipe)
