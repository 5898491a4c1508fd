"""Verdicts on the paper's claims, from paired runs. Needs no torch.

``RULE`` is the rule. A claim can be true in one or more ways. A way is a set of comparisons: "best of all" is one way
with a comparison to each rival, "some value is better" has one way per value, with one comparison each. Runs of one
seed share their images, their split and their initial weights, so a comparison is the difference within a seed. With k
ways, a claim would be supported by chance up to k times as often, and with k comparisons in a way be contradicted so;
Bonferroni's correction prevents both. A claim that is not false is contradicted in at most 2.5 % of all repetitions.

Fewer than three paired runs give no verdict: with few images, figures are so coarse that two differences are often
equal. Differences that are all equal have no interval and give no verdict either. A way with a missing comparison
cannot support a claim, and a missing comparison cannot contradict it.

The rise of the claim on eta is computed from the straight line through the differences of the scenarios. For two
scenarios it is the second difference minus the first.

``BLIND`` says what the rule does not see. A verdict holds for this protocol only. The interval of "cannot tell" shows
how large an undetected difference may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Any, Literal, TypeAlias

from lopsided.evaluation.intervals import Estimate, mean_interval
from lopsided.paper.protocol import CL, WORDS, Setting, published
from lopsided.runs.comparison import ALPHA
from lopsided.runs.records import ROUNDING

Key: TypeAlias = tuple[str | None, Setting, str, str]
"""Scenario, loss, split, figure."""

Values: TypeAlias = Mapping[Key, Mapping[int, float]]
"""Per cent, by seed."""

Decision: TypeAlias = Literal["supported", "contradicted", "cannot tell"]

FEWEST = 3
"""The minimum number of paired runs for a verdict."""

RULE = (
    "A claim makes one or more comparisons. Each states that one value is above another.",
    "A comparison is the difference between runs of the same seed, averaged over the scenarios of the claim. Its "
    "interval is Student's 95 % interval over the seeds.",
    "Supported: the intervals of all comparisons lie above 0. If the claim can be true in several ways, the "
    "comparisons of one way suffice.",
    "Contradicted: the interval of one comparison lies below 0. If there are several ways, this must hold in each.",
    f"Cannot tell: anything else. This includes fewer than {FEWEST} paired runs, and a range of scenarios of which an "
    "end was not run.",
    "Bonferroni's correction widens the intervals. With k ways, the lower limits have the confidence 1 - 0.025 / k "
    "instead of 0.975. With k comparisons in a way, the upper limits have it. If differences are normal, a claim that "
    "is not true is thus supported in at most 2.5 % of all repetitions.",
    "The claim on eta has two ways: the mean over all eta above 0, and the largest eta. In one of them, the difference "
    "to CL must be above 0 at 90:10 and must rise from 60:40 to 90:10.",
)
"""The rule in short sentences, for readers of tables and pages."""

BLIND = (
    "The rule does not see single scenarios. It cannot check whether so few differences are normal. It ignores what "
    "all runs share: one pool of images, and one choice for everything that the paper leaves open. Each verdict is "
    'separate, so some of many may be wrong. "Cannot tell" does not prove that two losses are equal.'
)


@dataclass(frozen=True)
class Contrast:
    """One comparison: its mean over seeds in points, with the limits that the rule uses."""

    name: str
    figure: Estimate
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        value = self.figure
        interval = "" if math.isnan(value.low) else f" [{value.low:+.1f}, {value.high:+.1f}]"
        return f"{self.name}: {value.value:+.1f} points{interval}"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a claim, for one figure (or several together) on one split."""

    claim: str
    text: str
    figures: tuple[str, ...]
    split: str
    decision: Decision
    ways: tuple[tuple[Contrast | None, ...], ...]
    """The comparisons of each way in which the claim may be true; None for a missing comparison."""
    missing: tuple[str, ...]
    decides: bool
    """Whether this split decides the claim: the held-out images if there are any, else the test images."""

    @property
    def contrasts(self) -> tuple[Contrast, ...]:
        """All comparisons that are not missing."""
        return tuple(contrast for way in self.ways for contrast in way if contrast is not None)

    @property
    def runs(self) -> int:
        """The smallest number of seeds of any comparison."""
        return min((len(contrast.seeds) for contrast in self.contrasts), default=0)

    @property
    def where(self) -> str:
        """The figure and the images, in words."""
        return f"{' and '.join(WORDS[name] for name in self.figures)}, {WORDS[self.split]} images"

    def reason(self) -> str:
        """Return the reason: the comparison closest to another verdict, the number of runs, and missing parts."""
        parts = []
        if self.contrasts:
            limit = "high" if self.decision == "contradicted" else "low"
            made = [[contrast for contrast in way if contrast is not None] for way in self.ways]
            least = [min(way, key=lambda contrast: getattr(contrast.figure, limit)) for way in made if way]
            told = max(least, key=lambda contrast: getattr(contrast.figure, limit))
            number = len(self.contrasts)
            word = "weakest" if len(made) == 1 else "strongest" if len(made) == number else "decisive one"
            parts.append(f"{'' if number == 1 else f'{word} of {number} comparisons, '}{told}; {self.runs} runs")
        return ". ".join([*parts, *self.missing]) + "."

    def to_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "claim": self.claim,
            "text": self.text,
            "figures": list(self.figures),
            "split": self.split,
            "decides": self.decides,
            "decision": self.decision,
            "runs": self.runs,
            "comparisons": [
                {"way": i, "name": contrast.name, **contrast.figure.to_dict(), "seeds": list(contrast.seeds)}
                for i, way in enumerate(self.ways)
                for contrast in way
                if contrast is not None
            ],
            "missing": list(self.missing),
        }


