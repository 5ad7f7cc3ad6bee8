"""Redirection of text that native libraries print to standard output, which may carry JSON."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def redirect_native_stdout() -> Iterator[None]:
    """Discard output to file descriptor 1: METIS and HiGHS report details there, no errors."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
