"""Export of a placement to a folder that needs ONNX Runtime alone: models, manifest, runner."""

import hashlib
import itertools
import re
import shutil
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_model

from gdp.base.errors import ModelError
from gdp.base.files.writing import (
    OWN_FILES_ONLY,
    OverwritePolicy,
    check_folder_writable,
    indented_json,
    new_contents,
)
from gdp.base.version import gdp_version
from gdp.cluster.machines import numbers_on_machine
from gdp.cluster.types import CORE_KIND, Cluster
from gdp.graph.op_graph import OpGraph
from gdp.placement.placement import Placement
from gdp.sim.segments import segment_values, segments
from gdp.targets.onnx_source import load_source
from gdp.targets.onnxruntime.cut import Cut, SubModel, cut_model
from gdp.targets.target import ExportJob

FORMAT = "gdp-onnxruntime"
SCHEMA = 2
KIND = "export to onnxruntime"
QUEUE_DEPTH = 2  # samples that wait on one link between segments
MAX_INLINE_BYTES = 1_500_000_000
"""Larger weights go beside the model: protobuf ends at 2 GB."""


class ManifestDevice(msgspec.Struct):
    """Address of a device of the placement."""

    name: str
    core: int | None  # where the segment's thread is pinned
    provider: str
    provider_options: dict[str, str]


class ManifestSegment(msgspec.Struct):
    """One cut model."""

    name: str
    file: str
    device: int  # index into devices
    others: list[int]  # devices that take its samples in turn with that one, in this order
    ops: int
    inputs: list[str]
    outputs: list[str]
    sha256: str  # of the file


class ManifestTensor(msgspec.Struct):
    """Type of an input or output of the whole model."""

    dtype: str
    shape: list[int | str | None]


class OnnxRuntimeManifest(msgspec.Struct):
    """The JSON file that the runner reads."""

    format: str
    schema: int
    model: str
    graph_digest: str
    made_by: str
    versions: dict[str, str]
    devices: list[ManifestDevice]
    segments: list[ManifestSegment]
    links: list[tuple[str, str]]  # who hands tensors to whom: segments, "feed" and "result"
    queue_depth: int
    inputs: dict[str, ManifestTensor]
    outputs: dict[str, ManifestTensor]


def export_onnxruntime(
    model: onnx.ModelProto,
    weights_folder: Path,
    graph: OpGraph,
    placement: Placement,
    cluster: Cluster,
    output: Path,
    *,
    overwrite: OverwritePolicy = OWN_FILES_ONLY,
) -> list[Path]:
    """Write the folder and return its files; it is complete or not there at all.

    `model` holds the nodes of `graph` by name, its external weights lie in `weights_folder`; the
    kinds of the cluster's devices say which provider runs them.
    The cut has the fewest segments (see `gdp.sim.segments`). Raises `ModelError` when weights are
    missing. See `gdp.base.files.writing` for `overwrite`.
    """
    check_folder_writable(output, KIND, overwrite)
    segment = segments(graph, placement.device)
    cut = cut_model(model, graph, segment)
    device_of = segment_values(placement.device, segment)
    serving = {team[0]: team for team in placement.teams}
    teams = [serving.get(lead, (lead,)) for lead in device_of.tolist()]
    with new_contents(output, KIND, overwrite) as folder:
        entries = [
            _write_piece(piece, i, teams[piece.segment], weights_folder, folder)
            for i, piece in enumerate(cut.pieces)
        ]
        manifest = OnnxRuntimeManifest(
            format=FORMAT,
            schema=SCHEMA,
            model=graph.name,
            graph_digest=graph.digest,
            made_by=placement.made_by,
            versions={"gdp": gdp_version()}
            | {name: version(name) for name in ("onnx", "onnxruntime")},
            devices=_devices(cluster),
            segments=entries,
            links=_links(cut, [entry.name for entry in entries]),
            queue_depth=QUEUE_DEPTH,
            inputs=_tensors(model.graph.input, cut.inputs),
            outputs=_tensors(model.graph.output, cut.outputs),
        )
        (folder / "manifest.json").write_bytes(indented_json(manifest))
        shutil.copyfile(Path(__file__).with_name("runner_template.py"), folder / "run.py")
        written = sorted(path.name for path in folder.iterdir())
    return [output / name for name in written]


