"""Decision rules: from probabilities to a class.

A model returns probabilities p that carry a prior pi: the class shares of the batches that trained it, corrected by the
weights of its loss. The rules use both.

    plain        argmax p_c
    balanced     argmax p_c / pi_c, which maximises the mean of the recalls if p is calibrated
    prevalence   argmax p_c q_c / pi_c for expected shares q
    cost         argmin over k of sum_c p_c C[c, k]
    recall, precision, alarms, false-alarms, threshold
                 the target class if p_target >= t, otherwise the best other class by ``balanced``
    tuned        argmax a log p_c + b_c, with a and b fitted to held-back images
    sets         every class with p_c >= t_c (``evaluation.sets``); the best of them is that of ``balanced``
    abstain      argmax p_c if it is at least 1 - error, otherwise a person is asked

``tuned`` maximises the mean over the classes of the mean log-likelihood of a class. A penalty keeps it near
``balanced`` if there are few images: one Gaussian on log a and one on each b_c + log pi_c. The simulation
``studies/thresholds.py`` chose their widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, model_validator

from lopsided.errors import InputError
from lopsided.evaluation.calibration import TINY, Calibration, Codes, Floats, HeldBack, class_weights, fit_affine
from lopsided.evaluation.sets import Bools, asks, fit_sets, members
from lopsided.evaluation.threshold_rules import Scored, fit_threshold
from lopsided.recipe.rules import Rule, parse_rule

PROBABILITY = "p:"
"""Prefix of the columns of probabilities in tables, so that a class called "path" hides no other column."""
NEVER = -1e4
"""The offset of a class without training images, which no rule that divides by the prior decides for."""
SCALE_SPREAD, OFFSET_SPREAD = 0.25, 1.0
"""Standard deviations of the penalty of ``tuned``: of log a, and of each offset."""


class Decision(BaseModel):
    """A rule that is ready to decide: the text of a rule, and its numbers for one model.

    The score of class c is ``scale`` log p_c + ``offsets``[c]. With ``costs`` it is minus the expected cost of deciding
    for c, in units of the largest cost. With ``target``, the score of the target is logit(p) - logit(``threshold``),
    and the best of the other classes has the score 0. The class with the highest score is decided; the first one if
    classes tie.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rule: str = "plain"
    scale: float = 1.0
    offsets: tuple[float, ...] = ()
    costs: tuple[tuple[float, ...], ...] = ()
    target: int | None = None
    threshold: float | None = None
    sets: tuple[float, ...] = ()
    """The thresholds of the classes above which a class is in the set of an image; empty: there are no sets."""
    error: float | None = None
    """The highest expected error of a decision, above which a person is asked; None: every image is decided."""
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> Decision:
        if (self.target is None) != (self.threshold is None):
            raise ValueError("target and threshold belong together")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ValueError("threshold must be between 0 and 1")
        if self.scale <= 0 or any(len(row) != len(self.costs) for row in self.costs):
            raise ValueError("scale must be > 0 and costs must be square")
        if self.error is not None and not 0 < self.error < 1:
            raise ValueError("error must be between 0 and 1")
        return self

    def fits(self, num_classes: int) -> bool:
        """Return whether the decision is for this number of classes."""
        lengths = {len(part) for part in (self.offsets, self.costs, self.sets) if part}
        return lengths <= {num_classes} and (self.target is None or 0 <= self.target < num_classes)

    def scores(self, probabilities: ArrayLike) -> Floats:
        """Return a score per class, (n, K), of probabilities (n, K) or (K,). The highest score is decided."""
        p = np.asarray(probabilities, dtype=np.float64)
        if self.costs:
            costs = np.asarray(self.costs)
            expected: Floats = -(p @ (costs / costs.max()))
            return expected
        logs = self.scale * np.log(np.maximum(p, TINY))
        if self.offsets:
            logs = logs + np.asarray(self.offsets)
        if self.target is None or self.threshold is None:
            return logs
        own = p[..., self.target]
        logs[..., self.target] = -np.inf
        logs -= logs.max(axis=-1, keepdims=True)
        odds = np.log(np.maximum(own, TINY)) - np.log(np.maximum(1 - own, TINY))
        logs[..., self.target] = odds - math.log(self.threshold / (1 - self.threshold))
        return logs

    def decide(self, probabilities: ArrayLike) -> Codes:
        """Return the decided class of each row of (n, K)."""
        p = np.asarray(probabilities)
        plain = not self.offsets and not self.costs and self.target is None
        decided: Codes = np.argmax(p if plain else self.scores(p), axis=-1)
        return decided

    def members(self, probabilities: ArrayLike) -> Bools:
        """Return which classes are in the set of each row of (n, K): by the thresholds, or the decided class alone."""
        p = np.asarray(probabilities)
        return members(p, self.sets) if self.sets else np.asarray(np.arange(p.shape[-1]) == self.decide(p)[..., None])

    def asks(self, probabilities: ArrayLike) -> Bools:
        """Return whether a person is asked about each row of (n, K)."""
        p = np.asarray(probabilities)
        return np.zeros(p.shape[:-1], dtype=np.bool_) if self.error is None else asks(p, self.error)

    def answer(self, probabilities: ArrayLike, classes: Sequence[str]) -> str:
        """Return the name of the decided class of one image, or ``ASK``."""
        return ASK if self.asks(probabilities) else classes[int(self.decide(probabilities))]

    def set_of(self, probabilities: ArrayLike, classes: Sequence[str]) -> list[str] | None:
        """Return the classes in the set of one image; None without sets."""
        if not self.sets:
            return None
        return [name for name, held in zip(classes, self.members(probabilities), strict=True) if held]


