"""llama.cpp's image encoder: what it holds and computes, and the device that it gets."""

from pathlib import Path

import numpy as np
import pytest

import gdp
from gdp.api.generation import generation_of
from gdp.base.errors import ModelError
from gdp.importers.gguf_projector import read_projector
from gdp.ops.llamacpp import PROJECTOR
from gdp.ops.rule import SOFTMAX_FLOP
from gdp.targets.llamacpp.flags import flags_of
from tests.gguf_models import MIB, box, quick, write_gguf, write_projector

ONCE = gdp.Search(seconds=None, evaluations=10)


def test_an_image_is_counted_by_hand(tmp_path: Path) -> None:
    """64 pixels a side are 16 patches of 64 numbers; the projector reads them as 4 rows of 256."""
    file = write_projector(tmp_path / "mmproj.gguf")
    one, patches = read_projector(file), 16
    blocks = 2 * (4 * 64 * 64 + 2 * 64 * 128)
    matrices = 64 * 3 * 16 * 16 + blocks + 256 * 256 + 256 * 256
    assert one.nbytes == 2 * (matrices + patches * 64)
    products = 2 * (patches * (64 * 3 * 16 * 16 + blocks) + 4 * (256 * 256 + 256 * 256))
    scores = 4 * patches * patches
    attention = 2 * scores * (2 * 16 + 1 + SOFTMAX_FLOP + 2 * 16)
    assert one.flop == products + attention
    # The layer of 128 and three tensors of 64 numbers, of all patches in 32 bits.
    assert one.held_bytes - one.nbytes == patches * 4 * (128 + 3 * 64)
    assert read_projector(file, 128).patches == 4 * patches


def test_buffers_are_those_that_llama_cpp_prints(tmp_path: Path) -> None:
    """248.10 MiB for the encoder of Qwen3.6 27B at 1472 pixels a side, by a public log."""
    file = write_projector(tmp_path / "m.gguf", width=1152, inner=4304, blocks=1, side=768)
    encoder = read_projector(file, 1472)
    assert encoder.patches == 92 * 92
    assert (encoder.held_bytes - encoder.nbytes) / MIB == pytest.approx(248.10, rel=0.02)


@pytest.mark.parametrize(("sizes", "home", "words"), [
    ((64, 64), 1, ["--mmproj-device", "CUDA0"]),
    # The first GPU has no room beside the blocks, or not even alone.
    ((1, 64), 2, ["--mmproj-device", "CUDA1"]),
    ((1,), 0, ["--no-mmproj-offload"]),
])  # fmt: skip
def test_the_encoder_is_where_there_is_room(
    tmp_path: Path, sizes: tuple[int, ...], home: int, words: list[str]
) -> None:
    model, file = write_gguf(tmp_path / "m.gguf"), tmp_path / "mm.gguf"
    write_projector(file, width=256, inner=1024)
    cluster = box(*(size * MIB for size in sizes))
    spec = f"{model}?prompt=64&new=8&mmproj={file}"
    result = gdp.place(spec, cluster, target="llamacpp", search=ONCE)
    graph, placement = gdp.load(spec), result.placement
    assert placement.device[graph.op_index[PROJECTOR]] == home
    assert result.score.feasible
    arguments = flags_of(graph, placement, cluster).arguments()
    assert arguments[-len(words) - 2 :] == ["--mmproj", str(file), *words]
    assert any(f"image encoder is on {cluster.device_names[home]}" in n for n in result.notes)


def test_an_image_is_encoded_once_in_a_request(tmp_path: Path) -> None:
    """On a processor alone the request takes longer by one roofline of the encoder."""
    model, file = write_gguf(tmp_path / "m.gguf"), write_projector(tmp_path / "mm.gguf", width=256)
    cluster, encoder = box(), read_projector(file)
    plain, seen = (
        gdp.place(
            f"{model}?prompt=64&new=8{more}",
            cluster,
            target="llamacpp",
            search=ONCE,
            costs="datasheet",
        )
        for more in ("", f"&mmproj={file}")
    )
    device = cluster.devices[0]
    roofline_s = max(
        encoder.flop / device.speed("float16"), encoder.traffic_bytes / device.bytes_per_s
    )
    assert seen.value_s - plain.value_s == pytest.approx(roofline_s, rel=0.02)


def test_pinned_encoders_stay(tmp_path: Path) -> None:
    model, file = write_gguf(tmp_path / "m.gguf"), write_projector(tmp_path / "mm.gguf")
    spec, cluster = f"{model}?sequence=64&mmproj={file}", box(64 * MIB)
    pinned = gdp.Constraints(pins=(gdp.Pin(PROJECTOR, ("cpu",)),))
    result = gdp.place(spec, cluster, target="llamacpp", search=ONCE, constraints=pinned)
    assert result.placement.device[gdp.load(spec).op_index[PROJECTOR]] == 0
    assert (result.placement.device == 1).any()


