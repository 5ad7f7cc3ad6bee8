"""Files that are never half written."""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is claimed, and nothing cleared
    fcntl = None


def write_atomic(path: str | os.PathLike[str], data: bytes | Sequence[bytes]) -> None:
    """Write to a temporary file in the same folder, flush it to the disk, rename it into place.

    A link is followed: the file that it points to is replaced, the link stays. A file that stood
    there keeps its mode and its owner, a new one gets what the umask leaves of 0666. A pipe or a
    character device (/dev/stdout, /dev/null) is written to as it is: it has no content to lose.
    Anything else that is no file is an `OSError`.
    """
    with atomic(path) as file:
        for chunk in [data] if isinstance(data, bytes) else data:
            file.write(chunk)


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The file that `write_atomic` writes; an error inside names it and leaves what stood there."""
    with _naming(path), _opened(path) as file:
        yield file


@contextlib.contextmanager
def _naming(path: str | os.PathLike[str], temporary: Path | None = None) -> Iterator[None]:
    """Errors of the system name what was to be written: a full disk names nothing, and where
    `temporary` is written first, that is gone when the error is read."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        name = os.fspath(path) if error.filename is None else str(error.filename)
        if temporary is not None and Path(name).is_relative_to(temporary):
            name = os.fspath(Path(path) / Path(name).relative_to(temporary))
        raise OSError(error.errno, error.strerror or str(error), name) from error


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    if is_stream(path):
        number = _descriptor(path)
        # Opened anew, a file would be written from its beginning, over what the owner writes.
        with open(path if number is None else os.dup(number), "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    before = target.stat() if target.exists() else None
    if before is not None and not stat.S_ISREG(before.st_mode):
        code = errno.EISDIR if stat.S_ISDIR(before.st_mode) else errno.EINVAL
        raise OSError(code, "is no file that can be written", os.fspath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(target)
    temporary, handle = _create_beside(target, 0o666 if before is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            if before is not None:
                _keep_owner_and_mode(handle, before)
            yield file
            file.flush()
            os.fsync(handle)
            # Renamed while it is open, and thereby claimed.
            os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether a path is written through instead of replaced: pipes, character devices, and open
    files (/dev/stdout where a shell sends the output to a file)."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """The number of the open file that a path such as /dev/stdout or /dev/fd/3 stands for."""
    text = os.path.abspath(path)
    for _ in range(8):
        found = re.fullmatch(rf"/(?:dev|proc/(?:self|thread-self|{os.getpid()}))/fd/(\d+)", text)
        if found:
            return int(found[1])
        if not os.path.islink(text):
            break
        text = os.path.normpath(os.path.join(os.path.dirname(text), os.readlink(text)))
    return None


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """A new folder beside the target, to be filled and renamed; what is left of it is removed."""
    room(target).mkdir(parents=True, exist_ok=True)
    clear_leftovers(target)
    while True:
        folder = _beside(target)
        folder.mkdir()
        handle = os.open(folder, os.O_RDONLY)
        if _claim(handle) and folder.exists():
            break
        os.close(handle)
    try:
        with _naming(target, folder):
            yield folder
    finally:
        os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(target: Path) -> None:
    """Remove what killed processes left beside a target.

    Whoever writes holds a lock on its temporary file or folder, which the system frees when the
    process ends: what can be locked belongs to nobody any more.
    """
    if fcntl is None:
        return
    pattern = re.compile(re.escape(f".{target.name[:200]}.tmp-") + "[0-9a-f]{12}")
    for name in os.listdir(room(target)):
        if pattern.fullmatch(name):
            _remove_unclaimed(room(target) / name)


def _remove_unclaimed(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if not _claim(handle, unsupported=False):
            return
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _claim(handle: int, unsupported: bool = True) -> bool:
    """Lock an open file or folder until it is closed; whether nobody else holds it. A file system
    without locks answers `unsupported`."""
    if fcntl is None:
        return unsupported
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return unsupported
    return True


def _beside(target: Path) -> Path:
    return room(target) / f".{target.name[:200]}.tmp-{secrets.token_hex(6)}"


def room(target: Path) -> Path:
    """Where to write what is to be renamed to the target: its parent, but inside a folder that
    cannot be renamed itself, such as a volume of a container."""
    fixed = target.is_dir() and (os.path.ismount(target) or not os.access(target.parent, os.W_OK))
    return target if fixed else target.parent


def _create_beside(target: Path, mode: int) -> tuple[Path, int]:
    """A new, claimed file in the target's folder, and its handle; the umask applies."""
    while True:
        temporary = _beside(target)
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        # Another process may have taken it for a leftover before it was claimed.
        if _claim(handle) and temporary.exists():
            return temporary, handle
        os.close(handle)


def _keep_owner_and_mode(handle: int, before: os.stat_result) -> None:
    # Only root may give a file away; anybody else owns what they could replace.
    with contextlib.suppress(PermissionError):
        os.fchown(handle, before.st_uid, before.st_gid)
    os.fchmod(handle, stat.S_IMODE(before.st_mode))


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename outlives a power cut."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # it may be written but not read
        return
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below a folder to the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            handle = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        sync_folder(Path(place))