ASK = "ask"
"""The answer where a person should decide."""
PLAIN = Decision()
"""The most probable class."""


def decide(probabilities: ArrayLike) -> Codes:
    """Return the most probable class of each row of (n, K); the first one if classes tie.

    >>> decide([[0.2, 0.8], [0.5, 0.5]])
    array([1, 0])
    """
    return PLAIN.decide(probabilities)


def resolve(rule: str | Rule, classes: Sequence[str], prior: Sequence[float], held: HeldBack | None = None) -> Decision:
    """Return the decision of a rule for a model with these classes, whose probabilities carry ``prior``.

    Rules that are fitted need ``held``. Raise an InputError if the rule does not fit the classes, or if it needs
    held-back images that are missing.
    """
    parsed = parse_rule(rule) if isinstance(rule, str) else rule
    if parsed.fitted:
        return _fitted(parsed, classes, prior, held)
    numbers: dict[str, Any] = _STATED[parsed.kind](parsed, classes, prior)
    return Decision(rule=str(parsed), **numbers)


def _by_threshold(rule: Rule, classes: Sequence[str], prior: Sequence[float]) -> dict[str, Any]:
    target, offsets = target_of(rule, classes, prior), _offsets(_balance(prior))
    # A probability that equals the threshold reaches it, also after rounding.
    return {"offsets": offsets, "target": target, "threshold": rule.bound * (1 - 1e-6)}


def _by_prevalence(rule: Rule, classes: Sequence[str], prior: Sequence[float]) -> dict[str, Any]:
    shares = np.array(_per_class(rule, classes, "share"))
    with np.errstate(divide="ignore"):
        return {"offsets": _offsets(np.maximum(_balance(prior) + np.log(shares), NEVER))}


def _by_error(rule: Rule, classes: Sequence[str], prior: Sequence[float]) -> dict[str, Any]:
    if ASK in classes:
        raise InputError(f"The decision rule {rule} answers {ASK!r}, which is a class of the model. Rename the class.")
    return {"error": rule.bound}


_STATED: dict[str, Callable[[Rule, Sequence[str], Sequence[float]], dict[str, Any]]] = {
    "plain": lambda rule, classes, prior: {},
    "balanced": lambda rule, classes, prior: {"offsets": _offsets(_balance(prior))},
    "prevalence": _by_prevalence,
    "cost": lambda rule, classes, prior: {"costs": _costs(rule, classes)},
    "threshold": _by_threshold,
    "abstain": _by_error,
}
"""The numbers of the rules that need no images."""


def _fitted(rule: Rule, classes: Sequence[str], prior: Sequence[float], held: HeldBack | None) -> Decision:
    """Return the decision of a rule that is fitted to held-back images."""
    text, balance, target = str(rule), _balance(prior), target_of(rule, classes, prior)
    if held is None or not len(held.labels):
        raise InputError(
            f"The decision rule {text} is fitted to images that the model was not trained on, but there are no "
            "validation images. Train with val=0.15, or use balanced."
        )
    if rule.kind == "sets":
        fitted = fit_sets(held, rule.bound)
        notes = tuple(fitted.words([_short(name, 40) for name in classes], held.kind))
        return Decision(rule=text, offsets=_offsets(balance), sets=fitted.thresholds, notes=notes)
    if target is None:
        absent = [name for name, number in zip(classes, held.counts(), strict=True) if not number]
        if absent:
            raise InputError(
                f"The decision rule {text} needs validation images of every class, but there are none of "
                f"{', '.join(absent)}. Hold back more images (val), or use balanced."
            )
        return _tuned(text, balance, held)
    if not (held.labels != target if rule.by_others else held.labels == target).any():
        of = f"that are not {classes[target]}" if rule.by_others else f"of {classes[target]}"
        raise InputError(
            f"The decision rule {text} needs validation images {of}, but there are none. "
            "Hold back more images (val), or use balanced."
        )
    threshold, note = fit_threshold(rule, Scored(held, target, _short(classes[target], 40), prior))
    return Decision(rule=text, offsets=_offsets(balance), target=target, threshold=threshold, notes=(note,))


