"""Functions that the rows of tables name as "module:function", imported when they are used.

So a row on a low floor, such as that of an objective, says all that belongs to it, and `gdp --help`
imports none of it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def imported(function: str) -> Any:
    """The function, class or row that "module:name" names, imported when it is used.

    Raises:
        LookupError: There is none of that name: the row of a table is wrong.
    """
    module, _, name = function.partition(":")
    try:
        return getattr(import_module(module), name)
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name != module:
            raise  # a library that is not installed
        raise LookupError(f"a row of a table of gdp names {function!r}: {error}") from error


def later(function: str) -> Callable[..., Any]:
    """A function that imports "module:function" at its first call, and calls it."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return imported(function)(*args, **kwargs)

    return called
