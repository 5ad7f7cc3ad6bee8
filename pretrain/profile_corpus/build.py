"""Builds the models of the profile corpus and measures them, a while at a time.

    python -m pretrain.profile_corpus.build --folder WORK -o data/profiles/cpu-core.json.gz

Measurements that are there are kept, so that a run can be repeated until it says that all is done;
`--seconds` ends it early. Another `--pass` measures everything again.
"""

import argparse
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import numpy_helper

from gdp.base.errors import GdpError
from gdp.costs.profile import load_profile, merge, save_profile
from gdp.importers.onnx.spec import resolve_spec
from gdp.targets.onnxruntime.profile import ProfileConfig, profile_models
from pretrain.profile_corpus import exports, random_networks, random_operators

LOG = logging.getLogger(__name__)
SYNTHETIC = {
    "cnn": random_networks.random_cnn,
    "transformer": random_networks.random_transformer,
    "ops": random_operators.random_ops,
    "image_ops": random_operators.random_image_ops,
    "joined": random_networks.random_joined,
    "windows": random_networks.random_windows,
}
# (name, family, batch, image size or None for the model's own)
LIGHT: tuple[tuple[str, str, int, int | None], ...] = (
    ("bvlc_alexnet", "alexnet", 1, None), ("bvlc_alexnet", "alexnet", 4, None),
    ("zfnet512", "zfnet", 1, None), ("zfnet512", "zfnet", 2, None), ("vgg19", "vgg", 1, None),
    ("vgg19", "vgg", 2, None), ("shufflenet", "shufflenet", 1, None),
    ("shufflenet", "shufflenet", 4, None), ("inception_v1", "inception", 1, None),
    ("inception_v1", "inception", 4, None), ("inception_v2", "inception", 1, None),
    ("inception_v2", "inception", 4, None), ("resnet50", "resnet", 1, None),
    ("resnet50", "resnet", 4, None), ("densenet121", "densenet", 1, None),
    ("densenet121", "densenet", 2, None), ("densenet121", "densenet", 1, 160),
    ("squeezenet", "squeezenet", 1, None), ("squeezenet", "squeezenet", 4, None),
    ("squeezenet", "squeezenet", 1, 320),
)  # fmt: skip


def build_light(name: str, batch: int, size: int | None, folder: Path) -> Path:
    """A light model with another input; reshapes to a fixed batch follow."""
    path = folder / f"{name}-b{batch}{'' if size is None else f'-i{size}'}.onnx"
    if path.exists():
        return path
    model = onnx.load(resolve_spec(f"onnx:light_{name}"))
    graph = model.graph
    held = {i.name for i in graph.initializer}
    for value in graph.input:
        if value.name not in held:
            dims = value.type.tensor_type.shape.dim
            dims[0].dim_value = batch
            if size is not None:
                dims[2].dim_value = dims[3].dim_value = size
    shapes = {n.input[1] for n in graph.node if n.op_type == "Reshape"}
    for tensor in graph.initializer:
        if tensor.name in shapes:
            values = numpy_helper.to_array(tensor).copy()
            if values[0] == 1 and batch != 1:
                values[0] = batch
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    del graph.value_info[:]
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


class Entry(NamedTuple):
    """A model of the corpus, and how to get its file."""

    name: str
    family: str
    build: Callable[[], Path]


def corpus(folder: Path, synthetic_count: int, *, with_exports: bool = True) -> Iterator[Entry]:
    """Every model: the light ones, the exports, the random ones. Without `with_exports`, only
    exports that were made before."""
    for name, family, batch, size in LIGHT:
        label = f"{name}-b{batch}{'' if size is None else f'-i{size}'}"
        yield Entry(
            label, family,
            lambda n=name, b=batch, s=size: build_light(n, b, s, folder / "light"),
        )  # fmt: skip
    for name, entry in exports.EXPORTS.items():
        if with_exports or (folder / "exports" / f"{name}.onnx").exists():
            yield Entry(name, entry.family, lambda e=entry: exports.export(e, folder / "exports"))
    for seed in range(synthetic_count):
        for kind, make in SYNTHETIC.items():
            path = folder / "syn" / f"{kind}{seed}.onnx"
            yield Entry(
                f"{kind}{seed}", f"synthetic_{kind}",
                lambda p=path, m=make, s=seed: p if p.exists() else random_networks.save(m(s), p),
            )  # fmt: skip


def blind(folder: Path) -> Iterator[Entry]:
    """Models of families that are only ever tested on."""
    for entry in exports.BLIND.values():
        yield Entry(entry.name, entry.family, lambda e=entry: exports.export(e, folder / "blind"))


def measure(entries: Iterator[Entry], target: Path, config: ProfileConfig, seconds: float) -> bool:
    """Measure what is not in `target` yet; whether everything is there now."""
    target.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    for entry in entries:
        path = target / f"{entry.name}.json.gz"
        if path.exists() or (target / f"{entry.name}.failed").exists():
            continue
        if time.monotonic() - started_s > seconds:
            return False
        try:
            models = [(entry.name, entry.family, entry.build())]
            save_profile(profile_models(models, config, overheads=False), path)
        except (GdpError, RuntimeError, ValueError, TypeError) as error:
            LOG.warning("%s is left out: %s", entry.name, error)
            (target / f"{entry.name}.failed").write_text(str(error))
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="built models and parts")
    parser.add_argument("-o", "--output", type=Path, help="the merged profile")
    parser.add_argument("--pass", dest="turn", default="a", help="a name for this round")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--synthetic", type=int, default=40, help="of each kind")
    parser.add_argument("--no-exports", action="store_true", help="no new exports, without torch")
    parser.add_argument("--blind", action="store_true", help="the families to test on once")
    parser.add_argument("--model-seconds", type=float, default=1.5, help="of measuring each")
    parser.add_argument("--families", help="only these, by comma")
    parser.add_argument("--core", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if arguments.blind:
        entries = blind(arguments.folder)
    else:
        with_exports = not arguments.no_exports
        entries = corpus(arguments.folder, arguments.synthetic, with_exports=with_exports)
    if arguments.families:
        wanted = set(arguments.families.split(","))
        entries = (entry for entry in entries if entry.family in wanted)
    target = arguments.folder / f"profiles-{arguments.turn}"
    config = ProfileConfig(core=arguments.core, seconds=arguments.model_seconds, min_runs=2)
    done = measure(entries, target, config, arguments.seconds)
    if not done:
        raise SystemExit(3)
    if arguments.output is not None:
        parts = [load_profile(path) for path in sorted(target.glob("*.json.gz"))]
        save_profile(merge(parts), arguments.output)


if __name__ == "__main__":
    main()
