"""The sections of a recipe: each table as a frozen model, each key as a field with its description.

The description of a field says if the paper does not state its value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, Field

from lopsided.recipe.encoder_spec import EncoderSpec, Scaling
from lopsided.recipe.losses import LossField, read_loss
from lopsided.recipe.values import (
    CHUNK,
    MOST,
    Alpha,
    Count,
    Number,
    Optimizer,
    PartialShare,
    Positive,
    Rule,
    Schedule,
    Section,
    Share,
    Side,
    Text,
    Texts,
    Views,
    Weights,
    Width,
)

USUAL_BETA = 0.9999
"""The beta of the class weights if a recipe does not set it."""
RUNTIME_FIELDS = frozenset(
    {"description", "device", "threads", "fast", "compile", "compare_quick", "track"}
    | {"data.cache", "data.allow_outside"}
)
"""Fields that do not change the result of a run."""
UNHASHED_FIELDS = RUNTIME_FIELDS | {"decision.rule", "decision.calibration"}
"""Fields that do not change what is trained. They are not part of the hash of a recipe."""
TRAINING_FIELDS = tuple(
    f"encoder_training.{name}"
    for name in (
        "reweight_from", "reweight_beta", "resample_from", "mixup", "cutmix", "sam_rho", "ema", "swa_from",
    )
)  # fmt: skip
"""Fields of the training of an encoder that are off by default."""
LOSSES = ("encoder_training.loss", "classifier.loss")
"""The fields that hold a loss."""
LOSS_NAMES = tuple(f"{path}.name" for path in LOSSES)
"""The fields that hold the name of a loss."""
SECOND_STAGE = frozenset({"classifier.kind", "classifier.tau"})
"""Fields that say how the classifier is made, and whether it has a second stage."""
CONTRASTED = frozenset(f"encoder_training.{name}" for name in ("views", "queue", "queue_balanced"))
"""Fields of a batch that only a contrastive loss uses."""
_OPEN = "The paper does not state it."
USUAL_VIEWS = 4
"""Augmented views of an image whose activations are kept if ``fine_tune.views`` is unset."""


def described(default: Any, description: str) -> Any:
    """Return a field with its default and its description, which ``Recipe.to_toml`` writes."""
    return Field(default, description=description)


class Data(Section):
    """The images, and their split into training, validation and test images."""

    source: Text | None = described(
        None, "Name of a source, a folder, or a table; DATA on the command line replaces it."
    )
    classes: Texts | None = described(None, "The classes to use, majority first; unset: all classes.")
    include: Texts | None = described(
        None, 'Glob patterns; only images with a matching name are used, such as ["*.jpg"]; unset: all images.'
    )
    exclude: Texts | None = described(
        None, 'Glob patterns; images with a matching name are left out, such as ["*_mask.*"]; unset: none.'
    )
    more: Texts | None = described(
        None,
        "Tables of further labelled images, with the columns path and label, for training only; unset: none.",
    )
    corrections: Texts | None = described(
        None,
        "Tables of corrected labels, with the columns path and label, which replace the labels of these images; unset: "
        "none.",
    )
    scenario: Text | None = described(
        None,
        'Class proportions to draw, such as "90:10,total=1000"; unset: all images. Validation and test images '
        "that the data define stay as they are.",
    )
    split: Literal["auto", "random", "stratified", "group", "given"] = described(
        "auto",
        "How to split the images; auto: given if the source has splits, group if it has groups, otherwise stratified. "
        f"{_OPEN}",
    )
    path_column: Text | None = described(None, "Table column with the paths of the images; unset: path.")
    label_column: Text | None = described(None, "Table column with the classes of the images; unset: label.")
    group: Text | None = described(
        None,
        "Table column, such as the patient, or parent: the folder of an image inside the folder of its class. Images "
        "of one group stay in one split.",
    )
    group_from: Text | None = described(
        None, 'Pattern that takes the group from the name of an image, such as "{group}_*"; unset: data.group.'
    )
    origin: Text | None = described(
        None,
        "Table column of the source of an image, such as its camera or clinic: the model is also tested on each source "
        "without training on it.",
    )
    columns: Texts | None = described(
        None,
        'Table columns that the classifier gets beside each image, such as ["age", "sex"]; "site:category" if the '
        "numbers of a column are codes; unset: none.",
    )
    test: Share = described(0.15, "Share of all images for the test, which is evaluated once, at the end.")
    val: Share = described(
        0.15,
        "Share of all images for the selection of the epoch; 0: keep the last epoch, ignore a given val split.",
    )
    folds: Annotated[int, Ge(2), Le(1000)] | None = described(
        None,
        "Test every image: train this many models, each tested on one fold of the images, without regard to data.test; "
        "unset: one split.",
    )
    repeats: Annotated[int, Ge(1), Le(1000)] = described(1, "How often to draw and train the folds.")
    fold: Count | None = described(
        None,
        "The fold that this run is tested on, counted from 1 over all repeats; runs with folds set it for their parts.",
    )
    held_out: bool = described(
        False, "Also evaluate on images that the scenario did not draw, with the same number per class."
    )
    redraw: bool = described(
        True, f"Whether the seed of a run also draws its images and split; false: every run uses seed 0. {_OPEN}"
    )
    image_size: Side | None = described(
        None,
        "Side in pixels to which images are resized; unset: the size of the encoder's weights if augment.normalisation "
        "is weights, otherwise the images' own size if all have the same, otherwise 224 or, for smaller images, the "
        "median of their shorter sides.",
    )
    channels: Literal[1, 3] | None = described(
        None, '1 for grey, 3 for colour; unset: as in the source, or 3 if augment.normalisation is "weights".'
    )
    cache: Literal["auto", "memory", "none"] = described(
        "auto", "Where to keep decoded images between epochs; auto: in memory if they fit."
    )
    skip_unreadable: bool = described(False, "Skip and list images that cannot be read, instead of stopping.")
    allow_outside: bool = described(False, "Allow a table to name files outside its own folder.")


class Augment(Section):
    """Random changes to training images, and the scale of the pixels."""

    rotation: Annotated[float, Ge(0), Le(180)] = described(15.0, f"Largest rotation, in degrees, both ways. {_OPEN}")
    horizontal_flip: bool = described(True, f"Mirror left and right with probability 1/2. {_OPEN}")
    vertical_flip: bool = described(False, f"Mirror top and bottom with probability 1/2. {_OPEN}")
    crop: PartialShare | None = described(None, "Smallest share of the area that a random crop keeps; unset: no crop.")
    colour: PartialShare | None = described(
        None, "Strength of brightness, contrast and saturation jitter; unset: none."
    )
    normalisation: Literal["none", "half", "imagenet", "source", "weights"] = described(
        "source",
        "Pixel scale: [0, 1], [-1, 1], ImageNet's statistics, those of the training images, or those that belong to "
        f"the encoder's weights. {_OPEN}",
    )


class Encoder(Section):
    """The network that turns an image into features."""

    name: Text = described(
        "resnet18",
        'Any timm model, or "mlp" for plain vectors. A frozen encoder can be several, joined by +. Feature blocks may '
        "follow: pixels (colours in regions of the image), stages (the layers before the last), regions (the first of "
        "these by regions), positions (two in the middle by position, for the recipe few).",
    )
    weights: Weights = described(
        "none",
        "Initial weights: random (none), those in the package (embedded), timm's weights, hf-hub:OWNER/NAME@COMMIT, or "
        f"a file; for joined encoders one word for all, or the weights of each, joined by +. {_OPEN}",
    )
    views: Views = described(
        "none",
        "Views of an image whose features are averaged wherever images are not augmented: none, flip (with its mirror "
        'image), flips (4 views), dihedral (8 views of square images), names such as "identity,rot180", or auto: inner '
        "folds choose flips, flip or none for a frozen encoder.",
    )
    scaling: Scaling = described(
        "none",
        "Scaling of the features of a pretrained encoder; root: the square root of each feature, then length 1; "
        "cube-root: the same with the cube root. Vectors are not scaled.",
    )

    @property
    def spec(self) -> EncoderSpec:
        """The section, taken apart."""
        return EncoderSpec.parse(self.name, self.weights, self.views, self.scaling)


class Head(Section):
    """The projection head: two layers, used in the first stage only."""

    hidden: Width | Literal["auto"] = described(
        "auto", "Width of the first layer; auto: the width of the encoder's features, as in the paper."
    )
    out: Width = described(128, "Width of the second layer, which is the length of a projection.")


class EncoderTraining(Section):
    """The first stage. With method "end-to-end" it is the only stage."""

    loss: LossField = described(
        read_loss("afcl"),
        'Contrastive or joint for "two-stage"; classification or joint for "end-to-end"; any for "fine-tune".',
    )
    epochs: Count = described(30, "Passes over the training images.")
    batch_size: Count = described(128, "Images in a batch, over all ranks.")
    lr: Positive = described(1e-3, "Learning rate (the first one, with a schedule).")
    optimizer: Optimizer = described("adam", "Rule of the update.")
    weight_decay: Number = described(0.0, f"Weight decay. {_OPEN}")
    schedule: Schedule = described("cosine", f"Course of the learning rate. {_OPEN}")
    sampler: Literal["plain", "balanced", "sqrt", "m-per-class"] = described(
        "plain",
        "How to draw batches: images equally, classes equally, classes by the root of their counts, or m of each.",
    )
    m_per_class: Count = described(4, 'Images of each drawn class with the sampler "m-per-class".')
    last_batch: Literal["keep", "drop"] = described(
        "keep", f"Whether to use the last, smaller batch of an epoch. {_OPEN}"
    )
    views: Annotated[int, Ge(1), Le(64)] = described(1, f"Augmented views of each image in a batch. {_OPEN}")
    queue: Annotated[int, Ge(0), Le(MOST)] = described(0, "Features of past batches that are also contrasted; 0: none.")
    queue_balanced: bool = described(
        False, "Keep the classes in the queue balanced, as far as there are enough features."
    )
    chunk_size: Annotated[int, Ge(2), Le(MOST), CHUNK] | None = described(
        None, "Images in the encoder at once, over all ranks, to save memory; unset: the whole batch."
    )
    batch_norm: Literal["sync", "rank"] = described(
        "sync", "With several ranks, batch statistics over the images of all ranks, or of each rank separately."
    )
    reweight_from: Share | None = described(
        None,
        "Share of the epochs after which the loss weights classes by their effective number, such as 0.8 (deferred "
        "re-weighting); unset: never.",
    )
    reweight_beta: Annotated[float, Ge(0), Le(1), AfterValidator(lambda x: x + 0.0)] = described(
        USUAL_BETA, "Beta of these weights; 0: equal weights, 1: in inverse proportion to the counts."
    )
    resample_from: Share | None = described(
        None,
        "Share of the epochs after which batches are drawn with classes equally, such as 0.8 (deferred re-sampling); "
        "unset: never.",
    )
    mixup: Alpha = described(
        0.0, "Mix the images and labels of a batch, with a share from Beta(mixup, mixup), such as 0.2; 0: no mixing."
    )
    cutmix: Alpha = described(
        0.0,
        "Paste a box of one image into another, with the area from Beta(cutmix, cutmix), such as 1; 0: no boxes. With "
        "mixup, each batch uses one of both at random.",
    )
    sam_rho: Number = described(
        0.0,
        "Radius of sharpness-aware minimisation (SAM), such as 0.05. Every step computes two gradients, so training "
        "takes twice as long; 0: off.",
    )
    ema: Share = described(
        0.0,
        "Share of the old average in a moving average of the weights, such as 0.999, which becomes the model; 0: off.",
    )
    swa_from: Share | None = described(
        None,
        "Share of the epochs after which the weights of all epochs are averaged equally (SWA), such as 0.75. The "
        "average becomes the model, and the learning rate stays constant from then on; unset: off.",
    )


class Classifier(Section):
    """The second stage: one linear layer on the frozen encoder.

    Without effect with the methods "end-to-end" and "fine-tune", unless kind is crt or lws."""

    kind: Literal["linear", "crt", "lws", "tau-norm"] = described(
        "linear",
        'Classifier of the model. linear: the trained one; after "end-to-end" or "fine-tune" also crt: a new one, '
        "trained with this section on the frozen encoder; lws: the trained one with a learnt scale per class; "
        "tau-norm: the trained one with weights divided by their length to the power tau, and without bias.",
    )
    tau: Annotated[float, Gt(0), Le(2)] | None = described(
        None, "Tau of tau-norm; unset: the best of 0, 0.1, ..., 2 on the validation images."
    )
    loss: LossField = described(read_loss("ce"), "Classification loss.")
    epochs: Count = described(10, "Passes over the training images.")
    batch_size: Count = described(128, "Images in a batch, over all ranks.")
    lr: Positive = described(1e-2, "Learning rate (the first one, with a schedule).")
    optimizer: Optimizer = described("adam", "Rule of the update.")
    weight_decay: Number = described(0.0, f"Weight decay. {_OPEN}")
    schedule: Schedule = described("cosine", f"Course of the learning rate. {_OPEN}")
    sampler: Literal["plain", "balanced", "sqrt"] = described(
        "balanced", "How to draw batches, as in encoder_training."
    )
    augment: bool = described(False, f"Whether the second stage augments images as well. {_OPEN}")


class Adapter(Section):
    """Small heads on the frozen features, each trained with encoder_training.loss. Used with method "adapter" only."""

    heads: Annotated[int, Ge(1), Le(64)] = described(
        5, "Number of heads; each head is trained without one of the inner folds (regression.folds)."
    )
    hidden: Width = described(128, "Width of the first layer of a head.")
    out: Width = described(64, "Width of the second layer of a head, which is the length of a projection.")
    input_dropout: Share = described(0.0, "Share of the features that are set to 0 at random in training.")
    dropout: Share = described(0.0, "Share of the first layer's outputs that are set to 0 at random in training.")
    blend: Share = described(
        0.0, "Share of the plain logistic regression in the averaged logits; 0: the heads only, 0.5: equal shares."
    )


class Regression(Section):
    """The logistic regression on standardised features, with classifier.loss.

    Used with the methods "frozen", "adapter" and "fine-tune". With "frozen", cross-entropy and no strength, ridge
    regressions join it."""

    strength: Positive | None = described(
        None, "Inverse strength of the L2 penalty (C); unset: the value with the lowest loss on inner folds."
    )
    folds: Annotated[int, Ge(2), Le(20)] = described(
        5, "Inner folds of the training images that choose the strength, by group if there are groups."
    )


class FineTune(Section):
    """Training of a pretrained encoder with the settings of encoder_training. Used with method "fine-tune" only."""

    blocks: Annotated[int, Ge(1), Le(MOST)] | Literal["all"] = described(
        "all",
        "How many of the last blocks of the encoder are trained. The activations of the other blocks are computed once "
        "and kept in memory. all: the whole encoder is trained.",
    )
    views: Annotated[int, Ge(1), Le(256)] | None = described(
        None,
        "Augmented views of each training image whose activations are kept, if blocks is a number; unset: "
        f"{USUAL_VIEWS}.",
    )
    layer_decay: PartialShare = described(
        0.8, "Learning rate of a block as a share of that of the next block; the heads have the full rate."
    )
    warmup: Share = described(0.1, "Share of the steps in which the learning rate rises to its full value.")
    batch_norm: Literal["frozen", "train"] = described(
        "frozen", "Whether batch norm keeps the statistics of the pretrained weights, or uses those of each batch."
    )
    average: Share = described(
        0.99,
        "Share of the old average in the moving average of the weights, which becomes the model; 0: the last weights.",
    )
    blend: Share = described(
        0.0,
        "Weight of the regression on the pretrained features in the average of its logits with those of a regression "
        "on the features of the trained encoder; 0: the trained encoder alone.",
    )
    steps: Count | None = described(None, "Number of training steps, instead of encoder_training.epochs.")
    minutes: Positive | None = described(
        None,
        "Minutes for the whole training, instead of encoder_training.epochs. The first steps are timed, and the number "
        "of steps is then fixed. So the result depends on the speed of the machine.",
    )


class Selection(Section):
    """Selection of the epoch to keep, by the validation images."""

    metric: Literal["uwa", "macro_f1", "g_mean", "mcc", "accuracy", "log_loss", "smooth_log_loss", "last"] = described(
        "log_loss",
        "The metric that selects: the highest of the first five (uwa: balanced accuracy), or the lowest log loss with "
        "equal weight for each class, of one epoch or as the mean of the last five epochs; last: keep the last epoch.",
    )
    patience: Count | None = described(
        None, "Stop after this many epochs without improvement; unset: train to the end."
    )


class Decision(Section):
    """From probabilities to a class."""

    rule: Rule = described(
        "balanced",
        "balanced: the class with the highest probability divided by its prior; plain: the most probable class; "
        "prevalence:A=0.02,B=0.98; cost:A=10,B=1; recall:A=0.95; precision:A=0.5; alarms:A=100; "
        "threshold:A=0.013; tuned.",
    )
    calibration: Literal["affine", "temperature", "none"] = described(
        "affine",
        "Calibrate the probabilities on the validation images, if there are any: by a temperature and a bias per "
        "class, or by a temperature alone.",
    )
    focus: str | None = described(
        None,
        "The class that matters most: headline, threshold, label check and find follow it. By default the class that "
        "the rule names, or the rarest one.",
    )
