"""What a run's page says in words: what was trained, what to mind, and what each figure shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lopsided.data.sources import SOURCE_NAMES
from lopsided.recipe import LossSettings, Recipe
from lopsided.reports.run_data import Judged, Stage
from lopsided.reports.thresholds import Counts
from lopsided.reports.wording import (
    ETA,
    GAMMA,
    TIMES,
    amount,
    clean,
    interval,
    listed,
    number,
    percent,
    probability,
    quoted,
)
from lopsided.runs.metrics import Evaluation, Metrics

FEW = 30
"""Test images of a class below which its recall says little."""
_GREEK = {"eta": ETA, "gamma": GAMMA}
SPLITS = {"train": "training", "val": "validation", "test": "test", "held_out": "further"}
# What a run warned of and the page says in its own words; cautions.py has the sentences.
_SAID = re.compile(
    r"fewer than \d+ images of|^There is no (test|validation) split|in more than one split|byte-identical"
)


@dataclass(frozen=True)
class Caution:
    """Something that makes the figures worth less: a headline, and what it means."""

    title: str
    text: str


@dataclass(frozen=True)
class Facts:
    """What the words are about; ``split`` is the one that is judged, None if no image was held out."""

    recipe: Recipe
    metrics: Metrics
    split: str | None

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes in their order."""
        return self.metrics.classes

    @property
    def figures(self) -> Evaluation | None:
        """Those of the split that is judged."""
        return self.metrics.judged().get(self.split or "")

    @property
    def rarest(self) -> int:
        """The class with the fewest training images, the first of equals."""
        return self._rarest(range(len(self.classes)))

    @property
    def minority(self) -> int:
        """The rarest of the classes that have judged images, or of all where none has: what the page is about."""
        rows = [] if self.figures is None else self.figures.per_class
        return self._rarest([i for i, row in enumerate(rows) if row.support] or range(len(self.classes)))

    def _rarest(self, labels: Iterable[int]) -> int:
        counts = self.metrics.counts.train
        return min(labels, key=lambda i: counts.get(self.classes[i], 0))

    def counts(self, split: str) -> dict[str, int]:
        """The images of each class in a split; empty where there is none."""
        return getattr(self.metrics.counts, split, None) or {}


def source_name(recipe: Recipe) -> str:
    """The name of a source, or the last part of its path."""
    source = recipe.data.source or "data"
    return source if source in SOURCE_NAMES else clean(Path(source).name or source)


def title(recipe: Recipe) -> str:
    """The heading of a run's page."""
    entry = recipe.encoder_training.loss.entry
    return f"{entry.title if entry.kind == 'classification' else entry.label} on {source_name(recipe)}"


def summary(facts: Facts) -> str:
    """What was trained on what, in two sentences."""
    recipe, training = facts.recipe, facts.recipe.encoder_training
    names = [quoted(name) for name in facts.classes]
    task = f"{names[0]} from {names[1]}" if len(names) == 2 else f"{amount(len(names), 'class', 'classes')} apart"
    start = {"none": "", "timm": " with timm's pretrained weights"}.get(recipe.encoder.weights, " with given weights")
    how = f"{amount(training.epochs, 'epoch')} of {_loss(training.loss)}"
    if recipe.method == "two-stage":
        how += (
            f", then {amount(recipe.classifier.epochs, 'epoch')} of a linear classifier with "
            f"{_loss(recipe.classifier.loss)}"
        )
    scenario = f", drawn as {recipe.data.scenario}" if recipe.data.scenario else ""
    parts = [f"trained on {amount(sum(facts.counts('train').values()), 'image')}"]
    if facts.metrics.val:
        parts.append(f"picked on {sum(facts.counts('val').values()):,}")
    if facts.split in ("test", "held_out") and facts.figures is not None:
        parts.append(f"judged on {facts.figures.num_images:,} that it had not seen")
    used = listed(parts) if len(parts) > 1 else parts[0]
    return (
        f"A {clean(recipe.encoder.name)}{start} learned to tell {task}: {how}. "
        f"It was {used}, all of {source_name(recipe)}{scenario}."
    )


def _loss(loss: LossSettings) -> str:
    """A loss by its title, with its numbers; a temperature and a choice are named where they differ from the usual."""
    entry, usual = loss.entry, loss.entry.defaults()
    text = f"{entry.title[0].lower()}{entry.title[1:]}"
    if entry.kind != "classification":
        text += f" ({entry.label})"
    knobs = []
    for name, value in loss.parameters.items():
        if name == "eta_unit" or (value == usual[name] and (isinstance(value, str) or name == "temperature")):
            continue
        shown = f"{value:g}" if isinstance(value, float) else f"{value}"
        unit = f" {TIMES} parity" if name == "eta" and loss.parameters.get("eta_unit") == "parity" else ""
        knobs.append(f"{_GREEK.get(name, name)} = {shown}{unit}")
    return f"{text} with {', '.join(knobs)}" if knobs else text


