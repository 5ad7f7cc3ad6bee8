"""ONNX values and nodes as the rules see them: types, shapes, and the data of small constants.

onnx_ir, which takes a second to import, is needed for the names of types only, and only once a
model is read.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from onnx_ir import Attr, DataType
else:
    Attr = DataType = object

KNOWN_ELEMENTS = 2048
"""Values up to this size are computed while importing: shapes, axes and their arithmetic."""
STRING_BITS = 128
"""A string is counted as the pointer and the length that runtimes hold; its text is unknown."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor with every dimension known."""

    dtype: DataType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The product of the dimensions; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """As packed in memory: types below a byte share bytes."""
        return packed_bytes(self.elements, bits(self.dtype))


@dataclass(frozen=True, slots=True)
class TensorList:
    """An ONNX sequence as runs of identical tensors, (tensor, how many), no two neighbours of
    one kind: a tensor that is split into its million rows is one run. See `tensor_list`."""

    runs: tuple[tuple[Tensor, int], ...] = ()

    @property
    def count(self) -> int:
        """Tensors in the sequence, of all runs."""
        return sum(count for _, count in self.runs)

    @property
    def elements(self) -> int:
        """Of all tensors together."""
        return sum(item.elements * count for item, count in self.runs)

    @property
    def bytes(self) -> int:
        """Of all tensors together, each packed by itself."""
        return sum(item.bytes * count for item, count in self.runs)


def tensor_list(runs: Iterable[tuple[Tensor, int]]) -> TensorList:
    """The sequence of these runs, empty ones left out and equal neighbours joined.

    >>> a = Tensor(data_type("FLOAT"), (2,))
    >>> tensor_list([(a, 1), (a, 2)]) == TensorList(((a, 3),))
    True
    """
    joined: list[tuple[Tensor, int]] = []
    for item, count in runs:
        if joined and joined[-1][0] == item:
            joined[-1] = (item, joined[-1][1] + count)
        elif count > 0:
            joined.append((item, count))
    return TensorList(tuple(joined))


Fact = Tensor | TensorList


@dataclass(frozen=True, slots=True)
class Partial:
    """A tensor as shape inference leaves it: `shape` None is an unknown rank, a None in it an open
    dimension, dtype UNDEFINED an unknown element type."""

    dtype: DataType = field(default_factory=lambda: data_type("UNDEFINED"))
    shape: tuple[int | None, ...] | None = None


Inferred = Fact | Partial


@dataclass(frozen=True)
class NodeView:
    """A node with its known inputs and outputs; None stands for an omitted one."""

    name: str
    domain: str
    op_type: str
    version: int  # of the operator set
    attributes: Mapping[str, Attr]
    inputs: tuple[Fact | None, ...]
    known: tuple[np.ndarray | None, ...]  # [i]: the data of input i, where small and constant
    outputs: tuple[Fact | None, ...] = ()
    num_outputs: int = 1
    # Bytes of each distinct value read and made. A weight that is kept quantised has its stored
    # size, and a value that two inputs name is read once, so this is not the sum over `inputs`.
    read_bytes: int = 0
    written_bytes: int = 0
    body: tuple[float, float] = field(default=(0.0, 0.0))  # FLOPs and traffic of all iterations

    def attribute(self, name: str, default: Any = None) -> Any:
        """The Python value of an attribute, strings decoded; `default` if omitted."""
        found = self.attributes.get(name)
        return default if found is None else found.value

    def tensor(self, index: int) -> Tensor | None:
        """Input `index` if it is there and is a tensor."""
        fact = self.inputs[index] if index < len(self.inputs) else None
        return fact if isinstance(fact, Tensor) else None

    def has(self, index: int) -> bool:
        """True where input `index` is given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def shape(self, index: int) -> tuple[int, ...]:
        """The shape of input `index`; () if omitted or no tensor."""
        tensor = self.tensor(index)
        return () if tensor is None else tensor.shape

    def in_elements(self, index: int) -> int:
        """Elements of input `index`; 0 if omitted."""
        fact = self.inputs[index] if index < len(self.inputs) else None
        return 0 if fact is None else fact.elements

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the first output; () where it is no tensor."""
        output = self.outputs[0] if self.outputs else None
        return output.shape if isinstance(output, Tensor) else ()

    @property
    def out_elements(self) -> int:
        """Elements of the first output; 0 where it is unknown."""
        output = self.outputs[0] if self.outputs else None
        return 0 if output is None else output.elements

    def data(self, index: int) -> np.ndarray | None:
        """The array of input `index`; None unless small and constant."""
        return self.known[index] if index < len(self.known) else None

    def ints(self, attribute: str, index: int) -> list[int] | None:
        """Integers that older operator sets hold in an attribute and newer ones in an input."""
        given = self.attribute(attribute)
        if given is not None:
            return [int(i) for i in given]
        data = self.data(index)
        return None if data is None else [int(i) for i in data.reshape(-1)]


ShapeRule = Callable[[NodeView], list[Inferred]]
"""The outputs of a node; may raise IndexError when a required input is missing."""


def need(view: NodeView, index: int) -> Tensor:
    """Input `index`, which the operator requires to be a tensor."""
    tensor = view.tensor(index)
    if tensor is None:
        raise IndexError(f"input {index} is left out")
    return tensor


def bits(dtype: DataType) -> int:
    """Stored bits of one element."""
    if dtype.name == "STRING":
        return STRING_BITS
    return 0 if dtype.name == "UNDEFINED" else dtype.bitwidth


def packed_bytes(elements: int, bits: int) -> int:
    """Bytes of a tensor, sub-byte types packed.

    >>> packed_bytes(3, 4)
    2
    """
    return (elements * bits + 7) // 8


def data_type(name: str) -> DataType:
    """The ONNX element type of this name, such as "FLOAT"."""
    import onnx_ir

    return onnx_ir.DataType[name]


def dtype_name(dtype: DataType) -> str:
    """The NumPy spelling: float32, bfloat16, int8.

    >>> dtype_name(data_type("FLOAT"))
    'float32'
    """
    other = {"STRING": "string", "UNDEFINED": "unknown"}
    return other.get(dtype.name) or dtype.numpy().name


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that NumPy's rules give, sizes that do not match taken at their larger.

    >>> broadcast((2, 1), (3,))
    (2, 3)
    """
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True))
