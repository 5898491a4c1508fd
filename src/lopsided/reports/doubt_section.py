"""The section of a page on what a model does not know: abstention, prediction sets and unfamiliar images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from markupsafe import Markup

from lopsided.evaluation.calibration import HeldBack
from lopsided.evaluation.decision import resolve
from lopsided.evaluation.doubt import ERRORS, cross_sets, measure_sets, trade_off
from lopsided.evaluation.sets import fit_sets, members
from lopsided.recipe.rules import parse_rule
from lopsided.reports import svg
from lopsided.reports.run_data import Judged
from lopsided.reports.run_words import Facts
from lopsided.reports.wording import clean, percent, quoted

SHOWN_ERRORS = (0.1, 0.05, 0.02, 0.01)
SHARES = (0.01, 0.05, 0.2, 0.5)
"""Shares of the rarest class for which the table says what abstention does, besides that of the images."""
LEVELS = (0.9, 0.95, 0.99)
SHOWN_CLASSES = 8
NONE = "\N{EN DASH}"

_FAMILIAR = (
    "Images of another kind than the training images, such as charts or screenshots, are marked by predict and left "
    "out by find. A new kind of object on the same camera is often not noticed: of seven kinds of skin lesions, a "
    "model of two of them marked few images of the other five."
)


def doubt_section(facts: Facts, judged: Judged, val: Judged | None, prevalence: str | None = None) -> dict[str, Any]:
    """Return the context of the section. ``val`` are images that set thresholds, if they are not the judged ones.

    ``prevalence`` are the class shares where the model is used, such as ``rare=0.02,other=0.98``.
    """
    p, groups = judged.p.astype(np.float64), None if judged.groups is None else np.array(judged.groups)
    rare, own = facts.minority, np.bincount(judged.y_true, minlength=len(facts.classes)) / len(judged)
    points = trade_off(p, judged.y_true, groups)
    rows = [{"share": f"{_share(own[rare])}, as here", "points": _cells(points)}]
    stated = _stated(facts, prevalence)
    wanted = [np.where(np.arange(len(own)) == rare, share, own * (1 - share) / max(1 - own[rare], 1e-9))
              for share in SHARES]  # fmt: skip
    places = sorted([*wanted, *([] if stated is None else [stated])], key=lambda shares: float(shares[rare]))
    there = None
    for place in places if (own > 0).all() else ():
        moved = trade_off(p, judged.y_true, groups, (facts.metrics.decision.prior, place.tolist()))
        word = _share(place[rare])
        if place is stated:
            there, word = moved, f"{word}, as stated"
        rows.append({"share": word, "points": _cells(moved)})
    held = HeldBack(p, judged.y_true, groups, "out-of-fold" if facts.metrics.folds is not None else judged.split)
    fitted_on = held
    if val is not None and val.split != judged.split:
        others = None if val.groups is None else np.array(val.groups)
        fitted_on = HeldBack(val.p.astype(np.float64), val.y_true, others)
    sets, notes = [], {}
    for level in LEVELS:
        fitted = fit_sets(fitted_on, level)
        crossed = members(p, fitted.thresholds) if fitted_on is not held else cross_sets(held, level)
        found = measure_sets(crossed, judged.y_true, facts.classes, groups)
        sizes = np.array(found["sizes"]) / len(judged)
        covered = (row["coverage"] for row in found["per_class"][:SHOWN_CLASSES])
        cells = [NONE if each["value"] is None else _interval(each) for each in covered]
        shares = [percent(sizes[1]), percent(sizes[2:].sum()), percent(sizes[0])]
        sets.append({"level": f"{level:g}", "cells": cells, "sizes": shares})
        for name, best in zip(facts.classes, fitted.reached, strict=True):
            if best < level:
                notes[name] = (
                    f"{clean(name)} has too few images for more than {100 * best:.3g} %: it is in every set then."
                )
    return {
        "words": _words(points, facts.classes[rare]),
        "plot": _plot([points] if there is None else [points, there]),
        "stated": "" if stated is None or there is None else _share(stated[rare]),
        "errors": [f"{error:g}" for error in SHOWN_ERRORS],
        "rows": rows,
        "rare": clean(facts.classes[rare]),
        "sets": sets,
        "shown": SHOWN_CLASSES,
        "notes": list(notes.values())[:6],
        "measured": "Measured on images that set no threshold, with 95 % intervals:",
        "familiar": _FAMILIAR,
    }


def _stated(facts: Facts, prevalence: str | None) -> np.ndarray | None:
    """Return the class shares where the model is used, if they are given or the rule of the run states them."""
    rule = facts.recipe.decision.rule if prevalence is None else f"prevalence:{prevalence.removeprefix('prevalence:')}"
    parsed = parse_rule(rule)
    if parsed.kind != "prevalence":
        return None
    resolve(parsed, facts.classes, facts.metrics.decision.prior)  # Checks the names of the classes.
    return np.array([parsed.values[name] for name in facts.classes])


def _words(points: list[dict[str, Any]], rare: str) -> str:
    point = next(point for point in points if point["error"] == 0.02)
    asked, errors = point["asked"]["value"], point["errors"]["value"]
    if errors is None:
        return "With abstain:0.02, a person would see every image: no probability is high enough."
    return (
        f"If the model decides only where the expected error is below 2 %, a person sees {_share(asked)} of the "
        f"images, and {_share(errors)} of the others are wrong. Check how many of them are {quoted(rare)}: a rare "
        "class can be missed with few errors."
    )


def _plot(curves: list[list[dict[str, Any]]]) -> Markup:
    """Return the curves of the trade-off: that of these images, and that of the stated shares."""
    known = [[point for point in points if point["errors"]["value"] is not None] for points in curves]
    highest = max((point["errors"]["high"] for points in known for point in points), default=0.1)
    plot = svg.Plot(
        "Share of wrong decisions against the share of images that a person sees",
        (0.0, 1.0),
        (0.0, max(highest, 0.01)),
        x_label="share of images that a person sees",
        y_label="share of the others that are wrong",
        height=300,
    )
    for style, points in zip(("c0", "c1"), known, strict=False):
        plot.line([(point["asked"]["value"], point["errors"]["value"]) for point in points], style)
        for point in points:
            x, errors = point["asked"]["value"], point["errors"]
            plot.whisker(x, errors["low"], errors["high"], style)
            title = f"abstain:{point['error']:g}: a person sees {percent(x)}, {percent(errors['value'])} wrong"
            plot.dot(x, errors["value"], f"dot {style}", title)
    return plot.render()


def _cells(points: list[dict[str, Any]]) -> list[dict[str, str]]:
    assert set(SHOWN_ERRORS) <= set(ERRORS)
    chosen = [point for point in points if point["error"] in SHOWN_ERRORS]
    return [
        {
            "asked": _interval(point["asked"]),
            "errors": NONE if point["errors"]["value"] is None else _interval(point["errors"]),
        }
        for point in chosen
    ]


def _interval(figure: Mapping[str, float | None]) -> str:
    value, low, high = (100 * float(figure[name] or 0) for name in ("value", "low", "high"))
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"


def _share(share: float) -> str:
    return f"{100 * share:.3g} %"
