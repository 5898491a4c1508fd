"""The kinds of cautions: reasons to trust the metrics of a run less, with their words as in ``notes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lopsided.facts.fact import caution

# Splits and folds


@caution("run")
def no_test_split() -> str:
    return "There is no test split: the run cannot estimate how well the model does on new images."


@caution("run")
def few_test_images(counts: Mapping[str, int], least: int) -> str:
    """Classes have few test images."""
    return f"The test split holds fewer than {least} images of {_classes(counts)}: check how wide the intervals are."


@caution("run")
def few_images(counts: Mapping[str, int], least: int) -> str:
    """Classes have few images in a run with folds."""
    return f"There are fewer than {least} images of {_classes(counts)}: check how wide the intervals are."


@caution("run")
def unmeasured_classes(classes: Sequence[str]) -> str:
    """Classes have one image each, so that no metric can be given for them."""
    has, them = ("has one image", "it") if len(classes) == 1 else ("have one image each", "them")
    return (
        f"{', '.join(classes)} {has}, which cannot be used for training and for testing at once. So recall, precision "
        f"and AUROC of {them} cannot be given, and means over classes leave {them} out. The model can predict {them}."
    )


@caution("counted")
def no_validation_split() -> str:
    return "There is no validation split: the run keeps the weights of the last epoch, not of the best one."


@caution("counted")
def few_validation_images(counts: Mapping[str, int], least: int) -> str:
    """Classes have few images that select the epoch."""
    return (
        f"The validation split holds fewer than {least} images of {_classes(counts)}: the choice of the epoch is noisy."
    )


def _classes(counts: Mapping[str, int]) -> str:
    named = [f"{name} ({number})" for name, number in counts.items()]
    return ", ".join(named[:5]) + (f" and {len(named) - 5} more classes" if len(named) > 5 else "")


@caution("run")
def shared_groups(groups: int, first: str, unit: str) -> str:
    """Groups are in more than one split or fold, which is the ``unit``."""
    number = f"{groups:,} groups are" if groups > 1 else "One group is"
    advice = "Split by group" if unit == "split" else "Use folds by group"
    return (
        f"{number} in more than one {unit}, for example {first}: the metrics will be too high. {advice} (split=group)."
    )


@caution("run")
def shared_images(images: int, first: Sequence[str], unit: str) -> str:
    """Identical images are in two splits or folds. ``first`` is a pair: image, place, other image, its place."""
    name, where, other, there = first
    number = f"{images:,} images are" if images > 1 else "One image is"
    return (
        f"{number} byte-identical to an image in another {unit}, for example {other} in {there} and {name} in {where}: "
        "the metrics will be too high."
    )


# Images and labels


@caution("once")
def same_patients(patients: int, images: int) -> str:
    """DICOM files have patients, but the source has no groups."""
    what = "One patient has" if patients == 1 else f"{patients:,} patients have"
    return (
        f"{what} several images, {images:,} together, and the images of a patient may be in two splits: the metrics "
        "may be too high. Use --group PatientID."
    )


@caution("once")
def similar_names(pairs: Sequence[Sequence[str]], counts: Mapping[str, int]) -> str:
    """Names of classes look like typos of others. ``counts`` holds their numbers of images."""
    found = [
        f"{name} ({counts[name]:,} image{'' if counts[name] == 1 else 's'}) and {near} ({counts[near]:,})"
        for name, near in pairs
    ]
    return f"Classes with similar names: {'; '.join(found)}. If they are the same class, rename one of them."


@caution("once")
def repeating_column(column: str, values: int, rows: int) -> str:
    return (
        f"The column {column} repeats: {values:,} values in {rows:,} rows. If several images show one {column}, the "
        f"metrics are too high, because such images are in training and test: use --group {column}."
    )


@caution("model")
def telling_columns(columns: Mapping[str, float]) -> str:
    """Columns beside the images give the label away: the balanced accuracy of each alone."""
    reached = " and ".join(f"{name} ({accuracy:.3g})" for name, accuracy in columns.items())
    return (
        f"Columns give the label away, by the balanced accuracy of each alone: {reached}. Is this known before the "
        "label, for every image that the model will see? If not, leave it out."
    )


@caution("once")
def same_stems(pairs: int, first: Sequence[str], suffix: str) -> str:
    """Pairs of files differ only in the suffix, of which ``suffix`` may be that of masks."""
    number = "One pair of images differs" if pairs == 1 else f"{pairs:,} pairs of images differ"
    return (
        f"{number} only in the suffix, for example {first[0]} and {first[1]}: both are used as images. "
        f"If one of them is a mask, leave it out, for example with exclude='*{suffix}'."
    )


@caution("once")
def large_images(width: int, height: int) -> str:
    return (
        f"The images have {width:,} x {height:,} pixels and are not resized, so training is slow and needs much "
        "memory. Set a size, for example image_size=224."
    )


@caution("once")
def twelve_bits(images: int, total: int) -> str:
    """Images of 16 bits hold 12-bit values."""
    what = f"{images:,} of {total:,} images have 16 bits, but no value above 4,095. They are read as 12-bit images"
    do = "" if images == total else " If other images of the same camera are brighter, convert all to 8 bits alike."
    return f"{what}, in which 4,095 is white.{do}"


@caution("once")
def first_pages(images: int, total: int) -> str:
    """TIFFs have several pages."""
    what = f"{images:,} of {total:,} images are TIFFs of several pages. Only the first page of each is used"
    return f"{what}. If the others matter, save each page as an image."


@caution("once")
def not_cached(error: str) -> str:
    return f"Features are not cached: {error}"


# Training


@caution("counted")
def large_queue(queue: int, features: int) -> str:
    return (
        f"The queue holds up to {queue:,} features, but the training images have only {features:,}: older features of "
        "an image become positives of the same image. Use a smaller queue (encoder_training.queue)."
    )


@caution("counted")
def few_positives(label: str, expected: float, learns: bool) -> str:
    """A batch holds few images of a class. ``learns`` is true if anchors learn without positives."""
    does = "its anchors have few positives" if learns else "anchors without a positive do not learn"
    return (
        f"A batch holds {expected:.1f} images of {label} on average: {does}. Use larger batches, "
        "encoder_training.views = 2, a queue (encoder_training.queue), or "
        'encoder_training.sampler = "balanced".'
    )


@caution("counted", apart="stage")
def falling_loss(stage: str, before: float, last: float, flag: str) -> str:
    return (
        f"The training loss of stage {stage} still fell steeply at its last epoch ({before:.4g} to {last:.4g}), so "
        f"the model may not be trained enough. Train for more epochs ({flag})."
    )


@caution("counted")
def directed_classes(alone: float, averaged: float, advice: str) -> str:
    return (
        "The classes seem to depend on which way round the images are, which an average over views loses: the log "
        f"loss in inner folds is {alone:.2f} without views and {averaged:.2f} with them. Use {advice}."
    )


@caution("run")
def below_baseline(
    split: str, baseline: str, model_uwa: float, baseline_uwa: float, low: float, high: float, level: float, advice: str
) -> str:
    """The model is worse than a baseline: the recipe "quick", or a linear classifier on "small-images" of 16 pixels.

    Test images must not choose settings, so the caution about them gives no advice to change settings.
    """
    what = {
        "quick": "the recipe quick, which takes seconds",
        "small-images": "a simple baseline, a linear classifier on images of 16 x 16 pixels",
    }[baseline]
    if split == "test":
        advice = "Do not tune the model on test images: hold out validation images (val=0.15) to compare settings."
    return (
        f"On the {split} images, the balanced accuracy of the model ({model_uwa:.3f}) is below that of {what} "
        f"({baseline_uwa:.3f}). The {100 * level:g} % interval of the difference is [{low:.3f}, {high:.3f}]. {advice}"
    )


# Trackers


@caution("run", apart="tracker")
def tracker_failed(tracker: str, error: str) -> str:
    return f"The tracker {tracker} failed and is left out; the run continues without it ({error})."


@caution("run")
def trackers_cannot_resume(error: str) -> str:
    return f"The trackers will not recognise the run when it is resumed ({error})."


@caution("run")
def results_not_sent(error: str) -> str:
    return f"The results could not be sent to the trackers ({error})."


@caution("run")
def cells_not_sent(cells: int, trackers: Sequence[str]) -> str:
    """Cells of a sweep were finished before a tracker was added."""
    some = "1 finished cell is" if cells == 1 else f"{cells:,} finished cells are"
    return f"{some} not sent to {', '.join(trackers)}: a tracker receives the cells that are trained from now on."


# The search for more images


@caution("run")
def unknown_images(error: str) -> str:
    return f"{error} Images that the run was trained on are not left out."


@caution("model", apart="label")
def cheap_cues(label: str, aurocs: Mapping[str, float]) -> str:
    """Something simple separates a class from the others. ``aurocs`` are those of the cues, by name."""
    first, *others = aurocs.items()
    further = "".join(f", {name} with {auroc:.2f}" for name, auroc in others)
    alone = f"{first[0].capitalize()} alone separates {label} from the other images with an AUROC of {first[1]:.2f}"
    return (
        f"{alone}{further}: "
        "were they photographed differently? Then the model may know the camera instead of the object."
    )


CAMERA_WORDS = {
    "red": ("a redder background", "a less red background"),
    "blue": ("a bluer background", "a yellower background"),
    "corners": ("lighter corners", "darker corners"),
    "sharpness": ("a sharper background", "a less sharp background"),
    "blue contrast": ("more contrast in blue", "less contrast in blue"),
}
"""What an image has whose cue is higher, or lower, than that of others."""


@caution("model", apart="label")
def odd_part(
    label: str,
    inside: Sequence[int],
    total: Sequence[int],
    higher: Sequence[str],
    lower: Sequence[str],
    kind: Sequence[str],
    names: Sequence[str],
) -> str:
    """A part of a class looks as if another camera took it.

    ``inside`` and ``total`` are numbers of images of the class and of others, in the part and in all. ``higher`` and
    ``lower`` are cues, ``kind`` a fact of the files and its value, if they were found by that. ``names`` are examples.
    """
    seen = [CAMERA_WORDS[name][0] for name in higher if name in CAMERA_WORDS]
    seen += [CAMERA_WORDS[name][1] for name in lower if name in CAMERA_WORDS]
    if kind:
        number = f"{sum(inside):,} images have the same {kind[0]} ({kind[1] or 'none'})"
    else:
        number = f"{sum(inside):,} images look as if another camera took them"
        number += f" ({', '.join(seen)})" if seen else ""
    shares = [f"{some / whole:.0%}" for some, whole in zip(inside, total, strict=True)]
    return (
        f"{number}: {inside[0]:,} of {total[0]:,} images of {label} ({shares[0]}) and {inside[1]:,} of {total[1]:,} "
        f"others ({shares[1]}). The model may know the camera or the place instead of the object. Look at them: "
        f"{', '.join(names)}. If a column of a table names the camera, use --source."
    )


@caution("run")
def worse_source(source: str, auroc: float, by_folds: float, metric: str = "an AUROC") -> str:
    return (
        f"On images of the source {source}, a model that was trained without it has {metric} of {auroc:.3f} instead "
        f"of {by_folds:.3f} by folds: the metrics hold for images of the known sources, not for those of a new one."
    )


# New images


@caution("run")
def drift(unfamiliar: int, images: int, level: float, p_value: float, ungrouped: bool = False) -> str:
    """New images differ from the training images. ``ungrouped``: the known images have groups, these may have, too."""
    shown = "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
    words = (
        f"These images differ from the training images ({shown}): they are less typical, and {unfamiliar / images:.1%} "
        f"are unfamiliar instead of {level:.1%}. The metrics of the run may not hold for them."
    )
    return (
        f"{words} If they have groups, as in training, name them with --group or --group-from." if ungrouped else words
    )
