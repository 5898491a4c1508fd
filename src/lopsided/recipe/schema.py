"""What a run is: one validated, frozen model, read from TOML and written to TOML. Needs no torch.

A recipe's table is a section, and every key of it a field with a description; ``Recipe.to_toml`` writes both. A field
that the paper leaves open says so. Fields that are left out take the values of the recipe ``default``.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lopsided.errors import InputError, sentence
from lopsided.files import check_regular
from lopsided.recipe import words

CONTRASTIVE_LOSSES = ("cl", "fcl", "acl", "afcl")
CLASSIFICATION_LOSSES = ("ce", "weighted-ce", "focal")
MAX_BYTES = 1_000_000
"""A recipe is a page; a larger file is something else."""

MAX_SIDE = 8192
"""The largest side of an image that a model may ask for: more pixels are not decoded either."""

_OPEN = "The paper does not state it."
_MOST = 2**31 - 1
_MOST_DOTS = 32
RUNTIME_FIELDS = frozenset({"description", "device", "threads", "fast", "compile", "data.cache", "data.allow_outside"})
"""Fields that do not decide the outcome of a run and stay out of its hash."""
LATER_FIELDS = frozenset(
    {"precision", "encoder_training.queue", "encoder_training.queue_balanced"}
    | {"encoder_training.chunk_size", "encoder_training.batch_norm"}
)
"""Fields that came after the first published records: a recipe that does not use them keeps the hash it has there."""


def _utf8(text: str) -> str:
    text.encode()  # A lone surrogate raises UnicodeEncodeError, a ValueError: it could not be written to a file.
    return text


def _filled(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("empty, or with a NUL")
    return text


def _tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _weights(text: str) -> str:
    if text in {"none", "timm"} or text.endswith(".safetensors"):
        return text
    raise ValueError("neither a word nor a file of weights")


AnyText = Annotated[str, AfterValidator(_utf8)]
Text = Annotated[AnyText, AfterValidator(_filled), words.Phrase("a text that is not empty")]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_tuple)]
Weights = Annotated[
    AnyText, AfterValidator(_weights), words.Phrase('"none", "timm" or a path that ends in .safetensors')
]
Seed = Annotated[int, Ge(0), Le(2**63 - 1)]
Count = Annotated[int, Ge(1), Le(_MOST)]
Side = Annotated[int, Ge(1), Le(MAX_SIDE)]
Width = Annotated[int, Ge(1), Le(2**16)]
Threads = Annotated[int, Ge(1), Le(1024)]
Temperature = Annotated[float, Ge(1e-6), Le(1e6)]  # beyond, its inverse or a similarity is no float32
Number = Annotated[float, Ge(0), AfterValidator(lambda x: x + 0.0)]  # + 0.0 makes -0.0 and 0.0 one recipe
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1), AfterValidator(lambda x: x + 0.0)]
PartialShare = Annotated[float, Gt(0), Le(1)]
_CHUNK = words.Phrase(f"an integer >= 2 and <= {_MOST} (one image has no batch statistics)")
Optimizer = Literal["adam", "adamw", "sgd"]
Schedule = Literal["constant", "cosine"]


def _field(default: Any, description: str) -> Any:
    return Field(default, description=description)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Data(_Section):
    """Which images, and which of them are for training, validation and test."""

    source: Text | None = _field(None, "A source's name, a folder, or a table; the command's DATA replaces it.")
    classes: Texts | None = _field(None, "The classes to use, majority first; unset: all.")
    scenario: Text | None = _field(None, 'Class proportions to draw, such as "90:10,total=1000"; unset: all images.')
    split: Literal["auto", "random", "stratified", "group", "given"] = _field(
        "auto",
        f"Rule of the split; auto: given if the source comes split, group if it has groups, else stratified. {_OPEN}",
    )
    group: Text | None = _field(None, "Column of a table that names what must not be parted, such as the patient.")
    test: Share = _field(0.15, "Share of all images that is held out and looked at once.")
    val: Share = _field(
        0.15,
        "Share of all images by which the model is picked; 0: the last one is taken, a given val is unused.",
    )
    held_out: bool = _field(
        False, "Judge the model also on the images that the scenario did not draw, as many of each class."
    )
    redraw: bool = _field(
        True, f"Whether each run's seed draws its own images and split; false: those of seed 0 for every run. {_OPEN}"
    )
    image_size: Side | None = _field(None, "Side in pixels to which images are resized; unset: the source's own size.")
    channels: Literal[1, 3] | None = _field(None, "1 for grey, 3 for colour; unset: as the source has them.")
    cache: Literal["auto", "memory", "none"] = _field(
        "auto", "Where decoded images are kept between epochs; auto: in memory if they fit."
    )
    skip_unreadable: bool = _field(False, "Leave out images that cannot be read, and list them, instead of stopping.")
    allow_outside: bool = _field(False, "Let a table name files outside its own folder.")


class Augment(_Section):
    """What happens to training images before the encoder sees them."""

    rotation: Annotated[float, Ge(0), Le(180)] = _field(15.0, f"Largest rotation, in degrees either way. {_OPEN}")
    horizontal_flip: bool = _field(True, f"Mirror left and right, every other time. {_OPEN}")
    vertical_flip: bool = _field(False, f"Mirror top and bottom, every other time. {_OPEN}")
    crop: PartialShare | None = _field(None, "Smallest share of the area that a random crop keeps; unset: no crop.")
    colour: PartialShare | None = _field(None, "Strength of brightness, contrast and saturation jitter; unset: none.")
    normalisation: Literal["none", "half", "imagenet", "source"] = _field(
        "source", f"Pixel scale: [0, 1], [-1, 1], ImageNet's statistics, or the training images' own. {_OPEN}"
    )


class Encoder(_Section):
    """The network that turns an image into features."""

    name: Text = _field("resnet18", 'Any timm model, or "mlp" for plain vectors.')
    weights: Weights = _field("none", f"Start from nothing, from timm's weights, or from a file. {_OPEN}")


class Head(_Section):
    """The projection head: two layers, used in the first stage only."""

    hidden: Width | Literal["auto"] = _field(
        "auto", "Width of the first layer; auto: the encoder's width, as in the paper."
    )
    out: Width = _field(128, "Width of the second layer: the length of a feature vector.")


# What each loss fixes of (eta, gamma); None: free.
_FIXED: dict[str, tuple[float | None, float | None]] = {
    "cl": (0.0, 0.0),
    "fcl": (0.0, 1.0),
    "acl": (None, 0.0),
    "afcl": (None, None),
    **dict.fromkeys(CLASSIFICATION_LOSSES, (0.0, 0.0)),
}
MAX_PARITY_ETA = 20.0
"""Above this a parity eta is a mistaken absolute one: the paper's 60..300 are 0.1..0.5 parity at batch 128."""


