"""What llama.cpp reaches by backend, memory and processor, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from gdp.base.errors import ClusterError
from gdp.cli.asking import limited
from gdp.cluster.detect import backend_of as backend_of_build
from gdp.cluster.detect import num_sockets
from gdp.cluster.file import cluster_of_toml, cluster_toml, with_backend
from gdp.cluster.presets import cluster_preset, device_names, device_preset
from gdp.cluster.types import BACKENDS
from gdp.costs import llama_backends as backends
from gdp.costs.base import roofline
from gdp.costs.llama_backends import REACHED, READ, Memory, backend_of, memory_of
from gdp.costs.llamacpp import NEWEST, LlamaCosts, Style, graph_kernels, predicts
from gdp.question.models import load
from tests.gguf_models import INNER, WIDTH, write_gguf

ONE_BLOCK = 2.0 * INNER * WIDTH


@pytest.mark.parametrize(
    ("preset", "backend", "memory"),
    [
        ("rtx4090", "cuda", Memory.GDDR), ("h100-pcie", "cuda", Memory.HBM),
        ("a30", "cuda", Memory.HBM), ("a40", "cuda", Memory.GDDR), ("h200", "cuda", Memory.HBM),
        ("r9700", "rocm", Memory.GDDR), ("mi300x", "rocm", Memory.HBM),
        ("arc-b70", "sycl", Memory.GDDR), ("m3-max", "metal", Memory.APPLE),
        ("ryzen-ai-max-395", "rocm", Memory.SHARED), ("dgx-spark", "cuda", Memory.SHARED),
        ("cpu", "cuda", Memory.MAIN),
    ],
)  # fmt: skip
def test_a_device_has_the_backend_of_its_maker_and_a_kind_of_memory(
    preset: str, backend: str, memory: Memory
) -> None:
    device = device_preset(preset)
    assert memory_of(device) == memory
    assert device.is_cpu or backend_of(device) == backend


@pytest.mark.parametrize("preset", [n for n in device_names() if predicts(device_preset(n))])
@pytest.mark.parametrize("backend", ["", "vulkan"])
def test_no_backend_beats_the_datasheet(preset: str, backend: str, tmp_path: Path) -> None:
    """Of every preset: the weights of a token at the bandwidth, a prompt's products at the
    fastest peak of the card."""
    device = replace(device_preset(preset), backend=backend)
    costs = LlamaCosts(None, roofline)
    style = costs.style_of(device)
    for query, tokens in (("decode&sequence=64", 1), ("sequence=512", 512)):
        graph = load(f"{write_gguf(tmp_path / 'm.gguf', layers=1)}?{query}")
        row = graph_kernels(graph, NEWEST, style)[graph.op_names.index("blk.0.ffn_up")]
        (own,) = costs.kernel_seconds([row], replace(device, dispatch_s=0.0))
        held = WIDTH * INNER // 256 * 144 / device.bytes_per_s
        assert own >= held
        peak = max(*device.flop_per_s.values(), 2 * device.speed("float16"))
        assert own >= tokens * ONE_BLOCK / (2 * peak)


@pytest.mark.parametrize("backend", ["rocm", "vulkan"])
def test_a_prompt_takes_the_share_of_its_backend(backend: str, tmp_path: Path) -> None:
    device = replace(device_preset("r9700"), backend=backend, dispatch_s=0.0)
    costs = LlamaCosts(None, roofline)
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', layers=1)}?sequence=512")
    row = graph_kernels(graph, NEWEST, costs.style_of(device))[graph.op_names.index("blk.0.ffn_up")]
    (product,) = row.products
    wide = product._replace(m=1e6)  # so that arithmetic binds
    (own,) = costs.kernel_seconds([row._replace(moved=(), products=(wide,))], device)
    share = REACHED[backend, "amd"].products
    assert own == pytest.approx(1e6 * ONE_BLOCK / (share * 191.4e12))
    widened = wide._replace(dtype="bfloat16")
    (slow,) = costs.kernel_seconds([row._replace(moved=(), products=(widened,))], device)
    own_s = 1e6 * ONE_BLOCK / (backends.BFLOAT16_AS_FLOAT32 * 23.9e12)
    assert slow == pytest.approx(own if backend == "rocm" else own_s)


def test_styles_are_those_of_backends() -> None:
    costs = LlamaCosts(None, roofline)
    found = {
        (preset, backend): costs.style_of(replace(device_preset(preset), backend=backend))
        for preset, backend in (
            ("rtx4090", "cuda"), ("rtx4090", "vulkan"), ("v100", "cuda"), ("p100", "cuda"),
            ("p40", "cuda"), ("dgx-spark", "cuda"), ("r9700", "rocm"), ("arc-b70", "sycl"),
            ("arc-b70", "vulkan"), ("m1", "metal"),
        )
    }  # fmt: skip
    assert list(found.values()) == [
        Style.INTEGERS, Style.DIRECT, Style.UNPACKED, Style.UNPACKED, Style.INTEGERS,
        Style.INTEGERS, Style.INTEGERS, Style.UNPACKED, Style.DIRECT, Style.DIRECT,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["cpu", "cpu-ddr4"])
@pytest.mark.parametrize("cores", [1e-3, 1e3])
def test_a_processor_reads_packed_weights_at_the_lesser_rate(
    kind: str, cores: float, tmp_path: Path
) -> None:
    """Of memory or of its cores, with four instructions in one on those of DDR5."""
    plain = device_preset(kind)
    device = replace(plain, flop_per_s={"default": cores * 1e12}, name="cpu")
    cluster = replace(cluster_preset(kind), devices=(device,))
    graph = load(f"{write_gguf(tmp_path / 'm.gguf', layers=1)}?decode&sequence=64")
    op = graph.op_names.index("blk.0.ffn_up")
    own = LlamaCosts(None, roofline)(graph, cluster)[op, 0]
    dots = backends.DOTS * (backends.VNNI if kind == "cpu" else 1.0) * cores * 1e12
    read_s = graph.memory_traffic_bytes[op] / (READ[Memory.MAIN] * plain.bytes_per_s)
    assert own == pytest.approx(max(read_s, ONE_BLOCK / dots))
    measured = replace(device, copy_bytes_per_s=1e9)
    assert backends.read_bytes_per_s(measured) > backends.read_bytes_per_s(device)


def test_two_sockets_are_not_one(tmp_path: Path) -> None:
    one = device_preset("cpu-server")
    two = replace(one, sockets=2, bytes_per_s=2 * one.bytes_per_s)
    assert backends.read_bytes_per_s(two) == backends.read_bytes_per_s(one)
    box = replace(cluster_preset("cpu-server"), devices=(two,))
    assert cluster_of_toml(cluster_toml(box), "box").devices[0].sockets == 2
    with pytest.raises(ClusterError, match="sockets must be at least 1"):
        replace(one, sockets=0)
    told = tmp_path / "cpuinfo"
    told.write_text("physical id\t: 0\nmodel name\t: x\nphysical id\t: 1\nphysical id\t: 0\n")
    assert num_sockets(str(told)) == 2
    assert num_sockets(str(tmp_path / "none")) == 1


def test_a_backend_is_named_in_a_file_and_for_a_whole_machine() -> None:
    cluster = with_backend(cluster_preset("cpu+rtx4090+r9700"), "vulkan")
    assert [d.backend for d in cluster.devices] == ["", "vulkan", "vulkan"]
    again = cluster_of_toml(cluster_toml(cluster), "again")
    assert [d.backend for d in again.devices] == ["", "vulkan", "vulkan"]
    with pytest.raises(ClusterError, match="'r9700': backend 'cuda' is for GPUs of nvidia"):
        with_backend(cluster, "cuda")
    with pytest.raises(ClusterError, match=f"backend must be one of {', '.join(BACKENDS)}"):
        with_backend(cluster, "opengl")
    text = '[[device]]\nname = "a"\npreset = "m1"\nbackend = "rocm"\n'
    with pytest.raises(ClusterError, match="backend 'rocm' is for GPUs of amd"):
        cluster_of_toml(text, "a")


def test_backends_differ_in_launches_until_the_user_says_them() -> None:
    costs, cluster = LlamaCosts(None, roofline), cluster_preset("cpu+r9700")
    by_rocm, by_vulkan = (with_backend(cluster, name) for name in ("rocm", "vulkan"))
    launches = [costs.with_runtime_overheads(c).devices[1].dispatch_s for c in (by_rocm, by_vulkan)]
    assert launches[0] == cluster.devices[1].dispatch_s > launches[1]
    own = replace(by_vulkan.devices[1], dispatch_s=1e-4)
    assert backends.launch_s(own) == 1e-4


@pytest.mark.parametrize(
    ("preset", "libraries", "backend"),
    [
        ("rtx4090", ["libggml-cuda.so", "libggml-vulkan.so"], ""),
        ("rtx4090", ["ggml-vulkan.dll"], "vulkan"), ("rtx4090", [], ""),
        ("r9700", ["libggml-cuda.so", "libggml-vulkan.so"], "vulkan"),
        ("r9700", ["libggml-hip.so"], ""), ("tpu-v5e", ["libggml-vulkan.so"], "vulkan"),
    ],
)  # fmt: skip
def test_a_build_tells_the_backend(preset: str, libraries: list[str], backend: str) -> None:
    assert backend_of_build(preset, libraries) == backend


def test_the_option_of_the_command_line_is_for_all_gpus() -> None:
    clusters = [cluster_preset("cpu+r9700"), cluster_preset("m1")]
    found = limited(clusters, (), (), "vulkan")
    assert [d.backend for c in found for d in c.devices] == ["", "vulkan", "vulkan"]
    assert not any(d.backend for c in limited(clusters, (), ()) for d in c.devices)
    with pytest.raises(ClusterError, match="--backend: device 'm1': backend 'rocm'"):
        limited(clusters, (), (), "rocm")
