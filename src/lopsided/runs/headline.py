"""What a run found, in one line per rare class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lopsided.evaluation.intervals import share_interval

MOST_CLASSES = 3
"""The largest number of classes with a line. All classes are in the table of the command and on the page."""
LEVEL = 0.95
"""The level of the interval of false alarms, if these are all that a run can say."""


@dataclass(frozen=True)
class Headline:
    """How many images of a class the model finds, and how many others it takes for that class."""

    label: str
    found: int
    images: int
    low: float | None
    high: float | None
    false_alarms: int
    others: int

    def words(self, label: str | None = None) -> str:
        """Return the counts as text. ``label`` replaces the name of the class.

        >>> Headline("shirt", 20, 24, 0.64, 0.93, 46, 300).words()
        'shirt: finds 20 of 24 (83 %, 64 to 93 %); 46 false alarms among 300 other images'
        >>> Headline("unusual", 0, 0, None, None, 10, 200).words()
        'unusual: no image was tested; 10 false alarms among 200 other images (5.0 %, 2.7 to 9.0 %)'
        """
        name = self.label if label is None else label
        if not self.images:
            alarms = share_interval(self.false_alarms / max(self.others, 1), self.others, LEVEL)
            value, low, high = (100 * part for part in (alarms.value, alarms.low, alarms.high))
            share = f" ({value:.1f} %, {low:.1f} to {high:.1f} %)"
            return f"{name}: no image was tested; {self._alarms()}{share if self.others else ''}"
        return f"{name}: finds {self.found:,} of {self.images:,} ({self._share()}); {self._alarms()}"

    def title(self, label: str) -> str:
        """Return the counts as the title of a page.

        >>> Headline("shirt", 20, 24, 0.64, 0.93, 46, 300).title("shirts")
        'Finds 20 of 24 shirts (83 %, 64 to 93 %) with 46 false alarms'
        """
        if not self.images:
            return f"No image of {label} was tested; {self._false()}"
        return f"Finds {self.found:,} of {self.images:,} {label} ({self._share()}) with {self._false()}"

    def _share(self) -> str:
        share = f"{100 * self.found / self.images:.0f} %"
        if self.low is not None and self.high is not None:
            share += f", {100 * self.low:.0f} to {100 * self.high:.0f} %"
        return share

    def _false(self) -> str:
        return f"{self.false_alarms:,} false alarm{'' if self.false_alarms == 1 else 's'}"

    def _alarms(self) -> str:
        return f"{self._false()} among {self.others:,} other image{'' if self.others == 1 else 's'}"


def headlines(evaluation: Mapping[str, Any]) -> list[Headline]:
    """Return the headlines of the rarest classes of an evaluation in ``metrics.json``, the rarest first.

    The most frequent class has none.
    """
    rows, confusion = evaluation["per_class"], evaluation["confusion"]
    by_size = sorted(range(len(rows)), key=lambda place: rows[place]["support"])
    total = sum(row["support"] for row in rows)
    lines = []
    for place in by_size[:-1][:MOST_CLASSES]:
        row, decided = rows[place], sum(line[place] for line in confusion)
        hits, recall = confusion[place][place], row["recall"]
        alarms, others = decided - hits, total - row["support"]
        lines.append(Headline(row["label"], hits, row["support"], recall["low"], recall["high"], alarms, others))
    return lines


def judged_split(metrics: Mapping[str, Any]) -> str | None:
    """Return the split whose metrics say most about new images: test, or else val; None if there is neither."""
    return next((split for split in ("test", "val") if metrics.get(split) is not None), None)