def warnings(facts: Facts) -> list[Caution]:
    """What to mind about the figures, the gravest first."""
    found = [*_of_recipe(facts), *_of_leaks(facts.metrics), *_of_test(facts), *_of_vote(facts), *_of_validation(facts)]
    found += [
        Caution("The run itself warned", clean(text)) for text in facts.metrics.warnings if not _SAID.search(text)
    ]
    unreadable = len(facts.metrics.unreadable)
    if unreadable:
        found.append(
            Caution(
                f"{amount(unreadable, 'image')} could not be read",
                "They were left out of training and figures alike; they are listed under Training.",
            )
        )
    return found


def _of_recipe(facts: Facts) -> Iterator[Caution]:
    if facts.metrics.recipe != facts.recipe.content_hash():
        yield Caution(
            "The recipe cannot be checked",
            f"lopsided {clean(facts.metrics.lopsided)}, which trained the run, took its hash in another way: "
            "whether recipe.toml is the run's own is not known.",
        )


def _of_leaks(metrics: Metrics) -> Iterator[Caution]:
    groups, duplicates = metrics.leaks.groups, metrics.leaks.duplicates
    if groups:
        yield Caution(
            f"{amount(len(groups), 'group')} {'lies' if len(groups) == 1 else 'lie'} in more than one split",
            f"Such as {listed([clean(group) for group in groups])}. The model may know the group of an "
            "image that judges it from training, so that its figures come out too high. Split by group "
            '(data.split = "group").',
        )
    if duplicates:
        first, where, other, there = (clean(part) for part in duplicates[0])
        yield Caution(
            f"{amount(len(duplicates), 'image')} {'is' if len(duplicates) == 1 else 'are'} in two splits at once",
            f"Byte by byte the same, such as {other} in {there} and {first} in {where}. "
            "Figures come out too high; remove the copies.",
        )


def _of_test(facts: Facts) -> Iterator[Caution]:
    if facts.figures is None:
        yield Caution(
            "No image was held out", "Nothing is known about images that the model was not trained on; set data.test."
        )
        return
    if facts.split == "held_out":
        yield Caution(
            "There is no test split",
            "The figures below are those of the images that the scenario did not draw.",
        )
    elif facts.split != "test":
        yield Caution(
            "There is no test split",
            "The figures below are those of the validation images, by which the model was picked: they flatter it.",
        )
    rows = facts.figures.per_class
    name, rare = facts.classes[facts.minority], rows[facts.minority].support
    what = SPLITS[facts.split or "test"]
    if 0 < rare < FEW:
        yield Caution(
            f"Only {amount(rare, f'{what} image')} of {quoted(name)}",
            f"One image more or less that is recognised moves its recall by {percent(1 / rare)[:-2]} points. "
            "Read the intervals, not the figures.",
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
            "How well such a class is recognised is not known; means over classes leave it out.",
        )


def _of_vote(facts: Facts) -> Iterator[Caution]:
    if facts.figures is None:
        return
    majority, uwa, accuracy = facts.figures.majority, facts.figures.figures.uwa, facts.figures.figures.accuracy
    always = f"always answering {quoted(majority.label)}"
    if uwa.high is not None and uwa.high < majority.uwa:
        yield Caution(
            f"The UWA is worse than that of {always}",
            f"{number(uwa.value)} {interval(uwa)} against {number(majority.uwa)}, which needs no model.",
        )
    elif uwa.low is not None and uwa.low <= majority.uwa:
        yield Caution(
            f"The UWA may be no better than that of {always}",
            f"Its interval {interval(uwa)} holds {number(majority.uwa)}, which needs no model.",
        )
    if accuracy.high is not None and accuracy.high < majority.accuracy:
        price = " Among lopsided classes that is the price of finding the rare one; judge by UWA and recall."
        if uwa.value is None or uwa.value <= majority.uwa:
            price = ""
        yield Caution(
            f"The accuracy is below that of {always}",
            f"{number(accuracy.value)} {interval(accuracy)} against {number(majority.accuracy)}.{price}",
        )
    elif accuracy.low is not None and accuracy.low <= majority.accuracy:
        yield Caution(
            f"The accuracy may be no better than that of {always}",
            f"Its interval {interval(accuracy)} holds {number(majority.accuracy)}. Among lopsided classes accuracy "
            "says little; judge by UWA and recall.",
        )


def _of_validation(facts: Facts) -> Iterator[Caution]:
    if facts.metrics.val is None:
        yield Caution(
            "There was no validation split",
            "The last model was taken, not the best one, and no threshold can be chosen without looking at the "
            "images that judge it.",
        )


