"""Headers of GGUF files: read as the gguf package reads them, and never beyond the file."""

import struct
import time
from pathlib import Path
from typing import Any

import pytest

from gdp.base.errors import ModelError
from gdp.importers.gguf_header import MOST_NUMBERS, read_header
from tests.fuzz import gguf_files
from tests.gguf_models import write_gguf

gguf = pytest.importorskip("gguf", reason="needs the gguf package")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*fields: bytes, count: int | None = None, tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count or len(fields)) + b"".join(fields)


def array(name: str, kind: int, count: int, data: bytes = b"") -> bytes:
    return text(name) + struct.pack("<IIQ", 9, kind, count) + data


@pytest.mark.parametrize("experts", [0, 4])
def test_fields_and_tensors_are_those_of_the_package(experts: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", experts=experts, empty=(1,) if experts else ())
    theirs, mine = gguf.GGUFReader(path), read_header(path)
    assert mine.architecture == "llama"
    assert {name: (t.dims, t.kind, t.nbytes) for name, t in mine.tensors.items()} == {
        t.name: (tuple(map(int, t.shape)), t.tensor_type.name, t.n_bytes) for t in theirs.tensors
    }
    wanted = {
        key.removeprefix("llama."): field.contents() for key, field in theirs.fields.items()
        if key.startswith("llama.") and not isinstance(field.contents(), float)
    }  # fmt: skip
    assert mine.numbers == wanted


def test_a_file_of_the_other_byte_order_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "big"
    folder.mkdir()
    headers = []
    for order in (gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG):
        path = folder / f"{order.name}.gguf"
        writer = gguf.GGUFWriter(path, "llama", endianess=order)
        writer.add_block_count(3)
        writer.add_array("llama.attention.head_count", [4, 0, 4])
        writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
        writer.add_tensor_info("x.weight", [2, 64], gguf.np.dtype("float16"), 256)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        path.write_bytes(path.read_bytes() + bytes(400))
        headers.append(read_header(path))
    assert headers[0].numbers == headers[1].numbers
    assert headers[1].numbers == {"block_count": 3, "attention.head_count": [4, 0, 4]}
    assert headers[0].tensors == headers[1].tensors
    assert headers[1].tensors["x.weight"].nbytes == 256


def test_every_length_is_compared_with_the_rest_of_the_file(tmp_path: Path) -> None:
    """Every second byte of a header in turn made large: all lengths are among these."""
    document = gguf_files.document()
    document["fields"] |= {"tokenizer.ggml.tokens": ["a", "bc"], "tokenizer.ggml.scores": [0.5]}
    document["tensors"] = {"output.weight": [[16, 32], 0], "x": [[16], 0]}
    data = gguf_files.encode(document)
    end = len(data) - 2 * 4096 - 32
    path, started_s, said = tmp_path / "m.gguf", time.process_time(), list[str]()
    for at in range(0, end, 2):
        changed = bytearray(data)
        changed[at] |= 0xC1
        path.write_bytes(changed)
        try:
            read_header(path)
        except ModelError as error:
            said.append(str(error))
    assert len(said) > end // 8
    assert all(str(path) in line and "\n" not in line for line in said)
    assert time.process_time() - started_s < 10


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (header(array("a", 5, 2**48 + 3)), "281474976710659 numbers in 'a' where 0 bytes are left"),
        (header(array("a", 8, 2**60)), "values in 'a' where 0 bytes"),
        (header(array("a", 8, 2, text("x") + struct.pack("<Q", 2**63))), "letters in 'a'"),
        (header(array("a", 9, 2**40)), "values in 'a'"),
        (header(struct.pack("<Q", 2**62) + bytes(9)), "4611686018427387904 bytes where 9"),
        (header(count=2**61), "fields where 0 bytes are left"),
        (header(tensors=2**61), "tensors where 0 bytes are left"),
        (header(array("a", 8, 1, text("x" * 9)[:-4])), "9 letters in 'a' where 5 bytes"),
        (header(text("a") + struct.pack("<I", 13)), "type 13, which is not known"),
        (header(text("a") + struct.pack("<Iq", 11, -1), text("a") + struct.pack("<Iq", 11, 1)),
         "field 'a' twice"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF" + bytes(2), "4 bytes where 2 bytes are left"),
    ],
)  # fmt: skip
def test_what_a_header_claims_and_a_file_lacks(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=f"m.gguf cannot be read as GGUF: .*{said}"):
        read_header(path)


@pytest.mark.parametrize(
    ("tensors", "fields", "said"),
    [
        ({"x": [[2**40, 2**40], 0]}, {}, "tensor 'x' ends at byte .*, and the file at"),
        ({"x": [[16] * 5, 0]}, {}, "has 5 axes; ggml has 4"),
        ({"x": [[16], 99]}, {}, "tensor 'x' is of type 99"),
        ({"x": [[40], 12]}, {}, "rows of 40, of which Q4_K packs 256 together"),
        ({}, {"general.alignment": 0}, "general.alignment must be a power of two, got 0"),
        ({}, {"general.alignment": 24}, "general.alignment must be a power of two, got 24"),
    ],
)
def test_tensors_that_no_file_holds(
    tensors: dict[str, Any], fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    document, path = gguf_files.document(), tmp_path / "m.gguf"
    document["tensors"] |= tensors
    document["fields"] |= fields
    path.write_bytes(gguf_files.encode(document))
    with pytest.raises(ModelError, match=said):
        read_header(path)


def test_long_arrays_are_passed_over(tmp_path: Path) -> None:
    """A hyperparameter with a number for each of more layers than any model has is none."""
    path = tmp_path / "m.gguf"
    for count in (MOST_NUMBERS, MOST_NUMBERS + 1):
        document = gguf_files.document()
        document["fields"] |= {"llama.long": [7] * count, "llama.last": 3}
        path.write_bytes(gguf_files.encode(document))
        numbers = read_header(path).numbers
        assert numbers["last"] == 3
        assert numbers.get("long") == ([7] * count if count == MOST_NUMBERS else None)


def test_the_last_byte_of_the_last_tensor_is_there_or_the_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data, last = path.read_bytes(), gguf.GGUFReader(path).tensors[-1]
    end = last.data_offset + last.n_bytes
    path.write_bytes(data[:end])
    assert last.name in read_header(path).tensors
    path.write_bytes(data[: end - 1])
    with pytest.raises(ModelError, match=f"ends at byte {end}, and the file at {end - 1}"):
        read_header(path)
