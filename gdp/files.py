"""Files that are never half written."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path


def write_atomic(path: str | os.PathLike[str], data: bytes | Sequence[bytes]) -> None:
    """Write to a temporary file beside `path`, then rename it into place."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in [data] if isinstance(data, bytes) else data:
                file.write(chunk)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