class EncoderTraining(_Section):
    """The first stage; with method "end-to-end", the only one."""

    loss: Literal["cl", "fcl", "acl", "afcl", "ce", "weighted-ce", "focal"] = _field(
        "afcl", 'Contrastive (cl, fcl, acl, afcl) for "two-stage", else a classification loss.'
    )
    eta: Number = _field(0.5, "Weight of the negatives' term; 0 for cl and fcl. Left out, it is 0.5 parity or 300.")
    eta_unit: Literal["absolute", "parity"] = _field(
        "parity",
        "absolute: the paper's eta. parity: times (n-1) log(n-1), where both terms weigh the same in a batch of n.",
    )
    gamma: Number = _field(2.0, "Focusing exponent of the positives' term; 0 for cl and acl, 1 for fcl.")
    temperature: Temperature = _field(0.07, "Divisor of the similarities in a contrastive loss.")
    normalization: Literal["paper", "released"] = _field(
        "paper", "Divisor of a contrastive loss's sums: the printed formula's, or that of the authors' released code."
    )
    focal_gamma: Number = _field(2.0, 'Focusing exponent of the loss "focal".')
    epochs: Count = _field(30, "Passes over the training images.")
    batch_size: Count = _field(128, "Images in a batch, over all ranks.")
    lr: Positive = _field(1e-3, "Learning rate (the first one, with a schedule).")
    optimizer: Optimizer = _field("adam", "Rule of the update.")
    weight_decay: Number = _field(0.0, f"Weight decay. {_OPEN}")
    schedule: Schedule = _field("cosine", f"Course of the learning rate. {_OPEN}")
    sampler: Literal["plain", "balanced", "sqrt", "m-per-class"] = _field(
        "plain", "How a batch is drawn: as the images come, classes equally, by the root of their counts, or m of each."
    )
    m_per_class: Count = _field(4, 'Images of each drawn class with the sampler "m-per-class".')
    last_batch: Literal["keep", "drop"] = _field("keep", f"What becomes of a last, smaller batch. {_OPEN}")
    views: Annotated[int, Ge(1), Le(64)] = _field(1, f"Augmented views of each image in a batch. {_OPEN}")
    queue: Annotated[int, Ge(0), Le(_MOST)] = _field(0, "Features of past batches to contrast with, too; 0: none.")
    queue_balanced: bool = _field(False, "Fill the queue with classes equally, as far as there are images of them.")
    chunk_size: Annotated[int, Ge(2), Le(_MOST), _CHUNK] | None = _field(
        None, "Images that go through the encoder at once, over all ranks, to save memory; unset: the whole batch."
    )
    batch_norm: Literal["sync", "rank"] = _field(
        "sync", "Of what several ranks take batch statistics: of their images together, or each rank of its own."
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_the_loss(cls, values: object) -> object:
        """Give eta and gamma, where they are left out, the values that belong to the loss."""
        if not isinstance(values, dict):
            return values
        loss = values.get("loss", "afcl")
        eta, gamma = _FIXED.get(loss, (None, None)) if isinstance(loss, str) else (None, None)
        free_eta = 300.0 if values.get("eta_unit") == "absolute" else 0.5
        return {"eta": free_eta if eta is None else eta, "gamma": 2.0 if gamma is None else gamma, **values}


class Classifier(_Section):
    """The second stage: one linear layer on the frozen encoder; not used by "end-to-end"."""

    loss: Literal["ce", "weighted-ce", "focal"] = _field("ce", "Classification loss.")
    focal_gamma: Number = _field(2.0, 'Focusing exponent of the loss "focal".')
    epochs: Count = _field(10, "Passes over the training images.")
    batch_size: Count = _field(128, "Images in a batch, over all ranks.")
    lr: Positive = _field(1e-2, "Learning rate (the first one, with a schedule).")
    optimizer: Optimizer = _field("adam", "Rule of the update.")
    weight_decay: Number = _field(0.0, f"Weight decay. {_OPEN}")
    schedule: Schedule = _field("cosine", f"Course of the learning rate. {_OPEN}")
    sampler: Literal["plain", "balanced", "sqrt"] = _field("balanced", "How a batch is drawn, as in encoder_training.")
    augment: bool = _field(False, f"Whether the second stage augments, too. {_OPEN}")


class Selection(_Section):
    """Which epoch's model is taken, judged on the validation images."""

    metric: Literal["uwa", "macro_f1", "g_mean", "mcc", "accuracy"] = _field("uwa", "Figure that is to be highest.")
    patience: Count | None = _field(None, "Stop after so many epochs without a gain; unset: train to the end.")


class Recipe(_Section):
    """Everything that decides a run. ``Recipe()`` is the recipe ``default``.

    >>> Recipe().override(**{"encoder_training.loss": "cl"}).encoder_training.eta
    0.0
    """

    description: AnyText = _field("", "What this recipe is for.")
    method: Literal["two-stage", "end-to-end"] = _field(
        "two-stage", "Encoder first and classifier second, or both at once with a classification loss."
    )
    seed: Seed = _field(0, "Every random choice of the run follows from it.")
    device: Text = _field("auto", 'Where to compute: "auto", "cpu", "cuda", "cuda:1", "mps".')
    threads: Threads | None = _field(None, "CPU threads; unset: as torch decides.")
    fast: bool = _field(
        True, "Fast paths and memory layouts that change results by roundings at most; false: torch as it comes."
    )
    compile: bool = _field(
        False, "Let torch.compile make a program of the encoder first: a minute or more that only long runs earn back."
    )
    precision: Literal["float32", "bf16", "fp16"] = _field(
        "float32", "Arithmetic of the encoder while it is trained; weights and losses are float32 in any case."
    )
    data: Data = Data()
    augment: Augment = Augment()
    encoder: Encoder = Encoder()
    head: Head = Head()
    encoder_training: EncoderTraining = EncoderTraining()
    classifier: Classifier = Classifier()
    selection: Selection = Selection()

    def __init__(self, /, **values: Any) -> None:  # The slash: a file may hold a field that is called self.
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
    def load(cls, path: str | Path) -> Recipe:
        """Read a TOML file."""
        try:
            check_regular(path)
            with open(path, "rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            got = f"{path} ({error.strerror})"
            raise InputError(sentence("a recipe must be a readable TOML file", got)) from None
        if len(content) > MAX_BYTES:
            raise InputError(
                sentence(f"a recipe must be at most {MAX_BYTES:,} bytes of TOML", f"{path}, which is larger")
            )
        return cls._parse(content, f"recipe {path}", before=f"recipe {path}: ")

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """Read TOML text."""
        return cls._parse(text.encode(errors="replace"), "a recipe")

    @classmethod
    def _parse(cls, content: bytes, name: str, *, before: str = "") -> Recipe:
        try:
            text = content.decode()
            _check_depth(text)
            values = tomllib.loads(text)
        except UnicodeDecodeError:
            raise InputError(sentence(f"{name} must be UTF-8 text", "other bytes")) from None
        except (ValueError, RecursionError) as error:  # tomllib lets Python's limits on digits and depth through
            got = "a nesting that is too deep" if isinstance(error, RecursionError) else str(error).rstrip(".")
            raise InputError(sentence(f"{name} must be valid TOML", got)) from None
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{before}{error}") from None

    def to_toml(self) -> str:
        """Write every field with its description; reading the text gives the same recipe."""
        return words.to_toml(self)

    def override(self, **changes: Any) -> Recipe:
        """Return a recipe with the fields of these dotted names replaced.

        A new ``encoder_training.loss`` brings its own eta and gamma unless they are given, too. A classification loss
        on a two-stage recipe makes it the ``baseline`` of the same budget unless ``method`` is given, too.
        """
        loss = changes.get("encoder_training.loss")
        if "method" not in changes and self.method == "two-stage" and loss in CLASSIFICATION_LOSSES:
            return self.baseline(loss).override(**changes)
        values = self.model_dump()
        for path, value in changes.items():
            section, _, name = path.rpartition(".")
            table = values.get(section) if section else values
            if not isinstance(table, dict) or name not in table or isinstance(table[name], dict):
                raise InputError(words.unknown(path, Recipe))
            table[name] = value
        training = values["encoder_training"]
        if loss != self.encoder_training.loss and isinstance(loss, str) and loss in _FIXED:
            before, after = _FIXED[self.encoder_training.loss], _FIXED[loss]
            for name, old, new in zip(("eta", "gamma"), before, after, strict=True):
                if f"encoder_training.{name}" not in changes and (old is not None or new is not None):
                    del training[name]
        return Recipe(**values)

    def baseline(self, loss: str) -> Recipe:
        """Return the end-to-end recipe of the same budget: as many passes over the images as both stages together."""
        training = self.encoder_training
        epochs = training.epochs + (self.classifier.epochs if self.method == "two-stage" else 0)
        fields = {"loss": loss, "epochs": epochs, "views": 1, "queue": 0, "queue_balanced": False}
        return self.override(
            method="end-to-end", **{f"encoder_training.{name}": value for name, value in fields.items()}
        )

    def content_hash(self) -> str:
        """Return the SHA-256 of every field but the ``RUNTIME_FIELDS``, and ``LATER_FIELDS`` that are not in use."""
        kept = {
            path: value
            for path, field, value in words.leaves(self)
            if path not in RUNTIME_FIELDS and not (path in LATER_FIELDS and value == field.default)
        }
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def named_recipes() -> dict[str, str]:
    """Return the name and the description of each recipe that comes with the package."""
    names = sorted(file.name.removesuffix(".toml") for file in _shelf().iterdir() if file.name.endswith(".toml"))
    return {name: named_recipe(name).description for name in names}


def named_recipe(name: str) -> Recipe:
    """Return one of the recipes that come with the package."""
    names = sorted(file.name.removesuffix(".toml") for file in _shelf().iterdir() if file.name.endswith(".toml"))
    if name not in names:
        raise InputError(
            sentence(f"a named recipe must be one of {', '.join(names)}", words.shown(name), words.suggest(name, names))
        )
    return Recipe._parse((_shelf() / f"{name}.toml").read_bytes(), f"recipe {name}")


def find_recipe(name_or_path: str | Path) -> Recipe:
    """Return a named recipe, or else the recipe in the file of that path."""
    if isinstance(name_or_path, str) and not name_or_path.endswith(".toml") and not Path(name_or_path).exists():
        return named_recipe(name_or_path)
    return Recipe.load(name_or_path)


def _check_depth(text: str) -> None:
    """Raise for keys of very many parts, which the parser visits as often as the square of their number."""
    strings = r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:[^"\\\n]|\\.)*+"?|\'[^\'\n]*+\'?|#[^\n]*'
    if any(line.count(".") > _MOST_DOTS for line in re.sub(strings, "", text).split("\n")):
        raise RecursionError


def _shelf() -> resources.abc.Traversable:
    return resources.files("lopsided.recipe") / "named"


def _conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every pair of fields that contradict each other."""
    data, training = recipe.data, recipe.encoder_training
    if data.test + data.val >= 1:
        got = f"{data.test} + {data.val}"
        yield sentence("data.test + data.val must be < 1", got, "What they leave is trained on.")
    if data.classes is not None and (len(data.classes) < 2 or len(set(data.classes)) < len(data.classes)):
        yield sentence("data.classes must be at least two different names", list(data.classes))
    if data.held_out and data.scenario is None:
        do = "Set data.scenario, or leave data.held_out out."
        yield sentence("data.held_out must be false when data.scenario is unset", "true", do)
    contrastive = recipe.method == "two-stage"
    losses = CONTRASTIVE_LOSSES if contrastive else CLASSIFICATION_LOSSES
    if training.loss not in losses:
        other = "end-to-end" if contrastive else "two-stage"
        must = f'encoder_training.loss must be one of {", ".join(losses)} when method is "{recipe.method}"'
        yield sentence(must, training.loss, f'Set method = "{other}" for that loss.')
    else:
        for name, fixed in zip(("eta", "gamma"), _FIXED[training.loss], strict=True):
            if fixed is not None and getattr(training, name) != fixed:
                do = "Use afcl for other values." if contrastive else "Leave it out."
                must = f'encoder_training.{name} must be {fixed:g} when encoder_training.loss is "{training.loss}"'
                yield sentence(must, getattr(training, name), do)
    if training.eta_unit == "parity" and training.eta > MAX_PARITY_ETA:
        must = f'encoder_training.eta must be <= {MAX_PARITY_ETA:g} when encoder_training.eta_unit is "parity"'
        yield sentence(must, training.eta, 'Set encoder_training.eta_unit = "absolute" for the paper\'s scale.')
    yield from _batch_conflicts(training, contrastive)
    if recipe.selection.patience is not None and data.val == 0:
        do = "Set data.val, or leave patience out."
        yield sentence("selection.patience must be unset when data.val is 0", recipe.selection.patience, do)


def _batch_conflicts(training: EncoderTraining, contrastive: bool) -> Iterator[str]:
    """Yield those of what a batch of the first stage is made of."""
    if contrastive and training.batch_size * training.views < 2:
        yield sentence("encoder_training.batch_size must be >= 2 for a contrastive loss", training.batch_size)
    for name, none in (("views", 1), ("queue", 0)):
        if not contrastive and getattr(training, name) > none:
            got = getattr(training, name)
            yield sentence(f'encoder_training.{name} must be {none} when method is "end-to-end"', got)
    if training.queue_balanced and not training.queue:
        do = "Set encoder_training.queue."
        yield sentence("encoder_training.queue_balanced must be false when encoder_training.queue is 0", "true", do)
    if training.sampler == "m-per-class" and training.m_per_class > training.batch_size:
        got = f"{training.m_per_class} > {training.batch_size}"
        yield sentence("encoder_training.m_per_class must be at most encoder_training.batch_size", got)
