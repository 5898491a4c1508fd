"""Compare methods from the records of a sweep: means, intervals, paired differences. Needs no torch.

A method is one treatment: all fields of the recipe except data, seed and class proportions. An entry is one metric of
one method in one scenario: a value per run, and the mean with Student's 95 % interval. It never pools runs of different
treatments. A difference between two methods uses the pairs of runs that saw the same data with the same seed. If the
runs of a method are folds of the same images, their training images overlap, and the intervals have the variance of
Nadeau and Bengio.

Each model is evaluated on two sets of images: ``test``, and ``held_out``, equally many images of each class that the
scenario did not draw. Held-out accuracy is the mean of the recalls weighted by the scenario's proportions: an estimate
of the accuracy on a large set with these proportions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from statistics import fmean
from typing import Any, NamedTuple

from lopsided.data.scenarios import parse_scenario
from lopsided.errors import InputError, sentence
from lopsided.evaluation.intervals import Estimate, mean_interval, paired_difference
from lopsided.evaluation.metric_table import METRICS, is_share
from lopsided.recipe.words import shown
from lopsided.runs.keys import Treatment
from lopsided.runs.records import ROUNDING, Record

SPLITS = ("test", "held_out")
COMPARED_METRICS = ("uwa", "uwa_balanced", "uwa_tuned", "uwa_plain", "accuracy", "auroc", "log_loss")
BY_RULE = {"uwa_balanced": "balanced", "uwa_tuned": "tuned", "uwa_plain": "plain"}
"""The metrics of one model by another decision rule than its own."""
RECALL, SECONDS = "recall:", "seconds"
"""``recall:0`` is the recall of the first class. The seconds of a run are an entry of the split ``test``."""

WORDS = {
    **{name: metric.label for name, metric in METRICS.items()},
    **{name: f"{METRICS['uwa'].label} by the rule {rule}" for name, rule in BY_RULE.items()},
    "seconds": "seconds",
    "test": "test",
    "held_out": "held-out",
}
ALPHA = 0.05
FOLD_RULE = (
    "A difference compares folds with the same test images. Its interval is the corrected resampled t interval of "
    "Nadeau and Bengio, because the training images of folds overlap. With Bonferroni's correction for the number of "
    "methods, the intervals of all differences to the baseline hold together at 95 %. Metrics are not corrected for."
)
RULE = (
    "A difference compares runs that saw the same data with the same seed; its interval is Student's. With "
    "Bonferroni's correction for the number of methods, the intervals of all differences to the baseline hold "
    "together at 95 %. Scenarios and metrics are not corrected for."
)

Key = tuple[str | None, str, str, str]
"""Scenario, method, split, metric."""


class Run(NamedTuple):
    """The value of a metric in one run. Two runs form a pair if they have the same data and the same seed."""

    data: str
    seed: int
    value: float
    fold: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON. A run of a seed has no fold."""
        return {name: value for name, value in self._asdict().items() if value is not None}


@dataclass(frozen=True)
class Entry:
    """One metric of one method in one scenario; shares are in per cent.

    ``overlap`` is 0, or for folds the number of images in a fold divided by the number of the other images.
    """

    runs: tuple[Run, ...]
    overlap: float = 0.0

    @property
    def mean(self) -> Estimate:
        """The mean over the runs, with its 95 % interval."""
        return mean_interval([run.value for run in self.runs], overlap=self.overlap)

    def pairs(self, other: Entry) -> list[tuple[float, float]]:
        """Return the values of both methods in the runs that saw the same data with the same seed."""
        theirs = {run[:2]: run.value for run in other.runs}
        return [(run.value, theirs[run[:2]]) for run in self.runs if run[:2] in theirs]

    def less(self, other: Entry, level: float, same: float = ROUNDING) -> Difference | None:
        """Return the mean difference to another method over their pairs of runs; None without a pair."""
        pairs = self.pairs(other)
        if not pairs:
            return None
        own, base = zip(*pairs, strict=True)
        overlap = max(self.overlap, other.overlap)
        return Difference(paired_difference(own, base, level, same=same, overlap=overlap), len(pairs))