def target_of(rule: Rule, classes: Sequence[str], prior: Sequence[float]) -> int | None:
    """Return the class of a rule with a threshold, by default the rarest one; None for any other rule."""
    if not rule.has_threshold:
        return None
    if not rule.target:
        return min((share, place) for place, share in enumerate(prior) if share > 0)[1]
    if rule.target not in classes:
        raise InputError(f"The decision rule {rule} names no class of the model; the classes are {', '.join(classes)}.")
    return list(classes).index(rule.target)


def through(decision: Decision, change: Calibration) -> Decision:
    """Return the decision on calibrated probabilities that equals ``decision`` on the original ones.

    It is for decisions by offsets: a log p + b is a T (log q - d) + b up to a constant, with q = calibrated p.
    """
    scale = decision.scale * change.temperature
    offsets = np.asarray(decision.offsets) - scale * np.asarray(change.bias)
    return decision.model_copy(update={"scale": scale, "offsets": _offsets(np.maximum(offsets, NEVER))})


def _balance(prior: Sequence[float]) -> Floats:
    shares = np.asarray(prior, dtype=np.float64)
    with np.errstate(divide="ignore"):
        return np.where(shares > 0, -np.log(shares), NEVER)


def _offsets(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())


def _per_class(rule: Rule, classes: Sequence[str], what: str) -> list[float]:
    unknown = [name for name in rule.values if name not in classes]
    missing = [name for name in classes if name not in rule.values]
    if unknown or missing:
        got = f"no class {unknown[0]!r}" if unknown else f"no {what} for {', '.join(missing)}"
        raise InputError(
            f"The decision rule {rule.kind} needs one {what} per class of the model ({', '.join(classes)}): "
            f"there is {got}."
        )
    return [rule.values[name] for name in classes]


def _costs(rule: Rule, classes: Sequence[str]) -> tuple[tuple[float, ...], ...]:
    if rule.matrix:
        if len(rule.matrix) != len(classes):
            raise InputError(
                f"The matrix of costs must have {len(classes)} rows and columns, one per class of the model "
                f"({', '.join(classes)}), got {len(rule.matrix)}."
            )
        return rule.matrix
    if rule.table:
        return _named_costs(rule.table, classes)
    missed = _per_class(rule, classes, "cost")
    return tuple(tuple(0.0 if k == c else cost for k in range(len(classes))) for c, cost in enumerate(missed))


def _named_costs(table: Mapping[str, Mapping[str, float]], classes: Sequence[str]) -> tuple[tuple[float, ...], ...]:
    named = {name for true, row in table.items() for name in (true, *row)}
    unknown = sorted(named - set(classes))
    missing = [(true, name) for true in classes for name in classes if true != name and name not in table.get(true, {})]
    if unknown or missing:
        if unknown:
            got = f"there is no class {unknown[0]!r}"
        else:
            got = "the cost of deciding {1} for an image of {0} is missing".format(*missing[0])
        raise InputError(f"The matrix of costs does not fit the classes of the model ({', '.join(classes)}): {got}.")
    return tuple(tuple(table[true].get(name, 0.0) for name in classes) for true in classes)


def _tuned(text: str, balance: Floats, held: HeldBack) -> Decision:
    num_classes = len(balance)
    weights = class_weights(held, np.full(num_classes, 1 / num_classes))
    log_scale, shift = fit_affine(held, weights, balance, SCALE_SPREAD, np.full(num_classes, OFFSET_SPREAD))
    note = (
        f"The weights of the rule tuned are fitted to {len(held.labels):,} {held.kind} images "
        f"({held.counts().min():,} of the rarest class)."
    )
    offsets = _offsets(np.maximum(balance + shift, NEVER))
    return Decision(rule=text, scale=float(math.exp(log_scale)), offsets=offsets, notes=(note,))


def threshold_of(decision: Decision, label: int, num_classes: int) -> float | None:
    """Return the probability from which on a decision is for ``label``; None with more than two classes.

    With more classes there is a threshold only for the target of a recall rule.

    >>> threshold_of(Decision(rule="balanced", offsets=(math.log(1 / 0.9), math.log(1 / 0.1))), 1, 2)
    0.1
    """
    if decision.target is not None and decision.threshold is not None and decision.target == label:
        return decision.threshold
    if num_classes != 2:
        return None
    other = 1 - label
    if decision.threshold is not None:
        return 1 - decision.threshold
    if decision.costs:
        wrong, missed = decision.costs[other][label], decision.costs[label][other]
        return wrong / (wrong + missed)
    offsets = decision.offsets or (0.0, 0.0)
    return float(round(1 / (1 + math.exp(min(700.0, (offsets[label] - offsets[other]) / decision.scale))), 12))


