"""A small canvas for SVG figures: text, boxes, lines, and linear or logarithmic axes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

INK, GREY, FAINT = "#24292f", "#6e7781", "#d8dee4"
BLUE, ORANGE, GREEN = "#2f6fb5", "#e08214", "#2d8659"


@dataclass
class Canvas:
    """Shapes in pixels, the origin at the top left, on white."""

    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, extra: str = ""
    ) -> None:
        """A filled rectangle."""
        self.shapes.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.2):.2f}" height="{height:.2f}" '
            f'fill="{fill}"{" " if extra else ""}{extra}/>'
        )

    def line(self, points: Sequence[tuple[float, float]], stroke: str = FAINT, width: float = 1.0,
             extra: str = "") -> None:  # fmt: skip
        """A line through points."""
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"'
            f"{' ' if extra else ''}{extra}/>"
        )

    def dot(self, x: float, y: float, fill: str, radius: float = 3.5) -> None:
        """A filled circle."""
        self.shapes.append(
            f'<circle cx="{x:.2f}" cy="{y:.2f}" r="{radius}" fill="{fill}" fill-opacity="0.8"/>'
        )

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", size: int = 13,
             fill: str = INK, bold: bool = False) -> None:  # fmt: skip
        """One line of text; `y` is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        self.shapes.append(
            f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{fill}"{weight}>{escape(words)}</text>'
        )

    def key(self, x: float, y: float, entries: Sequence[tuple[str, str]], step: float) -> None:
        """Coloured squares with their names, side by side."""
        for i, (colour, words) in enumerate(entries):
            self.box(x + i * step, y - 9, 10, 10, colour)
            self.text(x + i * step + 15, y, words, size=12, fill=GREY)

    def svg(self, title: str) -> str:
        """The file's text."""
        font = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="{font}" role="img">'
            f"<title>{escape(title)}</title>"
            f'<rect width="{self.width:g}" height="{self.height:g}" rx="6" fill="#ffffff"/>'
        )
        return "\n".join([head, *self.shapes, "</svg>", ""])