@dataclass(frozen=True)
class Difference:
    """The difference between two methods in points, and the number of pairs of runs."""

    estimate: Estimate
    pairs: int

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 0."""
        return self.estimate.leaves_out_0


@dataclass(frozen=True)
class Comparison:
    """Methods side by side on one source. A cell without a finished run has no entry."""

    source: str
    classes: tuple[str, ...]
    methods: tuple[str, ...]
    baseline: str
    scenarios: tuple[str | None, ...]
    entries: Mapping[Key, Entry]
    about: Mapping[str, str]
    """A description of each method."""
    passed_over: int
    """The number of runs ignored because an earlier run has the same method, data and seed."""
    folds: int | None = None
    """The number of folds if the runs are folds."""
    rare: int = 0
    """The number of images of the rarest class in all folds of a repeat."""
    tested: int = 0
    """The number of images in all folds of a repeat."""

    @property
    def rule(self) -> str:
        """The sentences that explain the intervals."""
        return RULE if self.folds is None else FOLD_RULE

    @property
    def splits(self) -> tuple[str, ...]:
        """The sets of images for which there are metrics."""
        return tuple(split for split in SPLITS if any(key[2] == split for key in self.entries))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics for which there are values."""
        known = (*COMPARED_METRICS, *(f"{RECALL}{i}" for i in range(len(self.classes))), SECONDS)
        return tuple(metric for metric in known if any(key[3] == metric for key in self.entries))

    def word(self, metric: str) -> str:
        """Name a metric."""
        if metric.startswith(RECALL):
            return f"recall of {self.classes[int(metric.removeprefix(RECALL))]}"
        return WORDS[metric]

    def images(self, split: str) -> str:
        """Name the images of a split."""
        return "out-of-fold" if self.folds is not None and split == "test" else WORDS[split]

    def entry(self, scenario: str | None, method: str, split: str, metric: str) -> Entry | None:
        """Return an entry, or None if there is no run."""
        return self.entries.get((scenario, method, split, metric))

    def difference(
        self, scenario: str | None, method: str, split: str, metric: str, *, to: str | None = None, comparisons: int = 0
    ) -> Difference | None:
        """Return the difference of a method to another one, by default the baseline; None without a pair of runs.

        The interval is corrected for ``comparisons``, by default the number of the other methods.
        """
        to = self.baseline if to is None else to
        own, other = self.entry(scenario, method, split, metric), self.entry(scenario, to, split, metric)
        if own is None or other is None or method == to:
            return None
        same = ROUNDING if is_share(metric) else ROUNDING / 100
        return own.less(other, self.level(comparisons), same)

    def level(self, comparisons: int = 0) -> float:
        """Return the level of one interval if ``comparisons`` intervals hold together at 95 %.

        The default is the number of the methods besides the baseline.
        """
        return 1 - ALPHA / max(comparisons or len(self.methods) - 1, 1)

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "source": self.source,
            "classes": list(self.classes),
            "methods": [{"name": method, "about": self.about.get(method, "")} for method in self.methods],
            "baseline": self.baseline,
            "scenarios": list(self.scenarios),
            "entries": [self._to_dict(key, entry) for key, entry in self.entries.items()],
            "rule": self.rule,
            **({} if self.folds is None else {"folds": self.folds, "rare": self.rare}),
        }

    def _to_dict(self, key: Key, entry: Entry) -> dict[str, Any]:
        scenario, method, split, metric = key
        difference = self.difference(*key)
        return {
            "scenario": scenario,
            "method": method,
            "split": split,
            "metric": self.word(metric) if metric.startswith(RECALL) else metric,
            "runs": [run.to_dict() for run in entry.runs],
            "mean": entry.mean.to_dict(),
            "difference": None if difference is None else difference.estimate.to_dict(),
            "pairs": 0 if difference is None else difference.pairs,
        }


