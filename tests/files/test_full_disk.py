"""A full disk: one line that names the file, whoever wrote it, and nothing left behind."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gdp.base import checkpoint
from gdp.base.files.writing import atomic, staging_folder, write_atomic

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")


@needs_full
def test_a_file_is_named(tmp_path: Path) -> None:
    link = tmp_path / "out.json"
    link.symlink_to(FULL)
    with pytest.raises(OSError, match="No space left on device") as found:
        write_atomic(link, b"x" * 100_000)
    assert found.value.errno == errno.ENOSPC
    assert found.value.filename == str(link)


def test_an_error_that_names_nothing_gets_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(OSError, match=r"out\.json"), atomic(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("inside", ["", "part/a.onnx", None])
def test_a_folder_that_is_staged_is_named_by_its_final_place(
    tmp_path: Path, inside: str | None
) -> None:
    target = tmp_path / "out"

    def fill() -> None:
        with staging_folder(target) as folder:
            name = () if inside is None else (str(folder / inside),)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *name)

    with pytest.raises(OSError, match="No space left") as found:
        fill()
    assert Path(found.value.filename) == target / (inside or "")
    assert list(tmp_path.iterdir()) == []


def test_an_error_elsewhere_keeps_its_name_and_a_bare_one_its_text(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as found, staging_folder(tmp_path / "out"):
        Path(tmp_path / "missing").read_text()
    assert found.value.filename == str(tmp_path / "missing")
    with pytest.raises(OSError, match=r"^just a text$"), staging_folder(tmp_path / "out"):
        raise OSError("just a text")


def test_weights_that_cannot_be_written_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **arrays: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/ck'"):
        checkpoint.save(tmp_path / "ck", {"a": np.zeros(3)})
    assert list(tmp_path.iterdir()) == []


@needs_full
def test_standard_output_is_named() -> None:
    with FULL.open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-m", "gdp", "devices", "--cluster", "2xcpu-core"],
            stdout=out, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "gdp: standard output: No space left on device\n"
