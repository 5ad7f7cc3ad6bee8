"""How large a report is, how long it takes to write and to open, and what it looks like.

    python -m benchmarks.report_page                       # bytes and seconds for 5,000 ops
    python -m benchmarks.report_page --screenshots DIR     # and PNG files, light, dark and narrow

Opening and screenshots need Playwright and a Chromium (`CHROMIUM`, or the one on the path); the
seconds end with the first frame after all charts are drawn.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gdp
from gdp.graph.op_graph import INPUT, OUTPUT, OpGraph, make_graph
from gdp.verbs import shown

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def chromium() -> str | None:
    """The browser to use, None without one."""
    return (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    )


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium(), args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()


def transformer(num_ops: int, width: int = 1024) -> OpGraph:
    """A stack of attention layers with module paths, no op of which is fused with another."""
    names, types, scopes = ["input:tokens"], [INPUT], [""]
    flop, weights, sizes, uses = [0.0], [0], [4 * width * 512], []
    parts = (
        ("attention.query", "Gemm", 1.0), ("attention.key", "Gemm", 1.0),
        ("attention.value", "Gemm", 1.0), ("attention.scores", "MatMul", 0.5),
        ("attention.context", "MatMul", 0.5), ("attention.output", "Gemm", 1.0),
        ("mlp.up", "Gemm", 4.0), ("mlp.down", "Gemm", 4.0),
    )  # fmt: skip
    reads = ((-1,), (-1,), (-1,), (0, 1), (2, 3), (4,), (5,), (6,))
    last = 0
    while len(names) < num_ops - 1:
        layer, first = (len(names) - 1) // len(parts), len(names)
        for k, (module, kind, work) in enumerate(parts[: num_ops - 1 - first]):
            uses += [(last if r < 0 else first + r, len(names)) for r in reads[k]]
            names.append(f"n{len(names)}")
            types.append(kind)
            scopes.append(f"model.layers.{layer}.{module}")
            flop.append(work * 2 * 512 * width**2)
            weights.append(int(work * 4 * width**2) if kind == "Gemm" else 0)
            sizes.append(int(4 * 512 * width * max(1.0, work if module == "mlp.up" else 1.0)))
        last = len(names) - 1
    names.append("output:logits")
    types.append(OUTPUT)
    scopes.append("")
    uses.append((last, len(names) - 1))
    zero = [0]
    return make_graph(
        "transformer", names, types, list(enumerate(sizes)), uses, flop=[*flop, 0.0],
        memory_traffic_bytes=np.array(weights + zero) + 8.0 * 512 * width,
        weight_bytes=weights + zero, scope=scopes,
    )  # fmt: skip


def placed(num_ops: int, cluster: gdp.Cluster) -> tuple[OpGraph, gdp.Result]:
    """The graph and what a short search finds for it."""
    graph = transformer(num_ops)
    search = gdp.Search(seconds=None, evaluations=200)
    return graph, gdp.place(graph, cluster, method="local_search", search=search)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ops", type=int, default=5000)
    parser.add_argument("--cluster", default="cpu+2xt4-pcie4")
    parser.add_argument("--screenshots", type=Path)
    given = parser.parse_args()
    cluster = gdp.Cluster.load(given.cluster)
    graph, result = placed(given.ops, cluster)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        shown.report(graph, result, cluster, path)  # imports and templates
        writing = []
        for _ in range(5):
            started_s = time.perf_counter()
            shown.report(graph, result, cluster, path)
            writing.append(time.perf_counter() - started_s)
        print(
            f"{graph.num_ops} ops on {cluster.name}: {path.stat().st_size / 1e6:.2f} MB, written "
            f"in {statistics.median(writing):.2f} s (median of 5)"
        )
        if chromium() is None:
            print("not opened: no Chromium (Debian: apt-get install chromium)")
            return
        with browser() as opened:
            opening = [_open_s(opened, path) for _ in range(5)]
            print(f"opened and drawn in {statistics.median(opening):.2f} s (median of 5)")
            if given.screenshots:
                screenshots(opened, path, given.screenshots)


def _open_s(opened: Any, path: Path) -> float:
    page = opened.new_page(viewport={"width": 1280, "height": 900})
    started_s = time.perf_counter()
    page.goto(path.as_uri())
    page.evaluate(DRAWN)
    took_s = time.perf_counter() - started_s
    page.close()
    return took_s


def screenshots(opened: Any, path: Path, folder: Path) -> None:
    """The page as a whole, light and dark, as wide as a desktop and as a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, width, scheme in (
        ("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light"),
    ):  # fmt: skip
        page = opened.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.goto(path.as_uri())
        page.evaluate(DRAWN)
        page.screenshot(path=folder / f"report-{name}.png", full_page=True)
        print(folder / f"report-{name}.png")
        page.close()


if __name__ == "__main__":
    main()
