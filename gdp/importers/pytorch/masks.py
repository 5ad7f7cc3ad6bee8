"""Attention masks of transformers, traced as they are when a model runs.

Where nothing is padded, scaled dot-product attention is told that it is causal, and no mask of
tokens times tokens exists (`_ignore_causal_mask_sdpa` of `transformers/masking_utils.py`). While
`torch.export` traces, transformers makes the mask anyway, since the program could be run with
inputs of other shapes. Programs here are run with the shapes that they were traced with. Attention
that is not fused ("eager") and windows shorter than the context have their masks either way.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MODULE = "transformers.masking_utils"
_POSITIONS = "position_ids"


@contextlib.contextmanager
def masks_as_run(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Trace inside with the masks that transformers makes when these inputs are run."""
    if "transformers" not in sys.modules:
        yield
        return
    masking: Any = importlib.import_module(_MODULE)
    with contextlib.ExitStack() as undo:
        _replace(undo, masking, "is_torchdynamo_exporting", lambda: False)
        if not _given(module, args, kwargs, _POSITIONS):
            # Positions that the model counts itself are of one sequence a row, so that there are no
            # packed sequences; positions from outside could tell several apart.
            _replace(undo, masking, "find_packed_sequence_indices", lambda position_ids: None)
        yield


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _given(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> bool:
    """True where an argument of a module's forward pass has this name."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args)
    except (AttributeError, TypeError, ValueError):
        return name in kwargs
    return name in {*bound.arguments, *kwargs}
