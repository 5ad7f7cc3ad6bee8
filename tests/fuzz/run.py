"""Mutants of every kind of file that gdp reads: an answer or a clean error, never anything else.

    python -m tests.fuzz.run --mutants 20000 --seed 0 [--only KIND] [--keep DIR]
    python -m tests.fuzz.run --seed 0 --replay 1234

A mutant is a valid file with a few places changed at random: deleted, doubled, of another type,
extreme, nested, cut off, bits flipped; ONNX models are changed as protobufs, PyTorch modules are
written at random. It is read, and what could be read is used. Findings are: an error that is
neither a `GdpError` nor a `ValueError`, one of more than a line, one that does not name the file,
more than 30 CPU seconds, and memory that grows by more than 1 GiB. The seed and the number of a
mutant make it again. Ctrl-C ends with the table so far. Exits with 1 if there are findings.
"""

import argparse
import logging
import multiprocessing
import multiprocessing.process
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

LIMIT_S = 30.0  # CPU seconds of a mutant, on however busy a machine
WAIT_S = 10 * LIMIT_S  # of wall-clock time, for what waits without end
LIMIT_BYTES = 1 << 30
START_S = 600.0  # imports, and kernels that are compiled for the first time


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant."""

    number: int
    kind: str
    refused: bool = False
    finding: str = ""  # empty: as it should be
    cpu_s: float = 0.0


def outcomes(seed: int, numbers: list[int], only: str, keep: Path | None) -> Iterator[Outcome]:
    """Every mutant's outcome. They run in a worker, which is started anew after one that kills it
    or does not come back."""
    context = multiprocessing.get_context("spawn")
    left = list(numbers)
    while left:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, seed, left, only, keep), daemon=True)
        process.start()
        there.close()
        wait_s, current = START_S, ""
        try:
            while left:
                if not _answers(here, process, wait_s):
                    late = f"did not end within {LIMIT_S:.0f} CPU seconds"
                    yield Outcome(left[0], current, finding=late)
                    break
                found = here.recv()
                wait_s = LIMIT_S + 1
                if isinstance(found, str):  # the kind of the mutant that begins
                    current = found
                    continue
                left.pop(0)
                yield found
                continue
            if left:
                left.pop(0)
        except EOFError:
            process.join()
            if not current:
                raise RuntimeError("no worker could be started; a valid file is refused") from None
            yield Outcome(left.pop(0), current, finding=f"the process ended: {process.exitcode}")
        finally:
            process.kill()
            process.join()


class Pollable(Protocol):
    """One end of a pipe."""

    def poll(self, timeout: float | None = ..., /) -> bool:
        """Whether something can be received within so many seconds."""
        ...


def _answers(pipe: Pollable, process: multiprocessing.process.BaseProcess, cpu_s: float) -> bool:
    """Whether the worker sends something before it has spent these CPU seconds more."""
    start_s, waited_s = _cpu_s(process.pid), time.perf_counter()
    while not pipe.poll(0.5):
        spent_s = _cpu_s(process.pid) - start_s
        if spent_s > cpu_s or time.perf_counter() - waited_s > WAIT_S + cpu_s:
            return False
    return True


def _cpu_s(pid: int | None) -> float:
    """CPU seconds of a process so far, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work(pipe: Connection, seed: int, numbers: list[int], only: str, keep: Path | None) -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    # Modules print, and so does torch of graphs that it cannot export.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    from tests.fuzz.targets import TARGETS

    targets = [t for t in TARGETS if only in ("", t.name) and t.is_possible]
    folder = Path(tempfile.mkdtemp(prefix="gdp-fuzz-"))
    try:
        for target in targets:  # what a valid file needs is not charged to the mutants
            _attempt(target, folder, None)
        for number in numbers:
            rng = random.Random(f"{seed} {number}")
            target = rng.choices(targets, [t.weight for t in targets])[0]
            pipe.send(target.name)
            started_s = time.process_time()
            _limit_memory()
            refused, finding = _attempt(target, folder, rng)
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
            cpu_s = time.process_time() - started_s
            if cpu_s > LIMIT_S and not finding:
                finding = f"took {cpu_s:.0f} CPU seconds"
            if finding and keep is not None:
                shutil.copytree(folder, keep / f"{target.name}-{seed}-{number}", dirs_exist_ok=True)
            pipe.send(Outcome(number, target.name, refused, finding, cpu_s))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def _attempt(target: object, folder: Path, rng: random.Random | None) -> tuple[bool, str]:
    """(whether the mutant was refused, the finding or an empty string)."""
    from gdp.base.errors import GdpError
    from tests.fuzz.targets import Target

    assert isinstance(target, Target)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = target.write(folder, rng)
    reading = True
    try:
        found = target.read(path)
        reading = False
        target.use(found)
    except BaseException as error:
        if rng is None or isinstance(error, KeyboardInterrupt):
            raise
        clean = isinstance(error, GdpError) or type(error) is ValueError
        if not clean or "\n" in str(error):
            return True, "".join(traceback.format_exception(error)[-12:])
        if reading and folder.name not in str(error):
            return True, f"the error does not name the file: {error}"
        return True, ""
    return False, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mutants", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="KIND", help="Of one kind of file.")
    parser.add_argument("--replay", type=int, metavar="NUMBER", help="Only this mutant.")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="Save mutants with findings.")
    arguments = parser.parse_args()
    numbers = list(range(arguments.mutants)) if arguments.replay is None else [arguments.replay]
    done: list[Outcome] = []
    started_s = time.perf_counter()
    try:
        for outcome in outcomes(arguments.seed, numbers, arguments.only, arguments.keep):
            done.append(outcome)
            if outcome.finding:
                number = f"--- mutant {outcome.number} ({outcome.kind})"
                print(f"{number}\n{outcome.finding}", flush=True)
    except KeyboardInterrupt:
        print(f"stopped after {len(done)} of {len(numbers)} mutants")
    for kind in sorted({outcome.kind for outcome in done}):
        of_kind = [outcome for outcome in done if outcome.kind == kind]
        print(
            f"{kind:12} {len(of_kind):6} mutants, {sum(o.refused for o in of_kind):6} refused with "
            f"a clean error, {sum(bool(o.finding) for o in of_kind):4} findings, slowest "
            f"{max(o.cpu_s for o in of_kind):6.2f} CPU seconds"
        )
    findings = [outcome for outcome in done if outcome.finding]
    print(
        f"{len(done)} mutants, seed {arguments.seed}: {len(findings)} findings, slowest "
        f"{max((o.cpu_s for o in done), default=0.0):.2f} CPU seconds, "
        f"{time.perf_counter() - started_s:.0f} s in all"
    )
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
