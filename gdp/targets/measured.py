"""Shared parts of the readers of result files, which stand beside the engines whose tools write
them."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec

from gdp.base.files.reading import Kind, convert
from gdp.corrections.run import Load, MeasuredRun, MeasurementFileError, checked

T = TypeVar("T")
Record = Mapping[str, Any]
"""One JSON object of a file: all of it, an element of its array, or a line."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
KIND = Kind("result file of this tool", MeasurementFileError)
MOST_FAILED = 0.01
"""Share of requests that may fail: times of those that survive are not those of the load."""
MOST_APART = 0.1
"""Relative difference between a rate that a file tells and the one that its tokens and seconds
make: rounding, and seconds that a tool counts from another moment."""


@dataclass(frozen=True)
class Reader:
    """One form of result files.

    Attributes:
        title: Tool, and the option that writes the file, as refusals list them.
        knows: True for a record of this form, whatever its values are.
        read: The runs of the records of a file; takes a name for errors, too.
    """

    title: str
    knows: Callable[[Record], bool]
    read: Callable[[Sequence[Record], str], list[MeasuredRun]]


def has(*names: str) -> Callable[[Record], bool]:
    """A test whether a record has keys of these names."""
    return lambda record: record.keys() >= set(names)


def typed(record: Any, type_: type[T], where: str, *, strict: bool = True) -> T:
    """A record as a struct; raises `MeasurementFileError` with the field at fault. Strings of a
    table become numbers where it is not `strict`."""
    if strict:
        return convert(record, KIND, type_, where)
    try:
        return msgspec.convert(record, type_, strict=False)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise KIND.exception(f"{where} is not a {KIND.name}: {error}") from None


def within(value: Any, *keys: str) -> Any:
    """The value at a path of keys; None where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def scaled(value: float | None, unit: float) -> float | None:
    """A value in seconds, where there is one."""
    return None if value is None else value * unit


def milliseconds(value: float | None) -> float | None:
    """Milliseconds as seconds."""
    return scaled(value, 1e-3)


def mean(values: Sequence[float]) -> float | None:
    """Their mean, None where there are none."""
    return sum(values) / len(values) if values else None


def median(values: Sequence[float]) -> float | None:
    """Their median, None where there are none."""
    return statistics.median(values) if values else None


def failures(done: int, failed: int, where: str) -> tuple[str, ...]:
    """A note on the few requests that failed.

    Raises:
        MeasurementFileError: They are more than `MOST_FAILED`, or none was served.
    """
    if done < 1:
        raise MeasurementFileError(f"{where}: no request was served; measure again")
    if failed < 0:
        raise MeasurementFileError(f"{where}: {failed} requests cannot have failed")
    if failed > MOST_FAILED * (done + failed):
        raise MeasurementFileError(
            f"{where}: {failed} of {done + failed} requests failed, and the times of the others "
            "are not those of this load; find out why (the server's log) and measure again"
        )
    return (f"{failed} of {done + failed} requests failed",) if failed > 0 else ()


def agreed(told: float | None, found: float, name: str, where: str) -> float:
    """The rate that a file's tokens and seconds make, which the rate that it tells has to confirm.

    Raises:
        MeasurementFileError: They are further apart than `MOST_APART`.
    """
    if told is not None and not abs(told - found) <= MOST_APART * found:
        raise MeasurementFileError(
            f"{where}: {name} are {told:g} by one field and {found:g} by others; give the file as "
            "the tool wrote it"
        )
    return found


def rate_of(value: float | str | None, where: str) -> float:
    """Requests per second as a file has them: a number, "inf", or none, all at once."""
    rate = math.inf if value in (None, "inf") else value
    if isinstance(rate, str) or not rate > 0:
        raise MeasurementFileError(
            f"{where}: requests that arrive at {value!r} per second teach nothing; measure with a "
            "rate or with a number of requests in flight"
        )
    return rate


def arriving(load: Load, rate: float, most: int | None) -> tuple[Load, tuple[str, ...]]:
    """A load whose requests were sent at a rate, `most` of them in flight, and a note on the
    binding one of the two.

    Little's law tells it: at a rate of r, of requests that take L seconds, r L are in flight. L is
    from the moment when a request was sent, so that it holds no time in the client's queue.
    """
    if most is None or (rate == math.inf and most >= load.requests):
        return replace(load, concurrency=0, rate=rate), ()
    if rate == math.inf:
        return replace(load, concurrency=most, rate=0.0), ()
    first = load.ttft_s if load.ttft_s is not None else load.ttft_median_s
    token = load.tpot_s if load.tpot_s is not None else load.tpot_median_s
    if first is None or (token is None and load.new > 1):
        return replace(load, concurrency=0, rate=rate), ()
    flight = rate * (first + (token or 0.0) * max(load.new - 1.0, 0.0))
    if flight < most:
        note = f"{flight:.3g} of at most {most} requests are in flight at {rate:g} per second"
        return replace(load, concurrency=0, rate=rate), (f"{note}: the rate binds",)
    note = (
        f"{rate:g} requests per second would keep {flight:.3g} in flight, and {most} were allowed"
    )
    return replace(load, concurrency=most, rate=0.0), (f"{note}: that limit binds",)


def flags(values: Iterable[tuple[str, object]]) -> tuple[tuple[str, str], ...]:
    """Options that a file tells, as text; those of None and of "" are left out, True and False
    are "on" and "off"."""
    texts = {True: "on", False: "off"}
    return tuple(
        (name, texts[value] if isinstance(value, bool) else str(value))
        for name, value in values
        if value is not None and value != ""
    )


def grouped(rows: Iterable[tuple[MeasuredRun, Load]]) -> list[MeasuredRun]:
    """Runs, each with all loads of the rows that are alike but for theirs."""
    loads: dict[MeasuredRun, list[Load]] = {}
    for run, load in rows:
        loads.setdefault(run, []).append(load)
    return [replace(run, loads=tuple(own)) for run, own in loads.items()]


def of_load(run: MeasuredRun, load: Load, where: str, rate: float, most: int | None) -> MeasuredRun:
    """A run of one load whose requests were sent at a rate, `most` of them in flight, once its
    numbers can be."""
    sent, notes = arriving(checked(replace(load, rate=rate, concurrency=0), where), rate, most)
    return replace(run, loads=(checked(sent, where),), notes=(*run.notes, *notes))