def test_blocks_have_the_memory_that_the_encoder_leaves(tmp_path: Path) -> None:
    """On a GPU that must have the encoder, and has room for half of the blocks beside it."""
    model, file = write_gguf(tmp_path / "m.gguf", layers=6), tmp_path / "mm.gguf"
    write_projector(file, width=512, inner=4096)
    spec = f"{model}?sequence=64&mmproj={file}"
    graph, held = gdp.load(spec), read_projector(file).held_bytes
    blocks = int(graph.weight_bytes[[s.startswith("blk.") for s in graph.scope]].sum())
    cluster = box(held + blocks // 2 + MIB)
    pinned = gdp.Constraints(pins=(gdp.Pin(PROJECTOR, ("gpu0",)),))
    result = gdp.place(spec, cluster, target="llamacpp", search=ONCE, constraints=pinned)
    assert result.score.feasible
    on_gpu = {graph.scope[op] for op in np.flatnonzero(result.placement.device == 1)}
    assert 1 < len(on_gpu & {f"blk.{i}" for i in range(6)}) < 6


@pytest.mark.parametrize(("rates", "size", "home"), [
    ((1e11, 1e11), 64, 1), ((1.6e11, 1e11), 64, 1),
    ((1e11, 1e11), 3, 0),  # no GPU has room for it
    ((1e11, 1e10, 1e11), 64, 1),
])  # fmt: skip
def test_one_gpu_encodes_beside_a_tensor_split(
    tmp_path: Path, rates: tuple[float, ...], size: int, home: int
) -> None:
    """Its bytes and its seconds are those of one device, whatever the shares of the others."""
    model, file = write_gguf(tmp_path / "m.gguf"), tmp_path / "mm.gguf"
    encoder = read_projector(write_projector(file, width=256, inner=1024))
    cluster = quick(*rates, size=size * MIB)
    spec = f"{model}?prompt=64&new=64"
    plain, seen = (
        gdp.place(own, cluster, target="llamacpp", search=ONCE, costs="datasheet")
        for own in (spec, f"{spec}&mmproj={file}")
    )
    assert seen.placement.splits == plain.placement.splits != ()
    graph = gdp.load(f"{spec}&mmproj={file}")
    assert seen.placement.device[graph.op_index[PROJECTOR]] == home
    assert seen.score.feasible
    more = seen.score.peak_bytes - plain.score.peak_bytes
    image_bytes = 16 * 256 * 4  # embeddings of the patches, which token_embd reads on the CPU
    assert encoder.held_bytes <= more[home] <= encoder.held_bytes + image_bytes
    others = [d for d in range(1, cluster.num_devices) if d != home]
    assert not more[others].any()
    device = cluster.devices[home]
    roofline_s = max(
        encoder.flop / device.speed("float16"), encoder.traffic_bytes / device.bytes_per_s
    )
    read_s = image_bytes / cluster.devices[0].bytes_per_s
    assert seen.value_s - plain.value_s == pytest.approx(roofline_s + read_s, rel=0.005)
    rows = generation_of(seen.question, seen.placement).memory
    own = generation_of(plain.question, plain.placement).memory
    held = [a.weights_bytes - b.weights_bytes for a, b in zip(rows, own, strict=True)]
    assert held == [encoder.held_bytes if d == home else 0 for d in range(cluster.num_devices)]
    arguments = flags_of(graph, seen.placement, cluster).arguments()
    assert "tensor" in arguments
    assert arguments[-1] == (f"CUDA{home - 1}" if home else "--no-mmproj-offload")


def test_a_gpu_encodes_no_sooner_than_its_peak(tmp_path: Path) -> None:
    """Seconds of a preset's GPU: FLOPs of the products over its 16-bit peak at the least."""
    model = write_gguf(tmp_path / "m.gguf")
    file = write_projector(tmp_path / "mm.gguf", width=1152, inner=4304, side=768)
    spec, cluster = f"{model}?sequence=64&mmproj={file}&image=1472", gdp.Cluster.load("cpu+rtx4090")
    seconds = []
    for own in (spec, f"{model}?sequence=64"):
        graph = gdp.load(own)
        device = np.where(graph.is_io, cluster.host, 1)
        device[graph.op_index["token_embd"]] = 0
        placement = gdp.make_placement(graph, cluster, device)
        seconds.append(gdp.simulate(graph, placement, cluster).latency_s)
    least_s = read_projector(file, 1472).flop / 330e12  # float16 with sums in 16 bits
    assert least_s < seconds[0] - seconds[1] < 20 * least_s


@pytest.mark.parametrize(("more", "said"), [
    ("&image=0", "image must be a positive whole number"),
    ("&image=8", "smaller than a patch of 16"),
    ("&decode", "leave out decode, or mmproj"),
])  # fmt: skip
def test_bad_images_are_refused(tmp_path: Path, more: str, said: str) -> None:
    model, file = write_gguf(tmp_path / "m.gguf"), write_projector(tmp_path / "mm.gguf")
    with pytest.raises(ModelError, match=said):
        gdp.load(f"{model}?sequence=64&mmproj={file}{more}")


def test_files_that_are_no_encoder_are_refused(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"no image encoder .*'llama'"):
        gdp.load(f"{model}?mmproj={model}")
    deaf = write_projector(tmp_path / "audio.gguf", vision=False)
    with pytest.raises(ModelError, match="without vision"):
        gdp.load(f"{model}?mmproj={deaf}")
    with pytest.raises(ModelError, match="give mmproj=FILE"):
        gdp.load(f"{model}?image=64")
