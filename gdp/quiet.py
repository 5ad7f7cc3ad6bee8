"""Keeps what libraries' C code prints off standard output, which may be carrying JSON."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """Within, file descriptor 1 leads nowhere; METIS and HiGHS report details there that are no
    errors to us."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
