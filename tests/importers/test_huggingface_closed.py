"""Configurations that ask for a network, for code or for kernels of others get none of them."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

from gdp.base.errors import InfeasibleError, ModelError
from gdp.importers.pytorch.closed import closed
from gdp.question.models import load

pytestmark = pytest.mark.usefixtures("traces_anew")
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 50,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
EVIL = {
    "AutoConfig": "evil.EvilConfig", "AutoModel": "evil.Evil", "AutoModelForCausalLM": "evil.Evil",
}  # fmt: skip
DETR = {
    "model_type": "detr", "architectures": ["DetrForObjectDetection"], "image_size": 64,
    "use_timm_backbone": False, "backbone": "microsoft/resnet-50", "use_pretrained_backbone": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, nobody to ask."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"the network or the terminal was asked: {args}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, forbidden)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, forbidden)
    monkeypatch.setattr("builtins.input", forbidden)


def spec(folder: Path, fields: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "evil.py").write_text("open('PWNED', 'w').write('x')")
    return f"hf:{folder}?sequence=8"


def test_a_model_of_the_local_hub_cache_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models--org--small"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0123abcd")
    (model / "snapshots" / "0123abcd").mkdir(parents=True)
    (model / "snapshots" / "0123abcd" / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelError, match=r"no configuration 'org/other'.*gdp downloads nothing"):
        load("hf:org/other")
    with pytest.raises(ModelError, match=r"no configuration 'no name at all!/x/y'"):
        load("hf:no name at all!/x/y")
    graph = load("hf:org/small?sequence=8")
    assert graph.weight_bytes.sum() == load(spec(tmp_path, LLAMA)).weight_bytes.sum() > 0


def test_code_beside_a_configuration_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="model type 'evil' is none of transformers") as found:
        load(spec(tmp_path, LLAMA | {"model_type": "evil", "auto_map": EVIL}))
    assert "gdp never runs the code that auto_map names" in str(found.value)
    graph = load(spec(tmp_path, LLAMA | {"auto_map": EVIL}))
    assert "gdp never runs the code that auto_map names; the llama" in caplog.text
    assert graph.digest == load(spec(tmp_path, LLAMA)).digest
    assert not (tmp_path / "PWNED").exists()


def test_code_of_a_configuration_within_is_never_run(tmp_path: Path) -> None:
    """No class answers for the text model here, where transformers asks before it says so."""
    inner = {"model_type": "detr", "auto_map": EVIL, "backbone": None}
    fields = {"model_type": "llava", "text_config": inner, "architectures": ["Llava"]}
    with pytest.raises(ModelError):
        load(spec(tmp_path, fields))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("asked", ["kernels-community/flash-attn2", "flash_attention_2"])
def test_attention_of_others_is_replaced_by_one_of_ours(
    key: str, asked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graph = load(spec(tmp_path, LLAMA | {key: asked}))
    assert f"attention {asked!r} is no part of torch" in caplog.text
    assert graph.digest == load(spec(tmp_path, LLAMA)).digest
    eager = load(spec(tmp_path, LLAMA | {key: "eager"}))
    assert "softmax" in eager.op_types
    assert "softmax" not in graph.op_types


def test_a_backbone_that_is_only_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="backbone 'microsoft/resnet-50' is only named") as found:
        load(spec(tmp_path, DETR))
    assert "\n" not in str(found.value)


def test_inside_nothing_is_reached_and_after_all_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub.constants as hub
    from transformers.integrations import hub_kernels

    calls: list[str] = []

    def record(*args: Any, **kwargs: Any) -> str:
        calls.append(str(args))
        return "called"

    monkeypatch.setattr(socket, "getaddrinfo", record)
    monkeypatch.setattr(hub_kernels, "get_kernel", record)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with closed(), closed():
        assert hub.is_offline_mode()
        with pytest.raises(FileNotFoundError, match=r"huggingface\.co on the network"):
            socket.getaddrinfo("huggingface.co", 443)
        with pytest.raises(FileNotFoundError, match="kernel 'a/b' of others"):
            hub_kernels.get_kernel("a/b")
        with socket.socket() as made, pytest.raises(FileNotFoundError):
            made.connect(("127.0.0.1", 9))
    assert not calls
    assert not hub.is_offline_mode()
    assert "HF_HUB_OFFLINE" not in os.environ
    assert [socket.getaddrinfo("x", 1), hub_kernels.get_kernel("a/b")] == ["called", "called"]


STUB = """
    import sys
    def __getattr__(name):
        if name.startswith("__"):
            raise AttributeError(name)
        def stub(*args, **kwargs):
            if name in ("get_kernel", "load_kernel"):
                open("KERNEL", "w").write(repr(args))
            return lambda made: made
        return stub
"""


@pytest.mark.slow
def test_the_program_asks_no_kernels_of_a_library_that_has_them(tmp_path: Path) -> None:
    """With a stub of `kernels` that records, and sockets that record, in a process of its own."""
    stubs = tmp_path / "stubs"
    (stubs / "kernels").mkdir(parents=True)
    (stubs / "kernels" / "__init__.py").write_text(textwrap.dedent(STUB))
    about = stubs / "kernels-0.99.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.99.0\n")
    (stubs / "sitecustomize.py").write_text(
        "import socket\n"
        "def stop(*a, **k):\n    open('SOCKET', 'w').write(repr(a)); raise OSError('no')\n"
        "socket.socket.connect = socket.getaddrinfo = stop\n"
    )
    asked = spec(tmp_path, LLAMA | {"attn_implementation": "kernels-community/flash-attn2"})
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(stubs), str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "gdp", "inspect", asked], cwd=tmp_path, capture_output=True,
        text=True, env=os.environ | {"PYTHONPATH": path}, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "KERNEL").exists()
    assert not (tmp_path / "SOCKET").exists()


def test_what_cannot_fit_is_refused_before_it_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the graph are the limit: with one byte less, nothing is traced."""
    from gdp.importers.pytorch import model

    asked = spec(tmp_path, LLAMA)
    graph = load(asked)
    traced: list[object] = []
    export = model.exported
    monkeypatch.setattr(model, "exported", lambda *a, **k: traced.append(a) or export(*a, **k))
    size = int(graph.weight_bytes.sum())
    with pytest.raises(InfeasibleError, match="weights alone miss 1 B on all devices together"):
        load(asked, room_bytes=size - 1)
    assert not traced
    assert load(asked, room_bytes=size).digest == graph.digest
    assert len(traced) == 1