def compare(
    records: Iterable[Record],
    *,
    methods: Mapping[Treatment, str] | None = None,
    baseline: str | None = None,
    scenarios: Sequence[str | None] | None = None,
    source: str = "",
) -> Comparison:
    """Arrange the records of one source by method and scenario; records of treatments not in ``methods`` are ignored.

    Without ``methods``, every treatment is a method, named by ``name_methods``. The default baseline is the first one.
    ``source`` names the data if there are no records.
    """
    records = sorted(records, key=lambda record: (record.seed, 0 if record.fold is None else record.fold.fold))
    methods = name_methods(records) if methods is None else methods
    chosen = [record for record in records if record.treatment in methods]
    names = tuple(dict.fromkeys(methods.values()))
    if baseline is not None and baseline not in names:
        raise InputError(sentence(f"the baseline must be one of the methods, {', '.join(names)}", shown(baseline)))
    if scenarios is None:
        scenarios = sorted({record.scenario for record in chosen}, key=lopsidedness)
    found: dict[Key, dict[tuple[str, int], Run]] = {}
    overlaps: dict[tuple[str | None, str], list[float]] = {}
    seen: Counter[tuple[Treatment, str | None, str, int]] = Counter()
    for record in chosen:
        place = record.treatment, record.scenario, record.data, record.seed
        seen[place] += 1
        if record.scenario in scenarios and seen[place] == 1:
            overlaps.setdefault((record.scenario, methods[record.treatment]), []).append(overlap_of(record))
            for split, metric, value in values_of(record):
                runs = found.setdefault((record.scenario, methods[record.treatment], split, metric), {})
                fold = None if record.fold is None else record.fold.fold
                runs[record.data, record.seed] = Run(record.data, record.seed, value, fold)
    order = {name: i for i, name in enumerate(names)}
    keys = sorted(found, key=lambda key: (list(scenarios).index(key[0]), order[key[1]]))
    return Comparison(
        source=source_of(chosen) or source,
        classes=_classes(chosen),
        methods=names,
        baseline=(names[0] if names else "") if baseline is None else baseline,
        scenarios=tuple(scenarios),
        entries={key: Entry(tuple(found[key].values()), fmean(overlaps[key[:2]])) for key in keys},
        about={methods[record.treatment]: _about(record) for record in reversed(chosen)},
        passed_over=sum(seen.values()) - len(seen),
        folds=next((record.fold.folds for record in chosen if record.fold is not None), None),
        rare=max((r.test.minority + r.fold.rest_minority for r in chosen if r.fold is not None), default=0),
        tested=max((r.test.images + r.fold.rest for r in chosen if r.fold is not None), default=0),
    )


def overlap_of(record: Record) -> float:
    """Return the test images of a fold divided by the other images; 0 if the run is no fold.

    Folds of groups can share a rare class less evenly than all images, so the larger ratio of the two counts.
    """
    fold = record.fold
    if fold is None:
        return 0.0
    rare = record.test.minority / fold.rest_minority if fold.rest_minority else 0.0
    return max(record.test.images / fold.rest, rare)


def name_methods(records: Iterable[Record], order: Sequence[str] = ()) -> dict[Treatment, str]:
    """Name every treatment by its method, or else by its loss. If names are equal, add in parentheses what differs.

    Treatments that differ in nothing that a record holds share a name if no scenario has runs of both: these are the
    scenarios of one method, with other totals. Otherwise they are numbered. The methods in ``order`` come first.
    """
    first: dict[Treatment, Record] = {}
    scenarios: dict[Treatment, set[str | None]] = {}
    for record in records:
        first.setdefault(record.treatment, record)
        scenarios.setdefault(record.treatment, set()).add(record.scenario)
    alike: dict[str, list[Treatment]] = {}
    for treatment, record in first.items():
        alike.setdefault(record.compared_as or record.loss.label, []).append(treatment)
    found: dict[Treatment, str] = {}
    taken: dict[str, set[str | None]] = {}
    for name, treatments in alike.items():
        traits = {treatment: _traits(first[treatment]) for treatment in treatments}
        for treatment, own in traits.items():
            differing = [trait for i, trait in enumerate(own) if any(other[i] != trait for other in traits.values())]
            text = f"{name} ({', '.join(filter(None, differing))})" if any(differing) else name
            numbered = chain([text], (f"{text} ({number})" for number in count(2)))
            free = next(each for each in numbered if not taken.get(each, set()) & scenarios[treatment])
            taken.setdefault(free, set()).update(scenarios[treatment])
            found[treatment] = free
    rank = {name: i for i, name in enumerate(order)}
    place = {treatment: rank.get(record.compared_as or "", len(rank)) for treatment, record in first.items()}
    return {treatment: found[treatment] for treatment in sorted(first, key=place.__getitem__)}


