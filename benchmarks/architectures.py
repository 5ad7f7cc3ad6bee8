"""Architectures that transformers can generate with: answered, refused in one line, or neither.

    python -m benchmarks.architectures [NAME ...] [--limit SECONDS]

Every model type of the installed transformers that has a class in one of `MAPPINGS` is written as a
`config.json` of its default configuration, cut to few layers, with the class that a saved model
would name, and imported as a request (`gdp.Generation`, a prompt of 64 tokens and 8 new ones). A
row has its ops and bytes, or the line that refuses it, and the CPU seconds. An error that is no
`GdpError`, a refusal of several lines, and more than `--limit` CPU seconds are faults: then the
command ends with 1. With `--shapes` the cache is read, and nothing is traced: 4 minutes for all.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

MAPPINGS = (
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MULTIMODAL_LM",
)  # fmt: skip
"""Classes with a head that writes tokens (`transformers.models.auto.modeling_auto`)."""
LAYERS = 4
"""Of each stack: enough for one of each kind in the hybrids."""
_COUNTS = frozenset((
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "encoder_layers",
    "decoder_layers", "num_decoder_layers", "num_encoder_layers", "depth", "encoder_num_layers",
    "decoder_num_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers",
    "num_mtp_layers",
))  # fmt: skip
_PER_LAYER = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")


class Row(NamedTuple):
    """The import of one class."""

    kind: str
    architecture: str
    outcome: str  # "answered", "refused" or "fault"
    said: str  # bytes of an answer, the line of a refusal
    cpu_s: float


def architectures() -> list[tuple[str, str]]:
    """(model type, class) of all classes that write tokens."""
    from transformers.models.auto import modeling_auto

    pairs: dict[tuple[str, str], None] = {}
    for name in MAPPINGS:
        for kind, classes in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
            for one in [classes] if isinstance(classes, str) else classes:
                pairs[kind, one] = None
    return sorted(pairs)


def small_config(kind: str, architecture: str, layers: int = LAYERS) -> dict[str, Any]:
    """The default configuration of a model type, with few layers, as its file would hold it."""
    import transformers

    document = transformers.CONFIG_MAPPING[kind]().to_dict()
    _cut(document, layers)
    document |= {"model_type": kind, "architectures": [architecture], "dtype": "bfloat16"}
    return json.loads(json.dumps(document, default=str))


def _cut(document: dict[str, Any], layers: int) -> None:
    lengths = {v for k, v in document.items() if k in _COUNTS and isinstance(v, int)}
    for key, value in document.items():
        if key in _COUNTS and isinstance(value, int):
            document[key] = min(value, layers)
        elif key == "per_layer_config" and isinstance(value, dict):
            document[key] = {i: own for i, own in value.items() if int(i) < layers}
        elif isinstance(value, dict):
            _cut(value, layers)
        elif isinstance(value, list) and (key in _PER_LAYER or len(value) in lengths):
            document[key] = _few(value, layers)


def _few(kinds: list[Any], layers: int) -> list[Any]:
    """The first entries; where those are alike and others follow, the last is of another kind."""
    kept = kinds[:layers]
    other = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
    return kept if other in kept or len(kept) < 2 else [*kept[:-1], other]


def imported(kind: str, architecture: str, limit_s: float, traces: bool = True) -> Row:
    """One row."""
    import gdp
    from gdp.base.errors import GdpError
    from gdp.importers.huggingface.model import huggingface_model
    from gdp.importers.pytorch.closed import error_line

    begin = time.process_time()
    outcome, folder = "answered", ""
    try:
        document = small_config(kind, architecture)
    except Exception as error:
        # transformers' own default does not pass its own checks.
        said = f"no default configuration: {error_line(error)}"
        return Row(kind, architecture, "refused", said, time.process_time() - begin)
    try:
        with tempfile.TemporaryDirectory() as folder, _cpu_limit(3 * limit_s):
            (Path(folder) / "config.json").write_text(json.dumps(document))
            request = gdp.Generation(folder, prompt=64, new=8)
            if traces:
                graph = gdp.load(request)
                said = f"{graph.num_ops} ops, {graph.weight_bytes.sum() / 2**30:.2f} GiB"
            else:
                said = huggingface_model(os.fspath(request)).label
    except GdpError as error:
        outcome, said = "refused", str(error).replace(folder, "FOLDER")
    except BaseException as error:  # also what ends the program: the import must raise none
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome, said = "fault", f"{type(error).__name__}: {error}"
    cpu_s = time.process_time() - begin
    if cpu_s > limit_s or "\n" in said:
        outcome = "fault"
    return Row(kind, architecture, outcome, said, cpu_s)


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:.0f} CPU seconds")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> int:
    """Import all, or those named, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types; without any, all")
    parser.add_argument("--limit", type=float, default=20.0, help="CPU seconds of an import")
    parser.add_argument("--shapes", action="store_true", help="trace nothing")
    options = parser.parse_args()
    counts = {"answered": 0, "refused": 0, "fault": 0}
    for kind, architecture in architectures():
        if options.names and kind not in options.names:
            continue
        row = imported(kind, architecture, options.limit, not options.shapes)
        counts[row.outcome] += 1
        print(f"{row.outcome:8} {row.cpu_s:6.1f} s  {kind:24} {architecture:42} {row.said}",
              flush=True)  # fmt: skip
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["fault"] else 0


if __name__ == "__main__":
    sys.exit(main())
