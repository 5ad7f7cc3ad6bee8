"""Named tuples of arrays that kernels receive as one pointer.

numba passes a tuple to a function field by field, and copies all of it wherever its name occurs: a
problem of 36 arrays is 350 values, and most of the time that a kernel took to compile went there.
A class that is registered here reaches kernels as a pointer to its fields, which are read where
they are used. Kernels see no difference; they may read attributes, nothing else.

    as_struct(EngineArrays, Workspace)  # in a module of kernels, after the classes are known
"""

import hashlib
import itertools
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import impl_ret_borrowed
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)


class Struct(types.Type):
    """A named tuple behind a pointer, which lives as long as the call from Python."""

    def __init__(self, cls: type, fields: tuple[types.Type, ...]) -> None:
        self.cls, self.fields = cls, fields
        # A name goes into every symbol of every kernel: short, but its own for other fields.
        inside = hashlib.sha256(", ".join(map(str, fields)).encode()).hexdigest()[:12]
        super().__init__(name=f"{cls.__module__}.{cls.__qualname__}_{inside}")

    @property
    def key(self) -> Any:
        """Identity of the type: two with equal keys are one."""
        return self.cls, self.fields

    def position(self, attr: str) -> int:
        """The index of a field, -1 where there is none of that name."""
        names = self.cls._fields  # type: ignore[attr-defined]
        return names.index(attr) if attr in names else -1


register_model(Struct)(models.OpaqueModel)
_LAYOUTS: dict[Struct, tuple[list[int], int]] = {}


def as_struct(*classes: type) -> None:
    """Let instances of these named tuples reach kernels as pointers; twice is once."""
    for cls in classes:
        if typeof_impl.dispatch(cls) is not _typeof:
            typeof_impl.register(cls, _typeof)


def _typeof(value: Any, context: Any) -> Struct:
    fields = tuple(typeof_impl(field, context) for field in value)
    for name, field, field_type in zip(value._fields, value, fields, strict=True):
        if field_type is None:
            raise TypeError(f"{type(value).__name__}.{name}: kernels cannot read a {type(field)}")
    return Struct(type(value), fields)


@infer_getattr
class _Fields(AttributeTemplate):
    key = Struct

    def generic_resolve(self, typ: Struct, attr: str) -> types.Type | None:
        """The type of a field."""
        i = typ.position(attr)
        return typ.fields[i] if i >= 0 else None


@unbox(Struct)
def _unbox(typ: Struct, obj: Any, c: Any) -> NativeValue:
    """Lay out the fields in the caller's frame. Their number is known: the class is the type's."""
    offsets, size = _layout(c.context, typ)
    words = ir.ArrayType(ir.IntType(64), size // 8)
    place = c.builder.bitcast(cgutils.alloca_once(c.builder, words), cgutils.voidptr_t)
    is_error = cgutils.alloca_once_value(c.builder, cgutils.false_bit)
    natives = []
    for i, field in enumerate(typ.fields):
        native = c.unbox(field, c.pyapi.tuple_getitem(obj, i))
        at = _at(c.builder, place, offsets[i], native.value.type)
        c.builder.store(native.value, at)
        with c.builder.if_then(native.is_error, likely=False):
            c.builder.store(cgutils.true_bit, is_error)
        natives.append((field, native))

    def cleanup() -> None:
        for field, native in reversed(natives):
            if native.cleanup is not None:
                native.cleanup()
            # As numba does for arguments; it sees no array behind our pointer.
            if c.context.enable_nrt:
                c.context.nrt.decref(c.builder, field, native.value)

    value = _launder(c.builder, place)
    return NativeValue(value, is_error=c.builder.load(is_error), cleanup=cleanup)


def _launder(builder: Any, pointer: Any) -> Any:
    """Hide from LLVM where a pointer points.

    What is read through it is declared to be constant, and is: but only from here on, so that the
    stores above must neither be seen as other content of the same memory nor be moved below.
    """
    kind = ir.FunctionType(cgutils.voidptr_t, [cgutils.voidptr_t])
    return builder.asm(kind, "", "=r,0,~{memory}", [pointer], side_effect=True)


@lower_getattr_generic(Struct)
def _get(context: Any, builder: Any, typ: Struct, value: Any, attr: str) -> Any:
    """Read one field."""
    i = typ.position(attr)
    kind = context.get_value_type(typ.fields[i])
    loaded = _load(builder, _at(builder, value, _layout(context, typ)[0][i], kind))
    return impl_ret_borrowed(context, builder, typ.fields[i], loaded)


def _layout(context: Any, typ: Struct) -> tuple[list[int], int]:
    """(offset of every field, size in all) in bytes; fields start at multiples of 8.

    Offsets instead of one structure type: its text, thousands of letters, would stand in every
    instruction that reads a field.
    """
    if typ not in _LAYOUTS:
        sizes = [context.get_abi_sizeof(context.get_value_type(field)) for field in typ.fields]
        ends = list(itertools.accumulate(-(-size // 8) * 8 for size in sizes))
        _LAYOUTS[typ] = [0, *ends[:-1]], ends[-1]
    return _LAYOUTS[typ]


def _at(builder: Any, base: Any, offset: int, kind: Any) -> Any:
    """Pointer to a value of a type at an offset in bytes from the base."""
    return builder.bitcast(cgutils.pointer_add(builder, base, offset), kind.as_pointer())


def _load(builder: Any, pointer: Any) -> Any:
    """Read a value scalar by scalar, each marked as constant: loops need not read it again."""
    kind = pointer.type.pointee
    if isinstance(kind, ir.Aggregate):
        loaded = ir.Constant(kind, ir.Undefined)
        for i in range(len(kind)):  # pyright: ignore[reportArgumentType]
            part = _load(builder, cgutils.gep_inbounds(builder, pointer, 0, i))
            loaded = builder.insert_value(loaded, part, i)
        return loaded
    load = builder.load(pointer)
    load.set_metadata("invariant.load", builder.module.add_metadata([]))
    return load
