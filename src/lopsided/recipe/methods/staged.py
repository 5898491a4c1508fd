"""Trainings of the encoder by gradient: end to end, or first the encoder and then a linear classifier on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.losses import catalogue
from lopsided.recipe.methods.spec import MethodSpec, Section, finisher_conflicts, is_second
from lopsided.recipe.words import amount

if TYPE_CHECKING:
    from lopsided.losses.catalogue import Loss
    from lopsided.recipe.losses import LossSettings
    from lopsided.recipe.schema import Recipe


def classifier_loss_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence if the loss of the classifier is not a classification loss."""
    loss = recipe.classifier.loss
    if loss.entry.kind != "classification":
        losses = ", ".join(entry.name for entry in catalogue.losses(("classification",)))
        yield f"classifier.loss cannot be {loss.name}. Use one of {losses}."


def unfit_loss(recipe: Recipe, kinds: tuple[str, ...], other: MethodSpec) -> str:
    """Return that the method cannot have the loss of the encoder: the losses that it can have, and the other method."""
    loss = recipe.encoder_training.loss.name
    losses = ", ".join(entry.name for entry in catalogue.losses(kinds))
    do = f"Use one of {losses}, or method={other.name}."
    return f'encoder_training.loss cannot be {loss} with method "{recipe.method}". {do}'


class EndToEndSpec(MethodSpec):
    """One stage with a classification loss, or with a joint one."""

    name = "end-to-end"
    trainer = "lopsided.training.methods.staged:EndToEndTrainer"
    finishers = ("linear", "crt", "lws", "tau-norm")

    def unused(self, path: str, recipe: Recipe) -> str | None:
        """Return why a field has no effect, or None."""
        if is_second(path) and not recipe.finisher.has_stage and path != "classifier.batch_size":
            # The word ``batch_size`` sets the field of both stages.
            nothing = f'{path} has no effect with method "{self.name}" and classifier.kind "{recipe.classifier.kind}"'
            return f'{nothing}. Set classifier.kind = "crt" to train the classifier again.'
        return super().unused(path, recipe)

    def loss_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence for every loss that does not fit."""
        if "logits" not in recipe.encoder_training.loss.entry.needs:
            yield unfit_loss(recipe, ("classification", "joint"), TWO_STAGE)
        yield from classifier_loss_conflicts(recipe)


END_TO_END = EndToEndSpec()


class TwoStageSpec(MethodSpec):
    """The paper's method."""

    name = "two-stage"
    trainer = "lopsided.training.methods.staged:TwoStageTrainer"
    finishers = ("linear", "tau-norm")
    no_finisher = ", whose second stage trains a new classifier anyway"

    def summary(self, recipe: Recipe, its: str) -> str:
        """Return how the model was trained."""
        training, section = recipe.encoder_training, recipe.classifier
        return (
            f"{amount(training.epochs, 'epoch')} of {training.loss.words}, then {amount(section.epochs, 'epoch')} of a "
            f"linear classifier with {section.loss.words}{recipe.finisher.summary(recipe)}"
        )

    def head_loss(self, recipe: Recipe) -> LossSettings:
        """Return the loss of the second stage."""
        return recipe.classifier.loss

    def loss_sections(self, recipe: Recipe) -> tuple[str, ...]:
        """Return both stages."""
        return ("encoder_training", "classifier")

    def method_for(self, loss: Loss) -> str:
        """Return the method of a recipe that gets this loss: one that needs logits trains both parts together."""
        return self.name if loss.kind == "contrastive" else END_TO_END.name

    def scored_by(self, recipe: Recipe) -> Section:
        """Return the second stage."""
        return "classifier"

    def stages(self, recipe: Recipe) -> dict[str, int | None]:
        """Return the epochs of both stages."""
        return {"encoder": recipe.encoder_training.epochs, "classifier": recipe.classifier.epochs}

    def joint_epochs(self, recipe: Recipe) -> int:
        """Return the epochs of both stages together."""
        return recipe.encoder_training.epochs + recipe.classifier.epochs

    def loss_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence for every loss that does not fit."""
        if "projections" not in recipe.encoder_training.loss.entry.needs:
            yield unfit_loss(recipe, ("contrastive", "joint"), END_TO_END)
        yield from classifier_loss_conflicts(recipe)

    def finisher_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence if the classifier cannot be finished as the recipe says."""
        yield from finisher_conflicts(recipe, self.finishers, self.no_finisher, "classifier.loss")


TWO_STAGE = TwoStageSpec()
