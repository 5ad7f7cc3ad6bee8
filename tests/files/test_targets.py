"""What commands write never destroys what gdp did not write, nor what they read."""

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper
from tiny import TOY, branches

from gdp.base.files.writing import TargetError, atomic, new_contents, read_manifest, write_atomic
from gdp.cli.main import cli
from gdp.graph.file import save_graph

FOREIGN = "years of work"
QUICK = ("--method", "single", "--evaluations", "1")
CLUSTER = ("--cluster", "2xcpu-core")


def gdp(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def done(*arguments: object) -> None:
    found = gdp(*arguments)
    assert found.exit_code == 0, (found.output, found.exception)


def refused(match: str, *arguments: object) -> None:
    found = gdp(*arguments)
    assert isinstance(found.exception, TargetError), (found.output, found.exception)
    message = str(found.exception)
    assert match in message
    assert "\n" not in message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_graph(branches(), tmp_path / "branches.json")
    return tmp_path / "branches.json"


@pytest.fixture
def placement(model: Path, tmp_path: Path) -> Path:
    done("place", model, *CLUSTER, *QUICK, "-o", tmp_path / "placement.json")
    return tmp_path / "placement.json"


def writers(model: Path, placement: Path) -> dict[str, tuple[object, ...]]:
    """Every verb that writes one file, up to the file."""
    return {
        "placement": ("place", model, *CLUSTER, *QUICK, "-o"),
        "report": ("place", model, *CLUSTER, *QUICK, "--report"),
        "trace": ("place", model, *CLUSTER, *QUICK, "--trace"),
        "simulated": ("simulate", model, placement, *CLUSTER, "--trace"),
        "page": ("report", placement, "--model", model, *CLUSTER, "-o"),
        "cluster": ("devices", *CLUSTER, "-o"),
    }


KINDS = ("placement", "report", "trace", "simulated", "page", "cluster")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_gdp_wrote_is_replaced_and_no_other(
    kind: str, model: Path, placement: Path, tmp_path: Path
) -> None:
    command, target = writers(model, placement)[kind], tmp_path / "out"
    done(*command, target)
    first = target.read_bytes()
    if kind != "cluster":
        done(*command, target)
    # The same again, not appended; a page holds seconds that differ.
    assert abs(target.stat().st_size - len(first)) < 200
    target.write_text(FOREIGN)
    refused("--force to write over it", *command, target)
    assert target.read_text() == FOREIGN
    done(*command, target, "--force")
    # The same again, not appended; a page holds seconds that differ.
    assert abs(target.stat().st_size - len(first)) < 200


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_verb_reads_is_never_written_over(
    kind: str, model: Path, placement: Path, tmp_path: Path
) -> None:
    """Nor under another name: a link leads to the same file."""
    command = writers(model, placement)[kind]
    if kind == "cluster":
        model = tmp_path / "toy.toml"
        model.write_text(TOY)
        command = ("devices", "--cluster", model, "-o")
    before = model.read_bytes()
    (tmp_path / "soft").symlink_to(model)
    os.link(model, tmp_path / "hard")
    for name in (model, tmp_path / "soft", tmp_path / "hard"):
        refused("is read by this command", *command, name, "--force")
    assert model.read_bytes() == before
    if kind in ("simulated", "page"):
        refused("is read by this command", *command, placement, "--force")


def test_a_cluster_file_is_for_editing_and_replaced_by_force_alone(tmp_path: Path) -> None:
    target = tmp_path / "cluster.toml"
    done("devices", *CLUSTER, "-o", target)
    refused("holds no cluster as gdp wrote it", "devices", *CLUSTER, "-o", target)
    done("devices", "--cluster", target)


def test_a_write_protected_file_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "cluster.toml"
    done("devices", *CLUSTER, "-o", target)
    target.chmod(0o444)
    refused("is write-protected", "devices", *CLUSTER, "-o", target)
    done("devices", *CLUSTER, "-o", target, "--force")
    assert mode(target) == 0o444


def test_one_file_cannot_take_two_outputs(model: Path, tmp_path: Path) -> None:
    same = tmp_path / "x"
    refused("for the placement and for the report", "place", model, *CLUSTER, *QUICK,
            "-o", same, "--report", same)  # fmt: skip
    assert not same.exists()


def test_folders_and_impossible_places_are_said_before_the_work(
    model: Path, tmp_path: Path
) -> None:
    command = ("place", model, *CLUSTER, *QUICK, "-o")
    refused("is a folder; give a file", *command, tmp_path, "--force")
    refused("is a file, not a folder", *command, model / "p.json")


def test_a_pipe_and_a_null_device_are_written_to_and_stay(
    model: Path, placement: Path, tmp_path: Path
) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    done("place", model, *CLUSTER, *QUICK, "-o", pipe)
    reader.join(timeout=60)
    assert read == [placement.read_bytes()]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    done("place", model, *CLUSTER, *QUICK, "-o", os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_standard_output_that_leads_to_a_file_is_written_through(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        write_atomic(f"/proc/self/fd/{file.fileno()}", b"through")
        assert os.fstat(file.fileno()).st_size == 7, "the file that is open, not another one"
        file.write(b", and on")
    assert (tmp_path / "log").read_bytes() == b"through, and on"


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_are_kept_and_new_files_honour_the_umask(tmp_path: Path) -> None:
    secret, new = tmp_path / "secret", tmp_path / "new"
    secret.write_bytes(b"")
    secret.chmod(0o600)
    with umask(0o027):
        write_atomic(secret, b"x")
        write_atomic(new, b"x")
        with new_contents(tmp_path / "folder", "thing") as folder:
            (folder / "a").write_bytes(b"x")
    assert (mode(secret), mode(new)) == (0o600, 0o640)
    assert (mode(tmp_path / "folder"), mode(tmp_path / "folder" / "a")) == (0o750, 0o640)


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to("real/file")
    write_atomic(link, b"x")
    assert (real / "file").read_bytes() == b"x"
    (tmp_path / "door").symlink_to("real/folder")
    for _ in range(2):
        with new_contents(tmp_path / "door", "thing") as folder:
            (folder / "a").write_bytes(b"x")
    assert (real / "folder" / "a").read_bytes() == b"x"
    assert link.is_symlink()
    assert (tmp_path / "door").is_symlink()


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", b"old")
    with pytest.raises(TypeError, match="bytes-like"), atomic(tmp_path / "f") as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_mount_point_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume of a container cannot be renamed."""
    monkeypatch.setattr(
        "gdp.base.files.writing.os.path.ismount", lambda path: Path(path) == tmp_path
    )
    with pytest.raises(TargetError, match="is a mount point"), new_contents(tmp_path, "thing"):
        pass
    with new_contents(tmp_path / "below", "thing") as folder:
        (folder / "a").write_text("x")
    assert (tmp_path / "below" / "a").read_text() == "x"


# Exports.


def tanh_model(folder: Path) -> Path:
    """A model whose weights lie beside it."""
    value = helper.make_tensor("w", TensorProto.FLOAT, [64, 64], b"\0" * 16384, raw=True)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["a"], name="n0"),
            helper.make_node("Tanh", ["a"], ["y"], name="n1"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 64])],
        [value],
    )
    made = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save_model(made, path, save_as_external_data=True, location="run.py", size_threshold=0)
    return path


@pytest.fixture
def onnx_model(tmp_path: Path) -> Path:
    """model.onnx with its weights in a file that is called as what an export writes."""
    return tanh_model(tmp_path / "source")


@pytest.fixture
def placed(onnx_model: Path, tmp_path: Path) -> Path:
    done("place", onnx_model, *CLUSTER, *QUICK, "-o", tmp_path / "placed.json")
    return tmp_path / "placed.json"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_the_module_of_a_model_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows its file before it is loaded."""
    save_graph(branches(), tmp_path / "graph.json")
    module = tmp_path / "module_of_a_model.py"
    module.write_text(f"import gdp\ndef graph(): return gdp.load({str(tmp_path / 'graph.json')!r})")
    text = module.read_text()
    monkeypatch.syspath_prepend(tmp_path)
    refused(
        "is read by this command", "place", "python:module_of_a_model:graph", *CLUSTER, *QUICK,
        "-o", module, "--force",
    )  # fmt: skip
    assert module.read_text() == text


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_an_export_replaces_an_export_and_nothing_else(
    target: str, onnx_model: Path, placed: Path, tmp_path: Path
) -> None:
    command = ("export", placed, "--model", onnx_model, *CLUSTER, "--to", target, "-o")
    out = tmp_path / "out"
    done(*command, out)
    first = contents(out)
    (out / "thesis.txt").write_text(FOREIGN)
    done(*command, out)
    assert contents(out) == first | {"thesis.txt": FOREIGN.encode()}
    name = next(iter(sorted(set(first) - {"gdp.json"})))
    (out / name).write_text("edited")
    refused("was changed since gdp wrote it", *command, out)
    assert (out / name).read_text() == "edited"
    other = tmp_path / "other"
    other.mkdir()
    (other / name).write_text(FOREIGN)
    refused("holds files that gdp did not write", *command, other)
    assert contents(other) == {name: FOREIGN.encode()}
    done(*command, other, "--force")
    assert contents(other) == first
    refused("is a file; give a folder", *command, placed, "--force")


def test_an_export_into_the_models_folder_never_touches_the_model(
    onnx_model: Path, placed: Path
) -> None:
    """Neither the model nor the file of its weights, not even by force."""
    folder = onnx_model.parent
    before = contents(folder)
    where = ("--model", onnx_model, *CLUSTER, "--to", "onnxruntime", "-o", folder)
    command = ("export", placed, *where)
    refused("holds files that gdp did not write", *command)
    refused("run.py' is read by this command", *command, "--force")
    assert contents(folder) == before
    done(*command[:-3], "openvino", "-o", folder, "--force")
    assert before.items() <= contents(folder).items()


def test_one_export_does_not_replace_one_of_another_kind(
    onnx_model: Path, placed: Path, tmp_path: Path
) -> None:
    command = ("export", placed, "--model", onnx_model, *CLUSTER, "-o", tmp_path / "out", "--to")
    done(*command, "openvino")
    refused(
        "another thing than the export to onnxruntime: export to openvino", *command, "onnxruntime"
    )
    done(*command, "onnxruntime", "--force")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.kind == "export to onnxruntime"
    assert "run.py" in manifest.files
    assert set(contents(tmp_path / "out")) == {"gdp.json", *manifest.files}


# Folders of training and calibration: asked before the work, which takes minutes.


def test_finetuning_replaces_no_model_no_folder_and_not_its_own_start(
    onnx_model: Path, tmp_path: Path
) -> None:
    command = ("finetune", onnx_model, *CLUSTER, "-o")
    before = contents(onnx_model.parent)
    refused("is a file; give a folder", *command, onnx_model, "--force")
    refused("holds files that gdp did not write", *command, onnx_model.parent)
    start = tmp_path / "start"
    (start / "weights").mkdir(parents=True)
    (start / "meta.json").write_text('{"schema": 1, "sha256": "0", "kind": "policy"}')
    refused("is read by this command", *command, start, "--checkpoint", start, "--force")
    assert contents(onnx_model.parent) == before
    assert (start / "meta.json").exists()


def test_calibration_and_profiles_ask_first(tmp_path: Path) -> None:
    folder, profile = tmp_path / "work", tmp_path / "p.json"
    folder.mkdir()
    (folder / "thesis.txt").write_text(FOREIGN)
    profile.write_text('{"gdp_profile": 1}')
    refused("holds files that gdp did not write", "calibrate", profile, "-o", folder)
    refused("is a file; give a folder", "calibrate", profile, "-o", profile, "--force")
    refused("holds no plot", "calibrate", profile, "-o", tmp_path / "new", "--plot",
            folder / "thesis.txt")  # fmt: skip
    refused("holds no profile", "profile", "onnx:light_squeezenet", "-o", folder / "thesis.txt")
    assert contents(folder) == {"thesis.txt": FOREIGN.encode()}


def test_pretraining_asks_first_and_reads_no_file_that_it_writes(tmp_path: Path) -> None:
    folder, recipe = tmp_path / "work", tmp_path / "r.toml"
    folder.mkdir()
    (folder / "labels.jsonl").write_text(FOREIGN)
    recipe.write_text(f'name = "x"\n[data]\nlabels = "{folder}/labels.jsonl"\nrandom_graphs = 3\n')
    refused("holds files that gdp did not write", "pretrain", recipe, "-o", folder)
    refused("labels.jsonl' is read by", "pretrain", recipe, "-o", folder, "--force")
    assert contents(folder) == {"labels.jsonl": FOREIGN.encode()}
