"""End to end: the encoder and the classifier are trained together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.losses import catalogue
from lopsided.recipe.methods.spec import MethodSpec, is_second

if TYPE_CHECKING:
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
            from lopsided.recipe.methods.two_stage import TWO_STAGE  # The two methods name each other.

            yield unfit_loss(recipe, ("classification", "joint"), TWO_STAGE)
        yield from classifier_loss_conflicts(recipe)


END_TO_END = EndToEndSpec()
