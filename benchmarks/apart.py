"""One measurement in a process of its own: its memory is its own, and it can be stopped."""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]


def run_apart(module: str, task: list[Any], limit_s: float) -> dict[str, Any]:
    """What `python -m MODULE --task JSON` prints as JSON, or why it printed nothing.

    That is a row with `reason` alone: stopped after so many seconds, or its last line of errors.
    """
    command = [sys.executable, "-m", module, "--task", json.dumps(task)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, cwd=_ROOT
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"stopped after {limit_s:.0f} s"}
    if done.returncode < 0:
        return {"reason": f"ended by signal {-done.returncode}"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"reason": f"failed: {last}"}
    return json.loads(done.stdout.splitlines()[-1])


def peak_mib() -> float:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
