"""The kind of model that a graph was made of, which says what runtime executes it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from gdp.ops.rule import names

Source = Literal["onnx", "jax", "torch", "gguf"]

_JAX_ALONE = names(
    "dot_general ragged_dot conv_general_dilated broadcast_in_dim convert_element_type reduce_sum "
    "reduce_max select_n"
)


def source_by_ops(
    op_types: Sequence[str], attributes: Iterable[Mapping[str, object]] = ()
) -> Source:
    """The source of a graph that no importer made, written by hand or in a file of an earlier
    version, by its ops: types of ONNX begin with capital letters, ops of GGUF files say how their
    weights are stored.

    >>> source_by_ops(["Input", "MatMul", "Relu"]), source_by_ops(["Input", "mm", "relu"])
    ('onnx', 'torch')
    """
    if any("stored" in given for given in attributes):
        return "gguf"
    if not _JAX_ALONE.isdisjoint(op_types):
        return "jax"
    own = [name for name in op_types if name not in ("Input", "Output")]
    return "onnx" if 2 * sum(name[:1].isupper() for name in own) > len(own) else "torch"
