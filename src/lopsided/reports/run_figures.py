"""The plots on the page of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from lopsided.evaluation.metrics import NUM_BINS
from lopsided.recipe.words import amount
from lopsided.reports import svg
from lopsided.reports.run_data import Judged, Stage
from lopsided.reports.thresholds import Counts, curves, mean_curves
from lopsided.reports.wording import number, percent, quoted

MOST_CELLS = 60
"""Maximum number of classes for a complete confusion matrix."""
MOST_MARKS = 12
OTHER = MOST_MARKS
"""The mark of classes without their own mark."""
FEW_MARKS = 4
"""Up to this number of classes, colours alone tell the classes apart, and all points are round."""
DOT, CROSS = "h0", "m-3-3l6 6m0-6l-6 6"
SHAPES = (
    "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",  # circle
    "m-3.2-3.2h6.4v6.4h-6.4z",  # square
    "m0-4.4l4.2 7.4h-8.4z",  # triangle
    "m0-4.8l4.4 4.8l-4.4 4.8l-4.4-4.8z",  # diamond
    "m0 4.4l4.2-7.4h-8.4z",  # triangle that points down
    "m-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",  # plus
)
"""Relative paths around the place of a point."""
MAP_WIDTH, MAP_HEIGHT = 720, 480
SIDE = 340
"""Width and height of the square curve plots."""


@dataclass(frozen=True)
class Cell:
    """One cell of a confusion matrix; ``shade`` is its share of the row in tenths."""

    true: int
    predicted: int
    count: int
    shade: int


def confusion_cells(confusion: Sequence[Sequence[int]]) -> tuple[list[int], list[list[Cell]]]:
    """Return the shown classes and their cells. If there are many classes, show those with the most mistakes."""
    matrix = np.array(confusion, dtype=np.int64)
    shown = np.arange(len(matrix))
    if len(matrix) > MOST_CELLS:
        wrong = matrix.sum(axis=0) + matrix.sum(axis=1) - 2 * np.diagonal(matrix)
        shown = np.sort(np.argsort(-wrong, kind="stable")[: MOST_CELLS * 2 // 3])
    totals = matrix.sum(axis=1)
    cells = [
        [
            Cell(t, p, int(matrix[t, p]), int(np.ceil(10 * matrix[t, p] / totals[t])) if totals[t] else 0)
            for p in shown.tolist()
        ]
        for t in shown.tolist()
    ]
    return shown.tolist(), cells


def curve_plots(
    roc_title: str, pr_title: str, share: float, side: int, identities: tuple[str, str] = ("", "")
) -> tuple[svg.Plot, svg.Plot]:
    """Return the axes of ROC and precision-recall curves, with the lines of a ranking by chance."""
    unit, marks = (0.0, 1.0), svg.ticks(0, 1)
    roc, pr = (
        svg.Plot(title, unit, unit, x_label, y_label, y_ticks=marks, width=side, height=side, identity=identity)
        for title, x_label, y_label, identity in (
            (roc_title, "false positive rate", "recall", identities[0]),
            (pr_title, "recall", "precision", identities[1]),
        )
    )
    roc.line([(0, 0), (1, 1)], "reference")
    pr.line([(0, share), (1, share)], "reference", identity=f"{pr.identity}-reference" if pr.identity else "")
    return roc, pr


def roc_plot(
    p: npt.NDArray[np.float32],
    positive: npt.NDArray[np.bool_],
    name: str,
    now: Counts,
    chosen: Counts | None,
    folds: npt.NDArray[np.int64] | None = None,
) -> tuple[Markup, Markup]:
    """Draw the ROC and precision-recall curves with the points of the current and the validation threshold."""
    roc, precision_recall = curves(p, positive) if folds is None else mean_curves(p, positive, folds)
    share = float(positive.mean()) if len(positive) else 0.0
    first, second = curve_plots(
        f"ROC curve of {quoted(name)}", f"Precision-recall curve of {quoted(name)}", share, SIDE, ("roc", "pr")
    )
    first.line(roc, "c0", identity="roc-line")
    second.line(precision_recall, "c0", identity="pr-line")
    for plot, axes in ((first, _roc_point), (second, _pr_point)):
        for counts, kind in ((chosen, "chosen"), (now, "now")):
            place = None if counts is None else axes(counts)
            x, y = place or (0.0, 0.0)
            away = "" if place else " away"
            identity = f"{plot.identity}-{kind}"
            if kind == "chosen":
                plot.diamond(x, y, f"chosen{away}", "validation threshold", identity=identity)
            else:
                plot.dot(x, y, f"now{away}", radius=6, identity=identity)
    return first.render(), second.render()


def _roc_point(counts: Counts) -> svg.Point | None:
    if counts.recall is None or counts.specificity is None:
        return None
    return 1 - counts.specificity, counts.recall


def _pr_point(counts: Counts) -> svg.Point | None:
    return None if counts.recall is None or counts.precision is None else (counts.recall, counts.precision)


def calibration_plot(judged: Judged) -> Markup:
    """Draw accuracy against confidence, in the bins of the calibration error."""
    confidence, hit = judged.p.max(axis=1).astype(np.float64), judged.p.argmax(axis=1) == judged.y_true
    bins = np.clip(np.ceil(confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
    sizes = np.bincount(bins, minlength=NUM_BINS)
    plot = svg.Plot(
        "Accuracy against confidence",
        (0.0, 1.0), (0.0, 1.0), x_label="confidence", y_label="accuracy", height=320,
        y_ticks=svg.ticks(0, 1),
    )  # fmt: skip
    points = []
    for i in np.flatnonzero(sizes).tolist():
        inside = bins == i
        said, right = float(confidence[inside].mean()), float(hit[inside].mean())
        told = f"{amount(int(sizes[i]), 'image')}: confidence {percent(said)}, accuracy {percent(right)}"
        plot.bar(i / NUM_BINS, (i + 1) / NUM_BINS - 0.006, 0.22 * sizes[i] / sizes.max(), "histogram", told)
        points.append((said, right, told, int(sizes[i])))
    plot.line([(0, 0), (1, 1)], "reference")
    plot.line([(said, right) for said, right, _, _ in points], "c0 thin")
    for said, right, told, size in points:
        plot.dot(said, right, "dot c0", told, radius=3 + 4 * (size / sizes.max()) ** 0.5)
    return plot.render()


def _epochs(stage: Stage) -> tuple[svg.Range, list[float]]:
    """Return the range of the axis of epochs, and its ticks."""
    epochs = [row["epoch"] for row in stage.epochs]
    x = (min(epochs) - 0.5, max(epochs) + 0.5) if len(epochs) < 3 else (min(epochs), max(epochs))
    return x, epochs if len(epochs) <= 8 else [tick for tick in svg.ticks(*x) if tick == int(tick)]


def learning_plots(stage: Stage) -> list[tuple[str, Markup, list[tuple[str, str]]]]:
    """Draw the loss and the validation figures of a stage. Return each plot with its caption and legend."""
    x, marks = _epochs(stage)
    plots = []
    for caption, series in (
        ("loss", [("loss", "loss", "c2")]),
        ("validation", [("val_uwa", "balanced accuracy", "c0"), ("val_accuracy", "accuracy", "c1")]),
    ):
        lines = [(stage.series(key), word, style) for key, word, style in series]
        lines = [line for line in lines if line[0]]
        if not lines:
            continue
        values = [value for points, _, _ in lines for _, value in points]
        y = svg.padded(values, floor=0.0) if caption == "loss" else (min(0.4, *values), 1.0)
        plot = svg.Plot(
            f"{caption} over the epochs of the {stage.name} stage", x, y, x_label="epoch", x_ticks=marks, height=230
        )
        if stage.picked:
            plot.rule(x=stage.taken, text=f"selected: {stage.taken}")
        for points, word, style in lines:
            plot.line(points, style)
            for epoch, value in points:
                plot.dot(epoch, value, f"dot {style}", f"epoch {epoch}: {word} {number(value)}", radius=2.6)
        plots.append((caption, plot.render(), [(style, word) for _, word, style in lines] if len(lines) > 1 else []))
    return plots


def diagnostic_plot(stage: Stage, image_share: float, name: str) -> tuple[Markup, list[tuple[str, str]]] | None:
    """Draw the share of the rare class in the loss, and the share of anchors without positives."""
    series = [
        (stage.series("minority_loss_share"), f"share of {quoted(name)} in the loss", "c1"),
        (stage.series("anchors_without_positives"), "anchors without positives", "c3"),
    ]
    series = [line for line in series if line[0]]
    if not series:
        return None
    x, marks = _epochs(stage)
    top = max([image_share, *(value for points, _, _ in series for _, value in points)])
    y = (0.0, min(1.0, 1.25 * top) or 1.0)
    plot = svg.Plot(f"{quoted(name)} in the loss", x, y, x_label="epoch", x_ticks=marks, height=230)
    above = np.mean([value for _, value in series[0][0]]) > image_share
    plot.rule(y=image_share, text="share of the images", below=bool(above))
    for points, word, style in series:
        plot.line(points, style)
        for epoch, value in points:
            plot.dot(epoch, value, f"dot {style}", f"epoch {epoch}: {word} {percent(value, 1)}", radius=2.6)
    return plot.render(), [(style, word) for _, word, style in series]


def class_colours(order: Sequence[int], judged: Judged) -> list[int]:
    """Return the mark of each class, in ``order``. If there are many, only those with most mistakes get one."""
    if len(order) > MOST_MARKS:
        wrong = np.bincount(judged.y_true[judged.wrong], minlength=len(order))
        order = np.argsort(-wrong, kind="stable")[: MOST_MARKS - 1].tolist()
    colours = [OTHER] * judged.p.shape[1]
    for colour, label in enumerate(order):
        colours[label] = colour
    return colours


def mark_paths(num_classes: int) -> list[tuple[str, str]]:
    """Return for each mark the relative paths of a correct image and of a mistake.

    With few classes these are a dot and a cross. With more classes each mark has its own shape, filled for a correct
    image and hollow for a mistake. Two marks of one colour have different shapes.
    """
    if num_classes <= FEW_MARKS:
        return [(DOT, CROSS)] * (MOST_MARKS + 1)
    shapes = [SHAPES[(mark + 3 * (mark // len(SHAPES))) % len(SHAPES)] for mark in range(MOST_MARKS)]
    return [(shape, shape) for shape in shapes] + [(DOT, CROSS)]


def map_paths(
    xy: npt.NDArray[np.float64], marks: npt.NDArray[np.int64], wrong: npt.NDArray[np.bool_], num_classes: int
) -> Markup:
    """Draw a map. Each mark has one path for its correct images and one for its mistakes."""
    places = xy * (MAP_WIDTH, MAP_HEIGHT)
    known = ~np.isnan(xy[:, 0])
    shapes, parts = mark_paths(num_classes), []
    for bad in (False, True):
        for mark in range(OTHER, -1, -1):
            rows = np.flatnonzero(known & (marks == mark) & (wrong == bad))
            d = svg.marks(map(tuple, places[rows].tolist()), shapes[mark][bad])
            parts.append(Markup('<path class="{}" d="{}"/>').format(point_style(mark, bad, shapes[mark][bad]), d))
    return Markup("\n").join(parts)


def point_style(mark: int, bad: bool, shape: str) -> str:
    """Return the CSS classes of the points of a mark."""
    outline = " shape" if shape not in (DOT, CROSS) else ""
    return f"point k{mark}{outline} {'bad' if bad else 'good'}"
