"""The page in a real browser: it draws, it follows keys and search, it says nothing on its own.

Needs Playwright and Chromium (Debian: `apt-get install chromium`, `pip install playwright`).
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reports.shared import RESULT, shown_view

from gdp.reports.html import report_html

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


def chromium() -> str | None:
    """The browser to use, None without one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


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


pytest.importorskip("playwright", reason="the page is not opened: Playwright is not installed")
if chromium() is None:
    pytest.skip("no Chromium on the path or in CHROMIUM", allow_module_level=True)
EVIL = "</script><img src=x onerror='window.stolen=1'><script>window.stolen=1</script>"


@pytest.fixture(scope="module")
def opened() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page in which every name tries to run a script."""
    view = shown_view()
    graph = replace(
        view.problem.graph,
        op_names=("in", "a", EVIL, "c"),
        op_types=("Input", "Conv", EVIL, "Conv"),
    )
    problem = replace(view.problem, graph=graph)
    row = {"name": EVIL, "predicted_latency_s": 1e-3, "latency_s": 2e-3, "rate": 8.0,
           "latency_interval_s": (1e-3, 2e-3), "predicted_rate": 10.0,
           "rate_interval": (7.0, 9.0)}  # fmt: skip
    measured = {"rows": [row], "lines": [EVIL], "segments": []}
    file = tmp_path_factory.mktemp("page") / "report.html"
    result = {**RESULT, "costs": EVIL, "notes": [EVIL], "bound_by": EVIL}
    file.write_text(report_html(replace(view, problem=problem), result, measured))
    return file


class Opened:
    """A page that notes what it says, fetches and throws."""

    def __init__(self, opened: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.page = opened.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.said: list[str] = []
        self.fetched: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.goto(path.as_uri())
        self.drawn()

    def drawn(self) -> None:
        self.page.evaluate(DRAWN)

    def colours(self, canvas: str) -> int:
        """How many different colours a canvas shows."""
        return self.page.evaluate(
            """id => { const c = document.getElementById(id);
            const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
            const seen = new Set();
            for (let i = 0; i < d.length; i += 4)
              if (d[i + 3] == 255) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
            return seen.size }""",
            canvas,
        )


@pytest.fixture(scope="module")
def wide(opened: Any, path: Path) -> Opened:
    return Opened(opened, path)


def test_it_opens_without_a_word_a_request_or_a_stolen_script(wide: Opened, path: Path) -> None:
    assert wide.said == []
    assert wide.fetched == [path.as_uri()]
    assert wide.page.evaluate("window.stolen") is None
    assert wide.page.locator("img").count() == 0


def test_the_charts_are_drawn(wide: Opened) -> None:
    assert wide.colours("timeline-canvas") > 3
    assert wide.colours("modules-canvas") > 3
    assert wide.page.locator("#memory-charts canvas").count() == 2
    assert wide.page.locator("#legend span").count() == 2


def test_search_counts_dims_and_filters(wide: Opened) -> None:
    page = wide.page
    page.fill("#find", "M.TWO / c")
    assert page.inner_text("#found") == "1 of 3 kernels, 3 s"
    assert page.locator("#ops-table tbody tr:visible").count() == 1
    page.press("#find", "Enter")
    assert page.inner_text("#timeline-said").startswith("m.two / c · Conv on d0 · 3 s, from 5 s")
    page.fill("#find", "")
    assert page.inner_text("#found") == ""
    assert page.locator("#ops-table tbody tr:visible").count() == 3


def test_keys_zoom_move_and_choose(wide: Opened) -> None:
    page = wide.page
    shown = "[view.from / 1e9, view.to / 1e9]"
    page.focus("#timeline-canvas")
    page.keyboard.press("0")
    assert page.evaluate(shown) == [0, 8]
    page.keyboard.press("+")
    assert page.evaluate(shown) == pytest.approx([1.6, 6.4])
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(shown) == pytest.approx([0.64, 5.44])
    page.keyboard.press("0")
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    assert page.inner_text("#timeline-said").startswith("m.one / a")
    page.keyboard.press("n")
    assert page.inner_text("#timeline-said").startswith("m.two / c")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#timeline-said").startswith(f"m.two / {EVIL}")
    page.keyboard.press("0")


def test_the_pointer_drags_zooms_and_tells(wide: Opened) -> None:
    page = wide.page
    page.click("[data-zoom=all]")
    page.click("[data-zoom=in]")
    assert page.evaluate("view.to - view.from") == 4e9
    box = page.locator("#timeline-canvas").bounding_box()
    page.mouse.move(box["x"] + 600, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 600 - box["width"] / 4, box["y"] + 50)
    page.mouse.up()
    assert page.evaluate("view.from / 1e9") == pytest.approx(3.0, abs=0.05)
    page.click("[data-zoom=all]")
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 50)
    assert page.inner_text("#tip").splitlines()[:2] == ["m.two / c", "Conv on d0"]
    page.mouse.move(0, 0)


def test_modules_open_and_tell_their_share(wide: Opened) -> None:
    page = wide.page
    page.focus("#modules-canvas")
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#where").startswith("m · 6 s, 100.0% of all work")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "m.two · 5 s, 83.3% of all work · 7 B of weights, 3 ops · d0: 60% · d1: 40%" in (
        page.inner_text("#where")
    )
    page.keyboard.press("Enter")
    assert page.evaluate("icicle.root") == 3
    page.click("#up")
    assert page.evaluate("icicle.root") == 1


def test_tables_sort_by_figures(wide: Opened) -> None:
    page = wide.page
    button = page.locator("#ops-table th button", has_text="weights")
    button.press("Enter")
    cells = "[...document.querySelectorAll('#ops-table tbody tr')].map(r => r.cells[5].innerText)"
    assert page.evaluate(cells) == ["4 B", "3 B", "2 B"]
    button.press("Enter")
    assert page.evaluate(cells) == ["2 B", "3 B", "4 B"]


CONTRAST = """() => {
  const light = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const ground = (e) => { for (; e; e = e.parentElement) {
    const c = getComputedStyle(e).backgroundColor;
    if (c !== "rgba(0, 0, 0, 0)") return c } };
  let worst = 99;
  const texts = "h1, h2, a, b, span, small, p, th, td, button, output";
  for (const e of document.querySelectorAll(texts)) {
    if (!e.textContent.trim() || !e.offsetParent) continue;
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
    worst = Math.min(worst, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return worst }"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_read_in_light_and_dark(opened: Any, path: Path, scheme: str) -> None:
    """WCAG 2.2 asks for a contrast of 4.5."""
    found = Opened(opened, path, scheme=scheme)
    assert found.page.evaluate(CONTRAST) >= 4.5
    ground = "getComputedStyle(document.body).backgroundColor"
    before = found.page.evaluate(ground)
    found.page.click("#theme")
    assert found.page.evaluate(ground) != before
    assert found.page.evaluate(CONTRAST) >= 4.5
    assert found.said == []
    found.page.close()


@pytest.mark.parametrize("width", [320, 390, 768])
def test_narrow_screens_scroll_tables_and_never_the_page(
    opened: Any, path: Path, width: int
) -> None:
    found = Opened(opened, path, width=width)
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    assert found.colours("timeline-canvas") > 3
    found.page.close()


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(wide: Opened) -> None:
    page = wide.page
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas, a, [tabindex]")]
        .filter(e => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length))
        .map(e => e.outerHTML)"""
    )
    assert unnamed == []
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"theme", "find", "next", "colour", "timeline-canvas", "measure", "up",
            "modules-canvas"} <= reached  # fmt: skip
