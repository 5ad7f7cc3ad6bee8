"""What gdp doctor finds: where all is well, and where a library, a cache or a checkpoint is not."""

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gdp.api import doctor
from gdp.api.doctor import FAIL, NONE, OK, WARN, Check
from gdp.base import version
from gdp.base.version import install_command
from gdp.cli.inform import doctor_text
from gdp.cluster.presets import device_names
from gdp.targets.target import Runtime


def named(checks: list[Check]) -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.found) for check in checks}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions by distribution; gdp wants numpy, scipy, and two libraries of extras."""
    versions = {"numpy": "2.3.0", "scipy": "1.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    wanted = ["numpy<3,>=2.2", "scipy>=1.15", 'pymetis>=2025; extra == "metis"',
              'ray>=2.50; extra == "cluster"', "onnx>=1",
              'ruff>=0.1; extra == "dev"']  # fmt: skip
    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wanted)
    return versions


def test_missing_and_old_libraries_fail_and_extras_do_not(installed: dict[str, str]) -> None:
    checks = list(doctor._libraries())
    assert named(checks) == {
        "numpy": (OK, "2.3.0"), "scipy": (FAIL, "1.0, but >=1.15 is wanted"),
        "pymetis": (NONE, "not installed"), "ray": (NONE, "not installed"),
        "onnx": (FAIL, "not installed"),
    }  # fmt: skip
    assert {c.area for c in checks} == {"libraries", "extra metis", "extra cluster"}
    assert {c.advice for c in checks if c.name == "pymetis"} == {install_command("metis")}
    installed["pymetis"] = "2024.1"
    assert named(list(doctor._libraries()))["pymetis"][0] == WARN


def test_a_source_tree_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", missing)
    assert [check.status for check in doctor._libraries()] == [WARN]


def test_a_runtime_that_breaks_fails_alone(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    def broken() -> list[str]:
        raise OSError("libcuda.so: cannot open shared object file")

    rows = {
        "one": Runtime("One", "numpy", "onnx", "", lambda: ["cpu", "gpu"]),
        "two": Runtime("Two", "scipy", "onnx", "", broken),
        "absent": Runtime("Absent", "torch", "torch", "", broken),
    }
    monkeypatch.setattr(doctor, "RUNTIMES", rows)
    assert named(list(doctor._runtimes())) == {
        "One": (OK, "cpu, gpu"),
        "Two": (FAIL, "OSError: libcuda.so: cannot open shared object file"),
    }


def test_costs_that_match_are_told_from_datasheets(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdp.cluster import detect
    from gdp.cluster.presets import device_preset
    from gdp.cluster.types import make_cluster
    from gdp.costs.default import shipped

    known = device_preset("cpu-core", "known")
    other = replace(known, name="other", model="Some Processor avx512")
    devices = [known, other, device_preset("a100", "gpu"), device_preset("m2-max", "unknown")]
    monkeypatch.setattr(detect, "local_cluster", lambda: make_cluster("box", devices))
    costs = [check for check in doctor._devices() if check.area == "costs"]
    assert [check.status for check in costs] == [OK, WARN, OK, WARN]
    assert costs[0].found == shipped()[0].label()
    assert "scaled by FLOP/s and bandwidth" in costs[1].found
    assert "gdp profile --quick" in costs[1].advice
    assert "measured kernels" in costs[2].found
    assert costs[3].found == "roofline from datasheets"
    assert "gdp profile MODEL" in costs[3].advice


def test_presets_are_listed_by_maker_and_family() -> None:
    checks = list(doctor._presets())
    listed = [name for check in checks for name in check.found.partition(" (")[0].split(", ")]
    assert sorted(listed) == device_names()
    rows = {check.name: check.found for check in checks}
    assert rows["amd RDNA"].endswith("(from datasheets)")
    assert rows["nvidia Ada"].endswith("rtx6000-ada")
    assert len(checks) < 24


def test_a_cache_that_cannot_be_kept_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from gdp.base.kernels import cache

    kept, _ = doctor._caches()
    assert kept.status == OK
    assert Path(kept.found).is_dir() or Path(kept.found).parent.is_dir()
    monkeypatch.setattr(cache, "KEEP", False)
    lost, _ = doctor._caches()
    assert lost.status == WARN
    assert "NUMBA_CACHE_DIR" in lost.advice


def test_cached_traces_are_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gdp.base.files.disk_cache import write_cached

    monkeypatch.setenv("GDP_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("GDP_KEEP_TRACES", "0")
    assert "GDP_KEEP_TRACES is off" in named(list(doctor._caches()))["traces"][1]
    monkeypatch.setenv("GDP_KEEP_TRACES", "1")
    write_cached("traces", "a", b"data")
    said = named(list(doctor._caches()))["traces"][1]
    assert (
        said
        == f"{tmp_path / 'traces'}: 1 of hf: models, {(tmp_path / 'traces/a').stat().st_size} B"
    )


def test_a_damaged_checkpoint_fails_and_the_rest_is_still_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from gdp.policy import method, policy

    assert named(list(doctor._checkpoints()))["policy"][0] == OK
    monkeypatch.setattr(policy, "default_checkpoint", lambda: tmp_path)
    monkeypatch.setattr(method, "default_checkpoint", lambda: tmp_path)
    assert named(list(doctor._checkpoints()))["policy"][0] == WARN
    (tmp_path / "meta.json").write_text("{}")
    monkeypatch.setattr(
        doctor, "AREAS", {"checkpoints": doctor._checkpoints, "caches": doctor._caches}
    )
    found = doctor.examine()
    assert not found["healthy"]
    assert [c["status"] for c in found["checks"]][:2] == [FAIL, OK]


def test_the_text_groups_and_ends_with_what_to_do() -> None:
    checks = [
        vars(Check("libraries", "a", OK, "1.0")),
        vars(Check("libraries", "bb", FAIL, "gone", "go")),
        vars(Check("caches", "c", OK, "/x")),
    ]  # fmt: skip
    found: dict[str, Any] = {"gdp": "1", "python": "3", "platform": "p", "healthy": False,
                             "warns": False, "checks": checks}  # fmt: skip
    assert doctor_text(found).splitlines() == [
        "gdp 1, Python 3, p", "", "libraries", "  ok    a   1.0", "  fail  bb  gone", "", "caches",
        "  ok    c  /x", "", "what to do", "bb          go", "", "something that gdp needs fails",
    ]  # fmt: skip


@pytest.mark.parametrize("status", [OK, FAIL])
def test_the_verb_exits_with_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    from click.testing import CliRunner

    from gdp.cli.main import cli

    monkeypatch.setattr(doctor, "AREAS", {"one": lambda: iter([Check("one", "n", status, "f")])})
    done = CliRunner().invoke(cli, ["doctor", "--json"])
    assert done.exit_code == (status == FAIL)
    assert json.loads(done.stdout)["checks"][0]["status"] == status


@pytest.mark.parametrize(
    ("statuses", "last"),
    [
        ([OK, NONE], "all is well"),
        ([OK, WARN], "gdp works; see the warnings"),
        ([WARN, FAIL], "something that gdp needs fails"),
    ],
)
def test_all_is_well_only_where_nothing_warns(
    monkeypatch: pytest.MonkeyPatch, statuses: list[str], last: str
) -> None:
    checks = [Check("one", f"n{i}", status, "f") for i, status in enumerate(statuses)]
    monkeypatch.setattr(doctor, "AREAS", {"one": lambda: iter(checks)})
    assert doctor_text(doctor.examine()).splitlines()[-1] == last


def test_what_is_missing_is_listed_once_for_each_command() -> None:
    checks = [vars(Check("extra torch", name, NONE, "not installed", "pip x")) for name in "ab"]
    found: dict[str, Any] = {"gdp": "1", "python": "3", "platform": "p", "healthy": True,
                             "warns": False, "checks": checks}  # fmt: skip
    lines = doctor_text(found).splitlines()
    assert "  -     a  not installed" in lines
    assert lines[-4:] == ["what to do", "a, b        pip x", "", "all is well"]


class Installed:
    """A distribution with what pip wrote about where it came from."""

    def __init__(self, record: str | None) -> None:
        self.record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.record


def test_the_command_for_an_extra_is_one_that_works_where_gdp_came_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkout, site = tmp_path / "a checkout", tmp_path / "site-packages"
    for folder in (checkout, site / "gdp"):
        folder.mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    monkeypatch.setattr(version, "__file__", str(site / "gdp" / "base" / "version.py"))

    def command(record: dict[str, Any] | None) -> str:
        installed = Installed(None if record is None else json.dumps(record))
        monkeypatch.setattr(version.Distribution, "from_name", lambda name: installed)
        return install_command("torch")

    here = {"url": checkout.as_uri(), "dir_info": {}}
    monkeypatch.chdir(tmp_path)
    assert command(here) == f"pip install '{checkout}[torch]'"
    monkeypatch.chdir(checkout)
    assert command(here) == "pip install '.[torch]'"
    assert command(here | {"dir_info": {"editable": True}}) == "pip install -e '.[torch]'"
    named = "pip install 'gdp-placement[torch]'"
    assert command({"url": "file:///w/gdp_placement-1.whl", "archive_info": {}}) == named
    assert command(None) == named
    assert command({"url": (tmp_path / "gone").as_uri(), "dir_info": {}}) == named


def test_a_tree_that_is_not_installed_is_its_own_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(version, "__file__", str(tmp_path / "gdp" / "base" / "version.py"))
    monkeypatch.setattr(version.Distribution, "from_name", missing)
    monkeypatch.chdir(tmp_path)
    assert install_command() == "pip install -e '.'"
