"""The kinds of notes: what a run decided or did. Each function returns the words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lopsided.facts.fact import note


def _some(number: int, one: str, many: str) -> str:
    return one if number == 1 else f"{number:,} {many}"


# The choice of the recipe and of the folds


_OTHER_RECIPES = "Use --recipe fine-tune or from-scratch to train an encoder."


@note("run")
def quick_by_size(images: int) -> str:
    """The recipe quick was taken, because thorough takes long for so many images."""
    return (
        f"Recipe: quick, because no recipe was named and there are {images:,} images, of which thorough would compute "
        f"four copies each, mirrored and turned: a pretrained encoder that is not trained. {_OTHER_RECIPES}"
    )


@note("run")
def quick_by_rarest(images: int) -> str:
    """The recipe quick was taken, because a class has few images."""
    return (
        f"Recipe: quick, because no recipe was named and the rarest class has {images} image{'s' * (images != 1)}: a "
        "pretrained encoder that is not trained. With so few, test-time augmentation is no reliable gain. "
        f"{_OTHER_RECIPES}"
    )


@note("run")
def quick_by_side(side: int) -> str:
    """The recipe quick was taken, because the images are small."""
    return (
        f"Recipe: quick, because no recipe was named and the images are small ({side} pixels): a pretrained encoder "
        f"that is not trained. Of such images, test-time augmentation is no reliable gain. {_OTHER_RECIPES}"
    )


@note("run")
def quick_for_vectors(width: int) -> str:
    """The recipe quick was taken, because the data are vectors."""
    return (
        f"Recipe: quick, because no recipe was named: a regression on vectors of {width:,} numbers, without an "
        "encoder. Use --recipe adapter or from-scratch to train layers on them."
    )


@note("run")
def thorough_by_size(images: int) -> str:
    """The recipe thorough was taken, because there are few images."""
    return (
        f"Recipe: thorough, because no recipe was named: {images:,} images, each also mirrored and turned, "
        f"through a pretrained encoder. Use --recipe quick for the images alone. {_OTHER_RECIPES}"
    )


@note("run")
def expected_time(seconds: float, features: float, trainings: int) -> str:
    """How long the run will take, measured on some of its images."""
    parts = f"{_about(features)} for features" if features >= 1 else "the features are cached"
    times = _some(trainings, "1 training", "trainings")
    return f"This will take about {_about(seconds)}: {parts}, and {times} with evaluation."


@note("run")
def time_left(seconds: float) -> str:
    """How long the rest of the run will take, by the pace of its trainings."""
    return f"About {_about(seconds)} left, by the time of the last training."


@note("run")
def few_by_counts(rare: int) -> str:
    """The recipe few was taken, because there are no or few images of a second class."""
    if not rare:
        why, what = "there is one class only", ", which needs no rare images"
    else:
        why = f"only {_some(rare, '1 image is', 'images are')} of the rarer class"
        what = ", joined with regressions on features"
    return f"Recipe: few, because no recipe was named and {why}: the distance from the frequent class{what}."


@note("run")
def recipe_by_field(recipe: str, field: str) -> str:
    return f"Recipe: {recipe}, because {field} is set."


@note("run")
def from_scratch_by_field(field: str) -> str:
    """The recipe from-scratch was taken, because a field was given that only training uses."""
    if field == "encoder.name":
        return "Recipe: from-scratch, because the encoder has no pretrained weights (weights)."
    return f"Recipe: from-scratch, because {field} is set, which has an effect only if an encoder is trained."


@note("run")
def quick_by_encoder() -> str:
    return (
        "Recipe: quick, because the fields of the encoder are given: a pretrained encoder that is not trained. Use "
        "--recipe from-scratch to train an encoder."
    )


@note("run")
def chosen_by_comparison(chosen: str, sentences: Sequence[str]) -> str:
    """A comparison of recipes chose this one. ``sentences`` are its answer."""
    return " ".join(sentences)


@note("run")
def folds_by_default(folds: int, rarest: str, images: int, test: float, seconds: float) -> str:
    """There are folds, because a class is rare."""
    number = _some(images, "1 image", "images")
    return (
        f"{folds} folds, because {rarest!r} has only {number}: so all of them are tested, not only "
        f"{test:.0%}. This takes about {_about(seconds)} longer than one split, which --folds 1 gives."
    )


@note("run")
def folds_for_alarms(folds: int) -> str:
    return f"{folds} folds, because false alarms of a threshold must be counted on images that were not trained on."


@note("run")
def split_by_default(rarest: str, images: int, seconds: float) -> str:
    """There is one split although a class is rare, because folds take long."""
    return (
        f"One split, although {rarest!r} has only {images:,} images, because folds would take about "
        f"{_about(seconds)} longer. Use --folds 5 for them."
    )


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


# Images, splits and folds


@note("run")
def split(rule: str, auto: bool, scenario: bool = False) -> str:
    """How the images were split. ``scenario`` is true if a scenario draws the training images of given splits."""
    drawn = " The scenario draws training images; validation and test images of the data stay as they are."
    return f"The images are split {_rule(rule, auto)}.{drawn if scenario else ''}"


@note("run")
def fold_of(rule: str, auto: bool, fold: int, folds: int, repeat: int) -> str:
    """Which fold tests, and how the images were split. ``fold`` and ``repeat`` count from 1."""
    which = f"fold {fold} of {folds}" + (f" in repeat {repeat}" if repeat > 1 else "")
    return f"The test images are {which}. The images are split {_rule(rule, auto)}."


def _rule(rule: str, auto: bool) -> str:
    what = {
        "random": "at random, without regard to classes or groups",
        "stratified": "at random within each class (stratified)",
        "group": "by group: all images of a group are in one split",
        "given": "as the data define it (given)",
    }[rule]
    why = {
        "stratified": "the data have neither splits nor groups",
        "group": "the data have groups",
        "given": "the data have splits",
    }
    return f"{what}; {f'the default, because {why[rule]}' if auto else 'as requested'}"


@note("run", detail=True)
def folds(images: int, folds: int, rule: str, repeats: int) -> str:
    """How the images of a run were put into folds."""
    what = {"group": "by group: all images of a group are in one fold", "stratified": "with the class shares of all"}
    times = f", {repeats} times" if repeats > 1 else ""
    number = f"The {images:,} images are in {folds} folds {what.get(rule, 'at random')}"
    return f"{number}. Each fold tests a model of the others{times}."


@note("run")
def mixed_groups(groups: int, first: str) -> str:
    """Groups hold images of several classes. These may be real, or wrong labels."""
    some = _some(groups, "One group holds", "groups hold")
    return f"{some} images of several classes, for example {first}. Check its labels."


@note("once")
def left_out(images: int) -> str:
    """Patterns left out images."""
    return f"data.include and data.exclude left out {_some(images, 'one image', 'images')}."


@note("once")
def unused_validation(images: int) -> str:
    return f"{images:,} images of the given val split are ignored because data.val is 0."


@note("once", apart="table")
def unlabelled_rows(table: str, marks: Mapping[str, int]) -> str:
    """Rows of a table of further labels have none."""
    few = " and ".join(f"{number:,} {mark}" for mark, number in marks.items())
    return f"{table} holds rows without a label, which are left out: {few}."


@note("once")
def repeated_labels(images: int) -> str:
    return f"{images:,} of the further labels only repeat labels that the images already have; they are left out."


@note("once")
def held_out_labels(images: int) -> str:
    return f"{images:,} of the further labels are of held-out images or their groups; they are left out."


@note("once")
def further_without_group(images: int, further: int, column: str) -> str:
    return (
        f"{images:,} of {further:,} further images have no group, so each counts as a group of its own. If one "
        f"belongs to a group that is tested, the metrics are too high. Fill the column {column} of the table."
    )


@note("once")
def corrected_labels(number: int, images: int) -> str:
    """Labels were replaced by those of tables."""
    return f"Corrections change {_some(number, '1 label', 'labels')} of {images:,} images."


@note("once")
def further_labels(counts: Mapping[str, int]) -> str:
    """The number of further training images of each class."""
    few = ", ".join(f"{number:,} {name}" for name, number in counts.items() if number)
    return f"Further labels: {few}. These images are for training only and are never tested."


@note("once")
def resized(side: int) -> str:
    """Images of different sizes were resized."""
    what = f"The images have different sizes and are resized to {side} x {side} pixels."
    return f"{what} Set another size with image_size."


@note("once", detail=True)
def images_read(images: int, shape: Sequence[int], megabytes: float, place: str, cache: str, free: float | None) -> str:
    """Where decoded images are: in "memory", "decoded" in every epoch, or "once" through an encoder."""
    what = f"{images:,} images of {' x '.join(map(str, shape))} ({megabytes:,.1f} MB decoded)"
    if place == "once":
        return f"{what} go through the encoder once, unless their features are cached."
    where = "are kept in memory" if place == "memory" else "are decoded again in every epoch"
    room = "an unknown amount" if free is None else f"{free:,.0f} MB"
    return f'{what} {where}: cache is "{cache}" and {room} of memory is free.'


@note("once")
def vectors(rows: int, width: int) -> str:
    """The data are vectors."""
    return f"{rows:,} vectors of {width:,} numbers, standardised by the training rows."


@note("model")
def table_columns(columns: Sequence[Mapping[str, Any]], rows: int) -> str:
    """Columns of a table stand beside each image, each with its name, categories and missing values."""
    parts = []
    for column in columns:
        what = "numbers" if column["categories"] is None else f"{column['categories']:,} categories"
        lacking = f", missing for {column['missing']:,} of {rows:,} training images" if column["missing"] else ""
        parts.append(f"{column['name']} ({what}{lacking})")
    return f"Beside each image, the classifier gets {', '.join(parts)}."


@note("once", detail=True)
def own_normalisation(encoders: int) -> str:
    """Joined encoders normalise images themselves."""
    each = "Each encoder" if encoders > 1 else "The encoder"
    return f"{each} normalises images by the mean and the deviation of its own weights."


@note("once", detail=True)
def normalisation(mean: Sequence[float], deviation: Sequence[float]) -> str:
    """Images are normalised by fixed numbers."""
    shown = [" ".join(f"{value:.4g}" for value in values) for values in (mean, deviation)]
    return f"Pixels in [0, 1] are normalised by mean {shown[0]} and deviation {shown[1]}."


@note("model", detail=True)
def fitted_normalisation(mean: Sequence[float], deviation: Sequence[float]) -> str:
    """Images are normalised by the mean and the deviation of the training images."""
    return f"{normalisation.words(mean, deviation)} These are those of the training images."


# Training


@note("run")
def continued(stage: str, epoch: int) -> str:
    return f"The run continues after epoch {epoch} of stage {stage}."


@note("run", apart="name")
def changed_machine(name: str, before: str, now: str) -> str:
    return f"The run started with {name} = {before} and continues with {name} = {now}, so the last digits may differ."


@note("once")
def not_repeatable(device: str) -> str:
    return f"On {device}, two runs of the same recipe may differ in the last digits. On a CPU they do not."


@note("once")
def ranks(ranks: int, batch_size: int) -> str:
    return f"{ranks} ranks share each batch of {batch_size:,} images."


@note("once")
def batch_norm(kind: str) -> str:
    """Over which images batch norm computes its statistics: "sync" or "rank"."""
    over, after = "all ranks", ""
    if kind != "sync":
        over, after = (
            "each rank's own images",
            ", and the running statistics are averaged over the ranks after each epoch",
        )
    return f'Batch norm computes its statistics over {over}: batch_norm is "{kind}"{after}.'


@note("once")
def precision(precision: str) -> str:
    return f"The encoder is trained in {precision}; its weights and losses are float32."


@note("once")
def chunks(images: int, norm: str) -> str:
    """A batch goes through the encoder in chunks. ``norm`` is what batch norm treats as a batch; "" without it."""
    whose = {"chunk": "each chunk", "share": "each rank's share of a chunk"}
    rule = f"; batch norm treats {whose[norm]} as a batch" if norm else ""
    return f"A batch goes through the encoder in chunks of {images:,} images{rule}."


@note("once")
def queue(features: int, balanced: bool) -> str:
    """A batch is contrasted with features of past batches."""
    which = "balanced over the classes" if balanced else "the most recent ones"
    return f"A batch is also contrasted with up to {features:,} features of past batches, {which}."


@note("once")
def reweighting(after: float, beta: float) -> str:
    return f"After {after:.0%} of the epochs, the loss weights classes by their effective number (beta = {beta:g})."


@note("once")
def resampling(after: float) -> str:
    return f"After {after:.0%} of the epochs, batches are drawn with classes equally."


@note("once")
def mixing(mixup: float, cutmix: float) -> str:
    """Images of a batch are mixed."""
    named = {"mixup": mixup, "CutMix": cutmix}
    what = " or ".join(f"{name} (alpha = {alpha:g})" for name, alpha in named.items() if alpha)
    return f"The images of a batch are mixed by {what}."


@note("once")
def sharpness(rho: float) -> str:
    return f"SAM with rho = {rho:g} computes two gradients in every step, which takes twice as long."


@note("once")
def moving_average(decay: float) -> str:
    return f"The model is a moving average of the weights (decay {decay:g})."


@note("once")
def weight_average(after: float) -> str:
    return f"The model is the mean of the weights at the end of each epoch after {after:.0%} of the epochs (SWA)."


@note("model", apart="stage")
def kept_epoch(stage: str, epoch: int, epochs: int, metric: str, value: float) -> str:
    """Validation images chose an epoch of a stage."""
    return f"Stage {stage} keeps epoch {epoch} of {epochs}, validation {metric.replace('_', ' ')} {value:.4f}."


@note("model")
def minutes(minutes: float, steps: int, seconds: float) -> str:
    """How many steps a budget of minutes gives. ``seconds`` are left for them after the preparation."""
    if seconds <= 0:
        return (
            f"The preparation took longer than fine_tune.minutes = {minutes:g}, so the encoder is trained for "
            f"{steps:,} step. Set more minutes."
        )
    return (
        f"fine_tune.minutes = {minutes:g} gives {steps:,} steps of {seconds / steps:.3g} s on this machine. The number "
        f"is now fixed for this run. Set fine_tune.steps = {steps} to repeat the run elsewhere."
    )


@note("run")
def fixed_steps(steps: int) -> str:
    return f"The run keeps the {steps:,} steps that were fixed when it started."


@note("once")
def trained_blocks(
    encoder: str, blocks: int, trained: int, weights: int, views: int, images: int, megabytes: float
) -> str:
    return (
        f"{trained:,} of the {weights:,} weights of {encoder} are trained: fine_tune.blocks is {blocks}. The "
        f"activations of {views:,} views of {images:,} images take {megabytes:,.0f} MB in memory."
    )


@note("model")
def tau(tau: float, metric: str | None, tried: int) -> str:
    """The tau of tau-normalisation. ``metric`` chose it on validation images; None if the recipe gives it."""
    how = " of the recipe"
    if metric is not None:
        how = f", the best of {tried} values by validation {metric.replace('_', ' ')}"
    return f"The weights of the classifier are divided by their length to the power tau = {tau:g}{how}, without bias."


@note("once")
def blend(share: float) -> str:
    """The model averages two regressions. ``share`` is the weight of the pretrained encoder."""
    return (
        f"The model averages the logits of two regressions: on the features of the pretrained encoder (weight "
        f"{share:g}) and of the trained encoder (weight {1 - share:g})."
    )


@note("counted")
def heads(heads: int, inner_folds: int, blend: float) -> str:
    """How the heads of an adapter were trained; ``inner_folds`` is 0 if a class has too few images for them."""
    words = f"{heads} heads were trained" if heads > 1 else "One head was trained"
    if inner_folds:
        words += f", each without one of {inner_folds} inner folds, whose images calibrate the logits"
    else:
        words += " on all training images, because a class has too few images for inner folds"
    return f"{words}.{f' Their average has the weight {1 - blend:g}.' if blend else ''}"


# Features and the regression on them


@note("once", detail=True)
def features(engine: str, encoder: str, views: Sequence[str], auto: bool, cache: str | None) -> str:
    """What computes the features, over which views, and where they are cached."""
    averaged = "once for each of the views" if auto else "averaged over the views"
    what = f", {averaged} {', '.join(views)} of each image" if views else ""
    where = "not cached" if cache is None else f"cached in {cache}"
    return f"{engine} computes the features of {encoder}{what}. Features are {where}."


@note("model")
def chosen_views(views: str, losses: Mapping[str, float]) -> str:
    """Inner folds chose the views of an image. ``losses`` are those of all sets of views, most views first."""
    names = list(losses)
    what = "those of the image alone" if views == names[-1] else f"means over the views {views}"
    why = ": the classes seem to depend on which way round the images are" if views != names[0] else ""
    shown = ", ".join(f"{name} {loss:.3g}" for name, loss in losses.items())
    return f"The features are {what}{why}. Log loss of inner folds: {shown}."


@note("model")
def unchosen_views(views: str) -> str:
    return (
        "A class has too few images for inner folds to choose the views of an image: the features are means over "
        f"{views}. If a view can look like another class, name the views to use (tta)."
    )


@note("run")
def other_views(other: int, folds: int) -> str:
    return f"{other} of {folds} folds chose other views than the model, so the metrics are partly those of other views."


@note("once", apart="encoder")
def hub_weights(encoder: str, weights: str, megabytes: float, licence: str | None) -> str:
    """Weights of the Hugging Face hub are used."""
    terms = "Its licence is not stated: see its page there" if licence is None else f"Licence: {licence}"
    return f"The encoder {encoder} has the weights {weights} of the Hugging Face hub ({megabytes:,.0f} MB). {terms}."


@note("model", detail=True)
def chosen_strength(strength: float, tried: int, inner_folds: int) -> str:
    return f"The regression has the strength C = {strength:g}, the best of {tried} values on {inner_folds} inner folds."


@note("once", detail=True)
def given_strength(strength: float) -> str:
    return f"The regression has the strength C = {strength:g} of the recipe."


@note("counted", detail=True)
def usual_strength(strength: float) -> str:
    return f"A class has too few images for inner folds: the regression has the strength C = {strength:g}."


@note("once")
def one_class(normal: str) -> str:
    return f"All images are of one class, {normal}. Other images will be called unusual."


@note("model", detail=True)
def distance(normal: str, rare: int, pull: float, relied: float = 1.0) -> str:
    """How the score of the method distance is made up. ``relied``: the share of the regression with the distance."""
    if not rare:
        return f"There is no image of another class than {normal}: the score is the distance from {normal} alone."
    images = "1 image of another class" if rare == 1 else f"{rare:,} images of other classes"
    if relied == 0:
        return (
            f"The score is that of regressions on {images}. These are about as far from {normal} as its own images, "
            "so the distance does not count."
        )
    what = "a regression" if relied == 1 else "regressions"
    return (
        f"The score joins {what} on {images} with the distance from {normal}: one standard deviation farther away adds "
        f"{pull:.2g} to the log odds."
    )


@note("model")
def aligned(share: float, counts: bool) -> str:
    """Whether single positions are compared: ``share`` is that of the variance that the position explains."""
    does = (
        "aligned, so each position is also compared by itself" if counts else "not aligned, so only wholes are compared"
    )
    return f"The position explains {share:.0%} of what varies in the images of the frequent class: they are {does}."


# The finished model


@note("run")
def decision(rule: str, sentence: str) -> str:
    """How the model decides. ``sentence`` is that of the decision, which files and pages also have without a run."""
    return sentence


@note("run", detail=True)
def calibrated(
    images: int, kind: str, temperature: float, bias: Sequence[float] | None, absent: Sequence[str] = ()
) -> str:
    """On which images the probabilities were calibrated: validation or out-of-fold. ``absent`` classes have none."""
    shown = "" if bias is None else f", bias {', '.join(f'{value:+.2f}' for value in bias[:6])}"
    none = f" There are no {kind} images of {', '.join(absent)}." if absent else ""
    return f"The probabilities are calibrated on {images:,} {kind} images: temperature {temperature:.3g}{shown}.{none}"


@note("run")
def not_calibrated() -> str:
    return "The probabilities are not calibrated, because there are no validation images."


@note("run", detail=True)
def model(models: int, members: int, parameters: int, megabytes: float) -> str:
    """The model of a run with folds. It averages this many models, and has ``members`` encoders."""
    numbers = f"{parameters / 1e6:.1f} million parameters, {megabytes:.1f} MB"
    if models == 1:
        return f"The model is trained on all images ({numbers}). The models of the folds only test it."
    cost = (
        f"{members} times as much as with one of them"
        if members > 1
        else "as much as with one of them, because they share the encoder"
    )
    return (
        f"The model is the ensemble of the {models} models of the folds ({numbers}): it averages their logits. An "
        f"image costs {cost}. Use final=refit for one model of all images."
    )


@note("run")
def quick_compared(seconds: float, on: str) -> str:
    return f"For comparison, the recipe quick was fitted on the same {on} ({seconds:.1f} s): the report and -v show it."


@note("run")
def quick_not_compared(error: str) -> str:
    return f"The recipe quick could not be used for comparison: {error}"


@note("model", detail=True)
def typicality(images: int, guessed: bool, groups: int | None = None) -> str:
    """The model recognises unfamiliar images by the images that it knows, which may be in groups."""
    grouped = "" if groups is None else f", which are {_some(groups, 'one group', 'groups')}"
    words = f"Images unlike the training images are recognised by comparison with {images:,} of them{grouped}."
    few = " With so few, the share of false alarms is an estimate." if guessed else ""
    return words + few


@note("run")
def left_out_sources(
    column: str,
    classes: Sequence[str],
    sources: Sequence[Mapping[str, Any]],
    by_folds: float,
    uwa_by_folds: float | None = None,
) -> str:
    """Models were trained without a source and tested on it. ``sources`` hold source, counts, auroc and uwa."""
    told, folds = [], f"By folds: AUROC {by_folds:.3f}"
    folds += "" if uwa_by_folds is None else f", balanced accuracy {uwa_by_folds:.3f}"
    for row in sources:
        images = ", ".join(f"{number:,} {name}" for name, number in zip(classes, row["counts"], strict=True))
        found = "no AUROC, because a class is missing" if row["auroc"] is None else f"AUROC {row['auroc']:.3f}"
        found += "" if row["uwa"] is None else f", balanced accuracy {row['uwa']:.3f}"
        told.append(f"{row['source']} {found} ({images})")
    return f"Trained without a source ({column}) and tested on it: {'; '.join(told)}. {folds}."


@note("model")
def no_typicality(reason: str) -> str:
    return f"The model cannot recognise images unlike the training images: {reason}."


@note("run")
def wrong_labels(value: float, low: float, high: float, images: int, suspects: int, table: str) -> str:
    """How many labels are probably wrong, and how many images look like another class than their label."""
    marked = f"{table} marks {_some(suspects, '1 suspect', 'suspects')}" if suspects else f"{table} has no suspects"
    return f"{wrong_label_words(value, low, high, images)} {marked}."


def wrong_label_words(value: float, low: float, high: float, images: int) -> str:
    """Return how many labels are probably wrong, for terminal and page.

    >>> wrong_label_words(11.4, 2.3, 24.6, 448)
    'About 11 of 448 labels are probably wrong (95 % interval 2 to 25), by models that did not see the image.'
    >>> wrong_label_words(11.4, 0.3, 24.6, 448)
    'About 11 of 448 labels may be wrong (95 % interval 0 to 25), by models that did not see the image.'
    """
    number, most = round(value), round(high)
    if not number:
        return f"Probably no label of {images:,} is wrong (95 % interval 0 to {most:,})."
    are = "may be" if not round(low) else "is probably" if number == 1 else "are probably"
    some = f"About {number:,} of {images:,} labels {are} wrong (95 % interval {round(low):,} to {most:,})"
    return f"{some}, by models that did not see the image."


@note("run")
def near_duplicates(pairs: int, table: str) -> str:
    """Images are almost the same, but have different labels."""
    what = _some(pairs, "1 pair of images is almost the same", "pairs of images are almost the same")
    return f"{what} but with different labels: {table} lists them."


@note("run")
def alike_images(pairs: int, table: str) -> str:
    """Images are almost the same and have the same label."""
    what = _some(pairs, "1 pair of images is almost the same", "pairs of images are almost the same")
    do = "If they show the same thing, give them one group (--group), so that no model is tested on what it saw"
    return f"{what}: {table} lists them. {do}."


@note("run")
def near_duplicates_not_searched(most: int) -> str:
    return f"Near-duplicates were not searched: there are more than {most:,} images."


@note("run")
def tracked(trackers: Sequence[str]) -> str:
    """Trackers follow the run."""
    return f"Tracked by {', '.join(trackers)}."


# Unfamiliar images


@note("run")
def unfamiliar_images(
    unfamiliar: int, images: int, level: float, known: int | None = None, unit: str = "images"
) -> str:
    """Images are unlike the training images. ``known`` are those that are compared with, if so few that one guesses."""
    blind = "A new kind of object on the same camera may not be noticed."
    if images == 1:
        what = "The image is unlike the training images." if unfamiliar else "The image is like the training images."
    else:
        some = {0: f"None of {images:,} images is", 1: "One image is"}
        what = f"{some.get(unfamiliar, f'{unfamiliar:,} of {images:,} images are')} unlike the training images."
        what += f" About {level * images:,.1f} would be expected of {images:,} images like them."
    few = "" if known is None else f" With {_known(known, unit)}, this is an estimate."
    return f"{what}{few} {blind}"


def _known(number: int, unit: str) -> str:
    return f"{number:,} known {unit if number != 1 else unit.removesuffix('s')}"


@note("run")
def level_not_reached(asked: float, level: float, images: int, unit: str = "images") -> str:
    """A level is lower than the number of known images, or of their groups, allows."""
    return (
        f"With {_known(images, unit)}, the lowest level is {level:.3g} instead of {asked:g}: an image is marked if it "
        "is farther away than every known image."
    )


@note("run")
def no_bank() -> str:
    return "The model has no bank of known images, so unfamiliar images are not marked. Train it again to get one."


# The search for more images


@note("run")
def unfamiliar_left_out(images: int) -> str:
    """Images of a pool are unlike the training images."""
    some = _some(images, "One image is", "images are")
    return f"{some} unlike the training images and left out. Keep them with --unfamiliar mark."


@note("run")
def labelled_left_out(images: int, like: bool) -> str:
    """Images of a pool are labelled already, in the run or, with ``like``, by --like."""
    some = _some(images, "One image is", "images are")
    return f"{some} byte-identical to a labelled image of the run{' or of --like' if like else ''} and left out."


@note("run")
def known_images(wanted: int, others: int) -> str:
    return f"Compared with {wanted:,} known images of the class and {others:,} of other classes."


@note("run")
def earlier_scores(images: int) -> str:
    return f"Continued: the scores of {images:,} images are those of an earlier call."


@note("run")
def small_pool(images: int, top: int) -> str:
    return f"The pool has only {images:,} images to list, fewer than --top {top:,}."
