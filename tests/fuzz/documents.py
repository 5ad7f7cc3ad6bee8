"""Mutations of documents: of JSON-like values, of ONNX protobufs, of bytes. Seeded, structural."""

import copy
import json
import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

WHOLE = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31), 2**53, 2**62, 2**63 - 1, 2**63, -(2**63),
         2**64, 10**30, 10**400)  # fmt: skip
REAL = (0.0, -0.0, 0.5, -1.5, 1e-300, 5e-324, 1e30, 1e308, -1e308, math.inf, -math.inf, math.nan)
TEXT = ("", "x", "a" * 5000, "\x00", "\x1b[31mred\x1b[0m", "a\nb", "é\u202e日本",
        "../../etc/passwd",
        "1e999GiB", "-1", "nan", "default", "cpu-core", "%s{0}", "[[[[", "'\"\\")  # fmt: skip
TEXT_LIMIT = 1 << 16


def any_value(rng: random.Random) -> Any:
    """A value of any kind, often an extreme one."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(WHOLE)
    if kind == 1:
        return rng.choice(REAL)
    if kind == 2:
        return rng.choice(TEXT)
    if kind == 3:
        return rng.choice((True, False, None))
    if kind == 4:
        return [any_value(rng) for _ in range(rng.randrange(3))]
    if kind == 5:
        return {rng.choice(TEXT): any_value(rng) for _ in range(rng.randrange(3))}
    return nested(rng, rng.choice((3, 30, 70, 100)))


def nested(rng: random.Random, depth: int) -> Any:
    """Lists or tables in each other."""
    value: Any = 0
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def mutate_value(document: Any, rng: random.Random) -> Any:
    """A copy with one to three places changed: deleted, doubled, of another type, extreme, nested,
    renamed, exchanged."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(document))
        if not places:
            return any_value(rng)
        # Long lists of numbers are one field among others, not most of the document.
        by_field: dict[str, list[tuple[Any, Any]]] = {}
        for field, holder, key in places:
            by_field.setdefault(field, []).append((holder, key))
        holder, key = rng.choice(by_field[rng.choice(sorted(by_field))])
        _change(holder, key, places, rng)
    return document


def _places(value: Any, field: str = "", depth: int = 12) -> Any:
    """(field, holder, key) of everything inside to a depth; the field is the path without
    indices."""
    if isinstance(value, dict):
        inside = [(f"{field}.{key}", key, inner) for key, inner in value.items()]
    elif isinstance(value, list):
        inside = [(f"{field}[]", index, inner) for index, inner in enumerate(value)]
    else:
        return
    for name, key, inner in inside:
        yield name, value, key
        if depth:
            yield from _places(inner, name, depth - 1)


def _change(holder: Any, key: Any, places: list, rng: random.Random) -> None:
    """`holder` is a list or a dict."""
    if (isinstance(holder, list) and key >= len(holder)) or (
        isinstance(holder, dict) and key not in holder
    ):
        return  # an earlier change took it away
    old, kind = holder[key], rng.randrange(8)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(old))
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(TEXT)] = holder.pop(key)
    elif kind == 2:
        _, other, where = rng.choice(places)
        alive = where < len(other) if isinstance(other, list) else where in other
        holder[key] = copy.deepcopy(other[where]) if alive else None
    elif kind == 3 and isinstance(old, list | dict | str):
        holder[key] = type(old)()
    elif kind in (4, 5) and isinstance(old, int | float):
        holder[key] = rng.choice(WHOLE + REAL)
    elif kind in (4, 5) and isinstance(old, str):
        holder[key] = rng.choice(TEXT)
    elif kind == 6 and isinstance(old, list):
        holder[key] = old * rng.choice((2, 100)) if len(old) < 100 else old[::-1]
    else:
        holder[key] = any_value(rng)