def _write_piece(
    piece: SubModel, index: int, team: tuple[int, ...], weights_folder: Path, folder: Path
) -> ManifestSegment:
    name = f"segment_{index:03d}"
    target = folder / f"{name}.onnx"
    try:
        load_external_data_for_model(piece.model, str(weights_folder))
    except (OSError, onnx.checker.ValidationError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"weights of {piece.model.graph.name!r} cannot be read: {reason}"
        ) from None
    weight_bytes = sum(
        int(np.prod(tensor.dims)) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in piece.model.graph.initializer
        if tensor.data_type != onnx.TensorProto.STRING
    )
    if weight_bytes > MAX_INLINE_BYTES:
        beside = {"save_as_external_data": True, "location": f"{name}.data"}
        onnx.save_model(piece.model, target, **beside)
    else:
        onnx.save_model(piece.model, target)
    return ManifestSegment(
        name=name,
        file=target.name,
        device=team[0],
        others=list(team[1:]),
        ops=len(piece.ops),
        inputs=list(piece.inputs),
        outputs=list(piece.outputs),
        sha256=hashlib.sha256(target.read_bytes()).hexdigest(),
    )


def _devices(cluster: Cluster) -> list[ManifestDevice]:
    """The address of each device by its kind: a core is one of the machine's, by its number where
    it is named so (`core3`), else the next one; other processors are not pinned; anything else is
    a CUDA device, in order."""
    numbers = [
        int(name[4:]) if device.kind == CORE_KIND and re.fullmatch(r"core[0-9]+", name) else None
        for name, device in zip(cluster.device_names, cluster.devices, strict=True)
    ]
    free = (number for number in itertools.count() if number not in numbers)
    entries = []
    for number, accelerator, device in zip(
        numbers, numbers_on_machine(cluster), cluster.devices, strict=True
    ):
        if accelerator is not None:
            options = {"device_id": str(accelerator)}
            entries.append(ManifestDevice(device.name, None, "CUDAExecutionProvider", options))
            continue
        core = next(free) if device.kind == CORE_KIND and number is None else number
        entries.append(ManifestDevice(device.name, core, "CPUExecutionProvider", {}))
    return entries


def _links(cut: Cut, names: list[str]) -> list[tuple[str, str]]:
    """Pairs of a sender and a receiver of tensors.

    Segments receive from the caller (also those that read nothing) and from other segments, the
    result from the makers of outputs.
    """
    maker = {tensor: names[i] for tensor, i in cut.maker().items()}
    links: list[tuple[str, str]] = []
    for name, piece in zip(names, cut.pieces, strict=True):
        makers = dict.fromkeys(maker.get(tensor, "feed") for tensor in piece.inputs)
        links += [(source, name) for source in makers or {"feed": None}]
    makers = dict.fromkeys(maker.get(tensor, "feed") for tensor in cut.outputs)
    return links + [(source, "result") for source in makers]


def _tensors(
    values: Iterable[onnx.ValueInfoProto], names: tuple[str, ...]
) -> dict[str, ManifestTensor]:
    tensors = {}
    for value in values:
        if value.name in names:
            kind = value.type.tensor_type
            dims = [
                d.dim_value if d.HasField("dim_value") else d.dim_param or None
                for d in kind.shape.dim
            ]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
            tensors[value.name] = ManifestTensor(str(dtype), dims)
    return tensors


def export(job: ExportJob) -> list[Path]:
    """Write the sub-models of a placement; see `export_onnxruntime`."""
    source = load_source(job.spec, job.question.dims)
    graph, placement, cluster, output, overwrite = job.plan
    return export_onnxruntime(
        source.model, source.folder, graph, placement, cluster, output, overwrite=overwrite
    )
