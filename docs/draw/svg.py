"""Writes small pictures as SVG: boxes, lines, arrows and words, nothing else."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

INK = "#1f2933"
GREY = "#8a94a0"
PALE = "#dfe3e8"
PANEL = "#f5f7f9"
KEPT = "#2f6db3"
LINK = "#d1560a"
FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


class Picture:
    """A picture of the given size; widths are those at which fonts are legible."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" font-family="{FONT}">'
        )
        self._parts = [
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "none",
        stroke: str = "none",
        radius: float = 2,
        dash: str = "",
    ) -> None:
        """Draws a rectangle whose upper left corner is (x, y)."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{radius:g}" fill="{fill}" stroke="{stroke}"{dashed}/>'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        color: str = INK,
        width: float = 1.5,
        dash: str = "",
    ) -> None:
        """Draws a line through the points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" '
            f'stroke-width="{width:g}"{dashed}/>'
        )

    def head(self, x: float, y: float, dx: int, dy: int, color: str = INK) -> None:
        """Draws an arrow head with its point at (x, y), towards (dx, dy)."""
        back_x, back_y = x - 8 * dx, y - 8 * dy
        points = (
            (x, y),
            (back_x + 4.5 * dy, back_y + 4.5 * dx),
            (back_x - 4.5 * dy, back_y - 4.5 * dx),
        )
        path = " ".join(f"{a:g},{b:g}" for a, b in points)
        self._parts.append(f'<polygon points="{path}" fill="{color}"/>')

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        color: str = INK,
        width: float = 1.5,
        both: bool = False,
    ) -> None:
        """Draws a level or upright arrow, with heads at one end or both."""
        dx = (end[0] > start[0]) - (end[0] < start[0])
        dy = (end[1] > start[1]) - (end[1] < start[1])
        tail = (start[0] + 6 * dx, start[1] + 6 * dy) if both else start
        self.line((tail, (end[0] - 6 * dx, end[1] - 6 * dy)), color, width)
        self.head(*end, dx, dy, color)
        if both:
            self.head(*start, -dx, -dy, color)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 13,
        color: str = INK,
        anchor: str = "middle",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Writes lines of text, the first with its base line at y."""
        style = ' font-weight="bold"' if bold else ""
        if mono:
            style += " font-family=\"Menlo, Consolas, 'DejaVu Sans Mono', monospace\""
        for number, words_of_line in enumerate(words.split("\n")):
            self._parts.append(
                f'<text x="{x:g}" y="{y + number * size * 1.25:g}" '
                f'font-size="{size:g}" text-anchor="{anchor}" fill="{color}"{style}>'
                f"{escape(words_of_line)}</text>"
            )

    def svg(self) -> str:
        """Gives the picture as text."""
        return "\n".join([self._head, *self._parts, "</svg>", ""])
