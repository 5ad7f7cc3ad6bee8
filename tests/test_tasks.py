"""Tasks over processes and over Ray: what one process makes, with workers killed on the way."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import pytest

import gdp
from gdp.base.errors import GdpError, InfeasibleError, MissingExtraError
from gdp.base.tasks import ATTEMPTS, HERE, Engine, code_digest, each
from gdp.base.version import install_command
from gdp.learn.instances import Instance
from gdp.learn.labels import Corpus, Task, label_all, load_labels

# Ray forks; JAX, where an earlier test has loaded it, warns of that.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

POOL = Engine(processes=2)
PATHS = (Path(__file__).parent, Path(__file__).parents[1])


class Mortal(NamedTuple):
    """A task whose worker is killed as often as there are deaths left."""

    number: int
    folder: Path
    deaths: int = 0


def squared(task: Mortal) -> int:
    mark = task.folder / f"{task.number}"
    lived = len(mark.read_text()) if mark.exists() else 0
    mark.write_text("x" * (lived + 1))
    if lived < task.deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return task.number**2


def refusing(number: int) -> int:
    if number == 2:
        raise InfeasibleError("nothing fits")
    return number


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[Engine]:
    """A Ray cluster of two workers on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = pytest.importorskip("ray", reason="ray is not installed")
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
        logging_level="ERROR", object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}},
    )  # fmt: skip
    yield Engine(ray="auto")
    ray.shutdown()


@pytest.fixture(params=["pool", pytest.param("ray", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> Engine:
    return POOL if request.param == "pool" else request.getfixturevalue("ray_engine")


@pytest.mark.slow
def test_killed_workers_lose_no_task(engine: Engine, tmp_path: Path) -> None:
    """Task 1 kills its worker twice, task 4 once: all are done, and each is asked for once."""
    deaths = {1: 2, 4: 1}
    tasks = [Mortal(n, tmp_path, deaths.get(n, 0)) for n in range(6)]
    found = list(each(squared, tasks, engine))
    assert sorted(found) == [(n, n**2) for n in range(6)]
    for number, count in deaths.items():
        assert len((tmp_path / f"{number}").read_text()) >= count + 1


class Breaking:
    """A pool in this process; the first made breaks while its second task is handed over."""

    made = 0

    def __init__(self, *_: object) -> None:
        self.breaks, self.given = Breaking.made == 0, 0
        Breaking.made += 1

    def submit(self, work: Callable[[int], int], task: int) -> Future[int]:
        self.given += 1
        if self.breaks and self.given == 2:
            raise BrokenProcessPool
        future: Future[int] = Future()
        if self.breaks:
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(work(task))
        return future

    def shutdown(self, **_: object) -> None:
        """Nothing runs."""


def test_a_pool_that_breaks_while_it_is_filled_loses_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Breaking, "made", 0)
    monkeypatch.setattr("gdp.base.tasks.ProcessPoolExecutor", Breaking)
    taken, found = [], []

    def tasks() -> Iterator[int]:
        for number in range(-9, 0):
            taken.append(number)
            yield number

    for one in each(abs, tasks(), Engine(processes=3)):
        found.append(one)
        if len(found) == 1:
            assert len(taken) == 3, "more than there is room for"
    assert sorted(found) == [(k, 9 - k) for k in range(9)]
    assert Breaking.made == 2


@pytest.mark.slow
def test_a_task_that_always_kills_its_worker_ends_the_run(engine: Engine, tmp_path: Path) -> None:
    found = []
    tasks = [Mortal(n, tmp_path, 99 * (n == 3)) for n in range(4)]
    with pytest.raises(GdpError, match=f"task 3 ended its worker {ATTEMPTS} times"):
        found.extend(each(squared, tasks, engine))
    assert {number for number, _ in found} <= {0, 1, 2}
    assert len((tmp_path / "3").read_text()) == ATTEMPTS


def test_an_error_of_a_task_is_raised_as_it_is(engine: Engine) -> None:
    with pytest.raises(InfeasibleError, match="nothing fits"):
        list(each(refusing, range(4), engine))


def test_tasks_are_taken_as_workers_come_free(engine: Engine) -> None:
    taken = []

    def tasks() -> Iterator[int]:
        for number in [0, 1, 3, *range(4, 100)]:
            taken.append(number)
            yield number

    with contextlib.closing(each(refusing, tasks(), engine)) as found:
        next(found)
    assert len(taken) < 10


@pytest.mark.slow
def test_labels_are_the_same_everywhere_and_a_run_goes_on(engine: Engine, tmp_path: Path) -> None:
    """Byte by byte: in one process, on the engine, and after an end in the middle."""
    source = Corpus("", 4, 30, 60)
    names = source.problems().train
    todo = [Task(source, Instance(name, 3), None, 40, 0) for name in names]
    assert label_all(tmp_path / "here", todo, engine=HERE) == len(todo) == 4
    assert label_all(tmp_path / "there", todo, engine=engine) == 4
    assert label_all(tmp_path / "parts", todo[2:], engine=engine) == 2
    torn = (tmp_path / "parts").read_bytes().splitlines(keepends=True)
    (tmp_path / "parts").write_bytes(torn[1] + torn[0])  # as a killed run leaves them
    assert label_all(tmp_path / "parts", todo, engine=engine) == 2
    assert label_all(tmp_path / "parts", todo, engine=engine) == 0
    assert len(load_labels(tmp_path / "here")) == 4
    for other in ("there", "parts"):
        assert (tmp_path / other).read_bytes() == (tmp_path / "here").read_bytes()


@pytest.mark.slow
def test_a_machine_with_other_code_is_refused(
    ray_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdp.base.tasks.code_digest", lambda: "other")
    with pytest.raises(GdpError, match="another version of gdp"):
        list(each(refusing, [1], ray_engine))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_command("cluster"))):
        list(each(refusing, [1], Engine(ray="auto")))


def test_the_digest_covers_what_tasks_are_made_of() -> None:
    assert len(code_digest()) == 64


WORKERS = """
import os, sys, time
from pathlib import Path
from gdp.base.tasks import Engine, each

def work(folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)

if __name__ == "__main__":
    list(each(work, [sys.argv[1]] * 2, Engine(2)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_workers_end_with_the_run_that_is_killed(tmp_path: Path) -> None:
    script, folder = tmp_path / "run.py", tmp_path / "workers"
    folder.mkdir()
    script.write_text(WORKERS)
    root = str(Path(gdp.__file__).resolve().parent.parent)
    run = subprocess.Popen(
        [sys.executable, str(script), str(folder)], env=os.environ | {"PYTHONPATH": root}
    )
    try:
        _wait_for(lambda: len(list(folder.iterdir())) == 2)
        run.kill()
        workers = [int(path.name) for path in folder.iterdir()]
        _wait_for(lambda: not any(_runs(pid) for pid in workers))
    finally:
        run.kill()
        run.wait()


def _wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120  # on however busy a machine
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