def explain(decision: Decision, classes: Sequence[str], *, stated: bool = False) -> str:
    """Return a sentence that says how a decision is taken. ``stated``: the class shares are not those of training.

    >>> explain(Decision(rule="balanced", offsets=(-math.log(0.98), -math.log(0.02))), ["functional", "defective"])
    'An image is called defective if its probability is at least 2.0 %, its share in training (balanced).'
    """
    classes, rule = [_short(name, 40) for name in classes], _short(decision.rule, 100)
    share = "its stated share" if stated else "its share in training"
    if decision.error is not None or decision.sets:
        return _doubt_words(decision, classes, rule, share)
    if decision.target is None and not decision.offsets and not decision.costs:
        return "An image is called the most probable class (plain)."
    by_threshold = _threshold_words(decision, classes, rule, share)
    if by_threshold:
        return by_threshold
    if decision.costs:
        return f"An image is called the class with the least expected cost: {_cost_words(decision.costs, classes)}."
    more = f" and {len(classes) - 6} more" if len(classes) > 6 else ""
    if decision.rule == "balanced":
        priors = [0.0 if offset <= NEVER else math.exp(-offset) for offset in decision.offsets]
        shares = ", ".join(f"{name} {_chance(p)}" for name, p in zip(classes[:6], priors, strict=False))
        return (
            f"An image is called the class whose probability is highest relative to {share} (balanced): {shares}{more}."
        )
    factors = ", ".join(f"{name} x {math.exp(o):.3g}" for name, o in zip(classes[:6], decision.offsets, strict=False))
    power = f" to the power {decision.scale:.3g}" if decision.scale != 1 else ""
    return f"An image is called the class with the highest weighted probability{power} ({rule}): {factors}{more}."


def _doubt_words(decision: Decision, classes: Sequence[str], rule: str, share: str) -> str:
    """Return how a decision is taken that may be a set, or a question to a person."""
    if decision.error is not None:
        return (
            "An image is called the most probable class if its expected error is at most "
            f"{_chance(decision.error)} ({rule}), otherwise a person is asked."
        )
    limits = ", ".join(f"{name} from {_chance(limit)}" for name, limit in zip(classes[:6], decision.sets, strict=False))
    more = f" and {len(classes) - 6} more" if len(classes) > 6 else ""
    return (
        f"The set of an image holds every class whose probability reaches its threshold ({rule}): {limits}{more}. "
        f"It is called the class whose probability is highest relative to {share}."
    )


def _threshold_words(decision: Decision, classes: Sequence[str], rule: str, share: str) -> str:
    """Return how a decision is taken that is a threshold of one class; otherwise an empty text."""
    label = decision.target
    if label is None and len(classes) == 2:
        label = min((0, 1), key=lambda c: threshold_of(decision, c, 2) or 0.0)
    threshold = None if label is None else threshold_of(decision, label, len(classes))
    if label is None or threshold is None:
        return ""
    called = f"An image is called {classes[label]} if its probability is at least {_chance(threshold)}"
    if decision.costs:
        return f"{called}: {_cost_words(decision.costs, classes)}."
    if decision.rule == "balanced":
        return f"{called}, {share} (balanced)."
    other = ", otherwise the best other class by balanced" if len(classes) > 2 else ""
    return f"{called} ({rule}){other}."


def _chance(p: float) -> str:
    """Return a probability in per cent, with the digits that it needs near 0 and 1.

    >>> _chance(0.02), _chance(0.5), _chance(0.00013), _chance(0.99996)
    ('2.0 %', '50 %', '0.013 %', '99.9960 %')
    """
    near = min(p, 1 - p)
    if not near:
        return f"{100 * p:.0f} %"
    digits = 0 if near >= 0.0995 else max(1, 1 - math.floor(math.log10(max(100 * near, 1e-10))))
    return f"{100 * p:.{digits}f} %"


def _cost_words(costs: Sequence[Sequence[float]], classes: Sequence[str]) -> str:
    """Return the highest costs in words.

    >>> _cost_words([[0, 1], [10, 0]], ["mel", "df"])
    'df decided as mel costs 10, mel decided as df costs 1'
    """
    pairs = [(costs[i][j], i, j) for i in range(len(costs)) for j in range(len(costs)) if i != j]
    pairs.sort(key=lambda pair: -pair[0])
    words = ", ".join(f"{classes[i]} decided as {classes[j]} costs {cost:g}" for cost, i, j in pairs[:4])
    return words + (f", and {len(pairs) - 4} more" if len(pairs) > 4 else "")


def _short(text: str, length: int) -> str:
    """Return a text of at most ``length`` printable characters."""
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return clean if len(clean) <= length else f"{clean[: length - 1]}…"
