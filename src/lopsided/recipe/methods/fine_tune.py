"""Fine-tune: a logistic regression on the features of a pretrained encoder, and then the training of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lopsided.errors import sentence
from lopsided.recipe.methods.frozen import regression_conflicts
from lopsided.recipe.methods.spec import USUAL_IMAGES, MethodSpec, Section, finisher_conflicts, is_second
from lopsided.recipe.sections import USUAL_VIEWS
from lopsided.recipe.words import amount

if TYPE_CHECKING:
    from lopsided.recipe.losses import LossSettings
    from lopsided.recipe.schema import Recipe


class FineTuneSpec(MethodSpec):
    """The training of a pretrained encoder, or of its last blocks, with any loss."""

    name = "fine-tune"
    trainer = "lopsided.training.methods.fine_tune:FineTuneTrainer"
    example = "fine-tune"
    advice = "Use other pretrained weights (encoder, weights), or train fewer blocks (fine_tune.blocks)."
    sections = frozenset({"regression", "fine_tune"})
    finishers = ("linear", "crt", "lws", "tau-norm")
    pretrained = True
    no_weights = ", which needs a pretrained encoder."
    needs_selection = False
    """The averaged weights of a fixed budget are no worse than those of an epoch that few images select."""

    def summary(self, recipe: Recipe, its: str) -> str:
        """Return how the model was trained: the budget, the trained part of the encoder, and the loss."""
        section, training = recipe.fine_tune, recipe.encoder_training
        budget = amount(section.steps, "step") if section.steps else amount(training.epochs, "epoch")
        if section.minutes is not None:
            budget = f"{section.minutes:g} minutes"
        what = {"all": "all blocks", 1: "the last block"}.get(section.blocks, f"the last {section.blocks} blocks")
        plus = ", averaged with that regression" if section.blend else ""
        second = recipe.finisher.summary(recipe)
        return f"logistic regression on its features, then {budget} of {what} with {training.loss.words}{second}{plus}"

    def chosen_by(self, path: str) -> bool:
        """Return whether a field is one of the fine-tuning."""
        return path.startswith("fine_tune.")

    def has_budget(self, recipe: Recipe) -> bool:
        """Return whether the budget is in steps or minutes instead of epochs."""
        return (recipe.fine_tune.steps or recipe.fine_tune.minutes) is not None

    def trains_classifier(self, recipe: Recipe) -> bool:
        """Return whether the classifier is trained together with the encoder; otherwise a regression follows."""
        return "logits" in recipe.encoder_training.loss.entry.needs

    def head_loss(self, recipe: Recipe) -> LossSettings:
        """Return the loss whose kind of classifier the finished model has."""
        return super().head_loss(recipe) if self.trains_classifier(recipe) else recipe.classifier.loss

    def scored_by(self, recipe: Recipe) -> Section:
        """Return what trained the classifier of the finished model."""
        if recipe.fine_tune.blend or not self.trains_classifier(recipe):
            return "regression"
        return super().scored_by(recipe)

    def stages(self, recipe: Recipe) -> dict[str, int | None]:
        """Return the epochs of each stage."""
        return super().stages(recipe) | ({self.name: None} if self.has_budget(recipe) else {})

    def passes(self, recipe: Recipe) -> float:
        """Return how often each image is trained with, as if minutes were epochs."""
        if recipe.fine_tune.steps is not None:
            return recipe.fine_tune.steps * recipe.encoder_training.batch_size / USUAL_IMAGES
        return float(sum(super().stages(recipe).values()))  # type: ignore[arg-type]

    def why_no_ensemble(self, recipe: Recipe) -> str | None:
        """Return what makes an ensemble impossible."""
        if recipe.fine_tune.blend:
            return "fine_tune.blend, which gives each model two encoders"
        return super().why_no_ensemble(recipe)

    def unused(self, path: str, recipe: Recipe) -> str | None:
        """Return why a field has no effect, or None."""
        if is_second(path) and not path.startswith("classifier.loss") and not recipe.finisher.has_stage:
            nothing = f'{path} has no effect with method "{self.name}"'
            return f"{nothing}: the classifier starts from a logistic regression."
        if path == "encoder_training.epochs" and self.has_budget(recipe):
            do = "Set that field instead, or add fine_tune.steps=unset."
            return f"{path} has no effect because fine_tune.steps or fine_tune.minutes is set. {do}"
        return super().unused(path, recipe)

    def loss_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence for every loss that does not fit."""
        yield from regression_conflicts(recipe)
        loss = recipe.encoder_training.loss
        if loss.entry.head != "linear":
            do = "Use another loss, or the method end-to-end."
            yield f'encoder_training.loss cannot be {loss.name} with method "fine-tune": it needs a cosine head. {do}'

    def finisher_conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence if the classifier cannot be finished as the recipe says."""
        if self.trains_classifier(recipe):
            yield from super().finisher_conflicts(recipe)
            return
        why = f" and the loss {recipe.encoder_training.loss.name}, which trains no classifier"
        yield from finisher_conflicts(recipe, ("linear",), why, "encoder_training.loss")

    def conflicts(self, recipe: Recipe) -> Iterator[str]:
        """Yield a sentence for every conflict of the fields of a fine-tuning."""
        yield from super().conflicts(recipe)
        section, training, kind = recipe.fine_tune, recipe.encoder_training, recipe.classifier.kind
        if training.ema:
            do = "Set fine_tune.average instead."
            yield sentence('encoder_training.ema must be 0 with method "fine-tune"', training.ema, do)
        if training.swa_from is not None and section.average:
            do = "Set fine_tune.average = 0, or remove encoder_training.swa_from."
            yield sentence("fine_tune.average must be 0 with encoder_training.swa_from", section.average, do)
        if section.steps is not None and section.minutes is not None:
            yield "fine_tune.steps and fine_tune.minutes cannot both be set. Remove one of them."
        if training.batch_size < 2:
            yield sentence('encoder_training.batch_size must be >= 2 with method "fine-tune"', 1)
        if section.blend and kind != "linear":
            do = 'Set fine_tune.blend = 0, or classifier.kind = "linear".'
            yield sentence(f'fine_tune.blend must be 0 with classifier.kind = "{kind}"', section.blend, do)
        yield from _block_conflicts(recipe)


def _block_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every field that does not fit the trained blocks."""
    section, training = recipe.fine_tune, recipe.encoder_training
    if section.blocks == "all":
        if section.views is not None:
            do = "Set fine_tune.blocks to a number, or remove the field."
            yield sentence('fine_tune.views must be unset when fine_tune.blocks is "all"', section.views, do)
        return
    for name in ("mixup", "cutmix"):
        if getattr(training, name) and training.loss.entry.soft_labels:
            must = f"encoder_training.{name} must be 0 when fine_tune.blocks is a number"
            do = 'Activations are kept instead of images. Set fine_tune.blocks = "all".'
            yield sentence(must, getattr(training, name), do)
    views = section.views or USUAL_VIEWS
    if views < training.views:
        do = "A batch holds different views of an image."
        yield sentence(f"fine_tune.views must be >= encoder_training.views ({training.views})", views, do)
    if recipe.compile:
        do = 'Set compile = false, or fine_tune.blocks = "all".'
        yield sentence("compile must be false when fine_tune.blocks is a number", "true", do)


FINE_TUNE = FineTuneSpec()
