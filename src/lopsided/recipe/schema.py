"""What a run is: one validated, frozen model, read from TOML and written to TOML. Needs no torch.

A table of a recipe is a section, and each of its keys a field with a description; ``Recipe.to_toml`` writes both. A
field that the paper leaves open says so. Fields that are left out take the values of the recipe ``default``. A loss is
a table of its own, with the parameters that the catalogue lists for it.
"""

from __future__ import annotations

import functools
import hashlib
import json
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
from lopsided.recipe.section import Section
from lopsided.recipe.upgrade import upgraded

MAX_BYTES = 1_000_000
"""A recipe is a page; a larger file is something else."""

MAX_SIDE = 8192
"""The largest side of an image that a model may ask for: more pixels are not decoded either."""

_OPEN = "The paper does not state it."
_MOST = 2**31 - 1
RUNTIME_FIELDS = frozenset({"description", "device", "threads", "fast", "compile", "data.cache", "data.allow_outside"})
"""Fields that do not decide the outcome of a run and stay out of its hash."""
LOSSES = ("encoder_training.loss", "classifier.loss")
"""The fields that hold a loss."""
_LOSS_NAMES = tuple(f"{path}.name" for path in LOSSES)
_CONTRASTED = frozenset(f"encoder_training.{name}" for name in ("views", "queue", "queue_balanced"))


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
Number = Annotated[float, Ge(0), AfterValidator(lambda x: x + 0.0)]  # + 0.0 makes -0.0 and 0.0 one recipe
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1), AfterValidator(lambda x: x + 0.0)]
PartialShare = Annotated[float, Gt(0), Le(1)]
_CHUNK = words.Phrase(f"an integer >= 2 and <= {_MOST} (one image has no batch statistics)")
Optimizer = Literal["adam", "adamw", "sgd"]
Schedule = Literal["constant", "cosine"]


def _field(default: Any, description: str) -> Any:
    return Field(default, description=description)


class Data(Section):
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


class Augment(Section):
    """What happens to training images before the encoder sees them."""

    rotation: Annotated[float, Ge(0), Le(180)] = _field(15.0, f"Largest rotation, in degrees either way. {_OPEN}")
    horizontal_flip: bool = _field(True, f"Mirror left and right, every other time. {_OPEN}")
    vertical_flip: bool = _field(False, f"Mirror top and bottom, every other time. {_OPEN}")
    crop: PartialShare | None = _field(None, "Smallest share of the area that a random crop keeps; unset: no crop.")
    colour: PartialShare | None = _field(None, "Strength of brightness, contrast and saturation jitter; unset: none.")
    normalisation: Literal["none", "half", "imagenet", "source"] = _field(
        "source", f"Pixel scale: [0, 1], [-1, 1], ImageNet's statistics, or the training images' own. {_OPEN}"
    )


class Encoder(Section):
    """The network that turns an image into features."""

    name: Text = _field("resnet18", 'Any timm model, or "mlp" for plain vectors.')
    weights: Weights = _field("none", f"Start from nothing, from timm's weights, or from a file. {_OPEN}")


class Head(Section):
    """The projection head: two layers, used in the first stage only."""

    hidden: Width | Literal["auto"] = _field(
        "auto", "Width of the first layer; auto: the encoder's width, as in the paper."
    )
    out: Width = _field(128, "Width of the second layer: the length of a feature vector.")


class EncoderTraining(Section):
    """The first stage; with method "end-to-end", the only one."""

    loss: LossField = _field(
        read_loss("afcl"), 'Contrastive or joint for "two-stage"; classification or joint for "end-to-end".'
    )
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


class Classifier(Section):
    """The second stage: one linear layer on the frozen encoder; not used by "end-to-end"."""

    loss: LossField = _field(read_loss("ce"), "Classification loss.")
    epochs: Count = _field(10, "Passes over the training images.")
    batch_size: Count = _field(128, "Images in a batch, over all ranks.")
    lr: Positive = _field(1e-2, "Learning rate (the first one, with a schedule).")
    optimizer: Optimizer = _field("adam", "Rule of the update.")
    weight_decay: Number = _field(0.0, f"Weight decay. {_OPEN}")
    schedule: Schedule = _field("cosine", f"Course of the learning rate. {_OPEN}")
    sampler: Literal["plain", "balanced", "sqrt"] = _field("balanced", "How a batch is drawn, as in encoder_training.")
    augment: bool = _field(False, f"Whether the second stage augments, too. {_OPEN}")


class Selection(Section):
    """Which epoch's model is taken, judged on the validation images."""

    metric: Literal["uwa", "macro_f1", "g_mean", "mcc", "accuracy"] = _field("uwa", "Figure that is to be highest.")
    patience: Count | None = _field(None, "Stop after so many epochs without a gain; unset: train to the end.")


