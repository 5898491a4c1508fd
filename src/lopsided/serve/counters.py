"""What a server counts, as the text that Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64)


class Counted:
    """A counter with labels."""

    kind = "counter"

    def __init__(self, name: str, words: str, labels: Sequence[str] = ()) -> None:
        self.name, self.words, self._labels = name, words, tuple(labels)
        self._values: Counter[tuple[str, ...]] = Counter()
        self._lock = Lock()

    def add(self, *labels: str, number: float = 1) -> None:
        """Add a number to the counter of some labels."""
        with self._lock:
            self._values[labels] += number  # type: ignore[assignment]

    def lines(self) -> list[str]:
        """Return the counter as text."""
        with self._lock:
            values = sorted(self._values.items()) or ([] if self._labels else [((), 0)])
        head = [f"# HELP {self.name} {self.words}", f"# TYPE {self.name} {self.kind}"]
        return [
            *head,
            *(f"{self.name}{_braced(dict(zip(self._labels, key, strict=True)))} {value:g}" for key, value in values),
        ]


class Histogram:
    """Numbers, counted in ranges."""

    def __init__(self, name: str, words: str, bounds: Sequence[float]) -> None:
        self.name, self.words, self._bounds = name, words, tuple(bounds)
        self._numbers, self._sum = [0] * (len(bounds) + 1), 0.0
        self._lock = Lock()

    def add(self, value: float) -> None:
        """Count a number."""
        with self._lock:
            self._numbers[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def lines(self) -> list[str]:
        """Return the histogram as text."""
        with self._lock:
            numbers, total = list(self._numbers), self._sum
        lines = [f"# HELP {self.name} {self.words}", f"# TYPE {self.name} histogram"]
        below = 0
        for bound, number in zip((*(f"{bound:g}" for bound in self._bounds), "+Inf"), numbers, strict=True):
            below += number
            lines.append(f'{self.name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{self.name}_sum {total:.9g}", f"{self.name}_count {below}"]


class Counters:
    """Everything that a server counts."""

    def __init__(self) -> None:
        self.requests = Counted("lopsided_requests_total", "Requests by route and status.", ("route", "status"))
        self.seconds = Histogram("lopsided_request_seconds", "Time from the head of a request to its answer.", SECONDS)
        self.images = Counted("lopsided_images_total", "Images by the decided class.", ("predicted",))
        self.unreadable = Counted("lopsided_unreadable_total", "Images that could not be read.")
        self.unfamiliar = Counted("lopsided_unfamiliar_total", "Images unlike the training images.")
        self.batches = Histogram("lopsided_batch_images", "Images that were scored together.", IMAGES)
        self.marks = Counted("lopsided_marks_total", "Marks by kind.", ("mark",))

    def text(self, gauges: Mapping[str, tuple[str, float]], facts: Mapping[str, str]) -> str:
        """Return all counters. ``gauges`` have words and a value; ``facts`` describe the model."""
        lines = [line for part in vars(self).values() for line in part.lines()]
        for name, (words, value) in gauges.items():
            lines += [f"# HELP {name} {words}", f"# TYPE {name} gauge", f"{name} {value:g}"]
        lines += ["# HELP lopsided_model The model that answers.", "# TYPE lopsided_model gauge"]
        return "\n".join([*lines, f"lopsided_model{_braced(facts)} 1"]) + "\n"


def _braced(labels: Mapping[str, str]) -> str:
    """Return labels as Prometheus writes them.

    >>> _braced({"predicted": 'a "b"'})
    '{predicted="a \\\\"b\\\\""}'
    """
    if not labels:
        return ""
    escaped = {
        name: value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"") for name, value in labels.items()
    }
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped.items()) + "}"
