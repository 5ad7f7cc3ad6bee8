"""Flags, values and rules that gdp writes for engines, held against unpacked packages of them.

    python -m benchmarks.engine_rules --vllm FOLDER --sglang FOLDER --llamacpp FOLDER

FOLDER is where `unzip` has put a wheel (`pip download --no-deps vllm`), or the source of llama.cpp
that the source package of llama-cpp-python carries (`vendor/llama.cpp`). Prints a line for every
difference, and ends with code 1 where there is one.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gdp.placement.placement import DraftModel
from gdp.targets.engine import EngineRules
from gdp.targets.llamacpp.flags import Flags
from gdp.targets.llamacpp.rules import MOST_GPUS, NO_TENSOR_SPLIT, RPC_SERVER
from gdp.targets.sglang import export as sglang
from gdp.targets.sglang.rules import SGLANG
from gdp.targets.vllm.export import VllmOptions
from gdp.targets.vllm.rules import VLLM

ALL = VllmOptions(
    (2, 2), (0, 1, 0, 1), 0.9, 4096, quantize="fp8", at_once=2048, tensor=2, experts=True,
    port=8000, draft=DraftModel("small", 4), machines=("a", "a", "b", "b"), node=1,
    dtype="float16", mixed=True, other_words=True,
)  # fmt: skip
"""Options with every flag that a plan may have."""
SETS = (
    ALL,
    replace(ALL, node=0),
    replace(ALL, data=2, machines=()),
    replace(ALL, role="prefill"),
)
IN_DOCUMENTATION = "docs/"
"""Files that are no part of a package begin so."""


def flags_of(words: Sequence[str]) -> set[str]:
    """The flags among arguments."""
    return {word for word in words if word.startswith("--")}


def texts(folder: Path, suffix: str = ".py") -> str:
    """All text of the files of a folder."""
    files = sorted(folder.rglob(f"*{suffix}")) if folder.is_dir() else []
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)


def capabilities(rules: EngineRules, folder: Path) -> Iterator[str]:
    """Rows whose file says another compute capability."""
    for kind, row in rules.methods.items():
        path = folder / row.file
        if row.file.startswith(IN_DOCUMENTATION):
            continue
        if not path.is_file():
            yield f"{kind}: there is no {row.file}"
            continue
        body = path.read_text().split("def get_min_capability")[1:]
        told = {number for part in body for number in re.findall(r"return .*", part[:900])}
        if not any(re.search(rf"\b{round(10 * row.capability)}\b", line) for line in told):
            yield f"{kind}: {row.file} does not return {round(10 * row.capability)}"


def classes_of(folder: Path) -> dict[str, list[ast.ClassDef]]:
    """Classes of the modules of a folder, by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def bases_of(node: ast.ClassDef) -> list[str]:
    """Names of the classes that one is made of."""
    return [b.id if isinstance(b, ast.Name) else getattr(b, "attr", "") for b in node.bases]