class Recipe(Section):
    """Everything that decides a run. ``Recipe()`` is the recipe ``default``.

    >>> Recipe().override(**{"encoder_training.loss": "acl", "encoder_training.loss.eta": 0.1}).encoder_training.loss
    LossSettings(name='acl', eta=0.1, eta_unit='parity', temperature=0.07, normalization='paper')
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
            values = upgraded(tomllib.loads(content.decode()))
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

    def override(self, /, **changes: Any) -> Recipe:
        """Return a recipe in which the fields of these dotted names are replaced.

        A new loss keeps the parameters that were set for the old one where it has them, too. A loss that needs logits
        turns a two-stage recipe into the ``baseline`` of the same budget unless ``method`` is given, too.
        """
        changes = {path.removesuffix(".name") if path in _LOSS_NAMES else path: v for path, v in changes.items()}
        values, path = self.model_dump(), "encoder_training.loss"
        stays = path not in changes or "method" in changes or self.method != "two-stage"
        if not stays and self._switched(path, changes[path]).entry.kind != "contrastive":
            late = {name for name in changes if name.startswith(path)} | _CONTRASTED  # A baseline resets these.
            rest = self.override(**{name: value for name, value in changes.items() if name not in late})
            return rest.baseline(changes.pop(path)).override(**{n: changes[n] for n in changes if n in late})
        for path in LOSSES:
            if path in changes:
                section, _, field = path.partition(".")
                values[section][field] = self._switched(path, changes.pop(path)).model_dump()
        for path, value in changes.items():
            _place(values, path, value)
        return Recipe(**values)

    def _switched(self, path: str, to: object) -> LossSettings:
        """Return another loss for the field of this name."""
        old: LossSettings = functools.reduce(getattr, path.split("."), self)  # type: ignore[assignment]
        try:
            return read_loss(old.switched(to))
        except words.RefusedError as error:
            raise InputError(f"{path}{error.where} {error.text}") from None

    def baseline(self, loss: str | Mapping[str, Any]) -> Recipe:
        """Return the end-to-end recipe of the same budget: as many passes over the images as both stages together."""
        training = self.encoder_training
        epochs = training.epochs + (self.classifier.epochs if self.method == "two-stage" else 0)
        changes: dict[str, Any] = {"loss": loss, "epochs": epochs}
        if self._switched("encoder_training.loss", loss).entry.kind == "classification":
            changes |= {"views": 1, "queue": 0, "queue_balanced": False}
        return self.override(
            method="end-to-end", **{f"encoder_training.{name}": value for name, value in changes.items()}
        )

    def content_hash(self) -> str:
        """Return the SHA-256 of every field but the ``RUNTIME_FIELDS``."""
        kept = {path: value for path, _, value in words.leaves(self) if path not in RUNTIME_FIELDS}
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


def parse_change(text: str) -> tuple[str, Any]:
    """Read ``dotted.name=value``, in which the value is TOML; what is no TOML is a text.

    >>> parse_change("encoder_training.loss.eta=300"), parse_change("encoder.name=resnet50")
    (('encoder_training.loss.eta', 300), ('encoder.name', 'resnet50'))
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise InputError(
            sentence("--set takes dotted.name=value", words.shown(text), "Such as --set encoder.name=resnet50.")
        )
    try:
        return path.strip(), tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):  # tomllib lets Python's limits on digits and depth through
        return path.strip(), value.strip()


def _place(values: dict[str, Any], path: str, value: object) -> None:
    """Put a value into the nested tables of a recipe; a loss refuses parameters that it does not have by itself."""
    *sections, field = path.split(".")
    table: Any = values
    for section in sections:
        table = table.get(section) if isinstance(table, dict) else None
    if not isinstance(table, dict) or (field not in table and ".".join(sections) not in LOSSES):
        raise InputError(words.unknown(path, Recipe))
    if isinstance(table.get(field), dict):
        raise InputError(f"{path} is a section. Set its fields, such as {path}.{next(iter(table[field]))}.")
    table[field] = value


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
    yield from _loss_conflicts(recipe)
    yield from _batch_conflicts(training, "projections" in training.loss.entry.needs)
    if recipe.selection.patience is not None and data.val == 0:
        do = "Set data.val, or leave patience out."
        yield sentence("selection.patience must be unset when data.val is 0", recipe.selection.patience, do)


def _loss_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield those of the losses with the method."""
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
        where = "" if path == "classifier.loss" else f' with method "{recipe.method}"'
        do = "" if path == "classifier.loss" else f' For {loss.name}, set method = "{other}".'
        yield f"{path} cannot be {loss.name}{where}, where it is one of {fit}.{do}"


_KINDS = {"two-stage": ("contrastive", "joint"), "end-to-end": ("classification", "joint")}


def _batch_conflicts(training: EncoderTraining, contrasts: bool) -> Iterator[str]:
    """Yield those of what a batch of the first stage is made of."""
    if contrasts and training.batch_size * training.views < 2:
        yield sentence("encoder_training.batch_size must be >= 2 for a contrastive loss", training.batch_size)
    for name, none in (("views", 1), ("queue", 0)):
        if not contrasts and getattr(training, name) > none:
            got = getattr(training, name)
            yield sentence(f"encoder_training.{name} must be {none} with the loss {training.loss.name}", got)
    if training.queue_balanced and not training.queue:
        do = "Set encoder_training.queue."
        yield sentence("encoder_training.queue_balanced must be false when encoder_training.queue is 0", "true", do)
    if training.sampler == "m-per-class" and training.m_per_class > training.batch_size:
        got = f"{training.m_per_class} > {training.batch_size}"
        yield sentence("encoder_training.m_per_class must be at most encoder_training.batch_size", got)