@dataclass
class Found:
    """The data of a claim: the points of each comparison by seed, and notes on missing data."""

    ways: list[list[str]]
    """The names of all comparisons of the claim, for each way in which it may be true."""
    points: dict[str, dict[int, float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper; each item of ``figures`` lists the figures that one verdict uses together."""

    name: str
    table: str
    text: str
    figures: tuple[tuple[str, ...], ...]
    find: Callable[[Values, str, Sequence[str]], Found]


def judge(table: str, values: Values) -> tuple[Verdict, ...]:
    """Return the verdicts on the claims of a table of the paper."""
    splits = [split for split in ("held_out", "test") if any(key[2] == split and values[key] for key in values)]
    splits = splits or ["test"]
    return tuple(
        _judge(claim, values, split, figures, decides=split == splits[0])
        for claim in CLAIMS
        if claim.table == table
        for figures in claim.figures
        for split in splits
    )


def _judge(claim: Claim, values: Values, split: str, figures: tuple[str, ...], *, decides: bool) -> Verdict:
    found = claim.find(values, split, figures)
    made = [[name for name in way if name in found.points] for way in found.ways]
    moved = sum(map(bool, made)), max(map(len, made), default=0)
    contrasts = {
        name: Contrast(name, _limits(list(points.values()), *moved), tuple(points))
        for name, points in found.points.items()
    }
    ways = tuple(tuple(contrasts.get(name) for name in way) for way in found.ways)
    decision = decide([[None if contrast is None else contrast.figure for contrast in way] for way in ways])
    missing = list(found.missing)
    missing += [
        f"All runs differ by the same number: {name}" for name, c in contrasts.items() if math.isnan(c.figure.low)
    ]
    return Verdict(claim.name, claim.text, figures, split, decision, ways, tuple(missing), decides)


def decide(ways: Sequence[Sequence[Estimate | None]]) -> Decision:
    """Apply the rule to the intervals of a claim's comparisons, by way; None is a missing comparison.

    >>> decide([[Estimate(1.0, 0.2, 1.8)], [Estimate(0.1, -1.0, 1.2)], [None]])
    'supported'
    """
    if any(way and all(figure is not None and figure.low > 0 for figure in way) for way in ways):
        return "supported"
    if ways and all(any(figure is not None and figure.high < 0 for figure in way) for way in ways):
        return "contradicted"
    return "cannot tell"


def _limits(points: Sequence[float], low: int, high: int) -> Estimate:
    """Return the mean with Student's limits, corrected for ``low`` and ``high`` comparisons."""
    lower, upper = (mean_interval(points, 1 - ALPHA / number, same=ROUNDING) for number in (low, high))
    return Estimate(lower.value, lower.low, upper.high)


def _seeds(values: Values, keys: Iterable[Key]) -> list[int]:
    """Return the seeds that all of the cells have."""
    found = [set(values.get(key, {})) for key in keys]
    return sorted(set.intersection(*found)) if found else []


Pairs: TypeAlias = Mapping[str, tuple[str, Setting, Setting]]
"""For each name of a comparison: the figure, the loss that is claimed to be higher, and the other loss."""


def _pooled(
    values: Values, split: str, scenarios: Sequence[str | None], pairs: Pairs, *, need: Literal["all", "any"]
) -> Found:
    """Return the difference of each pair, averaged over scenarios within each seed.

    Scenarios without enough paired runs are omitted, but the first and the last scenario are required. Then seeds that
    are not in all remaining scenarios are omitted. ``need``: whether the claim needs all comparisons or any of them.
    """
    found = Found([list(pairs)] if need == "all" else [[name] for name in pairs])
    without: dict[str, list[str]] = {}
    for name, (figure, *pair) in pairs.items():
        keys = {scenario: [(scenario, setting, split, figure) for setting in pair] for scenario in scenarios}
        kept = [scenario for scenario in scenarios if len(_seeds(values, keys[scenario])) >= FEWEST]
        seeds = _seeds(values, [key for scenario in kept for key in keys[scenario]])
        lost = _ends_lost(scenarios, kept)
        if not kept or (not lost and len(seeds) < FEWEST):
            without.setdefault(f"{FEWEST} paired runs", []).append(name)
            continue
        if lost:
            without.setdefault(lost, []).append(name)
            continue
        if len(kept) < len(scenarios):
            without.setdefault(", ".join(f"{s}" for s in scenarios if s not in kept), []).append(name)
        found.points[name] = {
            seed: math.fsum(values[keys[s][0]][seed] - values[keys[s][1]][seed] for s in kept) / len(kept)
            for seed in seeds
        }
    for what, names in without.items():
        found.missing.append(f"Without {what}" + ("" if len(names) == len(pairs) else f": {', '.join(names)}"))
    return found


def _ends_lost(asked: Sequence[str | None], kept: Sequence[str | None]) -> str:
    """Return a text that names the ends of a range of scenarios that lack runs, or an empty text."""
    lost = [f"{end}" for end in dict.fromkeys((asked[0], asked[-1])) if end not in kept]
    return f"{FEWEST} paired runs at {' and '.join(lost)}, where the claim's range ends" if lost else ""


def _between(first: str, last: str) -> list[str]:
    """Return the paper's scenarios from one to another."""
    names = [name for name in published("eta").scenarios if name is not None]
    return names[names.index(first) : names.index(last) + 1]


def _gamma_helps(values: Values, split: str, figures: Sequence[str]) -> Found:
    others = published("gamma").settings[1:]
    pairs = {f"gamma {other.gamma:g} above gamma 0": (figures[0], other, CL) for other in others}
    return _pooled(values, split, _between("70:30", "90:10"), pairs, need="any")


def _gamma_is_best_at_zero(values: Values, split: str, figures: Sequence[str]) -> Found:
    others = published("gamma").settings[1:]
    pairs = {f"gamma 0 above gamma {other.gamma:g}": (figures[0], CL, other) for other in others}
    return _pooled(values, split, ["50:50"], pairs, need="all")


def _acl_is_best(values: Values, split: str, figures: Sequence[str]) -> Found:
    acl = Setting(300.0, 0.0)
    others = [setting for setting in published("isic").settings if setting != acl]
    pairs = {f"{acl} above {other}": (figures[0], acl, other) for other in others}
    return _pooled(values, split, [None], pairs, need="all")


def _afcl_beats_both(values: Values, split: str, figures: Sequence[str]) -> Found:
    afcl, fcl = Setting(300.0, 7.0), Setting(0.0, 1.0)
    pairs = {
        f"{afcl} above {other} in {WORDS[figure]}": (figure, afcl, other) for figure in figures for other in (CL, fcl)
    }
    return _pooled(values, split, [None], pairs, need="all")


def _eta_helps_the_lopsided(values: Values, split: str, figures: Sequence[str]) -> Found:
    """Return the gain of eta over CL at 90:10, and its rise with imbalance; see the rule above.

    The mean covers the values of eta that both ends have. Scenarios between the ends count if they have all of them.
    """
    figure, whole = figures[0], published("eta").settings
    asked, largest = _between("60:40", "90:10"), whole[-1]
    there = {
        scenario: [s for s in whole if len(values.get((scenario, s, split, figure), {})) >= FEWEST]
        for scenario in asked
    }
    ends = [scenario for scenario in asked if {CL, largest} <= set(there[scenario])]
    if lost := _ends_lost(asked, ends):
        return Found([], missing=[f"Without {lost} (of CL and eta {largest.eta:g})"])
    settings = [s for s in whole if s in there[asked[0]] and s in there[asked[-1]]]
    scenarios = [scenario for scenario in ends if set(settings) <= set(there[scenario])]
    seeds = _seeds(values, [(scenario, setting, split, figure) for scenario in scenarios for setting in settings])
    if len(seeds) < FEWEST:
        return Found([], missing=[f"Without {FEWEST} paired runs of all scenarios and losses"])
    found = Found([])
    for what, left_out in (
        ("", [scenario for scenario in asked if scenario not in scenarios]),
        ("eta ", [f"{setting.eta:g}" for setting in whole if setting not in settings]),
    ):
        if left_out:
            found.missing.append(f"Without {what}{', '.join(left_out)}")
    ways = {"the mean over eta above 0": settings[1:], f"eta {largest.eta:g}": [largest]}
    shares = [float(scenario.partition(":")[0]) for scenario in scenarios]
    for name, chosen in ways.items():
        gain, rise = f"{name} above CL at {asked[-1]}", f"rise of {name} above CL from {asked[0]} to {asked[-1]}"
        found.ways.append([gain, rise])
        gains = {
            seed: [
                math.fsum(values[c, s, split, figure][seed] - values[c, CL, split, figure][seed] for s in chosen)
                / len(chosen)
                for c in scenarios
            ]
            for seed in seeds
        }
        found.points[gain] = {seed: points[-1] for seed, points in gains.items()}
        width = shares[-1] - shares[0]
        found.points[rise] = {seed: linear_regression(shares, points).slope * width for seed, points in gains.items()}
    return found


CLAIMS = (
    Claim(
        "eta",
        "eta",
        "A larger eta helps as imbalance grows from 60:40 to 90:10",
        (("uwa",), ("accuracy",)),
        _eta_helps_the_lopsided,
    ),
    Claim(
        "gamma-lopsided",
        "gamma",
        "A gamma above 0 is best from 70:30 to 90:10",
        (("uwa",), ("accuracy",)),
        _gamma_helps,
    ),
    Claim(
        "gamma-balanced",
        "gamma",
        "gamma = 0 is best at 50:50",
        (("uwa",), ("accuracy",)),
        _gamma_is_best_at_zero,
    ),
    Claim("isic-acl", "isic", "ACL(300) has the best UWA on ISIC", (("uwa",),), _acl_is_best),
    Claim(
        "isic-afcl",
        "isic",
        "AFCL(300, 7) beats CL and FCL on ISIC in both figures",
        (("uwa", "accuracy"),),
        _afcl_beats_both,
    ),
)
