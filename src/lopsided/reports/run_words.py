"""Sentences on the page of a run: summary, warnings and one sentence per section."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lopsided.data.sources import SOURCE_NAMES
from lopsided.evaluation.decision import Decision
from lopsided.evaluation.intervals import share_interval
from lopsided.evaluation.metric_table import METRICS
from lopsided.recipe import Recipe
from lopsided.recipe.words import amount
from lopsided.reports.run_data import Judged, Stage
from lopsided.reports.thresholds import Counts
from lopsided.reports.wording import clean, figure_value, interval, listed, number, percent, probability, quoted
from lopsided.runs.metrics import Estimate, Evaluation, FoldFacts, Headline, Metrics

FEW = 30
"""With fewer test images of a class, its recall is too uncertain."""
USUAL_RECALL, FURTHER, SINGLE = 0.8, (1, 2, 3, 5, 10), 10
"""The recall for which the page shows intervals if no image was tested, and numbers of further rare images."""
SPLITS = {"train": "training", "val": "validation", "test": "test", "held_out": "further"}
CURVES = (
    "The curves and their areas are means over the folds, because scores of different models do not rank together. The "
    "selected threshold counts all images, so its point can lie beside the curve."
)
"""What the curves of a run with folds show."""
_SAID = frozenset({"no_test_split", "few_test_images", "few_images"})
"""Kinds of cautions for which the page has its own words, because it may show other images than the test split."""


@dataclass(frozen=True)
class Caution:
    """A reason to trust the figures less: a headline, which may be empty, and an explanation."""

    title: str
    text: str


@dataclass(frozen=True)
class Facts:
    """The input of the sentences. ``split`` is the evaluated split, or None if no images were held out."""

    recipe: Recipe
    metrics: Metrics
    split: str | None
    focus: int | None = None
    """The class that somebody asked for, or that the rule of the model names; None: the rarest one."""

    @property
    def classes(self) -> Sequence[str]:
        """The class names in order."""
        return self.metrics.classes

    @property
    def figures(self) -> Evaluation | None:
        """The figures of the evaluated split."""
        return self.metrics.judged().get(self.split or "")

    @property
    def decision(self) -> Decision:
        """The decision rule of the model."""
        return self.metrics.decision.decision

    @property
    def rarest(self) -> int:
        """The class with the fewest training images. If classes tie, the first one."""
        return self._rarest(range(len(self.classes)))

    @property
    def minority(self) -> int:
        """The class that the page focuses on: ``focus``, or the rarest class with evaluated images, or the rarest."""
        if self.focus is not None:
            return self.focus
        rows = [] if self.figures is None else self.figures.per_class
        return self._rarest([i for i, row in enumerate(rows) if row.support] or range(len(self.classes)))

    def _rarest(self, labels: Iterable[int]) -> int:
        counts = self.metrics.counts.train
        return min(labels, key=lambda i: counts.get(self.classes[i], 0))

    def split_word(self, split: str) -> str:
        """Return the adjective for the images of a split."""
        return "out-of-fold" if split == "test" and self.metrics.folds is not None else SPLITS[split]

    def counts(self, split: str) -> dict[str, int]:
        """Return the number of images of each class in a split. The result is empty if the split does not exist."""
        return getattr(self.metrics.counts, split, None) or {}


def source_name(recipe: Recipe) -> str:
    """Return the name of the source, or the last part of its path."""
    source = recipe.data.source or "data"
    return source if source in SOURCE_NAMES else clean(Path(source).name or source)


def title(facts: Facts) -> str:
    """Return the heading of the page of a run: what it finds, in counts."""
    figures = facts.figures
    if figures is None:
        return f"Trained on {source_name(facts.recipe)}, not tested"
    place = facts.minority
    row, decided = figures.per_class[place], sum(line[place] for line in figures.confusion)
    found = figures.confusion[place][place]
    others = figures.num_images - row.support
    counts = Headline(row.label, found, row.support, row.recall.low, row.recall.high, decided - found, others)
    return counts.title(quoted(row.label)).replace(" %", "\N{NO-BREAK SPACE}%")


def lead(facts: Facts) -> str:
    """Return on which images the model was tested, and that it had not seen them."""
    figures, recipe = facts.figures, facts.recipe
    if figures is None:
        return "No images were held out, so nothing is known about new images."
    folds = facts.metrics.folds
    source = f"{source_name(recipe)}{f', {recipe.data.scenario}' if recipe.data.scenario else ''}"
    if folds is not None:
        times = f"{folds.repeats} times" if folds.repeats > 1 else "once"
        tested = f"Each of the {figures.num_images:,} images of {source} was tested {times}"
        return f"{tested}, by a model that was not trained on it ({folds.folds} folds)."
    kind = SPLITS[facts.split or "test"]
    tested = f"Tested on {amount(figures.num_images, f'{kind} image')} of {source}"
    if facts.split == "val":
        return f"{tested}, which {val_role(recipe)} the model, so the numbers are too high."
    return f"{tested}, on which the model was not trained."


def machinery(recipe: Recipe) -> str:
    """Return the method and the data of a run."""
    return f"{recipe.spec.title(recipe)} on {source_name(recipe)}"


def _encoder(recipe: Recipe) -> str:
    """Return the encoder, or the joined encoders, with their initial weights."""
    spec = recipe.encoder.spec
    kinds = {"none": "", "embedded": "the embedded pretrained weights", "timm": "pretrained weights of timm"}
    other = {part.weights: part.weights for part in spec.parts if part.is_hub}
    weights = dict.fromkeys((kinds | other).get(part.weights, "weights from a file") for part in spec.parts)
    start = f" with {listed(list(weights))}" if any(weights) else ""
    titles = [f"{block.title} ({block.name})" for block in spec.blocks]
    blocks = f", joined with {listed(titles)}," if titles else ""
    if len(spec.parts) == 1:
        return f"A {clean(spec.names[0])}{start}{blocks}"
    return f"{len(spec.parts)} joined encoders ({listed([clean(name) for name in spec.names])}){start}{blocks}"


def summary(facts: Facts) -> str:
    """Return two sentences: what was trained, and on which images."""
    recipe = facts.recipe
    names = [quoted(name) for name in facts.classes]
    task = f"{names[0]} from {names[1]}" if len(names) == 2 else amount(len(names), "class", "classes")
    its = "their" if len(recipe.encoder.spec.parts) > 1 else "its"
    how = recipe.spec.summary(recipe, its)
    num = len(facts.metrics.views)
    how += f", with features averaged over {amount(num, 'view')} of each image" if num > 1 else ""
    scenario = f", with the scenario {recipe.data.scenario}" if recipe.data.scenario else ""
    which = "All tested images" if recipe.data.more else "All images"  # Marked images may be from elsewhere.
    learned = f"{_encoder(recipe)} learned to distinguish {task}: {how}."
    if facts.metrics.folds is not None:
        return f"{learned} {fold_words(facts.metrics.folds, facts)} {which} are from {source_name(recipe)}{scenario}."
    parts = [f"trained on {amount(sum(facts.counts('train').values()), 'image')}"]
    if facts.metrics.val and recipe.spec.selects_epochs:
        parts.append(f"selected on {amount(sum(facts.counts('val').values()), 'validation image')}")
    if facts.split in ("test", "held_out") and facts.figures is not None:
        parts.append(f"evaluated on {amount(facts.figures.num_images, 'new image')}")
    used = listed(parts) if len(parts) > 1 else parts[0]
    return f"{learned} The model was {used}. {which} are from {source_name(recipe)}{scenario}."


def fold_words(folds: FoldFacts, facts: Facts) -> str:
    """Return how folds tested the images, how much the folds differ, and which model the run gives."""
    number = amount(sum(facts.counts("test").values()), "image")
    by = " by group" if folds.by == "group" else ""
    times = f", {folds.repeats} times" if folds.repeats > 1 else ""
    uwa = sorted(row.uwa for row in folds.per_fold)
    text = (
        f"{folds.folds} folds{by} tested all {number}{times}: every metric is out-of-fold, from models that were not "
        f"trained on the image. By fold, the balanced accuracy is {uwa[0]:.3f} to {uwa[-1]:.3f}."
    )
    size = f"{folds.parameters / 1e6:.1f} million parameters"
    if folds.final == "refit":
        return f"{text} The model of the run was then trained on all images ({size})."
    times = f"{folds.members} times " if folds.members > 1 else ""
    return (
        f"{text} The model of the run is the ensemble of {folds.folds} of these models ({size}), and an image costs "
        f"{times}as much as with one of them."
    )


def warnings(facts: Facts) -> list[Caution]:
    """Return the warnings about the figures."""
    of_run = [Caution("", clean(fact.text)) for fact in facts.metrics.facts if fact.kind not in _SAID]
    found = [*_of_recipe(facts), *of_run, *_of_test(facts), *_of_vote(facts)]
    unreadable = len(facts.metrics.unreadable)
    if unreadable:
        found.append(
            Caution(
                f"{amount(unreadable, 'image')} could not be read",
                "The run skipped these images in training and evaluation. The section Training lists them.",
            )
        )
    return found


def _of_recipe(facts: Facts) -> Iterator[Caution]:
    if facts.metrics.recipe != facts.recipe.content_hash():
        yield Caution(
            "The recipe cannot be checked",
            f"lopsided {clean(facts.metrics.lopsided)}, which trained the run, computed the hash of the recipe "
            "differently. The recipe.toml in this folder may not be the recipe of the run.",
        )


def _of_test(facts: Facts) -> Iterator[Caution]:
    if facts.figures is None:
        yield Caution(
            "No images were held out",
            "The performance of the model on new images is unknown. Set data.test to hold out test images.",
        )
        return
    if facts.split == "held_out":
        yield Caution(
            "There is no test split",
            "The metrics below are for the images that the scenario did not draw.",
        )
    elif facts.split != "test":
        yield Caution(
            "There is no test split",
            f"The metrics below are for the validation images. These images {val_role(facts.recipe)} the model, so the "
            "metrics are too high.",
        )
    rows = facts.figures.per_class
    name, rare = facts.classes[facts.minority], rows[facts.minority].support
    what = facts.split_word(facts.split or "test")
    if 0 < rare < FEW:
        yield Caution(
            f"Only {amount(rare, f'{what} image')} of {quoted(name)}",
            f"A single image changes the recall of this class by {percent(1 / rare)[:-2]} percentage points. "
            "Look at the intervals, not only at the values.",
        )
    others = [row.label for i, row in enumerate(rows) if 0 < row.support < FEW and i != facts.minority]
    more = "more " if 0 < rare < FEW else ""
    if others:
        yield Caution(
            f"{amount(len(others), f'{more}class', f'{more}classes')} with fewer than {FEW} {what} images",
            f"The recall of {listed([quoted(other) for other in others])} is uncertain{', too' if more else ''}.",
        )
    absent = [row.label for row in rows if not row.support]
    if absent:
        yield Caution(
            f"No {what} image of {listed([quoted(other) for other in absent])}",
            "The recall of such a class is unknown. Means over classes exclude it.",
        )


def _of_vote(facts: Facts) -> Iterator[Caution]:
    if facts.figures is None:
        return
    if sum(row.support > 0 for row in facts.figures.per_class) < 2:  # A constant answer is right: there is no question.
        return
    majority, figures = facts.figures.majority, facts.figures.figures
    always, informative = f"always predicting {quoted(majority.label)}", "Use balanced accuracy and recall instead."
    price = ""
    if figures.uwa.value is not None and figures.uwa.value > majority.uwa:
        price = f" With imbalanced classes, this is the price of finding the rare class. {informative}"
    doubt = f" With imbalanced classes, accuracy is not informative. {informative}"
    for name, figure, constant, if_lower, if_unsure in (
        ("balanced accuracy", figures.uwa, majority.uwa, "", ""),
        ("accuracy", figures.accuracy, majority.accuracy, price, doubt),
    ):
        if figure.high is not None and figure.high < constant:
            yield Caution(
                f"The {name} is lower than with {always}",
                f"The model reaches {figure_value(figure)} {interval(figure)}. The constant prediction reaches "
                f"{number(constant)}.{if_lower}",
            )
        elif figure.low is not None and figure.low <= constant:
            yield Caution(
                f"The {name} may not be higher than with {always}",
                f"The interval {interval(figure)} contains {number(constant)}, the {name} of the constant prediction."
                f"{if_unsure}",
            )


def val_role(recipe: Recipe) -> str:
    """Return what validation images did to the model."""
    return "selected" if recipe.spec.selects_epochs else "calibrated"


def has_kind(facts: Facts, kind: str) -> bool:
    """Return whether the run has a caution of a kind."""
    return any(fact.kind == kind for fact in facts.metrics.facts)


def confusion_words(facts: Facts, judged: Judged) -> str:
    """Return the number of mistakes and the most frequent mistake."""
    wrong = int(judged.wrong.sum())
    if not wrong:
        return f"No mistakes among {amount(len(judged), 'image')}."
    pairs, counts = np.unique(np.stack([judged.y_true, judged.y_pred])[:, judged.wrong], axis=1, return_counts=True)
    true, predicted = pairs[:, counts.argmax()].tolist()
    support = int((judged.y_true == true).sum())
    kind = f"{quoted(facts.classes[predicted])} for {quoted(facts.classes[true])}"
    return (
        f"{amount(wrong, 'mistake')} among {amount(len(judged), 'image')}, most often {kind} "
        f"({counts.max():,} of {support:,} images)."
    )


def rule_words(name: str, by_rule: Counts, at_start: Counts | None) -> str:
    """Return why the slider counts otherwise than the model's rule; empty if it does not. ``at_start`` is the slider.

    The slider starts elsewhere (None) if the rule is no threshold of this class.
    """
    if at_start == by_rule:
        return ""
    if at_start is not None:
        return (
            "Each fold was decided by the threshold that the other folds gave, so the counts of the rule can differ "
            "from those at one threshold."
        )
    support = by_rule.tp + by_rule.fn
    own = f", {number(by_rule.recall)} ({by_rule.tp:,} of {amount(support, 'image')})," if support else ""
    return (
        "The slider asks for one class at a time whether its probability reaches a threshold. The model gives each "
        f"image exactly one class, so its own recall of {quoted(name)}{own} can differ from that below."
    )


def threshold_words(
    name: str,
    by_rule: Counts,
    chosen: float | None,
    at_chosen: Counts | None,
    spread: tuple[float, float] | None = None,
) -> str:
    """Say what the rule of the model finds, and compare it with the validation threshold."""
    positives, others = by_rule.tp + by_rule.fn, by_rule.fp + by_rule.tn

    def outcome(counts: Counts) -> str:
        if not positives:
            alarms = amount(counts.fp, "false alarm")
            return f"the model gives {alarms} among {amount(others, 'image')}; no image of {quoted(name)} was tested"
        return (
            f"the model finds {counts.tp:,} of {positives:,} images of {quoted(name)} and gives "
            f"{counts.fp:,} false alarms among {amount(others, 'other image')}"
        )

    first = f"By its own rule, {outcome(by_rule)}."
    if chosen is None or at_chosen is None:
        return first
    known = "" if spread is None else f" (95 % interval {probability(spread[0])} to {probability(spread[1])})"
    threshold = f"the validation threshold {probability(chosen)}{known}"
    if at_chosen == by_rule:
        return f"{first} {threshold[0].upper()}{threshold[1:]} gives the same result."
    return f"{first} With {threshold}, {outcome(at_chosen)}."


def no_choice(facts: Facts, split: str) -> str:
    """Return why there is no validation threshold; empty for folds, which have no validation images."""
    if facts.metrics.folds is not None:
        return ""
    if split == "val":
        return "There is no validation threshold, because the metrics are already for the validation images."
    return "There is no validation threshold: it needs validation images of this class and of other classes."


def threshold_advice(facts: Facts, split: str, *, has_choice: bool) -> str:
    """Return a warning about thresholds that a reader chooses on the page. A choice is a validation threshold."""
    what = facts.split_word(split)
    text = f"If you choose a threshold by looking at {what} images, the metrics of these images are too high. "
    if split == "val":
        return f"{text}Before use, evaluate the threshold on images that were not used for training or model selection."
    text += "In practice, use the rule of the model. "
    if has_choice:
        text += "The validation threshold was chosen on the validation images, whose balanced accuracy is too high. "
    return f"{text}If you need another threshold, choose it on other images."


def learning_words(stages: Sequence[Stage], facts: Facts) -> str:
    """Return which epochs the model comes from."""
    metric = facts.recipe.selection.metric
    if facts.metrics.folds is not None:
        return "Each fold was trained by itself. The folder of each fold holds its log."
    if not any(epochs != 0 for epochs in facts.recipe.spec.stages(facts.recipe).values()):
        return "The encoder was not trained. The classifier was fitted to its features at once."
    if not stages:
        return "The log of the run is missing, so the course of the training is unknown."
    parts = [f"epoch {stage.taken} of {stage.epochs[-1]['epoch']} of the {stage.name} stage" for stage in stages]
    text = f"The model has the weights of {' and '.join(parts)}"
    if any(stage.picked for stage in stages):
        by = METRICS[metric.removeprefix("smooth_")]
        how = "highest" if by.higher_is_better else "lowest"
        return f"{text}, where the validation {'smooth ' if 'smooth' in metric else ''}{by.label} was {how}."
    why = "No epoch was selected."
    if has_kind(facts, "no_validation_split"):
        why = "These are the last epochs, because there was no validation split."
    elif metric == "last":
        why = "These are the last epochs, because the recipe keeps the last epoch."
    return f"{text}. {why}"


def diagnostic_words(stage: Stage, facts: Facts) -> str:
    """Return the share of the rare class in the images and in the loss."""
    counts = facts.counts("train")
    name = facts.classes[facts.rarest]
    images = counts.get(name, 0) / max(sum(counts.values()), 1)
    shares = [value for _, value in stage.series("minority_loss_share")]
    alone = [value for _, value in stage.series("anchors_without_positives")]
    text = ""
    if shares:
        text = (
            f"{quoted(name)} has {percent(images, 1)} of the training images and contributes "
            f"{percent(float(np.mean(shares)), 1)} of the loss."
        )
    if alone:
        mean = float(np.mean(alone))
        rest = "every anchor had a positive" if mean == 0 else f"{percent(mean, 2)} of the anchors had no positive"
        text += f" In the training batches, {rest}."
    return text.strip()


def calibration_words(figures: Evaluation, judged: Judged) -> str:
    """Return whether the probabilities match the accuracy."""
    error = figures.figures.calibration_error
    said = float(judged.p.max(axis=1).mean())
    right = float(np.mean(judged.p.argmax(axis=1) == judged.y_true))
    text = f"The mean of the highest probability is {percent(said)}, and {percent(right)} of these classes are correct"
    lean = "the model is overconfident"
    if said <= right:
        lean = "the model is underconfident" if said < right else "only single bins differ"
    if error.low == 0:
        lean = "chance can explain the difference"
    return f"{text}: {lean} (calibration error {figure_value(error)} {interval(error)})."


def narrowing(facts: Facts, figures: Evaluation) -> dict[str, Any] | None:
    """Return how the interval of a recall narrows with further rare images; None if there are many already."""
    row = figures.per_class[facts.minority if facts.metrics.only_class is None else facts.rarest]
    if row.support >= FEW:
        return None
    share = USUAL_RECALL if row.recall.value is None else row.recall.value
    soon = [row.support + more for more in FURTHER] if row.support < SINGLE else []
    numbers = sorted({row.support, *soon, *(n for n in (FEW, 50, 100, 200) if n > row.support)})
    steps = [(n, share_interval(share, n, figures.level)) for n in numbers if n]
    known = (
        f"If the recall of {quoted(row.label)} stays at" if row.support else f"If the recall of {quoted(row.label)} is"
    )
    wider = (
        " The interval above is wider than the first of these, because the models of the folds differ."
        if row.support and facts.metrics.folds is not None and _is_wider(row.recall, steps[0][1].low, steps[0][1].high)
        else ""
    )
    return {
        "words": f"{known} {100 * share:.0f} %, more images of it narrow the interval.{wider}",
        "rows": [{"images": n, "low": f"{100 * s.low:.0f} %", "high": f"{100 * s.high:.0f} %"} for n, s in steps],
    }


def _is_wider(found: Estimate, low: float | None, high: float | None) -> bool:
    """Return whether an interval is wider than another one, that of images alone, by what a page shows of both.

    >>> found = Estimate(value=0.7, low=0.43, high=0.89)
    >>> _is_wider(found, 0.51, 0.85), _is_wider(found, 0.43, 0.89)
    (True, False)
    """
    own, alone = ([round(100 * (end or 0)) for end in ends] for ends in ((found.low, found.high), (low, high)))
    return own[1] - own[0] > alone[1] - alone[0]


def class_words(figures: Evaluation) -> str:
    """Return the best and the worst recall."""
    known = [(row.recall.value, row.label) for row in figures.per_class if row.recall.value is not None]
    (best, of_best), (worst, of_worst) = (pick(known, key=lambda row: row[0]) for pick in (max, min))
    if best == worst:
        which = "The class" if len(known) == 1 else "Every class"
        return f"{which} with images has a recall of {number(best)}."
    return f"Recall ranges from {number(worst)} for {quoted(of_worst)} to {number(best)} for {quoted(of_best)}."
