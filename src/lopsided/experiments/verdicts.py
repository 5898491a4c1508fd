"""Verdicts on the paper's claims, from paired runs. Needs no torch.

The rule. A claim is a set of comparisons, each of which says that one thing is above another. Runs of one seed share
their images, their split and their first weights, so a comparison is a difference within a seed, averaged over the
scenarios of the claim; the seeds are what is independent, and Student's interval is taken over them. The claim is

- *supported* when the intervals of all its comparisons lie above 0 (where it needs but one of them: that of one),
- *contradicted* when that of one lies below 0 (where it needs but one: those of all),
- and otherwise one *cannot tell*.

Each limit holds with 97.5 %. Where a single comparison out of k is enough, one of k would do so by chance k times as
often, so that limit is moved out to 1 - 0.025 / k (Bonferroni). So a claim that is not true is called supported in at
most 2.5 % of all repetitions, and one that is not false contradicted in at most 2.5 %. Fewer than two runs give no
verdict. Comparisons that are missing can neither complete "all" nor be the last of "none".

What the rule cannot see. It speaks of the mean over a claim's scenarios, not of each. It takes the differences as
normal, which four seeds cannot show. It knows nothing of what all runs share: one pool of images, one protocol with its
unstated parts filled in one way, so that a verdict holds for this protocol. "Cannot tell" is no proof of equality: the
interval says how large a difference may have been overlooked. Every line is judged by itself; of many lines some may
be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from lopsided.experiments.paper import CL, Setting, published
from lopsided.intervals import Figure, mean_interval

Key: TypeAlias = tuple[str | None, Setting, str, str]
"""Scenario, loss, split, figure."""

Values: TypeAlias = Mapping[Key, Mapping[int, float]]
"""Per cent, by seed."""

Decision: TypeAlias = Literal["supported", "contradicted", "cannot tell"]
Need: TypeAlias = Literal["all", "any"]

ALPHA = 0.05
FEWEST = 2
"""Runs without which there is no interval."""

WORDS = {"uwa": "UWA", "accuracy": "accuracy", "test": "test", "held_out": "held-out"}

RULE = (
    "Supported: the interval of every comparison that the claim makes lies above 0 (of one, where it needs but one). "
    "Contradicted: that of one lies below 0 (of all, where it needs but one). Otherwise one cannot tell. Differences "
    "are taken within a seed and averaged over the claim's scenarios, Student's 95 % interval is taken over the seeds, "
    "and a limit that one comparison out of several may pass is widened by Bonferroni's correction."
)
BLIND = (
    "The rule cannot see single scenarios, nor whether so few differences are normal, nor what all runs share: one "
    "pool of images and one reading of what the paper leaves open. That one cannot tell is no proof of equality."
)


@dataclass(frozen=True)
class Contrast:
    """One comparison: its mean over seeds in points, with the limits that the rule looks at."""

    name: str
    figure: Figure
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        value = self.figure
        return f"{self.name}: {value.value:+.1f} points [{value.low:+.1f}, {value.high:+.1f}]"


@dataclass(frozen=True)
class Verdict:
    """What the runs say of a claim, in one figure (or several at once) on one split."""

    claim: str
    text: str
    figures: tuple[str, ...]
    split: str
    need: Need
    decision: Decision
    contrasts: tuple[Contrast, ...]
    missing: tuple[str, ...]
    decides: bool
    """Whether this split is the one that the claim is judged by: the held-out images where there are some."""

    @property
    def runs(self) -> int:
        """The fewest seeds that any comparison rests on."""
        return min((len(contrast.seeds) for contrast in self.contrasts), default=0)

    @property
    def where(self) -> str:
        """The figure and the images, in words."""
        return f"{' and '.join(WORDS[name] for name in self.figures)}, {WORDS[self.split]} images"

    def reason(self) -> str:
        """Say what decided: the comparison nearest to deciding otherwise, the runs, and what was missing."""
        parts = []
        if self.contrasts:
            least = self.need == "all"
            pick = min if least else max
            told = pick(self.contrasts, key=lambda contrast: contrast.figure.low)
            if self.decision == "contradicted":
                told = pick(self.contrasts, key=lambda contrast: contrast.figure.high)
            number = len(self.contrasts)
            which = "" if number == 1 else f"{'least' if least else 'greatest'} of {number}, "
            parts.append(f"{which}{told}; {self.runs} runs")
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
            "needs": self.need,
            "runs": self.runs,
            "comparisons": [
                {"name": contrast.name, **contrast.figure.to_dict(), "seeds": list(contrast.seeds)}
                for contrast in self.contrasts
            ],
            "missing": list(self.missing),
        }


@dataclass
class Found:
    """What a claim finds in the records: each comparison's points by seed, and what there was none of."""

    points: dict[str, dict[int, float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    complete: bool = False
    """Whether all comparisons of the claim could be made."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper; ``figures`` are those that each verdict takes together."""

    name: str
    table: str
    text: str
    need: Need
    figures: tuple[tuple[str, ...], ...]
    find: Callable[[Values, str, Sequence[str]], Found]


def judge(table: str, values: Values) -> tuple[Verdict, ...]:
    """Judge the claims that a table of the paper is for."""
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
    number = len(found.points)
    moved = (number, 1) if claim.need == "any" else (1, number)
    contrasts = tuple(
        Contrast(name, _limits(list(points.values()), *moved), tuple(points)) for name, points in found.points.items()
    )
    decision = decide(claim.need, [contrast.figure for contrast in contrasts], complete=found.complete)
    return Verdict(
        claim.name, claim.text, figures, split, claim.need, decision, contrasts, tuple(found.missing), decides
    )


def decide(need: Need, figures: Sequence[Figure], *, complete: bool) -> Decision:
    """Apply the rule to the intervals of a claim's comparisons; ``complete``: none of them is missing.

    >>> decide("any", [Figure(1.0, 0.2, 1.8), Figure(0.1, -1.0, 1.2)], complete=False)
    'supported'
    """
    above, below = [figure.low > 0 for figure in figures], [figure.high < 0 for figure in figures]
    if need == "any":
        supported, contradicted = any(above), complete and bool(below) and all(below)
    else:
        supported, contradicted = complete and bool(above) and all(above), any(below)
    return "supported" if supported else "contradicted" if contradicted else "cannot tell"


def _limits(points: Sequence[float], low: int, high: int) -> Figure:
    """Return the mean with Student's limits, each corrected for so many comparisons."""
    lower, upper = mean_interval(points, 1 - ALPHA / low), mean_interval(points, 1 - ALPHA / high)
    return Figure(lower.value, lower.low, upper.high)


def _seeds(values: Values, keys: Iterable[Key]) -> list[int]:
    """Return the seeds that all of these cells have."""
    found = [set(values.get(key, {})) for key in keys]
    return sorted(set.intersection(*found)) if found else []


Pairs: TypeAlias = Mapping[str, tuple[str, Setting, Setting]]
"""By the name of a comparison: the figure, the loss that is to have more of it, and the other."""


def _pooled(values: Values, split: str, scenarios: Sequence[str | None], pairs: Pairs) -> Found:
    """Find each pair's difference, averaged over scenarios within each seed.

    A scenario without two paired runs is left out, then every seed that is not in all of the others.
    """
    found = Found()
    without: dict[str, list[str]] = {}
    for name, (figure, *pair) in pairs.items():
        keys = {scenario: [(scenario, setting, split, figure) for setting in pair] for scenario in scenarios}
        kept = [scenario for scenario in scenarios if len(_seeds(values, keys[scenario])) >= FEWEST]
        seeds = _seeds(values, [key for scenario in kept for key in keys[scenario]])
        if len(seeds) < FEWEST:
            without.setdefault(f"{FEWEST} paired runs", []).append(name)
            continue
        if len(kept) < len(scenarios):
            without.setdefault(", ".join(f"{s}" for s in scenarios if s not in kept), []).append(name)
        found.points[name] = {
            seed: math.fsum(values[keys[s][0]][seed] - values[keys[s][1]][seed] for s in kept) / len(kept)
            for seed in seeds
        }
    for what, names in without.items():
        found.missing.append(f"Without {what}" + ("" if len(names) == len(pairs) else f": {', '.join(names)}"))
    found.complete = len(found.points) == len(pairs)
    return found


def _between(first: str, last: str) -> list[str]:
    """Return the paper's scenarios from one to another."""
    names = [name for name in published("eta").scenarios if name is not None]
    return names[names.index(first) : names.index(last) + 1]


def _gamma_helps(values: Values, split: str, figures: Sequence[str]) -> Found:
    others = published("gamma").settings[1:]
    pairs = {f"gamma {other.gamma:g} above gamma 0": (figures[0], other, CL) for other in others}
    return _pooled(values, split, _between("70:30", "90:10"), pairs)


def _gamma_is_best_at_zero(values: Values, split: str, figures: Sequence[str]) -> Found:
    others = published("gamma").settings[1:]
    pairs = {f"gamma 0 above gamma {other.gamma:g}": (figures[0], CL, other) for other in others}
    return _pooled(values, split, ["50:50"], pairs)


def _acl_is_best(values: Values, split: str, figures: Sequence[str]) -> Found:
    acl = Setting(300.0, 0.0)
    others = [setting for setting in published("isic").settings if setting != acl]
    return _pooled(values, split, [None], {f"{acl} above {other}": (figures[0], acl, other) for other in others})


def _afcl_beats_both(values: Values, split: str, figures: Sequence[str]) -> Found:
    afcl, fcl = Setting(300.0, 7.0), Setting(0.0, 1.0)
    pairs = {
        f"{afcl} above {other} in {WORDS[figure]}": (figure, afcl, other) for figure in figures for other in (CL, fcl)
    }
    return _pooled(values, split, [None], pairs)


def _eta_helps_the_lopsided(values: Values, split: str, figures: Sequence[str]) -> Found:
    """Find how much eta gains, as a straight line over eta in each scenario, and how this changes with imbalance.

    Within a seed, each scenario has the slope of its figure over eta (that of its difference to CL is the same), and
    the slopes have a line over the majority's share. The claim's two comparisons are that line's rise from the least to
    the most lopsided scenario, and its height there.
    """
    figure, whole = figures[0], published("eta").settings
    asked = _between("60:40", "90:10")
    scenarios, settings = _block(values, asked, whole, split, figure)
    seeds = _seeds(values, [(scenario, setting, split, figure) for scenario in scenarios for setting in settings])
    if len(scenarios) < 2 or len(seeds) < FEWEST:
        return Found(missing=[f"Without {FEWEST} scenarios that have {FEWEST} paired runs of CL and a larger eta"])
    found = Found(complete=True)
    for what, lost in (
        ("", [scenario for scenario in asked if scenario not in scenarios]),
        ("eta ", [f"{setting.eta:g}" for setting in whole if setting not in settings]),
    ):
        if lost:
            found.missing.append(f"Without {what}{', '.join(lost)}")
    shares = [float(scenario.partition(":")[0]) for scenario in scenarios]
    height = f"eta 300 above eta 0 at {scenarios[-1]}"
    rise = f"eta's gain at {scenarios[-1]} above that at {scenarios[0]}"
    found.points = {height: {}, rise: {}}
    for seed in seeds:
        gains = []
        for scenario in scenarios:
            numbers = [values[scenario, setting, split, figure][seed] for setting in settings]
            gains.append(300.0 * _line([setting.eta for setting in settings], numbers)[1])
        start, slope = _line(shares, gains)
        found.points[height][seed] = start + slope * shares[-1]
        found.points[rise][seed] = slope * (shares[-1] - shares[0])
    return found


def _block(
    values: Values, scenarios: Sequence[str], settings: Sequence[Setting], split: str, figure: str
) -> tuple[list[str], list[Setting]]:
    """Return the largest block of scenarios and losses, CL among them, that has two runs everywhere."""
    there = {
        scenario: [s for s in settings if len(values.get((scenario, s, split, figure), {})) >= FEWEST]
        for scenario in scenarios
    }
    best: tuple[list[str], list[Setting]] = ([], [])
    for columns in there.values():
        rows = [scenario for scenario in scenarios if set(columns) <= set(there[scenario])]
        if CL in columns and len(columns) > 1 and len(rows) * len(columns) > len(best[0]) * len(best[1]):
            best = (rows, columns)
    return best


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return intercept and slope of the least-squares line."""
    centre, height = math.fsum(x) / len(x), math.fsum(y) / len(y)
    slope = math.fsum((a - centre) * b for a, b in zip(x, y, strict=True)) / math.fsum((a - centre) ** 2 for a in x)
    return height - slope * centre, slope


CLAIMS = (
    Claim(
        "eta",
        "eta",
        "A larger eta helps as imbalance grows from 60:40 to 90:10",
        "all",
        (("uwa",), ("accuracy",)),
        _eta_helps_the_lopsided,
    ),
    Claim(
        "gamma-lopsided",
        "gamma",
        "A gamma above 0 is best from 70:30 to 90:10",
        "any",
        (("uwa",), ("accuracy",)),
        _gamma_helps,
    ),
    Claim(
        "gamma-balanced",
        "gamma",
        "gamma = 0 is best at 50:50",
        "all",
        (("uwa",), ("accuracy",)),
        _gamma_is_best_at_zero,
    ),
    Claim("isic-acl", "isic", "ACL(300) has the best UWA on ISIC", "all", (("uwa",),), _acl_is_best),
    Claim(
        "isic-afcl",
        "isic",
        "AFCL(300, 7) beats CL and FCL on ISIC in both figures",
        "all",
        (("uwa", "accuracy"),),
        _afcl_beats_both,
    ),
)
