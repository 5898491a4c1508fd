"""The answer of a comparison in words: the best arm, the arms that may be as good, and which arm to take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lopsided.evaluation.intervals import UNDEFINED, Figure
from lopsided.evaluation.resampled import MOST_TIMES, cheapest_near_best, images_needed, repeats_needed, standard_error
from lopsided.recipe.words import listed
from lopsided.runs.comparison import SECONDS, WORDS, Comparison

FIGURE = "uwa"
"""The figure that decides."""


@dataclass(frozen=True)
class Needed:
    """An arm that cannot be told apart from the best arm, and what would tell them apart.

    ``below`` is how far it lies below the best arm, in points. ``repeats`` and ``images`` are the number of repeats and
    the number of images of the rarest class that would be enough; None if no reasonable number is.
    """

    arm: str
    below: Figure
    repeats: int | None
    images: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {"arm": self.arm, "below": self.below.to_dict(), "repeats": self.repeats, "images": self.images}


@dataclass(frozen=True)
class Answer:
    """What a comparison says about one scenario. ``best`` and ``chosen`` are empty without a finished run.

    ``chosen`` is the cheapest arm within one standard error of the best arm. ``incomplete`` arms lack folds that the
    others have, so they are not ranked. If the runs are not folds, ``folds`` is 0 and nothing is chosen.
    """

    best: str = ""
    value: Figure = UNDEFINED
    chosen: str = ""
    close: tuple[Needed, ...] = ()
    lower: tuple[str, ...] = ()
    incomplete: Mapping[str, int] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)
    folds: int = 0
    runs: int = 0
    rare: int = 0
    tested: int = 0
    where: str = ""
    split: str = "test"

    @property
    def repeats(self) -> int:
        """The number of complete or started repeats."""
        return -(-self.runs // self.folds) if self.folds else 0

    def sentences(self) -> list[str]:
        """Return the answer in words."""
        if not self.best:
            return [f"{self.where}, no method has a finished {'fold' if self.folds else 'run'}."]
        if not self.folds:
            return [self._best()]
        found = [f"{self.use()}." if self.use() else "", self._best(), *self._chosen()]
        found = [text for text in found if text]
        found += [self._needed(each) for each in self.close]
        found += [
            f"{arm} is not ranked, because it has {number} of {self.runs} folds."
            for arm, number in self.incomplete.items()
        ]
        return found

    def use(self) -> str:
        """Return which method to use and why; empty if there is only one, or if the runs are no folds."""
        others = [*(each.arm for each in self.close), *self.lower]
        if not self.chosen or not others:
            return ""
        on = "" if self.where == "On all images" else f" {self.where[0].lower()}{self.where[1:]}"
        on = f"{on} on your {self.tested:,} images"
        if self.lower and not self.close:
            return f"Use {self.chosen}: it is reliably better than {listed(self.lower)}{on}"
        return f"Use {self.chosen}: nothing is reliably better{on}"

    def _best(self) -> str:
        on, what = ("", "fold") if self.folds else (f" on {WORDS[self.split]} images", "run")
        number = f"{self.runs} {what}{'' if self.runs == 1 else 's'}"
        highest = f"highest balanced accuracy{on}, {self.value.value:.1f} per cent ({number})"
        text = f"{self.where}, {self.best} has the {highest}"
        close = [each.arm for each in self.close]
        have = "has" if len(close) == 1 else "have"
        parts = [f"{listed(close)} {have} no reliable difference to it"] if close else []
        parts += [f"{listed(self.lower)} {'is' if len(self.lower) == 1 else 'are'} lower"] if self.lower else []
        return "; ".join([text, *parts]) + "."

    def _chosen(self) -> list[str]:
        cost = f"{time_text(60 * self.minutes[self.chosen])} per fold"
        if not (self.close or self.lower):
            return []
        if self.chosen == self.best:
            return [f"No method within one standard error of {self.best} is clearly cheaper ({cost})."]
        against = f"{self.best} needs {time_text(60 * self.minutes[self.best])}"
        why = "is the cheapest method within one standard error of the best"
        return [f"{self.chosen} {why} ({cost}; {against})."]

    def _needed(self, needed: Needed) -> str:
        both = f"{self.best} and {needed.arm}"
        gap = f"{needed.below.value:.1f} points"
        if math.isnan(needed.below.value):
            return f"{both} have no fold in common."
        if needed.repeats is None and needed.images is None:
            if needed.below.value < 0.05:
                return (
                    f"{both} do not differ in balanced accuracy, so more repeats or images would not show a difference."
                )
            most = f"more than {MOST_TIMES:,.0f} times as many rare images"
            return f"{both} differ by {gap}. It would take {most} to show that."
        ways = []
        if needed.repeats is not None:
            ways.append(f"about {needed.repeats} repeats instead of {self.repeats}")
        if needed.images is not None:
            ways.append(f"about {needed.images:,} rare images instead of {self.rare:,}")
        no_repeats = " More repeats of the same images would not be enough." if needed.repeats is None else ""
        return f"{both} differ by {gap}. It would take {' or '.join(ways)} to show that.{no_repeats}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "best": self.best or None,
            "uwa": self.value.to_dict(),
            "chosen": self.chosen or None,
            "cannot_be_told_apart": [each.to_dict() for each in self.close],
            "lower": list(self.lower),
            "incomplete": dict(self.incomplete),
            "minutes_per_fold": {arm: round(minutes, 4) for arm, minutes in self.minutes.items()},
            "sentences": self.sentences(),
        }


def answer(comparison: Comparison, scenario: str | None) -> Answer:
    """Return the answer for one scenario.

    The best arm is known only after looking at the figures, so its differences are corrected for all pairs of arms.
    """
    where = "On all images" if scenario is None else f"At {scenario}"
    folds, split = comparison.folds or 0, "test"
    if not folds and "held_out" in comparison.splits:
        split = "held_out"
    there = {arm: e for arm in comparison.arms if (e := comparison.entry(scenario, arm, split, FIGURE)) is not None}
    if not there:
        return Answer(where=where, folds=folds)
    runs = max(len(entry.runs) for entry in there.values())
    found = {arm: entry for arm, entry in there.items() if not folds or len(entry.runs) == runs}
    minutes = {arm: _minutes(comparison, scenario, arm) for arm in there}
    best = max(found, key=lambda arm: (found[arm].mean.value, -minutes[arm] if folds else 0.0))
    level = comparison.level(len(found) * (len(found) - 1) // 2)
    gaps = {arm: found[best].less(entry, level) for arm, entry in found.items() if arm != best}
    lower = tuple(arm for arm, gap in gaps.items() if gap is not None and gap.differs)
    values = {arm: [own - other for own, other in found[best].pairs(found[arm])] for arm in gaps}
    errors = {arm: standard_error(each, found[best].overlap) if folds and each else 0.0 for arm, each in values.items()}
    below = {arm: found[best].mean.value - found[arm].mean.value for arm in gaps}
    close = tuple(
        Needed(
            arm,
            UNDEFINED if gap is None else gap.figure,
            repeats_needed(values[arm], folds, found[best].overlap, level) if folds and values[arm] else None,
            images_needed(values[arm], comparison.rare, found[best].overlap, level) if folds and values[arm] else None,
        )
        for arm, gap in gaps.items()
        if arm not in lower
    )
    return Answer(
        best=best,
        value=found[best].mean,
        chosen=cheapest_near_best(best, below, errors, minutes) if folds else "",
        close=close,
        lower=lower,
        incomplete={arm: len(entry.runs) for arm, entry in there.items() if arm not in found},
        minutes=minutes,
        folds=folds,
        runs=len(found[best].runs),
        rare=comparison.rare,
        tested=comparison.tested,
        where=where,
        split=split,
    )


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison for JSON, with its answer for each scenario if the runs are folds."""
    answers = [answer(comparison, scenario) for scenario in comparison.scenarios]
    found = {**comparison.to_dict(), "sentences": [text for each in answers for text in each.sentences()]}
    if comparison.folds is not None:
        pairs = zip(comparison.scenarios, answers, strict=True)
        found["answers"] = [{"scenario": scenario, **each.to_dict()} for scenario, each in pairs]
    return found


def time_text(seconds: float) -> str:
    """Return the time of a run as text.

    >>> time_text(0.62), time_text(45), time_text(740)
    ('0.6 s', '45 s', '12.3 minutes')
    """
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.{int(seconds < 10)}f} s"


def _minutes(comparison: Comparison, scenario: str | None, arm: str) -> float:
    entry = comparison.entry(scenario, arm, "test", SECONDS)
    return 0.0 if entry is None else entry.mean.value / 60