def confusion_words(facts: Facts, judged: Judged) -> str:
    """The most frequent mistake."""
    wrong = int(judged.wrong.sum())
    if not wrong:
        return f"Not one mistake among {amount(len(judged), 'image')}."
    pairs, counts = np.unique(np.stack([judged.y_true, judged.y_pred])[:, judged.wrong], axis=1, return_counts=True)
    true, predicted = pairs[:, counts.argmax()].tolist()
    support = int((judged.y_true == true).sum())
    return (
        f"{amount(wrong, 'mistake')} among {amount(len(judged), 'image')}. The most frequent: {counts.max():,} of "
        f"{support:,} {quoted(facts.classes[true])} taken for {quoted(facts.classes[predicted])}."
    )


def threshold_words(name: str, split: str, at_half: Counts, chosen: float | None, at_chosen: Counts | None) -> str:
    """What the threshold that validation favours would change."""
    positives, others = at_half.tp + at_half.fn, at_half.fp + at_half.tn

    def outcome(counts: Counts) -> str:
        return f"{counts.tp:,} of {positives:,} are found, and {counts.fp:,} of {others:,} others are taken for it"

    first = f"Called {quoted(name)} from a probability of 0.5 on, {outcome(at_half)}."
    if chosen is None or at_chosen is None:
        return f"{first} {no_choice(split)}"
    if at_chosen == at_half:
        return f"{first} The threshold that the validation images favour, {probability(chosen)}, gives the same."
    return f"{first} From {probability(chosen)} on, which the validation images favour, {outcome(at_chosen)}."


def no_choice(split: str) -> str:
    """Why no threshold is favoured."""
    if split == "val":
        return "None is favoured: these are the validation images themselves, and their choice would flatter them."
    return "No threshold is favoured: there are no validation images of this class and of others."


def threshold_advice(split: str) -> str:
    """What to mind about a threshold that is picked on the page."""
    text = f"A threshold that is picked by looking at {SPLITS[split]} images flatters the figures of the same images. "
    if split == "val":
        return f"{text}For use, judge it on images that neither trained nor picked the model."
    return f"{text}For use, take the one that the validation images favour, or pick on other images."


def learning_words(stages: Sequence[Stage], metric: str) -> str:
    """Which epochs were taken."""
    if not stages:
        return "The run's log is not there, so nothing is known about its course."
    parts = [f"epoch {stage.taken} of {stage.epochs[-1]['epoch']} of the {stage.name} stage" for stage in stages]
    text = f"The model is that of {' and '.join(parts)}"
    if any(stage.picked for stage in stages):
        return f"{text}, where the validation {'UWA' if metric == 'uwa' else metric.replace('_', ' ')} was highest."
    return f"{text}: the last, because there was no validation split to pick by."


def diagnostic_words(stage: Stage, facts: Facts) -> str:
    """What the loss saw of the rare class."""
    counts = facts.counts("train")
    name = facts.classes[facts.rarest]
    images = counts.get(name, 0) / max(sum(counts.values()), 1)
    shares = [value for _, value in stage.series("minority_loss_share")]
    alone = [value for _, value in stage.series("anchors_without_positives")]
    text = ""
    if shares:
        text = (
            f"{quoted(name)} makes {percent(images, 1)} of the training images and "
            f"{percent(float(np.mean(shares)), 1)} of the loss."
        )
    if alone:
        mean = float(np.mean(alone))
        rest = "every anchor had a positive" if mean == 0 else f"{percent(mean, 2)} of the anchors had no positive"
        text += f" In its batches {rest}."
    return text.strip()


def calibration_words(figures: Evaluation, judged: Judged) -> str:
    """Whether the probabilities can be taken at their word."""
    error = figures.figures.calibration_error
    said, right = float(judged.confidence.mean()), 1 - float(judged.wrong.mean())
    text = f"On average the model is {percent(said)} sure and right in {percent(right)} of the images"
    lean = "too sure of itself" if said > right else "less sure than it could be" if said < right else "off within bins"
    if error.low == 0:
        lean = "no more apart than chance explains"
    return f"{text}: {lean} (calibration error {number(error.value)} {interval(error)})."


def class_words(figures: Evaluation) -> str:
    """The best and the worst recall."""
    known = [(row.recall.value, row.label) for row in figures.per_class if row.recall.value is not None]
    (best, of_best), (worst, of_worst) = (pick(known, key=lambda row: row[0]) for pick in (max, min))
    if best == worst:
        which = "The class" if len(known) == 1 else "Every class"
        return f"{which} with images has the recall {number(best)}."
    return f"Recall goes from {number(worst)} for {quoted(of_worst)} to {number(best)} for {quoted(of_best)}."
