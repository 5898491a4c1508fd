"""Plots as inline SVG. Colours and strokes are CSS classes, so a plot follows the theme of the page.

``Markup.format`` escapes every text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

Point = tuple[float, float]
Range = tuple[float, float]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round tick values within a range.

    >>> ticks(0, 1)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(1, 15)
    [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / max(most, 1)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next((scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * 0.999 / 1.25), scale * 10)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def padded(values: Iterable[float], *, floor: float | None = None, share: float = 0.06) -> Range:
    """Return the range of the values with a margin. The range does not start below ``floor``."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    room = (high - low) * share or abs(high) * share or 1.0
    return (low - room if floor is None else max(low - room, floor)), high + room


def short(value: float) -> str:
    """Return the text of an axis tick, without trailing zeros.

    >>> short(0.2), short(60.0), short(1e-05)
    ('0.2', '60', '1e-05')
    """
    return f"{value:.6g}"


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _id(identity: str) -> str:
    return Markup(' id="{}"').format(identity) if identity else ""


def _title(title: str) -> str:
    return Markup("<title>{}</title>").format(title) if title else ""


@dataclass
class Plot:
    """A plot with axes. ``label`` is the description for screen readers."""

    label: str
    x: Range
    y: Range
    x_label: str = ""
    y_label: str = ""
    x_ticks: Sequence[float] | None = None
    y_ticks: Sequence[float] | None = None
    x_names: Sequence[str] | None = None
    width: int = 440
    height: int = 280
    left: int = 46
    right: int = 14
    top: int = 14
    bottom: int = 42
    identity: str = ""
    parts: list[Markup] = field(default_factory=list)

    def px(self, x: float) -> float:
        """Return the horizontal position of a value."""
        low, high = self.x
        return self.left + (self.width - self.left - self.right) * ((x - low) / (high - low) if high > low else 0.5)

    def py(self, y: float) -> float:
        """Return the vertical position of a value."""
        low, high = self.y
        share = (y - low) / (high - low) if high > low else 0.5
        return self.height - self.bottom - (self.height - self.top - self.bottom) * share

    def path(self, points: Iterable[Point]) -> str:
        """Return the path through points. A point at the position of the previous point is omitted."""
        text: list[str] = []
        for x, y in points:
            place = f"{_at(self.px(x))} {_at(self.py(y))}"
            if not text or text[-1][1:] != place:
                text.append(("L" if text else "M") + place)
        return "".join(text)

    def line(self, points: Sequence[Point], style: str, identity: str = "") -> None:
        """Draw a line."""
        self.parts.append(Markup('<path class="line {}"{} d="{}"/>').format(style, _id(identity), self.path(points)))

    def whisker(self, x: float, low: float, high: float, style: str) -> None:
        """Draw a vertical interval."""
        at = _at(self.px(x))
        d = f"M{at} {_at(self.py(low))}V{_at(self.py(high))}"
        self.parts.append(Markup('<path class="whisker {}" d="{}"/>').format(style, d))

    def dot(self, x: float, y: float, style: str, title: str = "", *, radius: float = 3.5, identity: str = "") -> None:
        """Draw a point. ``title`` is its tooltip."""
        self.parts.append(
            Markup('<circle class="{}"{} cx="{}" cy="{}" r="{}">{}</circle>').format(
                style, _id(identity), _at(self.px(x)), _at(self.py(y)), _at(radius), _title(title)
            )
        )

    def diamond(self, x: float, y: float, style: str, title: str = "", *, identity: str = "") -> None:
        """Draw a diamond, the mark of the validation threshold."""
        place = f"translate({_at(self.px(x))} {_at(self.py(y))})"
        self.parts.append(
            Markup('<path class="{}"{} d="M0-6 6 0 0 6-6 0Z" transform="{}"><title>{}</title></path>').format(
                style, _id(identity), place, title
            )
        )

    def rule(self, *, x: float | None = None, y: float | None = None, text: str = "", below: bool = False) -> None:
        """Draw a dashed line across the plot, with a text above or below it."""
        if y is not None:
            at = self.py(y)
            d = f"M{self.left} {_at(at)}H{self.width - self.right}"
            place = (float(self.width - self.right - 2), at + 14 if below else at - 5, "end")
        else:
            at = self.px(x or 0.0)
            d = f"M{_at(at)} {self.top}V{self.height - self.bottom}"
            late = at > self.width * 0.6
            place = (at - 5 if late else at + 5, self.top + 10.0, "end" if late else "start")
        self.parts.append(Markup('<path class="rule" d="{}"/>').format(d))
        if text:
            self.text(*place, text, "note")

    def text(self, x: float, y: float, anchor: str, text: str, style: str = "tick") -> None:
        """Draw a text at a position in pixels."""
        self.parts.append(
            Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(
                style, _at(x), _at(y), anchor, text
            )
        )

    def bar(self, x0: float, x1: float, y: float, style: str, title: str = "") -> None:
        """Draw a bar from the bottom axis."""
        top, bottom = self.py(y), self.py(self.y[0])
        numbers = (_at(self.px(x0)), _at(top), _at(max(self.px(x1) - self.px(x0), 0.5)), _at(max(bottom - top, 0)))
        self.parts.append(
            Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}">{}</rect>').format(
                style, *numbers, _title(title)
            )
        )

    def _axes(self) -> Markup:
        bottom, right = self.height - self.bottom, self.width - self.right
        marks = ticks(*self.x) if self.x_ticks is None else self.x_ticks
        names = [short(value) for value in marks] if self.x_names is None else self.x_names
        rows = ticks(*self.y, most=5) if self.y_ticks is None else self.y_ticks
        lines = "".join(f"M{self.left} {_at(self.py(value))}H{right}" for value in rows)
        parts = [Markup('<path class="grid" d="{}"/>').format(lines)]
        text = Markup('<text class="{}" x="{}" y="{}" text-anchor="{}"{}>{}</text>')
        parts += [text.format("tick", self.left - 7, _at(self.py(row) + 4), "end", "", short(row)) for row in rows]
        parts += [
            text.format("tick", _at(self.px(value)), bottom + 16, "middle", "", name)
            for value, name in zip(marks, names, strict=True)
        ]
        parts.append(Markup('<path class="axis" d="M{} {}H{}"/>').format(self.left, bottom, right))
        if self.x_label:
            parts.append(
                text.format("axis-name", _at((self.left + right) / 2), self.height - 6, "middle", "", self.x_label)
            )
        if self.y_label:
            turn = Markup(' transform="rotate(-90 11 {})"').format(_at((self.top + bottom) / 2))
            parts.append(text.format("axis-name", 11, _at((self.top + bottom) / 2), "middle", turn, self.y_label))
        return Markup("").join(parts)

    def render(self) -> Markup:
        """Return the SVG element."""
        body = self._axes() + Markup("\n").join(self.parts)
        return Markup(
            '<svg class="plot"{} viewBox="0 0 {} {}" role="img" aria-label="{}" data-box="{}">{}</svg>'
        ).format(_id(self.identity), self.width, self.height, self.label, self._box(), body)

    def _box(self) -> str:
        """Return left, right, top and bottom of the plotting area, for the script of the page."""
        return f"{self.left} {self.width - self.right} {self.top} {self.height - self.bottom}"


