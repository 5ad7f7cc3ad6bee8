"""Two processes on loopback: the same weights and labels as one, and clear errors."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import SMALL_NETWORK

from gdp.learn.instances import Instance, load_problems
from gdp.learn.labels import LabelStore, load_labels
from gdp.learn.pretrain import pretrain
from gdp.learn.processes import DistributedError, ProcessGroup, join
from gdp.learn.recipe import load_recipe
from gdp.policy.policy import load_policy

ROOT = Path(__file__).parents[2]
RECIPE = f"""
name = "two"
seed = 7
{SMALL_NETWORK}[imitation]
updates = 2
graphs = 2
[ppo]
updates = 1
graphs = 3
samples = 12
[data]
labels = "LABELS"
max_ops = 60
random_graphs = 3
fresh = 0.0
[run]
validate_every = 1000
"""
"""Under its seed the three problems of PPO's update differ."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(recipe: Path, out: Path, port: int, rank: int) -> subprocess.Popen:
    """One of two processes, with two devices each."""
    command = [sys.executable, "-m", "gdp", "pretrain", str(recipe), "-o", str(out)]
    command += ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id", str(rank)]
    with log(out, rank).open("w") as file:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file,
            env=os.environ
            | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        )  # fmt: skip


def log(out: Path, rank: int) -> Path:
    return out.with_name(f"{out.name}{rank}.log")


def make_labels(folder: Path) -> Path:
    problems = load_problems("", random_graphs=3, min_ops=30, max_ops=60)
    store = LabelStore([])
    # With one to validate with, none is searched for.
    for name in [*problems.train, problems.validation[0]]:
        instance = Instance(graph=name, cluster=3)
        problem = problems.get(instance)
        device = problem.allowed.argmax(axis=1)
        store.improve(instance, problem, device, evaluations=1, found_by="first")
    store.save(folder / "labels.jsonl")
    recipe = folder / "two.toml"
    recipe.write_text(RECIPE.replace("LABELS", str(folder / "labels.jsonl")))
    return recipe


def weights(folder: Path) -> list[np.ndarray]:
    return jax.tree.leaves(load_policy(folder / "last").params)


def labels_of(folder: Path) -> dict[str, float]:
    return {
        label.instance.key: label.value_s for label in load_labels(folder / "labels.jsonl").all()
    }


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """Imitation and PPO over the same global batch: equal weights within float tolerance, and equal
    labels, though each process has improved those of its own problems alone."""
    recipe, port = make_labels(tmp_path), free_port()
    before = labels_of(tmp_path)
    team = [start(recipe, tmp_path / "two", port, rank) for rank in range(2)]
    settings, text = load_recipe(recipe)
    pretrain(settings, tmp_path / "one", recipe_text=text)
    for rank, process in enumerate(team):
        assert process.wait(timeout=240) == 0, log(tmp_path / "two", rank).read_text()
    for a, b in zip(weights(tmp_path / "one"), weights(tmp_path / "two"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)
    one, two = (
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("one", "two")
    )
    assert [line["step"] for line in one] == [line["step"] for line in two] == [0, 1, 2]
    assert all(np.isfinite(line["cross_entropy"]) for line in two[:2])
    after = labels_of(tmp_path / "two")
    assert after == labels_of(tmp_path / "one")
    assert sum(after[key] < before[key] for key in before) >= 2


@pytest.mark.slow
def test_when_one_process_dies_the_others_stop_and_the_job_resumes(tmp_path: Path) -> None:
    recipe, port = make_labels(tmp_path), free_port()
    long = tmp_path / "long.toml"
    text = recipe.read_text().replace("updates = 2\n", "updates = 4000\n")
    long.write_text(text.replace("[run]", "[run]\ncheckpoint_minutes = 0.001"))
    team = [start(long, tmp_path / "run", port, rank) for rank in range(2)]
    metrics, state = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "state"
    deadline = time.monotonic() + 400
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    team[1].kill()
    assert team[1].wait() != 0
    assert team[0].wait(timeout=200) != 0
    (line,) = lines_of_gdp(log(tmp_path / "run", 0).read_text())
    assert "lost the others" in line
    done = len(metrics.read_text().splitlines())
    settings, text = load_recipe(long)
    lengths = []

    def is_longer() -> bool:
        lengths.append(len(metrics.read_text().splitlines()))
        return lengths[-1] > done

    pretrain(settings, tmp_path / "run", recipe_text=text, stop=is_longer)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(len(steps))), "it went on where the checkpoint was"
    assert len(steps) > done
    assert lengths[0] > 0, "it did not begin anew"


