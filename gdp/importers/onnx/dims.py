"""Open dimensions of a model and the sizes that the user binds to them."""

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from gdp.errors import ModelError
from gdp.importers.onnx.expressions import compute, symbols


class Dimensions:
    """Sizes by symbol ("batch", or a whole expression such as "past + 1"), or by "TENSOR:AXIS".

    A dimension written as an expression of bound symbols is computed from them.
    """

    def __init__(self, sizes: Mapping[str, int], model: ir.Model) -> None:
        self.sizes = dict(sizes)
        values = [
            value
            for graph in model.graphs()
            for value in (*graph.inputs, *(out for node in graph for out in node.outputs))
        ]
        if sizes:
            self._check(values)

    def shape(self, value: ir.Value) -> tuple[int | None, ...] | None:
        """The declared shape of a value with what is bound filled in; None: unknown rank."""
        if value.shape is None:
            ranks = range(sum(key.startswith(f"{value.name}:") for key in self.sizes))
            named = tuple(self.sizes.get(f"{value.name}:{axis}") for axis in ranks)
            return named if named and None not in named else None
        return tuple(self._size(value.name, axis, dim) for axis, dim in enumerate(value.shape))

    def named(self, value: ir.Value, axis: int) -> int | None:
        """What the user bound to one axis of one tensor."""
        return self.sizes.get(f"{value.name}:{axis}") if self.sizes else None

    def _size(self, name: str | None, axis: int, dim: int | ir.SymbolicDim) -> int | None:
        if isinstance(dim, int):
            # Some writers spell an open dimension -1.
            return dim if dim >= 0 else self.sizes.get(f"{name}:{axis}")
        if dim.value is None:
            return self.sizes.get(f"{name}:{axis}")
        if dim.value in self.sizes:
            return self.sizes[dim.value]
        if self.sizes and symbols(dim.value):
            size = compute(dim.value, self.sizes)
            if size is not None and size >= 0:
                return size
        return self.sizes.get(f"{name}:{axis}")

    def _check(self, values: Iterable[ir.Value]) -> None:
        free: dict[str, None] = {}
        known: set[str] = set()
        for value in values:
            dims = () if value.shape is None else value.shape
            for axis, dim in enumerate(dims):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    free.update(dict.fromkeys(symbols(dim.value)))
                    known.add(dim.value)
                if isinstance(dim, ir.SymbolicDim) or dim < 0:
                    known.add(f"{value.name}:{axis}")
            if value.shape is None:
                known.update(key for key in self.sizes if key.startswith(f"{value.name}:"))
        for name in self.sizes:
            if name not in free and name not in known:
                there = ", ".join(free) if free else "none by name"
                raise ModelError(
                    f"the model has no open dimension {name!r}; its open dimensions are: {there} "
                    "(a single axis is named TENSOR:AXIS)"
                )


def how_to_bind(value: ir.Value, shape: tuple[int | None, ...] | None) -> str:
    """The shape of a value with its open dimensions, and the flags that would bind them."""
    if shape is None:
        return "has an unknown rank; declare its shape in the model (value_info)"
    declared = list(value.shape) if value.shape is not None else []
    texts: list[str] = []
    flags: dict[str, None] = {}
    for axis, size in enumerate(shape):
        if size is not None:
            texts.append(str(size))
            continue
        dim = declared[axis] if axis < len(declared) else None
        symbol = dim.value if isinstance(dim, ir.SymbolicDim) else None
        texts.append(symbol or "?")
        for name in (symbols(symbol) or [symbol]) if symbol else [f"{value.name}:{axis}"]:
            flags[f"--dim {name}=VALUE" if " " not in name else f"--dim '{name}=VALUE'"] = None
    return f"has the open shape [{', '.join(texts)}]; bind it with {' '.join(flags)}"
