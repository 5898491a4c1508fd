"""The images that a trained model knows: those by which it will recognise unfamiliar ones."""

from __future__ import annotations

from lopsided.evaluation.typicality import Bank
from lopsided.facts import notes
from lopsided.inference.familiar import known_images
from lopsided.inference.scorer import Scorer
from lopsided.training.methods import Trainer


def familiar_images(trainer: Trainer) -> Bank | None:
    """Return the bank of the finished model of a trainer, and log what it can do; None if it has none."""
    recipe, prepared = trainer.recipe, trainer.prepared
    if recipe.data.fold is not None:  # The model of a fold is not kept.
        return None
    trained = recipe.spec.trains_encoder
    if trained and prepared.val is None:
        trainer.log.fact(notes.no_typicality("training changed the encoder and there are no validation images"))
        return None
    scorer = trainer.scorer
    if trained:
        scorer = Scorer(trainer.model, trainer.card, engine=trainer.engine, ranks=trainer.ranks, cached="none")
    bank = known_images(scorer, prepared.train, prepared.val if trained else None, recipe.seed)
    if bank is None:
        trainer.log.fact(notes.no_typicality("there are no two images of different groups to compare"))
    else:
        trainer.log.fact(notes.typicality(len(bank.scores), bank.is_guessed))
    return bank