def to_json(value: Any) -> bytes:
    """JSON, where NaN and infinity are spelt as Python does: a mutant like others."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * TEXT_LIMIT


def to_toml(document: Any) -> bytes:
    """TOML with one inline value per top-level key."""
    if not isinstance(document, dict):
        return to_json(document)
    try:
        lines = [f"{_toml_key(key)} = {_toml(value)}" for key, value in document.items()]
    except RecursionError:
        return b"a = " + b"[" * TEXT_LIMIT
    return "\n".join(lines).encode() + b"\n"


def _toml_key(key: Any) -> str:
    return json.dumps(str(key), ensure_ascii=False)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml_key(k)} = {_toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return "nan" if math.isnan(value) else str(value)
    return json.dumps(value) if isinstance(value, str) else str(value)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut off, bits flipped, a piece doubled, or brackets put in."""
    kind = rng.randrange(5)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    changed = bytearray(data)
    if kind == 1 and changed:
        for _ in range(rng.choice((1, 2, 8, 64))):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        start, size = rng.randrange(len(data) + 1), rng.randrange(200)
        changed[start:start] = data[start : start + size]
    elif kind == 3:
        start = rng.randrange(len(data) + 1)
        changed[start:start] = rng.choice((b"[", b"{", b'{"a":', b"a.")) * rng.choice(
            (1, 100, 20000)
        )
    else:
        start = rng.randrange(len(data) + 1)
        changed[start : start + rng.randrange(20)] = rng.randbytes(rng.randrange(20))
    return bytes(changed)


def mutate_message(root: Message, rng: random.Random) -> None:
    """One to three fields of a protobuf changed, anywhere in it."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        messages = list(_messages(root))
        # By type, so that the one graph is changed as often as the many dimensions.
        by_type: dict[str, list[Message]] = {}
        for message in messages:
            by_type.setdefault(message.DESCRIPTOR.name, []).append(message)
        message = rng.choice(by_type[rng.choice(sorted(by_type))])
        field = rng.choice(message.DESCRIPTOR.fields)
        if present := [found for found, _ in message.ListFields()]:
            field = rng.choice(present) if rng.random() < 0.8 else field
        if field.is_repeated:
            _change_repeated(message, field, messages, rng)
        else:
            _change_single(message, field, messages, rng)


def _messages(message: Message) -> Any:
    stack = [message]
    while stack:
        top = stack.pop()
        yield top
        for field, value in top.ListFields():
            if field.type == Field.TYPE_MESSAGE:
                stack.extend(value if field.is_repeated else [value])


def _change_repeated(message: Any, field: Any, messages: list, rng: random.Random) -> None:
    values = getattr(message, field.name)
    kind = rng.randrange(5)
    at = rng.randrange(len(values)) if len(values) else -1
    if kind == 0 and at >= 0:
        del values[at]
    elif kind == 1:
        del values[:]
    elif field.type == Field.TYPE_MESSAGE:
        same = [m for m in messages if m.DESCRIPTOR is field.message_type]
        added = values.add()
        if same:
            added.CopyFrom(copy.deepcopy(rng.choice(same)))
        if kind == 2:
            for _ in range(rng.choice((5, 40))):
                values.add().CopyFrom(copy.deepcopy(added))
    elif kind == 2 and at >= 0:
        values.extend(list(values) * 3)
    elif at >= 0 and kind == 3:
        values[at] = _scalar(field, messages, rng)
    else:
        values.append(_scalar(field, messages, rng))


def _change_single(message: Any, field: Any, messages: list, rng: random.Random) -> None:
    if rng.random() < 0.2:
        message.ClearField(field.name)
    elif field.type != Field.TYPE_MESSAGE:
        setattr(message, field.name, _scalar(field, messages, rng))
    else:
        same = [m for m in messages if m.DESCRIPTOR is field.message_type]
        if same:
            chosen = copy.deepcopy(rng.choice(same))
            getattr(message, field.name).CopyFrom(chosen)
        else:
            getattr(message, field.name).SetInParent()


def _scalar(field: Any, messages: list, rng: random.Random) -> Any:
    if field.type in (Field.TYPE_STRING, Field.TYPE_BYTES):
        texts = list(TEXT)
        for message in rng.sample(messages, min(8, len(messages))):
            texts += [v for f, v in message.ListFields()
                      if f.type == Field.TYPE_STRING and not f.is_repeated]  # fmt: skip
        text = rng.choice(texts)
        return text if field.type == Field.TYPE_STRING else rng.choice((b"", b"x", text.encode()))
    if field.type == Field.TYPE_ENUM:
        return rng.choice(field.enum_type.values).number
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        value = rng.choice(REAL)
        return value if field.type == Field.TYPE_DOUBLE or abs(value) < 1e38 else math.inf
    wide = field.type in (Field.TYPE_INT64, Field.TYPE_UINT64)
    limits = {Field.TYPE_UINT64: (0, 2**64), Field.TYPE_INT64: (-(2**63), 2**63)}
    low, high = limits.get(field.type, (-(2**31), 2**31))
    small = [*range(-3, 30)] if wide or rng.random() < 0.8 else []
    return rng.choice([v for v in (*WHOLE, *small) if low <= v < high])
