"""Format numbers and names for a page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from markupsafe import Markup, escape

from lopsided.evaluation.metric_table import decimals
from lopsided.runs.metrics import Estimate

DASH, MINUS, TIMES = "\N{EN DASH}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
ETA, GAMMA = "\N{GREEK SMALL LETTER ETA}", "\N{GREEK SMALL LETTER GAMMA}"

_LONE = re.compile("[\ud800-\udc7f\udd00-\udfff]")  # Surrogates that do not encode a byte of a file name.
# Control characters and characters that change the text direction. Combining marks of letters are not included.
_STEERING = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Return an untrusted name, possibly a file name of arbitrary bytes, as valid text for a UTF-8 page.

    >>> clean("caf\\udce9.png")
    'caf\ufffd.png'
    >>> clean("\\ud800")
    '\ufffd'
    """
    text = _STEERING.sub("\ufffd", _LONE.sub("\ufffd", text))
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def breakable(name: str) -> Markup:
    """Return a cleaned name as HTML that may be broken after punctuation.

    >>> print(breakable("rust_heavy"))
    rust_<wbr>heavy
    """
    return Markup(re.sub(r"([_/.\-]+)(?=[^_/.\-\s])", r"\1<wbr>", str(escape(clean(name)))))


def end_of_path(name: str) -> str:
    """Return the end of a long path, which names the image.

    >>> end_of_path("/data/HAM/images/1.jpg"), end_of_path("shirt/p17/left.png")
    ('…/images/1.jpg', 'shirt/p17/left.png')
    """
    parts = name.split("/")
    return f"\N{HORIZONTAL ELLIPSIS}/{'/'.join(parts[-2:])}" if len(parts) > 3 else name


def quoted(name: str) -> str:
    """Return a class name in quotation marks.

    >>> quoted("shirt")
    '“shirt”'
    """
    return f"“{clean(name)}”"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return a list of at most ``most`` names, and the number of the rest.

    >>> listed(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    shown = list(names[:most])
    more = len(names) - len(shown)
    if more:
        return f"{', '.join(shown)} and {more:,} more"
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure with a fixed number of digits, or a dash if it is undefined.

    >>> number(0.5), number(None)
    ('0.500', '–')
    """
    return DASH if value is None or math.isnan(value) else f"{value:.{digits}f}"


def probability(value: float) -> str:
    """Return a threshold with more digits near 0 and 1.

    >>> probability(0.5), probability(0.99988), probability(0.0000123), probability(1e-12)
    ('0.500', '0.99988', '0.000012', '1.0e-12')
    """
    rest = min(value, 1 - value)
    if rest >= 0.0095 or float(number(value)) == value:
        return number(value)
    digits = 1 - math.floor(math.log10(rest))
    return f"{value:.1e}" if digits > 9 and value < 0.5 else number(value, min(max(digits, 3), 9))


def signed(value: float | None, digits: int = 3) -> str:
    """Return a difference with its sign.

    >>> signed(0.25), signed(-0.25), signed(None)
    ('+0.250', '−0.250', '–')
    """
    text = number(value, digits)
    return text if text == DASH else f"{MINUS}{text[1:]}" if text.startswith("-") else f"+{text}"


def interval(figure: Estimate) -> str:
    """Return the interval of a figure, or an empty text if it has none.

    >>> interval(Estimate(value=0.5, low=0.25, high=0.75))
    '[0.250, 0.750]'
    """
    digits = _decimals(figure)
    return "" if figure.low is None else f"[{number(figure.low, digits)}, {number(figure.high, digits)}]"


def figure_value(figure: Estimate) -> str:
    """Return the value of a figure, with as many digits as its interval.

    >>> figure_value(Estimate(value=0.5, low=0.25, high=0.75)), figure_value(Estimate(value=0.0001, low=0, high=0.0002))
    ('0.500', '0.00010')
    """
    return number(figure.value, _decimals(figure))


def _decimals(figure: Estimate) -> int:
    value, low, high = figure.value, figure.low, figure.high
    return 3 if value is None or low is None or high is None else decimals(value, low, high)


def percent(share: float, digits: int = 0) -> str:
    """Return a share in per cent.

    >>> percent(0.1), percent(0.104, 1)
    ('10 %', '10.4 %')
    """
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float) -> str:
    """Return a duration as text.

    >>> duration(31.4), duration(185), duration(7380)
    ('31 s', '3 min', '2 h 3 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
