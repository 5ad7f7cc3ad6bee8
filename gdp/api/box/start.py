"""Command lines that start the engines of a box, each on its devices with its share of memory."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gdp.api.box.models import OTHER, BoxModel
from gdp.api.box.pricing import Priced
from gdp.api.run import export_job
from gdp.cluster.machines import numbers_on_machine
from gdp.cluster.presets import presets
from gdp.cluster.types import Cluster, Device
from gdp.importers.spec import ModelSpec
from gdp.question.models import HF_PREFIX
from gdp.targets.llamacpp.flags import flags_of
from gdp.targets.sglang import export as sglang
from gdp.targets.target import ExportJob
from gdp.targets.vllm.plan import options_of

FIRST_PORT = 8101
"""Of the first model's server; each has one of its own."""
VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}
"""Variable that names the cards of a process, by their maker."""


SM_PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Variable that limits the SMs of a process under NVIDIA MPS (docs.nvidia.com/deploy/mps)."""


class Start(NamedTuple):
    """One engine, for a shell."""

    environment: dict[str, str]
    words: tuple[tuple[str, ...], ...]  # of each server, without the environment

    @property
    def commands(self) -> tuple[str, ...]:
        """Lines for a shell."""
        before = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return tuple(" ".join([*before, shlex.join(words)]) for words in self.words)


def started(
    cluster: Cluster, model: BoxModel, priced: Priced, number: int, sm_percent: int = 0
) -> Start:
    """The command of a model on its devices, with so many percent of their SMs; 0: all."""
    port, environment = FIRST_PORT + number, visible_devices(cluster, priced)
    if sm_percent:
        environment[SM_PERCENT] = str(sm_percent)
    if model.engine == OTHER:
        return Start(environment, (tuple(shlex.split(model.command)),) if model.command else ())
    if model.engine == "transformers":
        return Start(environment, ())
    assert priced.result is not None
    job = export_job(priced.result)
    assert job is not None
    if model.engine == "llamacpp":
        flags = flags_of(job.question.graph, job.placement, job.question.cluster)
        words = (
            "llama-server", "--model", ModelSpec.of(model.spec).path, "--port", str(port),
            "--parallel", str(priced.slots), *flags.arguments(),
        )  # fmt: skip
        return Start(environment, (words,))
    return _served(cluster, model, priced, job, port, environment)


def is_nvidia(device: Device) -> bool:
    """True for cards of NVIDIA, and of kinds without a preset."""
    known = presets().get(device.kind)
    return not device.is_cpu and (known is None or known.maker == "nvidia")


def visible_devices(cluster: Cluster, priced: Priced) -> dict[str, str]:
    """The variable that shows an engine the cards of its plan alone."""
    numbers = numbers_on_machine(cluster)
    cards = [d for d in priced.devices if not cluster.devices[d].is_cpu]
    if any(cluster.devices[d].is_unified for d in cards):
        return {}
    known = presets()
    kinds = {d.kind for d in cluster.devices if not d.is_cpu}
    makers = {known[kind].maker for kind in kinds if kind in known} or {"nvidia"}
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if "nvidia" in makers and cards else {}
    name = next((VISIBLE[maker] for maker in sorted(makers, reverse=True) if maker in VISIBLE), "")
    return order | ({name: ",".join(str(numbers[d]) for d in cards)} if name else {})


def _served(
    cluster: Cluster, model: BoxModel, priced: Priced, job: ExportJob, port: int,
    environment: dict[str, str],
) -> Start:  # fmt: skip
    """`vllm serve` or SGLang's server, on the cards that the plan is on."""
    options = options_of(job)
    numbers = numbers_on_machine(cluster)
    cards = [numbers[d] for d in priced.devices if not cluster.devices[d].is_cpu]
    gpus = tuple(int(cards[k] or 0) for k in options.gpus)
    share = priced.share or options.gpu_memory_utilization
    longest = min(options.max_model_len, model.context) if model.context else options.max_model_len
    options = replace(
        options, gpus=gpus, gpu_memory_utilization=share, max_model_len=longest, port=port
    )
    path = ModelSpec.of(model.spec).path.removeprefix(HF_PREFIX)
    name = str(Path(path).parent) if path.endswith(".json") else path
    rows: list[tuple[dict[str, Any], tuple[str, ...]]] = []
    for k, own in enumerate(options.commands):
        own = replace(own, port=port + 100 * k)
        if model.engine == "sglang":
            sglang.require_legal(job)
            plain = sglang.command(own)
            held = next(h for h in priced.held if h.cache_bytes)
            total_bytes = cluster.devices[cluster.device_names.index(held.device)].total_bytes
            fraction = (held.weights_bytes + held.cache_bytes) / total_bytes
            words = (
                "python", "-m", "sglang.launch_server", "--model-path", name,
                "--mem-fraction-static", f"{int(100 * fraction) / 100:.2f}", *plain["arguments"],
            )  # fmt: skip
        else:
            plain = own.command()
            words = ("vllm", "serve", name, *plain["arguments"])
        rows.append((plain["environment"], words))
    return Start(environment | rows[0][0], tuple(words for _, words in rows))
