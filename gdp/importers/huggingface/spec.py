"""Specs of models of transformers, `hf:PATH?task=causal-lm`, and the files that they name."""

from dataclasses import dataclass
from pathlib import Path

from gdp.base.errors import ModelError
from gdp.base.files.reading import is_file, is_folder
from gdp.base.units import whole_number
from gdp.graph.request import Request
from gdp.importers.huggingface.tasks import TASKS
from gdp.importers.program import batch_of, request_tokens, spec_parts
from gdp.ops.vllm import AT_ONCE

PREFIX = "hf:"
TYPES = ("bfloat16", "float16", "float32")
"""Types that weights are loaded in, in the order in which vLLM prefers them."""
CACHE_TYPES = ("fp8", "bfloat16", "float16")
"""Types of keys and values, `--kv-cache-dtype` of vLLM and SGLang."""


_KEYS = frozenset((
    "task", "batch", "sequence", "decode", "prompt", "new", "quantize", "requests", "context",
    "dtype", "kv_cache_dtype", AT_ONCE,
))  # fmt: skip


PIPELINE = "model_index.json"
"""The file that makes a folder a pipeline of diffusers."""


@dataclass(frozen=True)
class ConfigSpec:
    """A configuration, the task, and the batch that its graph is of."""

    path: str
    task: str = ""  # "": by the architecture that the configuration names
    batch: int = 1
    sequence: int = 512  # tokens of the prompt; with `decode`, of the cache
    decode: bool = False  # one step of a model that has read `sequence` tokens
    prompt: int = 0  # tokens that are read before `new` ones are written; 0: one phase alone
    new: int = 0
    quantize: str = ""  # a scheme to try; "": that of the configuration
    dtype: str = ""  # type that weights are loaded in; "": that of the checkpoint
    kv_cache_dtype: str = ""  # of an engine; "": as the checkpoint says, else that of activations
    # Tokens of a pass, where an engine computes the model (`gdp.graph.serving`); 0: torch does.
    max_num_batched_tokens: int = 0
    # Traces do not depend on these two, so that they are last:
    requests: int = 0  # in flight at once
    context: int = 0  # tokens that caches are reserved for; 0: those of prompt and new

    @property
    def request(self) -> Request:
        """The requested generation, without tokens for a single phase."""
        return Request(
            self.prompt, self.new, self.batch, self.requests, self.context,
            is_served=self.max_num_batched_tokens > 0, pass_tokens=self.max_num_batched_tokens,
        )  # fmt: skip


def parse_config_spec(text: str) -> ConfigSpec:
    """A spec from its text; raises `ModelError` for an unknown or malformed part.

    >>> parse_config_spec("hf:llama/config.json?batch=2&decode")  # doctest: +NORMALIZE_WHITESPACE
    ConfigSpec(path='llama/config.json', task='', batch=2, sequence=512, decode=True, prompt=0,
               new=0, quantize='', dtype='', kv_cache_dtype='', max_num_batched_tokens=0,
               requests=0, context=0)
    """
    form = "hf:PATH?task=TASK&batch=1&sequence=512&decode&quantize=SCHEME"
    path, given = spec_parts(text, form, _KEYS, PREFIX)
    task = given.get("task", "")
    if task and task not in TASKS:
        raise ModelError(f"no task {task!r}; there are {', '.join(TASKS)}")
    asked, scheme, dtype = request_tokens(given), given.get("quantize", ""), given.get("dtype", "")
    if "dtype" in given and dtype not in TYPES:
        raise ModelError(f"no dtype {dtype!r} to load weights in; there are {', '.join(TYPES)}")
    cached = given.get("kv_cache_dtype", "")
    if "kv_cache_dtype" in given and cached not in CACHE_TYPES:
        raise ModelError(f"no kv_cache_dtype {cached!r}; there are {', '.join(CACHE_TYPES)}")
    at_once = whole_number(given.get(AT_ONCE, "1"))
    if at_once is None:
        raise ModelError(
            f"{AT_ONCE} must be a positive whole number below 2**31, got {given[AT_ONCE]!r}"
        )
    at_once = at_once if AT_ONCE in given else 0
    return ConfigSpec(
        path, task, *batch_of(given), asked.prompt, asked.new, scheme, dtype, cached, at_once,
        asked.requests, asked.context,
    )  # fmt: skip


def config_file(spec: str) -> Path:
    """The configuration file of a spec: a path, else a model of that name in the local cache of
    the Hugging Face hub. Raises `ModelError` where there is none."""
    name = parse_config_spec(spec).path
    path = Path(name)
    path = path / "config.json" if is_folder(path) else path
    if is_file(path):
        return path
    cached = _cached_config(name, "config.json")
    if cached is None:
        if is_file(Path(name) / PIPELINE) or _cached_config(name, PIPELINE) is not None:
            raise ModelError(
                f"{name!r} is a pipeline of diffusers: ask what it makes with --image or --video"
            )
        raise ModelError(
            f"no configuration {name!r}: give a config.json of transformers, a folder that holds "
            "one, or ORG/NAME of a model that the Hugging Face cache of this machine holds; gdp "
            "downloads nothing"
        )
    return cached


def _cached_config(name: str, file: str) -> Path | None:
    """A file of model ORG/NAME as it was downloaded before (its main revision)."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        path = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None
