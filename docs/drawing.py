"""What the pictures of these documents are drawn with: boxes, lines of text and arrows, as SVG."""

from typing import Final, Literal
from xml.etree import ElementTree

INK: Final = "#1f2933"
MUTED: Final = "#52606d"
LINE: Final = "#9aa5b1"

_FONT: Final = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
_RADIUS: Final = 10.5

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]


class Picture:
    """An SVG picture, drawn from back to front. What it says depends on its calls alone, byte for byte.

    Args:
        width: In pixels, like all coordinates.
        height: The same.
        title: What a reader hears who does not see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {width:g} {height:g}",
                "width": f"{width:g}",
                "height": f"{height:g}",
                "font-family": _FONT,
                "role": "img",
            },
        )
        ElementTree.SubElement(self._root, "title").text = title

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "#ffffff",
        stroke: str = LINE,
        radius: float = 8,
        weight: float = 1.2,
    ) -> None:
        """Draw a rectangle with round corners."""
        place = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
        self._add("rect", **place, fill=fill, stroke=stroke, stroke_width=weight)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        color: str = INK,
        bold: bool = False,
        anchor: Anchor = "start",
    ) -> None:
        """Write a line of which the base begins, has its middle, or ends at a point."""
        weight = {"font_weight": "bold"} if bold else {}
        self._add("text", x=x, y=y, fill=color, font_size=size, text_anchor=anchor, **weight).text = text

    def number(self, x: float, y: float, number: int, color: str) -> None:
        """Draw the number of a function in the walk."""
        self._add("circle", cx=x, cy=y, r=_RADIUS, fill=color, stroke="#ffffff", stroke_width=1.5)
        label = {"text_anchor": "middle", "font_size": 11.5, "font_weight": "bold", "fill": "#ffffff"}
        self._add("text", x=x, y=y + 4, **label, **{"class": "number"}).text = str(number)

    def numbered(self, x: float, y: float, number: int, text: str, color: str) -> None:
        """Draw a number, with its middle at a point, and what it means beside it."""
        self.number(x, y, number, color)
        self.text(x + 15, y + 4, text, color=color)

    def arrow(self, *points: Point, color: str, weight: float = 1.8, dashed: bool = False) -> None:
        """Draw a line along points, with a head at its end that points along one of the axes."""
        (from_x, from_y), (x, y) = points[-2:]
        ahead_x, ahead_y = (x > from_x) - (x < from_x), (y > from_y) - (y < from_y)
        length, half = 7 + 2 * weight, 3 + 1.2 * weight
        back_x, back_y = x - length * ahead_x, y - length * ahead_y
        line = " ".join(f"{px:g},{py:g}" for px, py in [*points[:-1], (back_x, back_y)])
        dash = {"stroke_dasharray": "5 4"} if dashed else {}
        stroke = {"stroke": color, "stroke_width": weight, "stroke_linejoin": "round", **dash}
        self._add("polyline", points=line, fill="none", **stroke)
        head = [
            (x, y),
            (back_x - half * ahead_y, back_y + half * ahead_x),
            (back_x + half * ahead_y, back_y - half * ahead_x),
        ]
        self._add("polygon", points=" ".join(f"{px:g},{py:g}" for px, py in head), fill=color)

    def to_svg(self) -> str:
        """Return the file's text."""
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, tag: str, **attributes: object) -> ElementTree.Element:
        written = {
            name.replace("_", "-"): f"{value:g}" if isinstance(value, int | float) else str(value)
            for name, value in attributes.items()
        }
        return ElementTree.SubElement(self._root, tag, written)
