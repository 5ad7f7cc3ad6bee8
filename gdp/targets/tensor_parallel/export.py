"""A placement whose ops devices divide, as programs of PyTorch that run it.

`shards.json` says the spans of every parameter on each rank; `run.py` needs it, `config.json` and a
checkpoint alone. Where all ranks have equal parts and transformers has a style for each module,
`tp_plan.json` and `tp_run.py` use its own tensor parallelism (DTensor over a device mesh).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gdp.base.errors import reason_of
from gdp.base.files.writing import indented_json, new_contents
from gdp.cluster.types import Cluster
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement, Split
from gdp.targets.target import ExportJob
from gdp.targets.tensor_parallel.shards import (
    Shards,
    cannot,
    divided_evenly,
    shards_of,
    the_split,
    tp_plan,
)
from gdp.targets.torchrun import torchrun_lines

_HERE = Path(__file__).resolve().parent
RUNNER, TP_RUNNER = _HERE / "runner.py", _HERE / "tp_runner.py"


def export(job: ExportJob) -> list[Path]:
    """Write the spans of all parameters and the programs that run them.

    Raises:
        PlacementError: Modules of PyTorch cannot follow the placement.
    """
    plan, shards, config = planned(job.spec, job.question.graph, job.placement,
                                   job.question.cluster)  # fmt: skip
    styles = tp_plan(shards) if divided_evenly(shards) else {}
    with new_contents(job.output, "export to tensor-parallel", job.overwrite) as folder:
        write(folder, plan, config)
        if styles:
            (folder / "tp_plan.json").write_bytes(indented_json(styles) + b"\n")
            (folder / "tp_run.py").write_bytes(TP_RUNNER.read_bytes())
        names = sorted(path.name for path in folder.iterdir())
    return [job.output / name for name in names]


def write(folder: Path, plan: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """The files that `run.py` needs, and itself."""
    (folder / "shards.json").write_text(json_by_parameter(plan), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "run.py").write_bytes(RUNNER.read_bytes())


def json_by_parameter(plan: Mapping[str, Any]) -> str:
    """JSON with a line for every parameter."""
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in plan["parameters"].items()]
    rest = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in plan.items() if k != "parameters"]
    rest.append(' "parameters": {\n' + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(rest) + "\n}\n"


def planned(
    spec: str, graph: OpGraph, placement: Placement, cluster: Cluster
) -> tuple[dict[str, Any], Shards, dict[str, Any]]:
    """The contents of `shards.json`, the shards in it, and the configuration without code.

    Raises:
        PlacementError: Modules of PyTorch cannot follow the placement.
    """
    from gdp.importers.huggingface.dtype import loaded_config
    from gdp.targets.torch_devices import torch_names

    split, shards, model = divided_model(spec, graph, placement, cluster)
    read, names = loaded_config(spec), torch_names(cluster)
    asked = read.spec
    embedding = model.get_input_embeddings().weight
    plan = {
        "ranks": [
            {"device": cluster.device_names[d], "torch_device": names[d], "share": share}
            for d, share in zip(split.devices, split.parts, strict=True)
        ],
        "batch": asked.batch, "prompt": asked.prompt or asked.sequence, "new": asked.new,
        "words": int(embedding.shape[0]), "width": int(embedding.shape[1]), **asdict(shards),
    }  # fmt: skip
    require_fitting(spec, plan, split)
    lines = torchrun_lines(cluster, split.devices, "run.py")
    plan |= {"torchrun": lines} if lines else {}
    return plan, shards, read.document


def divided_model(
    spec: str, graph: OpGraph, placement: Placement, cluster: Cluster
) -> tuple[Split, Shards, Any]:
    """The split that computes the model of a spec, its shards, and the model on the meta device.

    Raises:
        PlacementError: It is another phase than a prompt, or a module of unknown form is divided.
    """
    from gdp.importers.huggingface.model import huggingface_model
    from gdp.importers.huggingface.spec import parse_config_spec

    split, asked = the_split(graph, placement, cluster), parse_config_spec(spec)
    if asked.decode or asked.quantize:
        raise cannot(
            "it is of one step alone, or of quantised weights; ask for a prompt, or for "
            "a whole request with --generate"
        )
    model = huggingface_model(spec, whole=False).model
    return split, shards_of(graph, split, model), model


def require_fitting(spec: str, plan: Mapping[str, Any], split: Split) -> None:
    """Raise `PlacementError` where the code of a module insists on sizes of the whole model: a
    rank's part of it is run without values."""
    import torch

    from gdp.importers.huggingface.model import huggingface_model
    from gdp.importers.pytorch.closed import closed
    from gdp.targets.tensor_parallel import runner

    shards = json.loads(json.dumps(plan))
    for rank in sorted({split.parts.index(part) for part in split.parts}):
        # Products of groups of experts have shapes of results in this type alone.
        model = huggingface_model(spec, whole=False).model.to(torch.bfloat16)
        runner.fill(model, None, "meta", shards, rank)
        runner.divide(model, shards, rank, len(split.devices), exchange=False)
        ids = torch.zeros(plan["batch"], 2, dtype=torch.long, device="meta")
        token = ids[:, :1]
        try:
            with closed(), torch.inference_mode(), torch.device("meta"):
                runner.generate(model, ids, 1, [token])
        except Exception as error:
            raise cannot(f"its modules do not compute a part alone ({reason_of(error)})") from error
