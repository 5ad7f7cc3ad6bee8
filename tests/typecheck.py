"""Types and shapes of gdp as the tests check them: beartype, and names of axes by jaxtyping.

jaxtyping's own decorator binds the arguments of every call and checks them twice; half the time of
a search went there. Axes have to agree only where an annotation names some, and there one pass over
arguments and result is enough. jaxtyping also copies all that it knows of a call before it looks at
an array; arrays of numpy are looked at here.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import jaxtyping
import numpy as np
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, install_import_hook


class ViolationError(TypeError):
    """A call with values of other types than its annotations say."""


# An int is a float, as PEP 484 says. Tests of wrong arguments expect what is a `TypeError`.
check = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=ViolationError))
_jaxtyped = jaxtyping.jaxtyped
_axes_of_calls: Any = getattr(jaxtyping, "_storage", None)
"""Not public: without it jaxtyping looks at all arrays itself."""


def checked_package(name: str) -> None:
    """Have every function and dataclass of a package checked that is imported from now on."""
    jaxtyping.jaxtyped = _checked  # by this name the hook decorates
    if _axes_of_calls is not None:
        _Annotation.__instancecheck__ = _is_as_annotated
    install_import_hook(name, "typecheck.check")


def _checked(made: Any = None, *, typechecker: Any = None) -> Any:
    """A function, or a class whose `__init__` is made by `dataclass`, that checks its types."""
    if made is None:
        return functools.partial(_checked, typechecker=typechecker)
    if not inspect.isclass(made):
        return _function(made)
    if dataclasses.is_dataclass(made) and "__init__" in vars(made):
        made.__init__ = _function(made.__init__)
    return made


def _function(plain: Any) -> Any:
    hints = plain.__annotations__
    for name, hint in hints.items():
        if any(isinstance(part, str | typing.ForwardRef) for part in _parts(hint)):
            hints[name] = _resolved(plain, name)
    if inspect.isgeneratorfunction(plain):  # what it is given is looked at when it is called
        return _jaxtyped(plain, typechecker=check)
    if "<locals>" in plain.__qualname__:
        return _with_checks(plain)
    checks = None

    @functools.wraps(plain)
    def at_first(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal checks
        if checks is None:  # few of all functions are called by one file of tests
            checks = _with_checks(plain)
        return checks(*args, **kwargs)

    return at_first


def _with_checks(plain: Any) -> Any:
    """The function that checks types, and axes where it has some."""
    checks = _checking(plain)
    if not any(_is_array(part) for hint in plain.__annotations__.values() for part in _parts(hint)):
        return checks

    @functools.wraps(plain)
    def within(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if _axes_of_calls is None:
            with _jaxtyped("context"):
                return checks(*args, **kwargs)
        _axes_of_calls.push_shape_memo({})  # axes of this call
        try:
            return checks(*args, **kwargs)
        finally:
            _axes_of_calls.pop_shape_memo()

    return within


_Annotation: Any = type(AbstractArray)
_slowly = _Annotation.__instancecheck__
# Axes of an annotation, None if jaxtyping has to read them, and the dtypes that it let pass.
_read: dict[Any, tuple[tuple[str | int, ...] | None, set[np.dtype]]] = {}


def _is_as_annotated(hint: Any, value: Any) -> bool:
    """Whether an array has the dtype and axes of its annotation; jaxtyping decides and words what
    is not known yet and what does not agree."""
    if type(value) is not np.ndarray:
        return _slowly(hint, value)
    known = _read.get(hint)
    if known is None:
        known = _read[hint] = _axes(hint), set()
    axes, dtypes = known
    if axes is None:
        return _slowly(hint, value)
    if value.dtype in dtypes and value.ndim == len(axes):
        sizes = _axes_of_calls.get_shape_memo()[0]
        before = len(sizes)
        for axis, size in zip(axes, value.shape, strict=True):
            if (axis if type(axis) is int else sizes.setdefault(axis, size)) != size:
                break
        else:
            return True
        while len(sizes) > before:  # no axis of an array that does not agree
            sizes.popitem()
    passes = _slowly(hint, value)
    if passes:
        dtypes.add(value.dtype)
    return passes


def _axes(hint: Any) -> tuple[str | int, ...] | None:
    """Names and sizes of the axes, None where one is more than a name or a size."""
    axes = hint.dim_str.split()
    if hint.array_type is not np.ndarray or not all(axis.isalnum() for axis in axes):
        return None
    return tuple(int(axis) if axis.isdigit() else axis for axis in axes)


_known: dict[Any, Any] = {}  # checks of functions inside functions


def _checking(plain: Any) -> Any:
    """The function with its checks; these are compiled once for one that is defined in every call
    of another."""
    if "<locals>" not in plain.__qualname__:
        return check(plain)
    try:
        key = plain.__code__, tuple(plain.__annotations__.items())
        known = _known.setdefault(key, None)
    except TypeError:  # an annotation that has no hash
        return check(plain)
    given = dict(getattr(known, "__kwdefaults__", None) or {})
    if given.get(_INSIDE) is None:
        _known[key] = check(plain)
        return _known[key]
    again = types.FunctionType(
        known.__code__, known.__globals__, known.__name__, known.__defaults__, known.__closure__
    )
    functools.update_wrapper(again, plain)
    again.__kwdefaults__ = given | {_INSIDE: plain}
    return again


_INSIDE = "__beartype_func"  # the function that beartype's wrapper calls


def _parts(hint: Any) -> Iterator[Any]:
    """An annotation and all that stands in its brackets."""
    yield hint
    for part in typing.get_args(hint):
        yield from _parts(part)


def _resolved(function: Any, name: str) -> Any:
    """The annotation that is written as text, Any where its names are not known yet."""

    def alone() -> None: ...

    alone.__annotations__ = {name: function.__annotations__[name]}
    try:
        return typing.get_type_hints(alone, function.__globals__, include_extras=True)[name]
    except Exception:  # a text may hold anything
        return Any


def _is_array(part: Any) -> bool:
    return inspect.isclass(part) and issubclass(part, AbstractArray)
