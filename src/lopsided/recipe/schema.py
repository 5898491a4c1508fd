"""The recipe: all settings of a run as one validated, frozen model, read from and written to TOML. No torch needed.

Each table of a recipe is a section (see ``sections``). Each key is a field with a description, and ``Recipe.to_toml``
writes both. Missing fields take the values of the recipe ``from-scratch``. A loss has its own table, with the
parameters that the catalogue lists for it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, PrivateAttr, ValidationError

from lopsided.errors import InputError, sentence
from lopsided.files import check_regular
from lopsided.recipe import methods, words
from lopsided.recipe.conflicts import conflicts
from lopsided.recipe.encoder_spec import with_full_names
from lopsided.recipe.losses import LossSettings, read_loss
from lopsided.recipe.methods.spec import FINISHERS, OWNED, Final, Finisher, MethodSpec
from lopsided.recipe.sections import (
    CONTRASTED,
    LOSS_NAMES,
    LOSSES,
    SECOND_STAGE,
    TRAINING_FIELDS,
    UNHASHED_FIELDS,
    Adapter,
    Augment,
    Classifier,
    Data,
    Decision,
    Encoder,
    EncoderTraining,
    FineTune,
    Head,
    Regression,
    Selection,
    described,
)
from lopsided.recipe.values import AnyText, Device, Section, Seed, Threads, TrackerTexts


def _known_method(name: str) -> str:
    try:
        return methods.find(name).name
    except InputError as error:
        text = str(error)
        where, must, rest = text.partition("method must")
        raise words.RefusedError("", f"cannot be used. {text}" if where or not must else f"must{rest}") from None


Method = Annotated[
    AnyText,
    AfterValidator(_known_method),
    words.Phrase(f"one of {', '.join(json.dumps(name) for name in methods.METHODS.built_in)}"),
]
MAX_BYTES = 1_000_000
"""The largest size of a recipe file. A real recipe is about one page."""


class Recipe(Section):
    """All settings of a run. ``Recipe()`` is the recipe ``from-scratch``.

    >>> Recipe().override(**{"encoder_training.loss": "acl", "encoder_training.loss.eta": 0.1}).encoder_training.loss
    LossSettings(name='acl', eta=0.1, eta_unit='parity', temperature=0.07, normalization='paper')
    """

    description: AnyText = described("", "What this recipe is for.")
    method: Method = described(
        "two-stage",
        "First the encoder and then the classifier; both together with a classification loss; a logistic regression "
        "on the features of a pretrained encoder, which is not trained; contrastive heads on such features; or that "
        "regression and then the training of the encoder.",
    )
    seed: Seed = described(0, "Seed of all random choices of the run.")
    device: Device = described("auto", 'Where to compute: "auto", "cpu", "cuda", "cuda:1", "mps".')
    threads: Threads | None = described(None, "Number of CPU threads; unset: torch decides.")
    fast: bool = described(
        True, "Use fast paths and memory layouts, which change results only by rounding; false: plain torch."
    )
    compile: bool = described(
        False, "Compile the encoder with torch.compile, which takes a minute or more and pays off only in long runs."
    )
    precision: Literal["float32", "bf16", "fp16"] = described(
        "float32", "Precision of the encoder in training; weights and losses are always float32."
    )
    compare_quick: bool = described(
        True, "After training, also evaluate the recipe quick on the same split, for comparison."
    )
    track: TrackerTexts = described(
        (),
        'Trackers that show the run in other programs, such as ["tensorboard", "mlflow:FOLDER"]. Those of a file are '
        "not used: name them with --track or in LOPSIDED_TRACK.",
    )
    final: Literal["auto", "refit", "ensemble"] = described(
        "auto",
        "The model of a run with folds: refit trains on all images, ensemble averages the models of the folds; auto: "
        "refit if the encoder is frozen or fine_tune.blend is set, otherwise ensemble.",
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
    _unused_trackers: tuple[str, ...] = PrivateAttr(())

    def __init__(self, /, **values: Any) -> None:  # The slash allows a field named self in a file.
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = list(words.problems(error, Recipe))
        else:
            problems = list(conflicts(self))
        if problems:
            more = f" ({len(problems) - 1} more of this recipe's fields cannot be used.)" if len(problems) > 1 else ""
            raise InputError(problems[0] + more)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a TOML file.

        Its trackers are left out, and ``unused_trackers`` holds them: a file may come from someone else, and a tracker
        can send the model and the names of images away.
        """
        try:
            check_regular(path)
            with open(path, "rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            got = f"{path} ({error.strerror})"
            raise InputError(sentence("a recipe must be a readable TOML file", got)) from None
        if len(content) > MAX_BYTES:
            raise InputError(f"The recipe {path} is larger than {MAX_BYTES:,} bytes. Use a smaller TOML file.")
        recipe = cls.from_bytes(content, f"The recipe {path}", before=f"recipe {path}: ")
        loaded = recipe.model_copy(update={"track": ()})
        loaded._unused_trackers = recipe.track
        return loaded

    @property
    def unused_trackers(self) -> tuple[str, ...]:
        """The trackers that the file of this recipe names."""
        return self._unused_trackers

    @classmethod
    def from_toml(cls, text: str) -> Recipe:
        """Read TOML text."""
        return cls.from_bytes(text.encode(errors="replace"), "The recipe")

    @classmethod
    def from_bytes(cls, content: bytes, name: str, *, before: str = "") -> Recipe:
        """Read TOML in bytes. Errors call it ``name``, and start with ``before`` if a field is wrong."""
        try:
            values = tomllib.loads(content.decode())
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

    def acting_toml(self) -> str:
        """Return TOML with the fields that have an effect on this recipe, or another value than by default."""
        others = {path for path, field, value in words.leaves(self) if value != field.default}
        return words.to_toml(self, is_left_out=lambda path: path not in others and self.unused(path) is not None)

    def override(self, /, **changes: Any) -> Recipe:
        """Return a recipe with new values for the fields with these dotted names.

        A new loss keeps the parameters that were set for the old loss, if both losses have them. A loss that needs
        logits turns a two-stage recipe into the ``baseline`` of the same budget, unless ``method`` is also given.
        """
        changes = with_full_names(changes)
        changes = {path.removesuffix(".name") if path in LOSS_NAMES else path: v for path, v in changes.items()}
        values, path = self.model_dump(), "encoder_training.loss"
        if changes.get("encoder.weights") == "embedded":
            changes.setdefault("augment.normalisation", "weights")
        for one, other in (("steps", "minutes"), ("minutes", "steps")):  # One budget replaces the other.
            if changes.get(f"fine_tune.{one}") is not None:
                changes.setdefault(f"fine_tune.{other}", None)
        given = dict(changes)
        if path in changes and "method" not in changes:
            loss = self._switched(path, changes[path]).entry
            if self.spec.method_for(loss) != self.method:
                # ``baseline`` resets the fields of contrast, and the others may fit the new loss or method only.
                late = {name for name in changes if name.startswith(path)}
                late |= CONTRASTED | {*TRAINING_FIELDS} | SECOND_STAGE
                rest = self.override(**{name: value for name, value in changes.items() if name not in late})
                finisher = FINISHERS.get(changes.get("classifier.kind", "linear"))
                base = rest.baseline(changes.pop(path), retrained=finisher is not None and finisher.has_stage)
                return base.override(**{name: value for name, value in changes.items() if name in late})
        for path in LOSSES:
            if path in changes:
                section, _, field = path.partition(".")
                values[section][field] = self._switched(path, changes.pop(path)).model_dump()
        for path, value in changes.items():
            _place(values, path, value)
        made = Recipe(**values)
        for path, value in given.items():  # Last, because a conflict says more than a field without effect.
            both = path == "classifier.batch_size" and given.get("encoder_training.batch_size") == value
            why = None if both else made.unused(path)  # The word ``batch_size`` sets the field of both stages.
            if why is not None:
                raise InputError(why)
        return made

    def vouched(self, changes: Mapping[str, Any]) -> Recipe:
        """Return a recipe with new values for fields of these dotted names, which the caller vouches for.

        Unlike in ``override``, nothing is validated: a recipe is checked once, where it comes in.
        """
        tables: dict[str, dict[str, Any]] = {}
        for path, value in changes.items():
            section, _, field = path.rpartition(".")
            tables.setdefault(section, {})[field] = value
        top = tables.pop("", {})
        parts = {name: getattr(self, name).model_copy(update=values) for name, values in tables.items()}
        return self.model_copy(update={**top, **parts})

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
        epochs = self.encoder_training.epochs if retrained else self.spec.joint_epochs(self)
        changes: dict[str, Any] = {"loss": loss, "epochs": epochs}
        if self._switched("encoder_training.loss", loss).entry.kind == "classification":
            changes |= {"views": 1, "queue": 0, "queue_balanced": False}
        return self.override(
            method="end-to-end", **{f"encoder_training.{name}": value for name, value in changes.items()}
        )

    @property
    def spec(self) -> MethodSpec:
        """The method: what it is, which fields it uses, and what it costs."""
        return methods.find(self.method)

    @property
    def finisher(self) -> Finisher:
        """What happens to the classifier after the encoder is trained."""
        return FINISHERS[self.classifier.kind]

    @property
    def loss(self) -> LossSettings:
        """The loss that names the run."""
        return self.spec.loss(self)

    @property
    def final_model(self) -> Final:
        """The model of a run with folds."""
        return self.spec.usual_final(self) if self.final == "auto" else self.final

    def first_stage(self) -> Recipe:
        """Return the recipe of the first stage alone, whose classifier is the one that is trained with the encoder."""
        section = self.classifier.model_copy(update={"kind": "linear", "tau": None})
        tuned = self.fine_tune.model_copy(update={"blend": 0.0})
        return self.model_copy(update={"classifier": section, "fine_tune": tuned})

    def unused(self, path: str) -> str | None:
        """Return why a field has no effect on this recipe, because of its method; None if it has one."""
        return self.spec.unused(path, self)

    def leaves(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield dotted name, field and value of each field. Some sections count only for the methods that use them."""
        for path, field, value in words.leaves(self):
            section = path.partition(".")[0]
            if section not in OWNED or section in self.spec.sections:
                yield path, field, value

    def chosen(self) -> Iterator[tuple[str, Any]]:
        """Yield dotted name and value of the names of the losses, and of each field that is not at its default.

        Hashes cover these fields alone: a field that is added to recipes leaves the hashes of all records as they are.
        """
        for path, field, value in self.leaves():
            if path in LOSS_NAMES or value != field.default:
                yield path, value

    def vector_fields(self) -> dict[str, Any]:
        """Return the fields that a recipe needs for vectors instead of images.

        Vectors are features already: a frozen encoder becomes the identity, and one that is trained an MLP.
        """
        if self.spec.trains_encoder and self.spec.pretrained:
            do = "Use the recipe quick, adapter or from-scratch."
            raise InputError(f'The method "{self.method}" trains an encoder of images, but the data are vectors. {do}')
        name = "mlp" if self.spec.trains_encoder else "identity"
        return {
            "encoder.name": self.encoder.name if self.encoder.spec.parts[0].is_mlp else name,
            "encoder.weights": "none",
            "encoder.views": "none",
            "encoder.scaling": "none",
            "augment.normalisation": "source",
            "data.image_size": None,
            "data.channels": None,
        }

    def content_hash(self) -> str:
        """Return the SHA-256 of the ``chosen`` fields that change what is trained."""
        hashed = {path: value for path, value in self.chosen() if path not in UNHASHED_FIELDS}
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


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


def named_recipes() -> dict[str, str]:
    """Return the names and descriptions of the recipes in the package."""
    return {name: named_recipe(name).description for name in _named()}


def named_recipe(name: str) -> Recipe:
    """Return one of the recipes in the package."""
    if name == "default":
        do = "lopsided fit takes thorough for up to 3,000 images of more than 32 pixels with at least 50 of "
        do += "each class, and quick otherwise. Name one of the two."
        raise InputError(f"default is not one recipe: {do}")
    files = _named()
    if name not in files:
        must = f"a named recipe must be one of {', '.join(files)}"
        raise InputError(sentence(must, words.shown(name), words.suggest(name, files)))
    return Recipe.from_bytes(files[name].read_bytes(), f"The recipe {name}")


def find_recipe(name_or_path: str | os.PathLike[str]) -> Recipe:
    """Return the recipe with this name, or the recipe in the file with this path."""
    if isinstance(name_or_path, str) and not name_or_path.endswith(".toml") and not Path(name_or_path).exists():
        return named_recipe(name_or_path)
    return Recipe.load(name_or_path)


def _named() -> dict[str, resources.abc.Traversable]:
    """Return the files of the recipes in the package by name."""
    files = sorted((resources.files("lopsided.recipe") / "named").iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}