# A member of a job that works for ten seconds between two collective operations.
MEMBER = """
import sys, time
from gdp.learn.processes import DistributedError, join, quit_at_once
port, rank = sys.argv[1:]
team = join(f"127.0.0.1:{port}", 2, int(rank), heartbeat_s=6)
team.agree(1)
print("joined", flush=True)
try:
    for word in sys.stdin:
        print("agreed", team.agree(2), flush=True)
except DistributedError as error:
    quit_at_once(error)
"""


class Member:
    """A process of `MEMBER`; a line on its standard input is one more collective operation."""

    def __init__(self, folder: Path, port: int, rank: int) -> None:
        self.log = folder / f"member{rank}.log"
        with self.log.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MEMBER, str(port), str(rank)],
                stdin=subprocess.PIPE, stdout=said, stderr=said, cwd=ROOT, text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
            )  # fmt: skip

    def wait_for(self, text: str) -> str:
        """All that it has said once it has said this."""
        for _ in range(600):
            if text in self.log.read_text():
                return self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(f"{text!r} is not in {self.log.read_text()!r}")

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout=60)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Member]]:
    port = free_port()
    found = [Member(tmp_path, port, rank) for rank in range(2)]
    for member in found:
        member.wait_for("joined")
    yield found
    for member in found:
        member.process.kill()
        member.process.wait()
        assert member.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            member.process.stdin.close()


def lines_of_gdp(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("gdp: ")]


def listening() -> set[tuple[str, int]]:
    """(address in hex, inode) of all sockets that listen."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add((fields[1].partition(":")[0], int(fields[9])))
    return found


def sockets_of(process: int) -> set[int]:
    links = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir()]
    return {int(link[8:-1]) for link in links if link.startswith("socket:[")}


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, ::ffff:127.0.0.1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets")
def test_processes_listen_on_the_coordinators_interface_and_part_in_peace(
    members: list[Member],
) -> None:
    for member in members:
        own = sockets_of(member.process.pid)
        assert {place for place, inode in listening() if inode in own} <= LOOPBACK
        member.step()
    for member in members:
        member.wait_for("agreed 2")
    ends = [threading.Thread(target=member.end) for member in members]  # they wait for each other
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    for member in members:
        assert member.process.returncode == 0, member.log.read_text()
        assert lines_of_gdp(member.log.read_text()) == []


@pytest.mark.slow
def test_a_killed_coordinator_ends_the_other_with_one_line(members: list[Member]) -> None:
    members[0].process.kill()
    members[1].step()
    assert members[1].process.wait(timeout=60) != 0
    members[1].wait_for("start all again, the run resumes from its checkpoint")
    for member in members:
        output = member.wait_for("gdp: ")
        assert len(lines_of_gdp(output)) == 1, output


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_other_while_it_waits_for_nothing(
    members: list[Member],
) -> None:
    """JAX's heartbeat does it, between two collective operations; the witness says so."""
    members[1].process.send_signal(signal.SIGSTOP)
    assert members[0].process.wait(timeout=60) != 0
    (line,) = lines_of_gdp(members[0].wait_for("gdp: "))
    assert "process 0 was ended" in line
    assert "start all again" in line


def test_a_wrong_coordinator_fails_in_bounded_time() -> None:
    with pytest.raises(DistributedError, match="no coordinator answers at"):
        join(f"127.0.0.1:{free_port()}", 2, 1, timeout_s=1.0)
    with pytest.raises(ValueError, match="HOST:PORT"):
        join("nowhere", 2, 1)
    with pytest.raises(ValueError, match="lies outside"):
        join("127.0.0.1:1", 2, 2)


def test_what_fails_for_want_of_another_process_says_so_and_nothing_else_does() -> None:
    lost = r"process 1 lost the others \(barrier\); start all"
    with pytest.raises(DistributedError, match=lost), ProcessGroup(1, 2).together():
        raise TimeoutError("barrier\nand pages of more")
    with pytest.raises(OSError, match="No space left"), ProcessGroup(1, 2).together():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(TimeoutError), ProcessGroup().together():
        raise TimeoutError("alone")


def test_items_are_dealt_to_processes_without_loss() -> None:
    found = [ProcessGroup(rank, 3).mine(list("abcdefg")) for rank in range(3)]
    assert sorted(index for part in found for index, _ in part) == list(range(7))
    assert found[1] == [(1, "b"), (4, "e")]
