"""Rules of engines are held against packages: made-up ones, in which all is there or one thing is
not."""

from pathlib import Path

import pytest

from benchmarks.engine_rules import SETS, flags_of, main
from gdp.targets.llamacpp.rules import NO_TENSOR_SPLIT, RPC_SERVER
from gdp.targets.sglang import export as sglang
from gdp.targets.sglang.rules import SGLANG
from gdp.targets.vllm.rules import VLLM


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + text + "\n")


def package(folder: Path) -> None:
    """A package of each engine in which all that gdp writes is there."""
    for own in SETS:
        for flag in flags_of(own.arguments()):
            name, _, key = flag.partition(".")
            write(folder / "vllm/engine/arg_utils.py", f'"{name}"')
            write(folder / "vllm/config/all.py", key)
        for variable in own.environment():
            write(folder / "vllm/envs.py", variable)
        write(folder / "sglang/srt/arg_groups/all.py", str(sglang.arguments(own)))
        write(folder / "sglang/srt/distributed/utils.py", str(sglang.environment(own)))
    for rules in (VLLM, SGLANG):
        for row in rules.methods.values():
            capability = round(10 * row.capability)
            write(folder / row.file, f"def get_min_capability():\n    return {capability}")
    for kind in VLLM.methods:
        method = kind.partition(" ")[0]
        write(folder / "vllm/model_executor/layers/quantization/__init__.py", f'"{method}"')
    write(folder / "vllm/model_executor/models/registry.py", "")
    for name in SGLANG.one_stage:
        write(folder / "sglang/srt/models/all.py",
              f"class {name}:\n    def forward(self, ids): pass")  # fmt: skip
    names = "\n".join(
        f'    {{ LLM_ARCH_{i}, "{n}" }},' for i, n in enumerate(sorted(NO_TENSOR_SPLIT))
    )
    cases = "\n".join(f"case LLM_ARCH_{i}:" for i in range(len(NO_TENSOR_SPLIT)))
    write(folder / "src/llama-arch.cpp",
          f"{names}\nbool llm_arch_supports_sm_tensor() {{ {cases} return false; }}")  # fmt: skip
    write(folder / "src/llama.cpp", "size_t llama_max_devices(void) {\n    return 16;\n}")
    write(folder / "tools/rpc/CMakeLists.txt", f"set(TARGET {RPC_SERVER})")


def flags_of_llamacpp(folder: Path) -> None:
    known = [
        "--fit", "--n-gpu-layers", "--split-mode", "--rpc", "--device", "--tensor-split",
        "--override-tensor", "--ctx-size", "--cache-type-k", "--cache-type-v", "--flash-attn",
        "--ubatch-size", "--batch-size", "--no-op-offload", "--mmproj", "--no-mmproj-offload",
        "--mmproj-device", "--model-draft", "--spec-type", "--spec-draft-n-max",
        "--gpu-layers-draft", "--device-draft",
    ]  # fmt: skip
    told = " ".join(f'"{flag}"' for flag in known)
    (folder / "common").mkdir(exist_ok=True)
    (folder / "common" / "arg.cpp").write_text(told)


def asked(folder: Path) -> list[str]:
    return [word for name in ("vllm", "sglang", "llamacpp") for word in (f"--{name}", str(folder))]


@pytest.mark.parametrize(
    ("path", "old", "new", "told"),
    [("", "", "", ""),
     ("vllm/engine/arg_utils.py", '"--nnodes"', "", "flag --nnodes is gone"),
     ("vllm/config/all.py", "num_speculative_tokens", "", "key num_speculative_tokens"),
     ("vllm/model_executor/layers/quantization/fp8.py", "75", "89", "fp8: "),
     ("sglang/srt/arg_groups/all.py", "--dist-init-addr", "", "flag --dist-init-addr is gone"),
     ("sglang/srt/models/all.py", "(self, ids)", "(self, pp_proxy_tensors)", "runs as a pipeline"),
     ("src/llama-arch.cpp", "case LLM_ARCH_0:", "", "has tensor splits now"),
     ("src/llama.cpp", "16", "32", "llama_max_devices() is no longer 16"),
     ("tools/rpc/CMakeLists.txt", RPC_SERVER, "rpc", f"{RPC_SERVER} is gone")],
)  # fmt: skip
def test_what_changed_is_told(
    path: str, old: str, new: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package(tmp_path)
    flags_of_llamacpp(tmp_path)
    if path:
        (tmp_path / path).write_text((tmp_path / path).read_text().replace(old, new))
    assert main(asked(tmp_path)) == bool(path)
    assert told in capsys.readouterr().out


def test_a_folder_that_is_no_package_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--llamacpp", str(tmp_path)]) == 1
    assert "an unpacked package?" in capsys.readouterr().out