def _traits(record: Record) -> tuple[str, ...]:
    """Return what a record holds about its treatment, in words that tell two methods of one name apart."""
    return (
        record.loss.label,
        record.method,
        "" if record.classifier_loss is None else f"classifier {record.classifier_loss.label}",
        record.encoder,
        f"weights {record.weights}",
        "" if record.image_size is None else f"{record.image_size} px",
        _epochs(record),
        f"split {record.split}",
    )


def _epochs(record: Record) -> str:
    return "" if not record.epochs else f"{' + '.join(map(str, record.epochs))} epochs"


def _about(record: Record) -> str:
    size = "" if record.image_size is None else f" at {record.image_size} px"
    parts = [record.loss.label, record.method, f"{record.encoder}{size}", _epochs(record)]
    return ", ".join(filter(None, parts))


def source_of(records: Iterable[Record]) -> str | None:
    """Return the source of all records; raise an error if there are several."""
    sources = dict.fromkeys(record.source for record in records)
    if len(sources) > 1:
        do = "Keep the records of one source, or name its data in a recipe."
        raise InputError(f"The records are of several sources: {', '.join(map(shown, sources))}. {do}")
    return next(iter(sources), None)


def _classes(records: Sequence[Record]) -> tuple[str, ...]:
    """Return the names of the classes, or numbers if the records disagree."""
    named = {record.classes for record in records}
    if len(named) == 1:
        return next(iter(named))
    return tuple(f"class {i + 1}" for i in range(max((len(r.test.recalls) for r in records), default=0)))


def values_of(record: Record) -> Iterator[tuple[str, str, float]]:
    """Yield the split, name and value of each metric of a run."""
    for split in SPLITS:
        scores = record.test if split == "test" else record.held_out
        if scores is None:
            continue
        for metric in COMPARED_METRICS:
            value = value_of(record, split, metric)
            if value is not None:
                yield split, metric, value
        for i, recall in enumerate(scores.recalls):
            if not math.isnan(recall):
                yield split, f"{RECALL}{i}", 100 * recall
    yield "test", SECONDS, record.seconds


def value_of(record: Record, split: str, metric: str) -> float | None:
    """Return one of ``COMPARED_METRICS`` of a run, shares in per cent, or None."""
    scores = record.test if split == "test" else record.held_out
    if scores is None:
        return None
    if not is_share(metric):
        return scores.log_loss
    value = dict(scores.rules).get(BY_RULE[metric]) if metric in BY_RULE else getattr(scores, metric)
    shares = None if record.scenario is None else parse_scenario(record.scenario).proportion
    if metric != "accuracy" or split == "test" or shares is None or len(shares) != len(scores.recalls):
        return None if value is None else 100 * float(value)
    weighted = math.fsum(share * recall for share, recall in zip(shares, scores.recalls, strict=True))
    return None if math.isnan(weighted) else weighted


def lopsidedness(scenario: str | None) -> tuple[float, str]:
    """Return the sort key of a scenario: the share of the majority."""
    first = (scenario or "").partition(":")[0]
    return (float(first) if first.replace(".", "", 1).isdigit() else 0.0, scenario or "")
