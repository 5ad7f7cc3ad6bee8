"""Says one clear line when a process of a training job is ended from outside.

JAX's distributed runtime ends every process of a job within its heartbeat's time-out when one of
them dies or hangs, with pages of traces and without a chance for Python to say more. A small child
of each process waits for a word through a pipe; where the pipe closes without it, the child says
what happened.
"""

import atexit
import contextlib
import subprocess
import sys

_CHILD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if not sys.stdin.buffer.read():
    os.write(2, ("\\n" + sys.argv[1] + "\\n").encode())
"""
_BYE = b"bye"


class Witness:
    """A child that says `line` on standard error unless this process ends in order or dismisses
    it."""

    def __init__(self, line: str) -> None:
        # -I and -S: nothing of the user's is imported, and it starts in a hundredth of a second.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, line],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.dismiss)

    def dismiss(self) -> None:
        """This process ends in order, or has said itself what happened."""
        atexit.unregister(self.dismiss)
        with contextlib.suppress(OSError, ValueError):
            self._child.communicate(_BYE, timeout=5.0)