def strip(label: str, value: float, low: float, high: float, reference: float | None = None) -> Markup:
    """Draw one figure between 0 and 1 with its interval and the mark of a reference value."""
    width, middle = 300, 13

    def at(share: float) -> str:
        return _at(6 + (width - 12) * min(max(share, 0.0), 1.0))

    parts = [Markup('<path class="strip-axis" d="M6 {}H{}"/>').format(middle, width - 6)]
    if reference is not None:
        parts.append(Markup('<path class="strip-reference" d="M{} 2V24"/>').format(at(reference)))
    parts.append(Markup('<path class="strip-interval" d="M{} {}H{}"/>').format(at(low), middle, at(high)))
    parts.append(Markup('<circle class="strip-value" cx="{}" cy="{}" r="6"/>').format(at(value), middle))
    return Markup('<svg class="strip" viewBox="0 0 {} 26" role="img" aria-label="{}">{}</svg>').format(
        width, label, Markup("").join(parts)
    )


def small_bar(share: float, low: float, high: float) -> Markup:
    """Draw a share with its interval, as wide as a table cell. Hidden from screen readers: the number is beside it."""
    x, a, b = (_at(100 * min(max(value, 0.0), 1.0)) for value in (share, low, high))
    return Markup(
        '<svg class="small-bar" viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="small-track" width="100" height="12"/><rect class="small-fill" width="{}" height="12"/>'
        '<path class="small-interval" d="M{} 6H{}"/></svg>'
    ).format(x, a, b)


def marks(points: Iterable[Point], shape: str) -> str:
    """Return the path of points of one shape, a path relative to the point. "h0" is a dot, by the round line cap."""
    return "".join(f"M{_at(x)} {_at(y)}{shape}" for x, y in points)