def has_base(name: str, base: str, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """True for a class that is made of another one."""
    if name == base:
        return True
    own = classes.get(name, [])
    return any(has_base(b, base, classes) for node in own for b in bases_of(node) if b != name)


def takes_stages(name: str, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """True for a model of SGLang whose `forward` takes tensors of the stage before."""
    for node in classes.get(name, []):
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "forward":
                return "pp_proxy_tensors" in {
                    a.arg for a in (*part.args.args, *part.args.kwonlyargs)
                }
    return any(
        takes_stages(b, classes) for node in classes.get(name, []) for b in bases_of(node)
        if b != name
    )  # fmt: skip


def of_vllm(folder: Path) -> Iterator[str]:
    """Differences of vLLM."""
    told = texts(folder / "vllm" / "engine") + texts(folder / "vllm" / "entrypoints")
    keys, variables = texts(folder / "vllm" / "config"), texts(folder / "vllm")
    for flag in sorted(set().union(*(flags_of(own.arguments()) for own in SETS))):
        name, _, key = flag.partition(".")
        if f'"{name}"' not in told:
            yield f"flag {name} is gone"
        if key and not re.search(rf"\b{key}\b", keys):
            yield f"key {key} of {name} is gone"
    for variable in sorted(set().union(*(own.environment() for own in SETS))):
        if variable.startswith("VLLM_") and variable not in variables:
            yield f"variable {variable} is gone"
    methods = (folder / "vllm/model_executor/layers/quantization/__init__.py").read_text()
    for method in sorted({kind.partition(" ")[0] for kind in VLLM.methods}):
        if f'"{method}"' not in methods:
            yield f"quantisation {method!r} is gone"
    yield from (f"plugin of {m!r}: it is a method again" for m in VLLM.plugins
                if f'"{m}"' in methods)  # fmt: skip
    yield from capabilities(VLLM, folder)
    models = folder / "vllm" / "model_executor" / "models"
    registry = (models / "registry.py").read_text()
    named = dict(re.findall(r'"(\w+)":\s*\(\s*"[\w.]+",\s*"(\w+)",?\s*\)', registry))
    classes = classes_of(models)
    for name in sorted(VLLM.one_stage):
        if has_base(named.get(name, name), "SupportsPP", classes):
            yield f"{name} runs as a pipeline now"


def of_sglang(folder: Path) -> Iterator[str]:
    """Differences of SGLang."""
    told = texts(folder / "sglang" / "srt" / "arg_groups") + texts(folder / "sglang/srt/layers")
    environment = texts(folder / "sglang" / "srt" / "distributed") + told
    for flag in sorted(set().union(*(flags_of(sglang.arguments(own)) for own in SETS))):
        if flag not in told and flag[2:].replace("-", "_") not in told:
            yield f"flag {flag} is gone"
    for variable in sorted(set().union(*(sglang.environment(own) for own in SETS))):
        if variable.startswith("SGLANG_") and variable not in environment:
            yield f"variable {variable} is gone"
    yield from capabilities(SGLANG, folder)
    classes = classes_of(folder / "sglang" / "srt" / "models")
    for name in sorted(SGLANG.one_stage):
        if name not in classes:
            yield f"{name} is gone"
        elif takes_stages(name, classes):
            yield f"{name} runs as a pipeline now"


def of_llamacpp(folder: Path) -> Iterator[str]:
    """Differences of llama.cpp."""
    source = (folder / "src" / "llama-arch.cpp").read_text()
    body = source.partition("bool llm_arch_supports_sm_tensor")[2].partition("return false")[0]
    names = dict(re.findall(r'\{\s*(LLM_ARCH_\w+),\s*"([^"]+)"\s*\}', source))
    there = {names.get(case, case) for case in re.findall(r"case (LLM_ARCH_\w+):", body)}
    yield from (f"{name} has no tensor split" for name in sorted(there - NO_TENSOR_SPLIT))
    yield from (f"{name} has tensor splits now" for name in sorted(NO_TENSOR_SPLIT - there))
    most = re.search(r"llama_max_devices\(void\) \{\s*return (\d+)",
                     (folder / "src" / "llama.cpp").read_text())  # fmt: skip
    if most is None or int(most[1]) - 1 != MOST_GPUS:
        yield f"llama_max_devices() is no longer {MOST_GPUS + 1}"
    if RPC_SERVER not in (folder / "tools" / "rpc" / "CMakeLists.txt").read_text():
        yield f"{RPC_SERVER} is gone"
    told = texts(folder / "common", ".cpp")
    every = Flags(2, (1, 1), ("x=CPU",), 64, rpc=("a",), device=("CUDA0",), divides=True,
                  ubatch_size=4096, op_offload=False, mmproj="m", mmproj_device="CUDA0",
                  draft=DraftModel("d", 4), draft_device="CUDA0")  # fmt: skip
    words = (*every.arguments(), *replace(every, mmproj_device="").arguments())
    yield from (
        f"flag {flag} is gone" for flag in sorted(flags_of(words)) if f'"{flag}"' not in told
    )


ENGINES = {"vllm": of_vllm, "sglang": of_sglang, "llamacpp": of_llamacpp}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what differs; 1 where something does."""
    parser = argparse.ArgumentParser(description="Rules of engines against unpacked packages.")
    for name in ENGINES:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER")
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    if not given:
        parser.error("name at least one unpacked package")
    count = 0
    for name, folder in given.items():
        try:
            found = list(ENGINES[name](folder))
        except OSError as error:
            found = [f"{error.filename} cannot be read: is {folder} an unpacked package?"]
        count += len(found)
        print(f"{name}: {len(found)} differences")
        print("".join(f"  {line}\n" for line in found), end="")
    return min(count, 1)


if __name__ == "__main__":
    sys.exit(main())
