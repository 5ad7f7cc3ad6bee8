"""Decorators that pass a command one object, made from several options."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields
from typing import Any

import click

from gdp.base.errors import GdpError

Decorator = Callable[[Callable[..., None]], Callable[..., None]]


@contextlib.contextmanager
def prefix_errors(flag: str) -> Iterator[None]:
    """Begin errors about the value of an option with its name."""
    try:
        yield
    except (GdpError, ValueError) as error:
        raise type(error)(f"{flag}: {error}") from None


def pass_one(
    argument: str, make: Callable[..., Any], options: Mapping[str, Decorator]
) -> Decorator:
    """Pass a command one `argument`, made from the parameters of these options by name."""

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def called(**values: Any) -> None:
            value = make(**{name: values.pop(name) for name in options})
            verb(**values, **{argument: value})

        return functools.reduce(lambda f, option: option(f), list(options.values())[::-1], called)

    return decorate


def pass_dataclass(argument: str, kind: type) -> Decorator:
    """Pass a command a dataclass, every field of which is an `option`."""
    return pass_one(argument, kind, {f.name: f.metadata["option"](f.name) for f in fields(kind)})


def option(*flags: str, make: Callable[..., Any] = click.option, **settings: Any) -> Any:
    """A field of a dataclass that is a parameter of the command line."""
    if settings.get("default") not in (None, ""):
        settings["show_default"] = True
    return field(metadata={"option": functools.partial(make, *flags, **settings)})


def alone(kind: type, name: str) -> Decorator:
    """One option of a dataclass, for a command that needs no other of it."""
    (match,) = (f for f in fields(kind) if f.name == name)
    return match.metadata["option"](name)
