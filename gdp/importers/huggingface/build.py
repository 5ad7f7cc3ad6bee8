"""Models of transformers from a checked configuration, without weights."""

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gdp.base.errors import ModelError
from gdp.importers.huggingface.check import ATTENTION
from gdp.importers.huggingface.tasks import TASKS
from gdp.importers.pytorch.closed import error_line, not_at_hand

LOG = logging.getLogger(__name__)


def read_config(
    transformers: Any, path: Path, given: Mapping[str, Any], document: Mapping[str, Any]
) -> Any:
    """The configuration object of a checked file (`given`) without its code (`document`); raises
    `ModelError` where transformers itself has no such model."""
    kind = document.get("model_type")
    built_in = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    if given.get("auto_map") and not built_in:
        raise ModelError(
            f"{path}: model type {kind!r} is none of transformers {transformers.__version__}, and "
            "gdp never runs the code that auto_map names; place the module: "
            "python:package.module:function"
        )
    if not isinstance(kind, str):
        raise ModelError(f"{path} is no configuration of transformers: it names no model_type")
    if given.get("auto_map"):
        LOG.warning(
            "%s: gdp never runs the code that auto_map names; the %s of transformers is placed",
            path, kind,
        )  # fmt: skip
    try:
        # A folder of its own, since transformers looks for more beside a configuration.
        with tempfile.TemporaryDirectory(prefix="gdp-config-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(document), encoding="utf-8")
            return transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        _refuse_missing(error, str(path), given)
        raise ModelError(
            f"{path} is no configuration of transformers: {error_line(error)}"
        ) from error


def build_model(transformers: Any, config: Any, task: str, text: str, attention: str | None) -> Any:
    """The model of a configuration for a task, on torch's default device; raises `ModelError`."""
    asked = {} if attention is None else {"attn_implementation": attention}
    try:
        model = getattr(transformers, TASKS[task]).from_config(
            config, trust_remote_code=False, **asked
        )
    except Exception as error:
        _refuse_missing(error, repr(text), config.to_dict())
        raise ModelError(
            f"{text!r}: transformers makes no {task} model of it: {error_line(error)}"
        ) from error
    for module in model.modules():
        used = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if used not in (None, *ATTENTION):
            raise ModelError(f"{text!r}: attention {used!r} is none of {', '.join(ATTENTION)}")
    return model.eval()


def _refuse_missing(error: BaseException, where: str, document: Mapping[str, Any]) -> None:
    """Raise `ModelError` where transformers would have fetched something."""
    missing = not_at_hand(error)
    if not missing:
        return
    backbone = document.get("backbone")
    if isinstance(backbone, str) and backbone:
        raise ModelError(
            f"{where}: its backbone {backbone!r} is only named, and gdp downloads nothing; write "
            "the backbone's own configuration as backbone_config"
        ) from error
    raise ModelError(f"{where}: needs {missing}, and gdp downloads nothing") from error


@contextmanager
def countable(text: str) -> Iterator[None]:
    """Raise `ModelError` where inputs have more bytes than 64 bits count."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ModelError(
            f"{text!r}: its inputs are too large to be counted; ask for fewer samples, tokens or "
            f"pixels ({error_line(error)})"
        ) from error
