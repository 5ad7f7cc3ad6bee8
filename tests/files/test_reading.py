"""The one reader of files: what bounds it, and what its errors say."""

import gzip
import io
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gdp.base.errors import ModelError
from gdp.base.files.reading import (
    Kind,
    decode_arrays,
    decode_json,
    decode_toml,
    read_bytes,
    read_json,
    shipped,
)

KIND = Kind("made-up file", ModelError, "write one")


class Numbers(msgspec.Struct, forbid_unknown_fields=True):
    numbers: list[int] = []


@dataclass(frozen=True)
class Inner:
    width: int = 1


@dataclass(frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no made-up file '.*none\.json'; write one"):
        read_json(tmp_path / "none.json", KIND, Numbers)
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_json(tmp_path, KIND, Numbers)


def test_a_file_is_bounded_before_and_after_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"a" * 1001)
    assert len(read_bytes(path, KIND, 1001)) == 1001
    with pytest.raises(ModelError, match="holds more than 1000 B, which is too much"):
        read_bytes(path, KIND, 1000)
    path.write_bytes(gzip.compress(b"a" * 1001))
    assert len(path.read_bytes()) < 100
    assert len(read_bytes(path, KIND, 1001)) == 1001
    with pytest.raises(ModelError, match="holds more than 1000 B"):
        read_bytes(path, KIND, 1000)
    path.write_bytes(gzip.compress(b"a" * 1001)[:-9])
    with pytest.raises(ModelError, match="is a damaged gzip file"):
        read_bytes(path, KIND)


def test_long_files_end(tmp_path: Path) -> None:
    with (tmp_path / "long").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="holds more than"):
        read_bytes(tmp_path / "long", KIND, 1 << 16)


def test_values_are_counted_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdp.base.files.reading.MAX_VALUES", 10)
    assert decode_json(b'{"numbers": [1, 2, 3]}', KIND, Numbers, "f").numbers == [1, 2, 3]
    with pytest.raises(ModelError, match="f holds more than 10 values"):
        decode_json(b'{"numbers": [' + b"1," * 20 + b"1]}", KIND, Numbers, "f")


def test_a_file_that_is_nested_too_deeply_is_one_line() -> None:
    with pytest.raises(ModelError, match="f is not a made-up file: it is nested too deeply"):
        decode_json(b'{"a":' * 100_000, KIND, dict, "f")
    with pytest.raises(ModelError, match="f is not a made-up file: it is nested too deeply"):
        decode_toml(b"a = " + b"[" * 100_000, KIND, dict, "f")


def test_a_dotted_key_of_many_parts_is_one_line() -> None:
    """Its parser would take minutes."""
    with pytest.raises(ModelError, match="f is not a made-up file: a key has more than 64 parts"):
        decode_toml(b".".join([b"a"] * 100_000) + b" = 1", KIND, dict, "f")
    dots = ".a" * 100
    assert decode_toml(f"a = '{dots}' # {dots}\n".encode(), KIND, dict, "f") == {"a": dots}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"numbers": [1, "x"]}', r"f is not a made-up file: Expected `int`.*\$\.numbers\[1\]"),
        (b'{"numbers": [1e999]}', r"out of range - at `\$\.numbers\[0\]`"),
        (b'{"numbers": [], "x": 1}', "unknown field `x`"),
        (b'{"numbers": [1', "truncated"),
        (b'{"\xff": 1}', "f is not a made-up file"),
    ],
)
def test_an_error_names_the_file_and_the_field(text: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        decode_json(text, KIND, Numbers, "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner = 3", r"Expected `object`, got `int` - at `\$\.inner`|missing required field"),
        ("name = {a = 1}", r"Expected `str`, got `object` - at `\$\.name`"),
        (
            "name = 'x'\n[inner]\nwidht = 1",
            r"unknown key 'widht' - at `\$\.inner`; known are width",
        ),
        ("name = 'x'\n[inner]\nwidth = " + "9" * 5000, "4300 digits"),
    ],
)
def test_dataclasses_are_filled_strictly(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        decode_toml(text.encode(), KIND, Outer, "f")


def test_an_error_is_one_line_whatever_it_quotes() -> None:
    with pytest.raises(ModelError) as caught:
        decode_json(b'{"a\\nb": 1}', KIND, Numbers, "f")
    assert "\n" not in str(caught.value)


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def member(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", data)
    return buffer.getvalue()


def npy(header: str) -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


HUGE = npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,)}")
OBJECTS = npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}") + b"\x80\x04N."


def test_arrays_come_back() -> None:
    found = decode_arrays(npz(a=np.arange(3), b=np.ones((2, 2), np.float32)), KIND, "f")
    assert found["a"].tolist() == [0, 1, 2]
    assert found["b"].shape == (2, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no zip", "f is not a made-up file: File is not a zip file"),
        (npz(a=np.arange(100))[:-30], "f is not a made-up file"),
        (npz(a=np.array([1.0, np.nan])), "array 'a.npy' holds numbers that are not finite"),
        (npz(a=np.array(["text"])), "array 'a.npy': "),
        (member(HUGE), "is not what its"),
        (member(OBJECTS), "is not what its"),
        (member(npy("{'descr': '<f8', 'fortran_order': Fal")), "array 'a.npy'"),
        (member(b"\x93NUMPY"), "array 'a.npy'"),
    ],
)
def test_arrays_that_are_none_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        decode_arrays(data, KIND, "f")


def test_a_zip_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = npz(a=np.zeros(1 << 20))
    assert len(data) < 20_000
    monkeypatch.setattr("gdp.base.files.reading.MAX_BYTES", 1 << 20)
    with pytest.raises(ModelError, match=r"unpacks to 8\.00 MiB"):
        decode_arrays(data, KIND, "f")


def test_what_travels_with_gdp_is_found_from_anywhere_and_ones_own_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = "pretrain/recipes/base.toml"
    for name in (recipe, "finetune/recipes/gradient.toml", "data/labels/train.jsonl"):
        assert Path(shipped(name)).is_file()
        assert Path(shipped(name)).is_absolute()
    assert Path(shipped("data/corpus")).is_dir()
    (tmp_path / recipe).parent.mkdir(parents=True)
    (tmp_path / recipe).write_text('name = "mine"')
    assert shipped(recipe) == recipe
    assert shipped("pretrain/recipes/no.toml") == "pretrain/recipes/no.toml"
