"""The recipe: all settings of a run as one validated, frozen model, read from and written to TOML. No torch needed.

Each table of a recipe is a section. Each key is a field with a description, and ``Recipe.to_toml`` writes both. The
description of a field says if the paper does not state its value. Missing fields take the values of the recipe
``from-scratch``. A loss has its own table, with the parameters that the catalogue lists for it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from lopsided.errors import InputError, sentence
from lopsided.files import check_regular
from lopsided.losses import catalogue
from lopsided.recipe import words
from lopsided.recipe.losses import LossField, LossSettings, read_loss
from lopsided.recipe.rules import parse_rule
from lopsided.recipe.second_stage import RETRAINED, Kind, second_stage_conflicts
from lopsided.recipe.section import Section
from lopsided.recipe.training import USUAL_BETA, training_conflicts
from lopsided.recipe.upgrade import upgraded
from lopsided.recipe.views import name_views, parse_views
from lopsided.recipe.weights import JOINT, is_weights, joined_conflicts

MAX_BYTES = 1_000_000
"""The largest size of a recipe file. A real recipe is about one page."""

MAX_SIDE = 8192
"""The largest image side that a model may need. The decoder does not read larger images either."""

MAX_MEMBERS = 100
"""The largest number of encoders in an ensemble."""

_OPEN = "The paper does not state it."
_TRACKER = re.compile(r"[\w.-]+(:[^\x00-\x1f]+)?")
_MOST = 2**31 - 1
RUNTIME_FIELDS = frozenset(
    {"description", "device", "threads", "fast", "compile", "compare_default", "track"}
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
LATER_FIELDS = frozenset(
    {"data.include", "data.exclude", "data.more", "data.folds", "data.repeats", "data.fold", "final", *TRAINING_FIELDS}
    | {"encoder.views", "encoder.scaling", "classifier.kind", "classifier.tau", "fine_tune.blend"}
)
"""Fields that older records lack. A hash covers them only if they are not the default, so older hashes stay valid."""
USUAL_VIEWS = 4
"""Augmented views of an image whose activations are kept if ``fine_tune.views`` is unset."""
FROZEN_LOSSES = ("ce", "weighted-ce")
"""Losses of the logistic regression: each image counts the same, or each class."""
LOSSES = ("encoder_training.loss", "classifier.loss")
"""The fields that hold a loss."""
_LOSS_NAMES = tuple(f"{path}.name" for path in LOSSES)
_IDLE = ("augment.", "head.", "encoder_training.", "classifier.", "selection.")
_NOT_IDLE = frozenset({"augment.normalisation"})
"""Sections without effect if the encoder is frozen, and the fields in them that have one."""
_ADAPTER_IDLE = (
    tuple(f"encoder_training.{name}" for name in ("views", "queue", "queue_balanced", "chunk_size", "batch_norm"))
    + TRAINING_FIELDS
)
"""Fields of the training without effect on heads, which are trained on the features of images."""
FROZEN = ("frozen", "adapter")
"""Methods that do not train the encoder."""
_OWN_SECTIONS = {"regression": (*FROZEN, "fine-tune"), "adapter": ("adapter",), "fine_tune": ("fine-tune",)}
"""Sections that only some methods use."""
_SECOND = frozenset({"classifier.kind", "classifier.tau"})
_CONTRASTED = frozenset(f"encoder_training.{name}" for name in ("views", "queue", "queue_balanced"))


def _utf8(text: str) -> str:
    text.encode()  # A lone surrogate raises UnicodeEncodeError, a ValueError, because no file can hold it.
    return text


def _filled(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("empty, or with a NUL")
    return text


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _weights(text: str) -> str:
    if is_weights(text.rpartition(JOINT)[2]):  # Joined encoders have several.
        return text
    raise ValueError("neither a word nor a file of weights")


def _tracker(text: str) -> str:
    if not _TRACKER.fullmatch(text):
        raise ValueError("no name, or nothing after the colon")
    return text


def _rule(text: str) -> str:
    try:
        return str(parse_rule(text))
    except InputError as error:
        raise words.RefusedError("", f"cannot be used. {error}") from None


def _views(text: str) -> str:
    try:
        return name_views(parse_views(text))
    except InputError as error:
        raise words.RefusedError("", f"cannot be used. {error}") from None


AnyText = Annotated[str, AfterValidator(_utf8)]
Text = Annotated[AnyText, AfterValidator(_filled), words.Phrase("a string that is not empty")]
Rule = Annotated[AnyText, AfterValidator(_rule), words.Phrase("a decision rule")]
Views = Annotated[AnyText, AfterValidator(_views), words.Phrase("views of an image, such as flip")]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_tuple)]
TrackerText = Annotated[Text, AfterValidator(_tracker)]
TrackerTexts = Annotated[
    tuple[TrackerText, ...],
    BeforeValidator(_tuple),
    words.Phrase('a list of trackers, such as ["tensorboard", "mlflow:FOLDER"]'),
]
Weights = Annotated[
    AnyText, AfterValidator(_weights), words.Phrase('"none", "embedded", "timm" or a path that ends in .safetensors')
]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
Count = Annotated[int, Ge(1), Le(_MOST)]
Side = Annotated[int, Ge(1), Le(MAX_SIDE)]
Width = Annotated[int, Ge(1), Le(2**16)]
Threads = Annotated[int, Ge(1), Le(1024)]
Number = Annotated[float, Ge(0), AfterValidator(lambda x: x + 0.0)]  # -0.0 and 0.0 are the same recipe
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1), AfterValidator(lambda x: x + 0.0)]
PartialShare = Annotated[float, Gt(0), Le(1)]
Alpha = Annotated[float, Ge(0), Le(100), AfterValidator(lambda x: x + 0.0)]
_CHUNK = words.Phrase(f"an integer >= 2 and <= {_MOST} (one image has no batch statistics)")
Optimizer = Literal["adam", "adamw", "sgd"]
Schedule = Literal["constant", "cosine"]


def _field(default: Any, description: str) -> Any:
    return Field(default, description=description)


class Data(Section):
    """The images, and their split into training, validation and test images."""

    source: Text | None = _field(None, "Name of a source, a folder, or a table; DATA on the command line replaces it.")
    classes: Texts | None = _field(None, "The classes to use, majority first; unset: all classes.")
    include: Texts | None = _field(
        None, 'Glob patterns; only images with a matching name are used, such as ["*.jpg"]; unset: all images.'
    )
    exclude: Texts | None = _field(
        None, 'Glob patterns; images with a matching name are left out, such as ["*_mask.*"]; unset: none.'
    )
    more: Texts | None = _field(
        None,
        "Tables of further labelled images, with the columns path and label, for training only; unset: none.",
    )
    scenario: Text | None = _field(None, 'Class proportions to draw, such as "90:10,total=1000"; unset: all images.')
    split: Literal["auto", "random", "stratified", "group", "given"] = _field(
        "auto",
        "How to split the images; auto: given if the source has splits, group if it has groups, otherwise stratified. "
        f"{_OPEN}",
    )
    group: Text | None = _field(None, "Table column, such as the patient; images of one group stay in one split.")
    test: Share = _field(0.15, "Share of all images for the test, which is evaluated once, at the end.")
    val: Share = _field(
        0.15,
        "Share of all images for the selection of the epoch; 0: keep the last epoch, ignore a given val split.",
    )
    folds: Annotated[int, Ge(2), Le(1000)] | None = _field(
        None,
        "Test every image: train this many models, each tested on one fold of the images, without regard to data.test; "
        "unset: one split.",
    )
    repeats: Annotated[int, Ge(1), Le(1000)] = _field(1, "How often to draw and train the folds.")
    fold: Count | None = _field(
        None,
        "The fold that this run is tested on, counted from 1 over all repeats; runs with folds set it for their parts.",
    )
    held_out: bool = _field(
        False, "Also evaluate on images that the scenario did not draw, with the same number per class."
    )
    redraw: bool = _field(
        True, f"Whether the seed of a run also draws its images and split; false: every run uses seed 0. {_OPEN}"
    )
    image_size: Side | None = _field(
        None,
        "Side in pixels to which images are resized; unset: the size of the encoder's weights if augment.normalisation "
        "is weights, otherwise the images' own size if all have the same, otherwise 224 or, for smaller images, the "
        "median of their shorter sides.",
    )
    channels: Literal[1, 3] | None = _field(
        None, '1 for grey, 3 for colour; unset: as in the source, or 3 if augment.normalisation is "weights".'
    )
    cache: Literal["auto", "memory", "none"] = _field(
        "auto", "Where to keep decoded images between epochs; auto: in memory if they fit."
    )
    skip_unreadable: bool = _field(False, "Skip and list images that cannot be read, instead of stopping.")
    allow_outside: bool = _field(False, "Allow a table to name files outside its own folder.")


class Augment(Section):
    """Random changes to training images, and the scale of the pixels."""

    rotation: Annotated[float, Ge(0), Le(180)] = _field(15.0, f"Largest rotation, in degrees, both ways. {_OPEN}")
    horizontal_flip: bool = _field(True, f"Mirror left and right with probability 1/2. {_OPEN}")
    vertical_flip: bool = _field(False, f"Mirror top and bottom with probability 1/2. {_OPEN}")
    crop: PartialShare | None = _field(None, "Smallest share of the area that a random crop keeps; unset: no crop.")
    colour: PartialShare | None = _field(None, "Strength of brightness, contrast and saturation jitter; unset: none.")
    normalisation: Literal["none", "half", "imagenet", "source", "weights"] = _field(
        "source",
        "Pixel scale: [0, 1], [-1, 1], ImageNet's statistics, those of the training images, or those that belong to "
        f"the encoder's weights. {_OPEN}",
    )


class Encoder(Section):
    """The network that turns an image into features."""

    name: Text = _field(
        "resnet18", 'Any timm model, or "mlp" for plain vectors. A frozen encoder can be several, joined by +.'
    )
    weights: Weights = _field(
        "none",
        "Initial weights: random (none), those in the package (embedded), timm's weights, or a file; for joined "
        f"encoders one word for all, or the weights of each, joined by +. {_OPEN}",
    )
    views: Views = _field(
        "none",
        "Views of an image whose features are averaged wherever images are not augmented: none, flip (with its mirror "
        'image), flips (4 views), dihedral (8 views of square images), or names such as "identity,rot180".',
    )
    scaling: Literal["none", "root"] = _field(
        "none",
        "Scaling of the features of a pretrained encoder; root: the square root of each feature, then length 1. "
        "Vectors are not scaled.",
    )

    @property
    def is_joined(self) -> bool:
        """Whether these are several encoders, whose features are joined."""
        return JOINT in self.name

    @property
    def passes(self) -> int:
        """How often an image goes through an encoder if it is not augmented: once for each encoder and each view."""
        return len(self.name.split(JOINT)) * len(parse_views(self.views))


class Head(Section):
    """The projection head: two layers, used in the first stage only."""

    hidden: Width | Literal["auto"] = _field(
        "auto", "Width of the first layer; auto: the width of the encoder's features, as in the paper."
    )
    out: Width = _field(128, "Width of the second layer, which is the length of a projection.")


class EncoderTraining(Section):
    """The first stage. With method "end-to-end" it is the only stage."""

    loss: LossField = _field(
        read_loss("afcl"),
        'Contrastive or joint for "two-stage"; classification or joint for "end-to-end"; any for "fine-tune".',
    )
    epochs: Count = _field(30, "Passes over the training images.")
    batch_size: Count = _field(128, "Images in a batch, over all ranks.")
    lr: Positive = _field(1e-3, "Learning rate (the first one, with a schedule).")
    optimizer: Optimizer = _field("adam", "Rule of the update.")
    weight_decay: Number = _field(0.0, f"Weight decay. {_OPEN}")
    schedule: Schedule = _field("cosine", f"Course of the learning rate. {_OPEN}")
    sampler: Literal["plain", "balanced", "sqrt", "m-per-class"] = _field(
        "plain",
        "How to draw batches: images equally, classes equally, classes by the root of their counts, or m of each.",
    )
    m_per_class: Count = _field(4, 'Images of each drawn class with the sampler "m-per-class".')
    last_batch: Literal["keep", "drop"] = _field("keep", f"Whether to use the last, smaller batch of an epoch. {_OPEN}")
    views: Annotated[int, Ge(1), Le(64)] = _field(1, f"Augmented views of each image in a batch. {_OPEN}")
    queue: Annotated[int, Ge(0), Le(_MOST)] = _field(0, "Features of past batches that are also contrasted; 0: none.")
    queue_balanced: bool = _field(False, "Keep the classes in the queue balanced, as far as there are enough features.")
    chunk_size: Annotated[int, Ge(2), Le(_MOST), _CHUNK] | None = _field(
        None, "Images in the encoder at once, over all ranks, to save memory; unset: the whole batch."
    )
    batch_norm: Literal["sync", "rank"] = _field(
        "sync", "With several ranks, batch statistics over the images of all ranks, or of each rank separately."
    )
    reweight_from: Share | None = _field(
        None,
        "Share of the epochs after which the loss weights classes by their effective number, such as 0.8 (deferred "
        "re-weighting); unset: never.",
    )
    reweight_beta: Annotated[float, Ge(0), Le(1), AfterValidator(lambda x: x + 0.0)] = _field(
        USUAL_BETA, "Beta of these weights; 0: equal weights, 1: in inverse proportion to the counts."
    )
    resample_from: Share | None = _field(
        None,
        "Share of the epochs after which batches are drawn with classes equally, such as 0.8 (deferred re-sampling); "
        "unset: never.",
    )
    mixup: Alpha = _field(
        0.0, "Mix the images and labels of a batch, with a share from Beta(mixup, mixup), such as 0.2; 0: no mixing."
    )
    cutmix: Alpha = _field(
        0.0,
        "Paste a box of one image into another, with the area from Beta(cutmix, cutmix), such as 1; 0: no boxes. With "
        "mixup, each batch uses one of both at random.",
    )
    sam_rho: Number = _field(
        0.0,
        "Radius of sharpness-aware minimisation (SAM), such as 0.05. Every step computes two gradients, so training "
        "takes twice as long; 0: off.",
    )
    ema: Share = _field(
        0.0,
        "Share of the old average in a moving average of the weights, such as 0.999, which becomes the model; 0: off.",
    )
    swa_from: Share | None = _field(
        None,
        "Share of the epochs after which the weights of all epochs are averaged equally (SWA), such as 0.75. The "
        "average becomes the model, and the learning rate stays constant from then on; unset: off.",
    )


class Classifier(Section):
    """The second stage: one linear layer on the frozen encoder.

    Without effect with the methods "end-to-end" and "fine-tune", unless kind is crt or lws."""

    kind: Kind = _field(
        "linear",
        'Classifier of the model. linear: the trained one; after "end-to-end" or "fine-tune" also crt: a new one, '
        "trained with this section on the frozen encoder; lws: the trained one with a learnt scale per class; "
        "tau-norm: the trained one with weights divided by their length to the power tau, and without bias.",
    )
    tau: Annotated[float, Gt(0), Le(2)] | None = _field(
        None, "Tau of tau-norm; unset: the best of 0, 0.1, ..., 2 on the validation images."
    )
    loss: LossField = _field(read_loss("ce"), "Classification loss.")
    epochs: Count = _field(10, "Passes over the training images.")
    batch_size: Count = _field(128, "Images in a batch, over all ranks.")
    lr: Positive = _field(1e-2, "Learning rate (the first one, with a schedule).")
    optimizer: Optimizer = _field("adam", "Rule of the update.")
    weight_decay: Number = _field(0.0, f"Weight decay. {_OPEN}")
    schedule: Schedule = _field("cosine", f"Course of the learning rate. {_OPEN}")
    sampler: Literal["plain", "balanced", "sqrt"] = _field("balanced", "How to draw batches, as in encoder_training.")
    augment: bool = _field(False, f"Whether the second stage augments images as well. {_OPEN}")


class Adapter(Section):
    """Small heads on the frozen features, each trained with encoder_training.loss. Used with method "adapter" only."""

    heads: Annotated[int, Ge(1), Le(64)] = _field(
        5, "Number of heads; each head is trained without one of the inner folds (regression.folds)."
    )
    hidden: Width = _field(128, "Width of the first layer of a head.")
    out: Width = _field(64, "Width of the second layer of a head, which is the length of a projection.")
    input_dropout: Share = _field(0.0, "Share of the features that are set to 0 at random in training.")
    dropout: Share = _field(0.0, "Share of the first layer's outputs that are set to 0 at random in training.")
    blend: Share = _field(
        0.0, "Share of the plain logistic regression in the averaged logits; 0: the heads only, 0.5: equal shares."
    )


class Regression(Section):
    """The logistic regression on standardised features, with classifier.loss.

    Used with the methods "frozen", "adapter" and "fine-tune"."""

    strength: Positive | None = _field(
        None, "Inverse strength of the L2 penalty (C); unset: the value with the lowest loss on inner folds."
    )
    folds: Annotated[int, Ge(2), Le(20)] = _field(
        5, "Inner folds of the training images that choose the strength, by group if there are groups."
    )


class FineTune(Section):
    """Training of a pretrained encoder with the settings of encoder_training. Used with method "fine-tune" only."""

    blocks: Annotated[int, Ge(1), Le(_MOST)] | Literal["all"] = _field(
        "all",
        "How many of the last blocks of the encoder are trained. The activations of the other blocks are computed once "
        "and kept in memory. all: the whole encoder is trained.",
    )
    views: Annotated[int, Ge(1), Le(256)] | None = _field(
        None,
        "Augmented views of each training image whose activations are kept, if blocks is a number; unset: "
        f"{USUAL_VIEWS}.",
    )
    layer_decay: PartialShare = _field(
        0.8, "Learning rate of a block as a share of that of the next block; the heads have the full rate."
    )
    warmup: Share = _field(0.1, "Share of the steps in which the learning rate rises to its full value.")
    batch_norm: Literal["frozen", "train"] = _field(
        "frozen", "Whether batch norm keeps the statistics of the pretrained weights, or uses those of each batch."
    )
    average: Share = _field(
        0.99,
        "Share of the old average in the moving average of the weights, which becomes the model; 0: the last weights.",
    )
    blend: Share = _field(
        0.0,
        "Weight of the regression on the pretrained features in the average of its logits with those of a regression "
        "on the features of the trained encoder; 0: the trained encoder alone.",
    )
    steps: Count | None = _field(None, "Number of training steps, instead of encoder_training.epochs.")
    minutes: Positive | None = _field(
        None,
        "Minutes for the whole training, instead of encoder_training.epochs. The first steps are timed, and the number "
        "of steps is then fixed. So the result depends on the speed of the machine.",
    )


class Selection(Section):
    """Selection of the epoch to keep, by the validation images."""

    metric: Literal["uwa", "macro_f1", "g_mean", "mcc", "accuracy", "log_loss", "smooth_log_loss", "last"] = _field(
        "log_loss",
        "The figure that selects: the highest of the first five, or the lowest log loss with equal weight for each "
        "class, of one epoch or as the mean of the last five epochs; last: keep the last epoch.",
    )
    patience: Count | None = _field(None, "Stop after this many epochs without improvement; unset: train to the end.")


class Decision(Section):
    """From probabilities to a class."""

    rule: Rule = _field(
        "balanced",
        "balanced: the class with the highest probability divided by its prior; plain: the most probable class; "
        "prevalence:A=0.02,B=0.98; cost:A=10,B=1; recall:A>=0.95; tuned.",
    )
    calibration: Literal["affine", "temperature", "none"] = _field(
        "affine",
        "Calibrate the probabilities on the validation images, if there are any: by a temperature and a bias per "
        "class, or by a temperature alone.",
    )


class Recipe(Section):
    """All settings of a run. ``Recipe()`` is the recipe ``from-scratch``.

    >>> Recipe().override(**{"encoder_training.loss": "acl", "encoder_training.loss.eta": 0.1}).encoder_training.loss
    LossSettings(name='acl', eta=0.1, eta_unit='parity', temperature=0.07, normalization='paper')
    """

    description: AnyText = _field("", "What this recipe is for.")
    method: Literal["two-stage", "end-to-end", "frozen", "adapter", "fine-tune"] = _field(
        "two-stage",
        "First the encoder and then the classifier; both together with a classification loss; a logistic regression "
        "on the features of a pretrained encoder, which is not trained; contrastive heads on such features; or that "
        "regression and then the training of the encoder.",
    )
    seed: Seed = _field(0, "Seed of all random choices of the run.")
    device: Text = _field("auto", 'Where to compute: "auto", "cpu", "cuda", "cuda:1", "mps".')
    threads: Threads | None = _field(None, "Number of CPU threads; unset: torch decides.")
    fast: bool = _field(
        True, "Use fast paths and memory layouts, which change results only by rounding; false: plain torch."
    )
    compile: bool = _field(
        False, "Compile the encoder with torch.compile, which takes a minute or more and pays off only in long runs."
    )
    precision: Literal["float32", "bf16", "fp16"] = _field(
        "float32", "Precision of the encoder in training; weights and losses are always float32."
    )
    compare_default: bool = _field(
        True, "After training, also evaluate the recipe default on the same split, for comparison."
    )
    track: TrackerTexts = _field(
        (),
        'Trackers that show the run in other programs, such as ["tensorboard", "mlflow:FOLDER"]. Their names are '
        "checked when the run starts.",
    )
    final: Literal["auto", "refit", "ensemble"] = _field(
        "auto",
        "The model of a run with folds: refit trains on all images, ensemble averages the models of the folds; auto: "
        "refit if the encoder is frozen, otherwise ensemble.",
    )
    data: Data = Data()
    augment: Augment = Augment()
    encoder: Encoder = Encoder()
    head: Head = Head()
    encoder_training: EncoderTraining = EncoderTraining()
    classifier: Classifier = Classifier()
    adapter: Adapter = Adapter()
    regression: Regression = Regression()
    fine_tune: FineTune = FineTune()
    selection: Selection = Selection()
    decision: Decision = Decision()

    def __init__(self, /, **values: Any) -> None:  # The slash allows a field named self in a file.
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = list(words.problems(error, Recipe))
        else:
            problems = list(_conflicts(self))
        if problems:
            more = f" ({len(problems) - 1} more of this recipe's fields cannot be used.)" if len(problems) > 1 else ""
            raise InputError(problems[0] + more)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a TOML file."""
        try:
            check_regular(path)
            with open(path, "rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            got = f"{path} ({error.strerror})"
            raise InputError(sentence("a recipe must be a readable TOML file", got)) from None
        if len(content) > MAX_BYTES:
            raise InputError(f"The recipe {path} is larger than {MAX_BYTES:,} bytes. Use a smaller TOML file.")
        return cls._parse(content, f"The recipe {path}", before=f"recipe {path}: ")

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """Read TOML text."""
        return cls._parse(text.encode(errors="replace"), "The recipe")

    @classmethod
    def _parse(cls, content: bytes, name: str, *, before: str = "") -> Recipe:
        try:
            values = upgraded(tomllib.loads(content.decode()))
        except UnicodeDecodeError:
            raise InputError(f"{name} is not UTF-8 text.") from None
        except (ValueError, RecursionError) as error:  # tomllib passes on Python's limits on digits and depth
            got = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
            raise InputError(f"{name} is not valid TOML: {got}.") from None
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{before}{error}") from None

    def to_toml(self) -> str:
        """Return TOML with every field and its description. Reading it gives the same recipe."""
        return words.to_toml(self)

    def override(self, /, **changes: Any) -> Recipe:
        """Return a recipe with new values for the fields with these dotted names.

        A new loss keeps the parameters that were set for the old loss, if both losses have them. A loss that needs
        logits turns a two-stage recipe into the ``baseline`` of the same budget, unless ``method`` is also given.
        """
        changes = {path.removesuffix(".name") if path in _LOSS_NAMES else path: v for path, v in changes.items()}
        values, path = self.model_dump(), "encoder_training.loss"
        if changes.get("encoder.weights") == "embedded":
            changes.setdefault("augment.normalisation", "weights")
        _check_used(changes, self)
        given = tuple(changes)
        stays = path not in changes or "method" in changes or self.method != "two-stage"
        if not stays and self._switched(path, changes[path]).entry.kind != "contrastive":
            # ``baseline`` resets the fields of contrast, and the others may fit the new loss or method only.
            late = {name for name in changes if name.startswith(path)}.union(_CONTRASTED, TRAINING_FIELDS, _SECOND)
            rest = self.override(**{name: value for name, value in changes.items() if name not in late})
            base = rest.baseline(changes.pop(path), retrained=changes.get("classifier.kind") in RETRAINED)
            return base.override(**{n: changes[n] for n in changes if n in late})
        for path in LOSSES:
            if path in changes:
                section, _, field = path.partition(".")
                values[section][field] = self._switched(path, changes.pop(path)).model_dump()
        for path, value in changes.items():
            _place(values, path, value)
        made = Recipe(**values)
        for path in given:  # Last, because a conflict says more than a field without effect.
            text = _unused_classifier(path, made.method, made.classifier.kind)
            if text is not None:
                raise InputError(text)
        return made

    def _switched(self, path: str, to: object) -> LossSettings:
        """Return the settings of another loss for this field."""
        old: LossSettings = functools.reduce(getattr, path.split("."), self)  # type: ignore[assignment]
        try:
            return read_loss(old.switched(to))
        except words.RefusedError as error:
            raise InputError(f"{path}{error.where} {error.text}") from None

    def baseline(self, loss: str | Mapping[str, Any], *, retrained: bool = False) -> Recipe:
        """Return the end-to-end recipe with the same budget: as many epochs as both stages together.

        With ``retrained``, the classifier will be trained again, so the epochs of the first stage are enough.
        """
        training = self.encoder_training
        joined = self.method == "two-stage" and not retrained
        epochs = training.epochs + (self.classifier.epochs if joined else 0)
        changes: dict[str, Any] = {"loss": loss, "epochs": epochs}
        if self._switched("encoder_training.loss", loss).entry.kind == "classification":
            changes |= {"views": 1, "queue": 0, "queue_balanced": False}
        return self.override(
            method="end-to-end", **{f"encoder_training.{name}": value for name, value in changes.items()}
        )

    @property
    def loss(self) -> LossSettings:
        """The loss that names the run: that of the encoder, or that of the classifier if the encoder is frozen."""
        return self.classifier.loss if self.method == "frozen" else self.encoder_training.loss

    @property
    def classifier_loss(self) -> LossSettings:
        """The loss that trains the classifier of the finished model."""
        loss = self.encoder_training.loss
        together = self.method == "end-to-end" or (self.method == "fine-tune" and "logits" in loss.entry.needs)
        return loss if together and self.classifier.kind != "crt" else self.classifier.loss

    @property
    def retrains(self) -> bool:
        """Whether a second stage trains the classifier after an encoder that was trained together with one."""
        return self.classifier.kind in RETRAINED and self.method in ("end-to-end", "fine-tune")

    def first_stage(self) -> Recipe:
        """Return the recipe of the first stage alone, whose classifier is the one that is trained with the encoder."""
        section = self.classifier.model_copy(update={"kind": "linear", "tau": None})
        tuned = self.fine_tune.model_copy(update={"blend": 0.0})
        return self.model_copy(update={"classifier": section, "fine_tune": tuned})

    @property
    def blends(self) -> bool:
        """Whether the model averages a fine-tuned and a pretrained encoder."""
        return self.method == "fine-tune" and self.fine_tune.blend > 0

    @property
    def is_frozen(self) -> bool:
        """Whether the encoder is not trained."""
        return self.method in FROZEN

    @property
    def ensembles(self) -> bool:
        """Whether the model of a run with folds is the ensemble of the models of its folds."""
        return self.final == "ensemble" or (self.final == "auto" and _can_ensemble(self))

    def ignores(self, path: str) -> bool:
        """Return whether a field has no effect on this recipe, because of its method."""
        budget = self.fine_tune.steps or self.fine_tune.minutes
        kind = self.classifier.kind
        return (_unused(path, self.method, budget, kind) or _unused_classifier(path, self.method, kind)) is not None

    def leaves(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield dotted name, field and value of each field. Some sections count only for the methods that use them.

        So the hashes of the other methods are the same as before these sections existed.
        """
        for path, field, value in words.leaves(self):
            if self.method in _OWN_SECTIONS.get(path.partition(".")[0], (self.method,)):
                yield path, field, value

    def content_hash(self) -> str:
        """Return the SHA-256 of all fields that change what is trained."""
        kept = {path: value for path, value in hashed_fields(self) if path not in UNHASHED_FIELDS}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def hashed_fields(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield dotted name and value of each field that a hash may cover, without ``LATER_FIELDS`` at their default."""
    for path, field, value in recipe.leaves():
        if path not in LATER_FIELDS or value != field.default:
            yield path, value


def named_recipes() -> dict[str, str]:
    """Return the names and descriptions of the recipes in the package."""
    names = sorted(file.name.removesuffix(".toml") for file in _shelf().iterdir() if file.name.endswith(".toml"))
    return {name: named_recipe(name).description for name in names}


def named_recipe(name: str) -> Recipe:
    """Return one of the recipes in the package."""
    names = sorted(file.name.removesuffix(".toml") for file in _shelf().iterdir() if file.name.endswith(".toml"))
    if name not in names:
        raise InputError(
            sentence(f"a named recipe must be one of {', '.join(names)}", words.shown(name), words.suggest(name, names))
        )
    return Recipe._parse((_shelf() / f"{name}.toml").read_bytes(), f"The recipe {name}")


def find_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """Return the recipe with this name, or the recipe in the file with this path."""
    if isinstance(name_or_path, str) and not name_or_path.endswith(".toml") and not Path(name_or_path).exists():
        return named_recipe(name_or_path)
    return Recipe.load(name_or_path)


def parse_change(text: str) -> tuple[str, Any]:
    """Parse ``dotted.name=value``. The value is TOML; if it is not valid TOML, it is a string.

    >>> parse_change("encoder_training.loss.eta=300"), parse_change("encoder.name=resnet50")
    (('encoder_training.loss.eta', 300), ('encoder.name', 'resnet50'))
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise InputError(
            sentence("--set must be dotted.name=value", words.shown(text), "Example: --set encoder.name=resnet50.")
        )
    if value.strip() == "unset":
        return path.strip(), None
    try:
        return path.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # tomllib passes on Python's limits on digits and depth
        return path.strip(), value.strip()


def _place(values: dict[str, Any], path: str, value: object) -> None:
    """Set a value in the nested tables of a recipe. Unknown parameters of a loss raise later, in validation."""
    *sections, field = path.split(".")
    table: Any = values
    for section in sections:
        table = table.get(section) if isinstance(table, dict) else None
    if not isinstance(table, dict) or (field not in table and ".".join(sections) not in LOSSES):
        raise InputError(words.unknown(path, Recipe, value))
    if isinstance(table.get(field), dict):
        first = next(name for name, each in table[field].items() if not isinstance(each, dict))
        got = f"{path} is a section and cannot be {words.shown(value)}"
        raise InputError(f"{got}. Set a field, such as {path}.{first}.")
    table[field] = value


def is_idle(path: str, method: str = "frozen") -> bool:
    """Return whether a field has no effect because ``method`` does not train the encoder."""
    if method not in FROZEN or not path.startswith(_IDLE) or path in _NOT_IDLE or path.startswith("classifier.loss"):
        return False
    if method == "adapter" and path.startswith("encoder_training."):
        return path in _ADAPTER_IDLE
    return True


def _unused(path: str, method: str, budget: float | None, kind: str = "linear") -> str | None:
    """Return why a field has no effect with a method, or None.

    ``budget`` is that of ``fine_tune``, and ``kind`` that of the classifier.
    """
    nothing = f'{path} has no effect with method "{method}"'
    if path.startswith("fine_tune.") and method != "fine-tune":
        return f"{nothing}. Start from the recipe fine-tune."
    if path.startswith("adapter.") and method != "adapter":
        return f"{nothing}. Use a recipe with heads, such as adapter."
    if is_idle(path, method):
        return f"{nothing}. Use another recipe, such as from-scratch, to train an encoder."
    if method == "fine-tune" and _is_second(path, kind) and not path.startswith("classifier.loss"):
        return f"{nothing}: the classifier starts from a logistic regression."
    if method == "fine-tune" and path == "encoder_training.epochs" and budget is not None:
        do = "Set that field instead, or add --set fine_tune.steps=unset."
        return f"{path} has no effect because fine_tune.steps or fine_tune.minutes is set. {do}"
    return None


def _is_second(path: str, kind: str) -> bool:
    """Return whether only a second stage uses a field, and a classifier of this kind has none of its own."""
    return path.startswith("classifier.") and path not in _SECOND and kind not in RETRAINED


def _unused_classifier(path: str, method: str, kind: str) -> str | None:
    """Return why a field of the second stage has no effect on an end-to-end recipe, or None."""
    if method != "end-to-end" or not _is_second(path, kind) or path == "classifier.batch_size":
        return None  # ``--batch-size`` sets the field of both stages.
    nothing = f'{path} has no effect with method "{method}" and classifier.kind "{kind}"'
    return f'{nothing}. Set classifier.kind = "crt" to train the classifier again.'


def _check_used(changes: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise if a field is set that has no effect with the method or the budget of the new recipe."""
    old = recipe.fine_tune
    budgets = (changes.get("fine_tune.steps", old.steps), changes.get("fine_tune.minutes", old.minutes))
    budget = next((value for value in budgets if value is not None), None)
    for path in changes:
        kind = str(changes.get("classifier.kind", recipe.classifier.kind))
        text = _unused(path, str(changes.get("method", recipe.method)), budget, kind)
        if text is not None:
            raise InputError(text)


def _shelf() -> resources.abc.Traversable:
    return resources.files("lopsided.recipe") / "named"


def _conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every pair of fields that contradict each other."""
    data, training = recipe.data, recipe.encoder_training
    if data.test + data.val >= 1:
        got = f"{data.test} + {data.val}"
        yield sentence("data.test + data.val must be < 1", got, "The remaining images are for training.")
    if data.classes is not None and (len(data.classes) < 2 or len(set(data.classes)) < len(data.classes)):
        yield sentence("data.classes must be at least two different names", list(data.classes))
    if data.held_out and data.scenario is None:
        do = "Set data.scenario, or remove data.held_out."
        yield sentence("data.held_out must be false when data.scenario is unset", "true", do)
    yield from _fold_conflicts(recipe)
    yield from _weights_conflicts(recipe)
    yield from joined_conflicts(recipe)
    yield from _loss_conflicts(recipe)
    if recipe.method == "adapter" and recipe.adapter.blend == 0 and recipe.regression.strength is not None:
        do = "Set adapter.blend, or remove regression.strength."
        yield sentence("regression.strength must be unset when adapter.blend is 0", recipe.regression.strength, do)
    yield from second_stage_conflicts(recipe)
    yield from _batch_conflicts(training, "projections" in training.loss.entry.needs)
    if not recipe.is_frozen:
        yield from training_conflicts(recipe)
    if recipe.method == "fine-tune":
        yield from _fine_tune_conflicts(recipe)
    if recipe.selection.patience is not None and data.val == 0:
        do = "Set data.val, or remove selection.patience."
        yield sentence("selection.patience must be unset when data.val is 0", recipe.selection.patience, do)
    if recipe.selection.patience is not None and recipe.selection.metric == "last":
        do = "Choose another selection.metric, or remove selection.patience."
        yield sentence("selection.patience must be unset when selection.metric is last", recipe.selection.patience, do)


def _can_ensemble(recipe: Recipe) -> bool:
    """Return whether an ensemble is possible and useful: each member must be an encoder and a linear layer."""
    return not recipe.is_frozen and recipe.classifier_loss.entry.head == "linear" and not recipe.blends


def _fold_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every conflict between the fields of folds."""
    data = recipe.data
    if data.folds is None:
        idle = (("data.fold", None, data.fold), ("data.repeats", 1, data.repeats), ("final", "auto", recipe.final))
        for name, default, value in idle:
            if value != default:
                must = f"{name} must be {'unset' if default is None else default} when data.folds is unset"
                yield sentence(must, value, "Set data.folds (--folds).")
        return
    if recipe.final == "ensemble" and recipe.method != "frozen" and not _can_ensemble(recipe):
        what = 'method "adapter"' if recipe.is_frozen else f"the loss {recipe.classifier_loss.name}"
        what = "fine_tune.blend, which gives each model two encoders" if recipe.blends else what
        yield f'final cannot be "ensemble" with {what}. Use final = "refit".'
    if data.split == "given":
        do = "Use another split, or leave out folds."
        yield f'data.folds cannot be used with data.split = "given": the data define their own splits. {do}'
    if recipe.ensembles and data.folds > MAX_MEMBERS:
        do = "Use fewer folds, or --final refit."
        yield sentence(f"data.folds must be at most {MAX_MEMBERS} for an ensemble", data.folds, do)
    if data.val + 1 / data.folds >= 1:
        must = f"data.val must be below {1 - 1 / data.folds:.3g} with {data.folds} folds, to leave images for training"
        yield sentence(must, data.val)


def _weights_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence if the pixels or the method do not fit the encoder's weights."""
    weights, scale = recipe.encoder.weights, recipe.augment.normalisation
    if weights == "none" and recipe.is_frozen and recipe.encoder.name != "identity":
        do = 'Set encoder.weights, such as "embedded".'
        yield f'encoder.weights cannot be "none" with method "{recipe.method}": random features are of no use. {do}'
    elif weights == "none" and recipe.method == "fine-tune":
        do = 'Set encoder.weights, such as "embedded", or use the recipe from-scratch.'
        yield f'encoder.weights cannot be "none" with method "fine-tune", which needs a pretrained encoder. {do}'
    elif weights == "none" and scale == "weights":
        do = 'Set encoder.weights, or augment.normalisation = "source".'
        yield f'augment.normalisation cannot be "weights" without pretrained weights. {do}'
    elif (weights == "embedded" or recipe.encoder.is_joined) and scale != "weights":
        what = 'encoder.weights = "embedded"' if weights == "embedded" else "joined encoders"
        yield sentence(f'augment.normalisation must be "weights" with {what}', f'"{scale}"')


def _loss_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every loss that does not fit the method."""
    if recipe.is_frozen or recipe.method == "fine-tune":
        method, heads, linear = recipe.method, recipe.encoder_training.loss, recipe.classifier.loss
        if linear.name not in FROZEN_LOSSES:
            fit = ", ".join(FROZEN_LOSSES)
            yield f'classifier.loss cannot be {linear.name} with method "{method}". Use one of {fit}.'
        if method == "adapter" and (heads.entry.kind != "contrastive" or heads.entry.views > 1):
            fit = ", ".join(entry.name for entry in catalogue.losses(("contrastive",)) if entry.views == 1)
            yield f'encoder_training.loss cannot be {heads.name} with method "adapter". Use one of {fit}.'
        if method == "fine-tune" and heads.entry.head != "linear":
            do = "Use another loss, or the method end-to-end."
            yield f'encoder_training.loss cannot be {heads.name} with method "fine-tune": it needs a cosine head. {do}'
        return
    need = "projections" if recipe.method == "two-stage" else "logits"
    other = "end-to-end" if recipe.method == "two-stage" else "two-stage"
    for path, loss, needed in (
        ("encoder_training.loss", recipe.encoder_training.loss, need),
        ("classifier.loss", recipe.classifier.loss, "logits"),
    ):
        if needed in loss.entry.needs and not (path == "classifier.loss" and loss.entry.kind == "joint"):
            continue
        kinds = ("classification",) if path == "classifier.loss" else _KINDS[recipe.method]
        fit = ", ".join(entry.name for entry in catalogue.losses(kinds))
        if path == "classifier.loss":
            yield f"{path} cannot be {loss.name}. Use one of {fit}."
            continue
        start = f'start from a recipe with method "{other}", such as {_EXAMPLES[other]}'
        do = f"To use {loss.name}, {start}, or add --set method={other}."
        yield f'{path} cannot be {loss.name} with method "{recipe.method}". Use one of {fit}. {do}'


def _fine_tune_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every conflict between the settings of a fine-tuning."""
    section, views = recipe.fine_tune, recipe.encoder_training.views
    if section.steps is not None and section.minutes is not None:
        yield "fine_tune.steps and fine_tune.minutes cannot both be set. Remove one of them."
    if recipe.encoder_training.batch_size < 2:
        yield sentence('encoder_training.batch_size must be >= 2 with method "fine-tune"', 1)
    kind = recipe.classifier.kind
    if recipe.blends and kind != "linear":
        do = 'Set fine_tune.blend = 0, or classifier.kind = "linear".'
        yield sentence(f'fine_tune.blend must be 0 with classifier.kind = "{kind}"', section.blend, do)
    if section.blocks == "all":
        if section.views is not None:
            do = "Set fine_tune.blocks to a number, or remove the field."
            yield sentence('fine_tune.views must be unset when fine_tune.blocks is "all"', section.views, do)
        return
    kept = section.views or USUAL_VIEWS
    if kept < views:
        do = "A batch holds different views of an image."
        yield sentence(f"fine_tune.views must be >= encoder_training.views ({views})", kept, do)
    if recipe.compile:
        do = 'Set compile = false, or fine_tune.blocks = "all".'
        yield sentence("compile must be false when fine_tune.blocks is a number", "true", do)


_KINDS = {"two-stage": ("contrastive", "joint"), "end-to-end": ("classification", "joint")}
_EXAMPLES = {"two-stage": "default", "end-to-end": "baseline-ce"}
"""A named recipe of each method."""


def _batch_conflicts(training: EncoderTraining, contrasts: bool) -> Iterator[str]:
    """Yield a sentence for every conflict between the settings of a batch of the first stage."""
    if contrasts and training.batch_size * training.views < 2:
        yield sentence("encoder_training.batch_size must be >= 2 for a contrastive loss", training.batch_size)
    for name, none in (("views", 1), ("queue", 0)):
        if not contrasts and getattr(training, name) > none:
            got = getattr(training, name)
            yield sentence(f"encoder_training.{name} must be {none} with the loss {training.loss.name}", got)
    least = training.loss.entry.views
    if contrasts and training.views < least:
        must = f"encoder_training.views must be >= {least} with the loss {training.loss.name}"
        yield sentence(must, training.views, f"Set encoder_training.views = {least}.")
    if training.queue_balanced and not training.queue:
        do = "Set encoder_training.queue."
        yield sentence("encoder_training.queue_balanced must be false when encoder_training.queue is 0", "true", do)
    if training.sampler == "m-per-class" and training.m_per_class > training.batch_size:
        got = f"{training.m_per_class} > {training.batch_size}"
        yield sentence("encoder_training.m_per_class must be at most encoder_training.batch_size", got)
