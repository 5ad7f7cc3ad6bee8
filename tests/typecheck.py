"""Types and shapes of gdp as the tests check them: beartype, and names of axes by jaxtyping.

jaxtyping's own decorator binds the arguments of every call and checks them twice; half the time of
a search went there. Axes have to agree only where an annotation names some, and there one pass over
arguments and result is enough.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, install_import_hook


class ViolationError(TypeError):
    """A call with values of other types than its annotations say."""


# An int is a float, as PEP 484 says. Tests of wrong arguments expect what is a `TypeError`.
check = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=ViolationError))
_jaxtyped = jaxtyping.jaxtyped


def checked_package(name: str) -> None:
    """Have every function and dataclass of a package checked that is imported from now on."""
    jaxtyping.jaxtyped = _checked  # by this name the hook decorates
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
    checks = _checking(plain)
    if not any(_is_array(part) for hint in hints.values() for part in _parts(hint)):
        return checks

    @functools.wraps(plain)
    def within(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with _jaxtyped("context"):  # axes of this call
            return checks(*args, **kwargs)

    return within


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
