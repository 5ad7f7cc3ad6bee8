"""Caches of models that generate: the model's own cache object, as it is after reading a prompt.

A prompt is read on the meta device, where nothing is computed, and the cache that the model returns
is kept with the shapes of its states: keys and values, compressed ones (MLA), those of a window,
convolution and recurrent states, those of an encoder. One step of decoding takes the states as
inputs that are held where they are read, in a copy of that object; so whatever a cache is made of,
it is what transformers makes of it, not a guess from names in a configuration.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gdp.base.errors import ModelError
from gdp.importers.pytorch.closed import closed, error_line

FIELDS = ("past_key_values", "cache_params", "cache", "state")
"""Names of the cache in the outputs of models."""
ARGUMENTS = ("past_key_values", "cache", "cache_params", "state")
"""Names of the cache among the arguments of models; some versions return it by another one."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type)


def on_meta(read: Any = None) -> Any:
    """A mode in which modules run on the meta device where they ask for data, or for kernels whose
    shapes torch does not infer there; `read`, if given, is called with every tensor read."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten: Any = torch.ops.aten

    class OnMeta(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if read is not None:
                for leaf in tree_leaves((args, kwargs or {})):
                    if isinstance(leaf, torch.Tensor):
                        read(leaf)
            if func is aten._local_scalar_dense.default:  # noqa: SLF001
                # Nothing is known of a number on the meta device; zero leads on as any does.
                return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
            if func is aten._grouped_mm.default and args[0].dim() == 2 and args[1].dim() == 3:  # noqa: SLF001
                # Experts: torch infers its shape for bfloat16 alone.
                return args[0].new_empty(args[0].shape[0], args[1].shape[2])
            return func(*args, **(kwargs or {}))

    return OnMeta()


def states(cache: Any) -> dict[str, Any]:
    """The tensors of a cache object by their path in it, such as "layers.0.keys"; each once.

    Numbers that a layer keeps beside its states, such as its window, are left out.
    """
    return {path: tensor for path, tensor, _ in _tensors(cache) if tensor.dim()}


def _tensors(cache: Any) -> list[tuple[str, Any, int | None]]:
    """Path, tensor and the tokens of the layer's window, None without one."""
    import torch

    tensors: list[tuple[str, Any, int | None]] = []
    seen: set[int] = set()

    def walk(value: Any, path: tuple[str, ...], window: int | None) -> None:
        if isinstance(value, _PLAIN) or id(value) in seen:
            return
        seen.add(id(value))
        if torch.is_tensor(value):
            tensors.append((".".join(path), value, window))
        elif isinstance(value, Mapping):
            for key, part in value.items():
                walk(part, (*path, str(key)), window)
        elif isinstance(value, list | tuple):
            for i, part in enumerate(value):
                walk(part, (*path, str(i)), window)
        elif not hasattr(value, "to_diff_dict"):  # a configuration, which some caches refer to
            own = getattr(value, "sliding_window", None)
            window = own if isinstance(own, int) and own > 0 else window
            walk(getattr(value, "__dict__", None), path, window)

    walk(cache, (), None)
    return tensors


class StateGrowth(NamedTuple):
    """Bytes of a state of a cache by the tokens that were read and written."""

    nbytes: int  # at `tokens`
    tokens: int
    per_token: float
    most: float  # inf where every token is kept

    def at(self, tokens: int) -> int:
        """Bytes at a number of tokens that is not smaller."""
        return round(min(self.nbytes + self.per_token * (tokens - self.tokens), self.most))

    @property
    def bend(self) -> int:
        """Tokens from which on it grows no more; 0 where that is so already, or never."""
        grows = self.per_token > 0 and math.isfinite(self.most)
        return self.tokens + math.ceil((self.most - self.nbytes) / self.per_token) if grows else 0


def growth_of(full: Any, tokens: int, other: Mapping[str, int], at: int) -> dict[str, StateGrowth]:
    """Growth of every state of a cache of `tokens` tokens, from its bytes at another number. A
    window keeps all of its tokens but one, as in transformers; once full, its size is fixed."""
    grown = {}
    for path, state, window in _tensors(full):
        if not state.dim():
            continue
        size = int(state.nbytes)
        per_token = (size - other.get(path, size)) / (tokens - at)
        most = math.inf
        if window is not None:
            per_token = 0.0 if tokens >= window else per_token
            most = size + per_token * max(window - 1 - tokens, 0)
        grown[path] = StateGrowth(size, tokens, max(per_token, 0.0), most)
    return grown


def cache_of(outputs: Any) -> tuple[str, Any] | None:
    """(name, cache) in the outputs of a model; None where it returns none."""
    for name in FIELDS:
        cache = outputs.get(name) if hasattr(outputs, "get") else None
        if cache is not None and states(cache):
            return name, cache
    return None


class ReadPrompt(NamedTuple):
    """Outputs of a model that has read a prompt, as a step of decoding takes them."""

    name: str  # of the cache among the outputs
    cache: Any
    encoded: Any  # last hidden state of the encoder; None without an encoder


def read_prompt(module: Any, inputs: Mapping[str, Any], label: str) -> ReadPrompt:
    """The cache of a module on the meta device after it has read `inputs`.

    Raises `ModelError` where it cannot read them there, or keeps no cache.
    """
    import torch

    try:
        with closed(), torch.no_grad(), torch.device("meta"), on_meta():
            outputs = module(**inputs, use_cache=True)
            cache = cache_of(outputs)
    except Exception as error:
        if "torch.nonzero()" in str(error):
            raise ModelError(
                f"{label}: {type(module).__name__} chooses by data which of its parts run "
                "(torch.nonzero), so that its ops are not known without weights; leave --decode "
                "or --generate out, or place a python: function with real weights and inputs"
            ) from error
        raise ModelError(
            f"{label}: reading a prompt on the meta device failed, which shows the shapes of its "
            f"cache: {error_line(error)}"
        ) from error
    if cache is None:
        bidirectional = getattr(getattr(module, "config", None), "is_decoder", None) is False
        hint = (
            " (it has one where its configuration says is_decoder: true)" if bidirectional else ""
        )
        raise ModelError(
            f"{label}: decoding needs a cache, and {type(module).__name__} returns none{hint}; "
            "leave --decode or --generate out to place it reading a whole prompt"
        )
    encoded = outputs.get("encoder_last_hidden_state")
    if encoded is None and "decoder_input_ids" in inputs:
        raise ModelError(
            f"{label}: {type(module).__name__} returns no result of its encoder, which a step of "
            "decoding takes; leave --decode or --generate out to place it reading a whole prompt"
        )
    return ReadPrompt(*cache, encoded)


def as_encoded(hidden: Any) -> Any:
    """The result of an encoder as models of transformers take it."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=hidden)


def refilled(cache: Any, tensors: Sequence[Any]) -> Any:
    """A copy of a cache with other tensors in the order of `states`."""
    fresh = iter(tensors)
    # Numbers on the meta device have no value, and no step reads them.
    memo = {id(old): next(fresh) if old.dim() else None for _, old, _ in _tensors(cache)}
    return copy.deepcopy(cache, memo)
