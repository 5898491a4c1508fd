"""What a method of training is, without torch: all that recipes, plans, pages and commands ask about it.

A method is a spec and a trainer. The spec is an object of a class derived from ``MethodSpec``; its trainer
(``lopsided.training.methods``) does the work. Nobody else compares the name of a method. After the training of an
encoder, a finisher may change the classifier, as ``classifier.kind`` says (Kang et al. 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lopsided.errors import sentence
from lopsided.recipe.conflicts import batch_conflicts, training_conflicts
from lopsided.recipe.words import amount

if TYPE_CHECKING:
    from lopsided.losses.catalogue import Loss
    from lopsided.recipe.losses import LossSettings
    from lopsided.recipe.schema import Recipe


@dataclass(frozen=True)
class Finisher:
    """What a finisher is, without torch. ``lopsided.training.finishers`` has its code.

    ``has_stage`` says that it has a stage of its own, with the settings of the section ``classifier``. ``makes_head``
    says that it makes a new classifier, of the kind that ``classifier.loss`` needs. ``evens`` says that it takes the
    class shares out of the probabilities. ``words`` is for the summary of a run, with {trained} for the epochs and the
    loss.
    """

    kind: str
    words: str = ""
    has_stage: bool = False
    makes_head: bool = False
    evens: bool = False

    def summary(self, recipe: Recipe) -> str:
        """Return what the finisher did, to be put behind what the method did; "" if it did nothing."""
        section = recipe.classifier
        return self.words.format(trained=f"{amount(section.epochs, 'epoch')} of {section.loss.words}")


FINISHERS = {
    finisher.kind: finisher
    for finisher in (
        Finisher("linear"),
        Finisher(
            "crt",
            ", then a new linear classifier with {trained} on the frozen encoder (cRT)",
            has_stage=True,
            makes_head=True,
        ),
        Finisher("lws", ", then one scale per class with {trained} on the frozen encoder (LWS)", has_stage=True),
        Finisher("tau-norm", ", then tau-normalisation of the classifier", evens=True),
    )
}


def finisher_conflicts(recipe: Recipe, possible: tuple[str, ...], why: str, path: str) -> Iterator[str]:
    """Yield a sentence for every conflict of ``classifier.kind`` and ``classifier.tau``.

    ``possible`` are the kinds of the method, and ``why`` says why there are no others. ``path`` is the field with the
    loss that trains the classifier.
    """
    section = recipe.classifier
    if section.tau is not None and section.kind != "tau-norm":
        do = 'Set classifier.kind = "tau-norm", or remove classifier.tau.'
        yield sentence(f'classifier.tau must be unset when classifier.kind is "{section.kind}"', section.tau, do)
    if section.kind == "linear":
        return
    if section.kind not in possible:
        kinds = " or ".join(f'"{kind}"' for kind in possible)
        yield f'classifier.kind cannot be "{section.kind}" with method "{recipe.method}"{why}. Use {kinds}.'
        return
    loss: LossSettings = getattr(recipe, path.partition(".")[0]).loss
    if not recipe.finisher.makes_head and loss.entry.head != "linear":
        what = f"{path} = {loss.name}, which trains a {loss.entry.head} classifier"
        yield f'classifier.kind cannot be "{section.kind}" with {what}. Use "crt", or another loss.'
    if section.kind == "tau-norm" and section.tau is None and recipe.data.val == 0:
        yield "classifier.tau must be set when data.val is 0: there are no validation images to choose it by."


OWNED = {
    "regression": "Use a method with a logistic regression, such as frozen.",
    "adapter": "Use a recipe with heads, such as adapter.",
    "fine_tune": "Start from the recipe fine-tune.",
}
"""Sections that only some methods have (``MethodSpec.sections``), and the advice if a recipe has another method."""
USUAL_IMAGES = 1000
"""Number of images for which the cost of a training is estimated."""

Final = Literal["refit", "ensemble"]
Section = Literal["encoder_training", "classifier", "regression"]


class MethodSpec:
    """A method that trains an encoder. Methods override what is different."""

    name: str = ""
    """The value of ``method`` in a recipe."""
    trainer: str = ""
    """The place of the class that trains: "module:Class", derived from ``lopsided.training.methods.Trainer``."""
    example: str = "from-scratch"
    """A named recipe with this method."""
    advice: str = "Train for more epochs, use pretrained weights (weights), or try another loss."
    """What to do if the model is worse than a simple baseline."""
    sections: frozenset[str] = frozenset()
    """The sections of ``OWNED`` that the method has."""
    finishers: tuple[str, ...] = ("linear",)
    """The values of ``classifier.kind`` that the method can have."""
    no_finisher: str = ""
    """Why there are no other finishers: ", whose ..."."""

    trains_encoder: bool = True
    pretrained: bool = False
    """Whether the encoder must have pretrained weights."""
    no_weights: str = ": random features are of no use."
    """Why the encoder must have them."""
    needs_rare: bool = True
    """Whether training needs images of at least two classes."""
    chooses_views: bool = False
    """Whether inner folds can choose the views of an image (``encoder.views`` is auto)."""
    selects_epochs: bool = True
    """Whether validation images select the epoch that is kept."""
    needs_selection: bool = True
    """Whether the last epoch is a bad choice if there are no validation images."""
    calibrates: bool = False
    """Whether training calibrates the probabilities, also without validation images."""
    folds_by_default: bool = False
    """Whether ``fit`` uses folds if a class is rare: one fold takes seconds."""
    takes_weights: bool = False
    """Whether training inputs may have weights (``fit(sample_weight=)`` of the estimators)."""
    reads_positions: bool = False
    """Whether the classifier reads columns of which each is about one position (``Block.is_local``)."""
    shares_features: bool = False
    """Whether the models of all folds have the same features of an image."""

    # What the method is called, and what it does.

    def title(self, recipe: Recipe) -> str:
        """Return the name of a run: what was trained."""
        entry = self.loss(recipe).entry
        return entry.title if entry.kind == "classification" else entry.label

    def summary(self, recipe: Recipe, its: str) -> str:
        """Return how the model was trained, for a sentence. ``its`` is the pronoun of the encoders: its or their."""
        training = recipe.encoder_training
        return f"{amount(training.epochs, 'epoch')} of {training.loss.words}{recipe.finisher.summary(recipe)}"

    def chosen_by(self, path: str) -> bool:
        """Return whether a field belongs to this method so closely that setting it means to choose the method."""
        return False

    # Losses.

    def loss(self, recipe: Recipe) -> LossSettings:
        """Return the loss that names the run."""
        return recipe.encoder_training.loss

    def head_loss(self, recipe: Recipe) -> LossSettings:
        """Return the loss whose kind of classifier the finished model has."""
        return recipe.classifier.loss if recipe.finisher.makes_head else recipe.encoder_training.loss

    def loss_sections(self, recipe: Recipe) -> tuple[str, ...]:
        """Return the sections whose loss trains something by batches."""
        return ("encoder_training", "classifier") if recipe.finisher.has_stage else ("encoder_training",)

    def method_for(self, loss: Loss) -> str:
        """Return the method of a recipe that gets this loss for the encoder, if the user does not name a method."""
        return self.name

    def scored_by(self, recipe: Recipe) -> Section:
        """Return what trained the classifier of the finished model, which decides the prior of its probabilities."""
        return "classifier" if recipe.finisher.has_stage else "encoder_training"

    def counted(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of images of which the prior has the shares, given those of the training images."""
        return tuple(map(int, counts))

    # Epochs and cost.

    def stages(self, recipe: Recipe) -> dict[str, int | None]:
        """Return the epochs of each stage, in order; None if the budget of a stage is not in epochs.

        The names are those in checkpoints and logs.
        """
        second = {"classifier": recipe.classifier.epochs} if recipe.finisher.has_stage else {}
        return {self.name: recipe.encoder_training.epochs, **second}

    def epochs(self, recipe: Recipe) -> tuple[int, ...]:
        """Return the epochs of all stages that have epochs; none if the budget of a stage is not in epochs."""
        numbers = list(self.stages(recipe).values())
        return () if None in numbers else tuple(number for number in numbers if number)

    def joint_epochs(self, recipe: Recipe) -> int:
        """Return the epochs that train encoder and classifier together with the same budget."""
        return recipe.encoder_training.epochs

    def passes(self, recipe: Recipe) -> float:
        """Return how often each image is trained with, in epochs, to compare costs."""
        return float(sum(number or 0 for number in self.stages(recipe).values()))

    # The model of a run with folds.

    def why_no_ensemble(self, recipe: Recipe) -> str | None:
        """Return what makes an ensemble of the models of folds impossible; None if it is possible."""
        loss = self.head_loss(recipe)
        return None if loss.entry.head == "linear" else f"the loss {loss.name}"

    def usual_final(self, recipe: Recipe) -> Final:
        """Return the model of a run with folds if the recipe does not name it."""
        return "ensemble" if self.trains_encoder and self.why_no_ensemble(recipe) is None else "refit"

    # Fields.

    def is_idle(self, path: str) -> bool:
        """Return whether a field has no effect because the method does not train the encoder."""
        return False

    def unused(self, path: str, recipe: Recipe) -> str | None:
        """Return why a field has no effect on a recipe of this method, or None if it has one."""
        section, nothing = path.partition(".")[0], f'{path} has no effect with method "{self.name}"'
        if section in OWNED and section not in self.sections:
            return f"{nothing}. {OWNED[section]}"
        if self.is_idle(path):
            return f"{nothing}. Use another recipe, such as from-scratch, to train an encoder."
        return None

    def loss_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence for every loss that does not fit the method."""
        yield from ()

    def conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence for every field that contradicts the method or a field that the method uses."""
        yield from self.loss_conflicts(recipe)
        yield from self.finisher_conflicts(recipe)
        if "encoder_training" in self.loss_sections(recipe):
            yield from batch_conflicts(recipe.encoder_training)
        if self.trains_encoder:
            yield from training_conflicts(recipe.encoder_training)

    def finisher_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence if the classifier cannot be finished as the recipe says."""
        yield from finisher_conflicts(recipe, self.finishers, self.no_finisher, "encoder_training.loss")


def is_second(path: str) -> bool:
    """Return whether only a stage of the classifier uses a field."""
    return path.startswith("classifier.") and path not in ("classifier.kind", "classifier.tau")
