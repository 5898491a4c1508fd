"""The page of a run, made from the run folder alone. Does not import torch."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lopsided.data.images import Progress
from lopsided.errors import InputError, sentence
from lopsided.evaluation.intervals import share_interval
from lopsided.evaluation.metric_table import METRICS
from lopsided.recipe.words import amount
from lopsided.reports import run_figures, run_words, svg
from lopsided.reports.doubt_section import doubt_section
from lopsided.reports.feature_map import FeatureMap, lay_out, neighbour_share
from lopsided.reports.labels_section import labels_section
from lopsided.reports.page import LIMIT, embedded_json, packed, render
from lopsided.reports.run_data import (
    MOST_IMAGES,
    WORST,
    Judged,
    Stage,
    in_order,
    open_finished,
    read_judged,
    read_stages,
)
from lopsided.reports.run_words import Facts
from lopsided.reports.threshold_section import threshold_section
from lopsided.reports.thumbnails import COLUMNS, ROWS, Thumbnails, kept_pictures, make_thumbnails
from lopsided.reports.wording import clean, duration, percent, quoted
from lopsided.runs.folder import FEATURES, RECIPE
from lopsided.runs.maps import read_maps
from lopsided.runs.metrics import Evaluation, Metrics

PICTURE_LIMIT = 13_000_000
"""Maximum bytes of data and pictures together. The rest of the limit is for figures and text."""
FEW_CLASSES = 12
MOST_NOTED = 100
"""Maximum number of unreadable images that a page lists."""
LEAST_IMAGES = 50
"""A page always lists at least this many images, even if it exceeds the size limit."""


def run_page(
    folder: Path,
    kind: str = "pca",
    *,
    allow_outside: bool = False,
    focus: str | None = None,
    prevalence: str | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda note: None,
) -> str:
    """Return the page of a finished run. ``kind`` is the feature map shown in addition to PCA.

    ``focus`` is the class that headline, threshold and label check follow: by default that of the recipe or of the
    model's rule if it names one, otherwise the rarest class. ``prevalence`` are the shares where the model is used.

    Files that a table names outside its folder become pictures only with ``allow_outside``. The recipe cannot allow
    this: a run folder from a stranger could otherwise put pictures of this machine into the page. ``tell`` gets the
    reason why pictures are missing.
    """
    run, metrics = open_finished(folder)
    judged = read_judged(run, metrics)
    split = next((name for name in metrics.judged() if name in judged), None)
    recipe = run.recipe.override(**{"data.allow_outside": allow_outside})
    facts = Facts(recipe, metrics, split, _focus(metrics, focus or recipe.decision.focus))
    stages, notes = read_stages(run)
    context: dict[str, Any] = {
        **_head(facts),
        **_course(facts, stages, notes),
        "recipe_text": clean((folder / RECIPE).read_text(encoding="utf-8", errors="surrogateescape")),
        "command": f"lopsided fit --recipe {RECIPE} --out again",
        "folder": clean(folder.resolve().name),
        "judged": None,
        "labels": None,
        "is_alone": False,
    }
    if facts.figures is None or split is None:
        return render("run.html.j2", data={"kind": "run"}, **context)
    most, room, kept = MOST_IMAGES, PICTURE_LIMIT, kept_pictures(folder)
    val, figures = judged.get("val"), facts.figures
    # Without images of a second class, no answer of the section is about the model.
    tested = sum(row.support > 0 for row in figures.per_class)
    doubt = doubt_section(facts, judged[split], val, prevalence) if tested > 1 else None
    while True:
        pictures, data, seen = _judgement(facts, figures, judged[split], val, kind, most, room, progress, kept)
        seen["doubt"] = doubt
        if metrics.folds is not None:
            seen["labels"] = labels_section(folder, pictures, facts)
        add_heat(folder, data, [*seen["worst"], *((seen.get("labels") or {}).get("tiles") or [])])
        page = render("run.html.j2", data=data, pictures=pictures.css(), **{**context, **seen})
        if most <= LEAST_IMAGES or len(page.encode()) <= LIMIT:
            allowed = run.recipe.data.allow_outside and not allow_outside and not pictures.sheets
            tell(_OUTSIDE if allowed else pictures.note)
            return page
        most, room = max(LEAST_IMAGES, min(most, len(judged[split])) // 2), room // 2


_OUTSIDE = (
    "There are no pictures: the run was fitted with images outside the folder of its table. If the run is yours, add "
    "--allow-outside."
)


def _focus(metrics: Metrics, name: str | None) -> int | None:
    """Return the class that a page follows, or None for the rarest one."""
    if name is None:
        return metrics.decision.decision.target
    if name not in metrics.classes:
        raise InputError(sentence(f"--focus must be a class of the run: {', '.join(metrics.classes)}", repr(name)))
    return metrics.classes.index(name)


def _judgement(
    facts: Facts,
    figures: Evaluation,
    judged: Judged,
    val: Judged | None,
    kind: str,
    most: int,
    room: int,
    progress: Progress | None,
    kept: Mapping[str, Image.Image],
) -> tuple[Thumbnails, dict[str, Any], dict[str, Any]]:
    """Return the pictures, the script data and the template context of the sections with evaluated images.

    ``most`` limits the listed images. ``room`` limits the bytes of data and pictures. ``kept`` are pictures of the run.
    """
    ordered = in_order(judged, facts.recipe.seed, most)
    first = ordered.first()
    ranks = sorted(range(len(facts.classes)), key=lambda i: -facts.counts("train").get(facts.classes[i], 0))
    colours = run_figures.class_colours(ranks, judged)
    maps = _maps(first, kind, facts.recipe.seed)
    chosen_on = val if judged.split != "val" else None
    threshold, threshold_context = threshold_section(facts, figures, ordered.judged, chosen_on, ranks)
    data: dict[str, Any] = {
        "kind": "run",
        "classes": [clean(name) for name in facts.classes],
        "images": len(judged),
        "listed": ordered.number,
        "label": packed(ordered.judged.y_true.astype(np.uint16)),
        "predicted": packed(first.y_pred.astype(np.uint16)),
        "sure": packed(first.confidence),
        "truth": packed(first.p[np.arange(len(first)), first.y_true]),
        "names": [clean(name) for name in first.names],
        "groups": None if first.groups is None else [clean(group) for group in first.groups],
        "threshold": threshold,
        "map": _map_data(maps, colours, len(facts.classes)) if maps else None,
    }
    thumbnails = make_thumbnails(facts.recipe, first.names, room - len(embedded_json(data)), progress, kept)
    if thumbnails.sheets:
        data["pictures"] = {"missing": thumbnails.missing, "columns": COLUMNS, "rows": ROWS}
    shown, cells = run_figures.confusion_cells(figures.confusion)
    context = {
        "judged": judged,
        "is_alone": len(np.unique(judged.y_true)) < 2,
        "split": facts.split_word(judged.split),
        "listed_note": ordered.note,
        "picture_note": thumbnails.note,
        "confusion_words": run_words.confusion_words(facts, judged),
        "cells": cells,
        "shown": shown,
        "worst": _worst(first, thumbnails),
        "class_words": run_words.class_words(figures),
        "class_rows": _class_rows(facts, figures),
        "narrowing": run_words.narrowing(facts, figures),
        "calibration_words": run_words.calibration_words(figures, judged),
        "calibration": run_figures.calibration_plot(judged),
        **threshold_context,
        **_map_context(facts, first, maps, colours),
    }
    return thumbnails, data, context


def _head(facts: Facts) -> dict[str, Any]:
    metrics, figures = facts.metrics, facts.figures
    train = facts.counts("train")
    largest = max(train.values(), default=0)
    splits = [split for split, counts in metrics.counts if counts and sum(counts.values())]
    splits = splits if metrics.folds is None else ["train"]  # Each image is a training and a test image.
    rows = [
        {"name": clean(name), "counts": [facts.counts(split).get(name, 0) for split in splits],
         "share": train.get(name, 0) / largest if largest else 0.0}
        for name in facts.classes
    ]  # fmt: skip
    counted, columns = sorted(train.values()), _figure_columns(facts)
    many = (
        f"{len(facts.classes)} classes; the largest has {amount(counted[-1], 'training image')}, the smallest "
        f"{counted[0]:,}. The section Classes lists all classes."
    )
    return {
        "title": run_words.title(facts),
        "lead": run_words.lead(facts),
        "machinery": run_words.machinery(facts.recipe),
        "summary": run_words.summary(facts),
        "warnings": run_words.warnings(facts),
        "classes": [clean(name) for name in facts.classes],
        "rarest": facts.rarest,
        "count_splits": ["images"] if metrics.folds else [run_words.SPLITS.get(split, split) for split in splits],
        "count_rows": rows if len(rows) <= FEW_CLASSES else [],
        "count_words": many if len(rows) > FEW_CLASSES else "",
        "headline": [] if figures is None else _headline(facts, figures),
        "figures": figures,
        "figure_columns": columns,
        "table_of_metrics": [row for row in METRICS.values() if any(each["figures"].get(row.name) for each in columns)],
        "metrics": metrics,
        "seconds": duration(metrics.seconds),
    }


def _headline(facts: Facts, figures: Evaluation) -> list[dict[str, Any]]:
    majority, row = figures.majority, figures.per_class[facts.minority]
    always = f"always {quoted(majority.label)}"
    is_rarest = facts.minority == facts.rarest
    is_majority = majority.label == row.label
    found = figures.confusion[facts.minority][facts.minority]
    which = "the class in focus" if facts.focus is not None else "the rarest class"
    if facts.focus is None and not is_rarest:
        which = "the rarest class that was evaluated"
    decided = sum(line[facts.minority] for line in figures.confusion)
    if not row.support:  # Recall, precision and balanced accuracy need images of the class.
        called = share_interval(decided / max(figures.num_images, 1), figures.num_images, figures.level)
        note = f"{decided:,} of {amount(figures.num_images, 'image')} called {quoted(row.label)}"
        return [_with_strip({"name": "share of false alarms", "figure": called, "note": note, "reference": None})]
    share = row.support / max(figures.num_images, 1)
    alarms = f"{found:,} of {amount(decided, 'alarm')} real" if decided else "no alarm"
    items: list[dict[str, Any]] = [
        {
            "name": f"recall of {quoted(row.label)}, {which}",
            "figure": row.recall,
            "note": f"{found:,} of {amount(row.support, 'image')} found",
            "reference": float(is_majority),
        },
        {
            "name": f"precision of {quoted(row.label)}",
            "figure": row.precision,
            "note": f"{alarms}; calling every image {quoted(row.label)}: {share:.3f}",
            "reference": share,
        },
        {
            "name": "balanced accuracy",
            "figure": figures.figures.uwa,
            "note": f"the mean recall of all classes; {always}: {majority.uwa:.3f}{_beside_quick(facts)}",
            "reference": majority.uwa,
        },
    ]
    return [_with_strip(item) for item in items]


def _with_strip(item: dict[str, Any]) -> dict[str, Any]:
    """Add the picture of a number and its interval, or none if it is not defined."""
    figure = item["figure"]
    if figure.value is None:
        return {**item, "strip": ""}
    told = f"{figure.value:.3f}, interval {figure.low:.3f} to {figure.high:.3f}; {item['note']}"
    return {**item, "strip": svg.strip(told, figure.value, figure.low, figure.high, item["reference"])}


def _beside_quick(facts: Facts) -> str:
    """Return the balanced accuracy of the recipe to which the run is compared, as the end of a note."""
    baseline = facts.metrics.baseline
    found = None if baseline is None else baseline.splits.get(facts.split or "")
    if baseline is None or found is None or found.uwa.value is None:
        return ""
    unit = "split" if facts.metrics.folds is None else "folds"
    return f"; recipe {clean(baseline.recipe)} on the same {unit}: {found.uwa.value:.3f}"


def _figure_columns(facts: Facts) -> list[dict[str, Any]]:
    """Return the parts that have figures, if they have images of several classes: most figures compare classes."""
    metrics = facts.metrics
    words = {
        "test": "test images" if metrics.folds is None else "images, out-of-fold",
        "held_out": "images not drawn by the scenario",
        "val": f"validation images, which {run_words.val_role(facts.recipe)} the model",
    }
    return [
        {"words": text, "images": part.num_images, "figures": part.figures}
        for name, text in words.items()
        if (part := metrics.judged().get(name)) and sum(row.support > 0 for row in part.per_class) > 1
    ]


def _class_rows(facts: Facts, figures: Evaluation) -> list[dict[str, Any]]:
    train = facts.counts("train")
    rows = []
    for row in figures.per_class:
        bar = "" if row.recall.value is None else svg.small_bar(*vars(row.recall).values())
        rows.append({**dict(row), "label": clean(row.label), "train": train.get(row.label, 0), "bar": bar})
    return rows


def _worst(first: Judged, thumbnails: Thumbnails) -> list[dict[str, Any]]:
    return [
        {
            "name": clean(first.names[i]),
            "group": clean(first.groups[i]) if first.groups is not None else "",
            "true": int(first.y_true[i]),
            "predicted": int(first.y_pred[i]),
            "sure": float(first.confidence[i]),
            "picture": thumbnails.classes(i),
        }
        for i in range(min(WORST, int(first.wrong.sum())))
    ]


def _maps(first: Judged, kind: str, seed: int) -> list[FeatureMap]:
    if first.features is None or _no_map(first, ""):
        return []
    kinds = ["pca"] if kind == "pca" else [kind, "pca"]
    return [lay_out(first.features, each, seed) for each in kinds]


def _no_map(first: Judged, split: str) -> str:
    """Return why there is no map of the images of a split, or an empty text if there is one."""
    if first.features is None or not first.features.size:
        return f"There is no map: the run has no features of the {split} images ({FEATURES})."
    if len(first) < 2:
        return f"There is no map: there is only one {split} image."
    if not np.isfinite(first.features).all():
        return f"There is no map: the features of the {split} images ({FEATURES}) are not all finite numbers."
    return ""


def _map_data(maps: Sequence[FeatureMap], colours: Sequence[int], num_classes: int) -> dict[str, Any]:
    places = {
        each.kind: packed(np.where(np.isnan(each.xy), 65535, each.xy.clip(0, 1) * 10_000).round().astype(np.uint16))
        for each in maps
    }
    return {
        "places": places,
        "colours": colours,
        "shapes": run_figures.mark_paths(num_classes),
        "notes": {each.kind: each.note for each in maps},
    }


def _map_context(facts: Facts, first: Judged, maps: Sequence[FeatureMap], colours: Sequence[int]) -> dict[str, Any]:
    if not maps or first.features is None:
        return {"maps": [], "no_map": _no_map(first, facts.split_word(first.split))}
    name = facts.classes[facts.minority]
    share = neighbour_share(first.features, first.y_true, facts.minority)
    told = (
        f"For {percent(share)} of the images of {quoted(name)}, the nearest other image is also {quoted(name)}."
        if share is not None
        else ""
    )
    own = [label for label, colour in enumerate(colours) if colour != run_figures.OTHER]
    own.sort(key=lambda label: colours[label])
    rest = [facts.classes[label] for label, colour in enumerate(colours) if colour == run_figures.OTHER]
    legend = [(colours[label], clean(facts.classes[label])) for label in own]
    if rest:
        legend.append((run_figures.OTHER, amount(len(rest), "other class", "other classes")))
    shapes = run_figures.mark_paths(len(facts.classes))
    has_shapes = len(facts.classes) > run_figures.FEW_MARKS
    return {
        "maps": [(each.kind, each.title) for each in maps],
        "map_words": told,
        "map_note": maps[0].note,
        "map_legend": [
            (run_figures.point_style(mark, False, shapes[mark][0]), shapes[mark][0], word) for mark, word in legend
        ],
        "map_mistake": (run_figures.point_style(run_figures.OTHER, True, shapes[0][1]), shapes[0][1]),
        "map_mistake_words": "mistake: hollow, in the colour and shape of the true class"
        if has_shapes
        else "mistake, in the colour of the true class",
        "map_paths": run_figures.map_paths(
            maps[0].xy, np.array(colours)[first.y_true], first.wrong, len(facts.classes)
        ),
        "map_size": (run_figures.MAP_WIDTH, run_figures.MAP_HEIGHT),
    }


def _course(facts: Facts, stages: Sequence[Stage], notes: Sequence[str]) -> dict[str, Any]:
    train = facts.counts("train")
    name = facts.classes[facts.rarest]
    unreadable = facts.metrics.unreadable
    diagnostics = None
    if stages:
        share = train.get(name, 0) / max(sum(train.values()), 1)
        plot = run_figures.diagnostic_plot(stages[0], share, name)
        if plot is not None:
            words = run_words.diagnostic_words(stages[0], facts)
            is_contrastive = "projections" in facts.recipe.encoder_training.loss.entry.needs
            diagnostics = {"words": words, "plot": plot[0], "legend": plot[1], "is_contrastive": is_contrastive}
    return {
        "learning_words": run_words.learning_words(stages, facts),
        "stages": [(stage.name, run_figures.learning_plots(stage)) for stage in stages],
        "diagnostics": diagnostics,
        "notes": [clean(note) for note in notes],
        "unreadable": [
            {name: clean(str(item.get(name, ""))) for name in ("name", "reason")} for item in unreadable[:MOST_NOTED]
        ],
        "unreadable_more": max(len(unreadable) - MOST_NOTED, 0),
    }


SIDE = 48
"""Side of the squares in pixels, in which the picture has the shape of its image."""
STRONGEST = 0.75
RED, BLUE = (220, 30, 30), (30, 60, 220)


def heat_pictures(folder: Path) -> Mapping[str, str]:
    """Return the map of each image that has one, by name, as the URL of a picture with the shape of a thumbnail."""
    found = read_maps(folder)
    if found is None:
        return {}
    sizes = zip(found.names, found.maps.astype(np.float32), found.sizes.tolist(), strict=True)
    return {name: _url(values, width, height) for name, values, (width, height) in sizes}


def add_heat(folder: Path, data: dict[str, Any], tiles: Sequence[dict[str, Any]]) -> None:
    """Give the tiles of a page, and the images in the data of its script, their maps, if the run has any."""
    pictures = {clean(name): url for name, url in heat_pictures(folder).items()}
    for tile in tiles:
        tile["heat"] = pictures.get(tile["name"])
    if pictures:
        data["heat"] = {row: pictures[name] for row, name in enumerate(data["names"]) if name in pictures}


def _url(values: np.ndarray, width: int, height: int) -> str:
    pixels = np.zeros((*values.shape, 4), dtype=np.uint8)
    pixels[..., :3] = np.where(values[..., None] >= 0, RED, BLUE)
    pixels[..., 3] = np.round(255 * STRONGEST * np.clip(np.abs(values), 0, 1))
    scale = SIDE / max(width, height)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    square = Image.new("RGBA", (SIDE, SIDE))
    square.paste(
        Image.fromarray(pixels, "RGBA").resize(size, Image.Resampling.BILINEAR),
        ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2),
    )
    content = io.BytesIO()
    square.save(content, "WEBP", quality=60)
    return f"data:image/webp;base64,{base64.b64encode(content.getvalue()).decode()}"
