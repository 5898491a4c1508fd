"""The end of training: calibrate the probabilities, settle how the model decides, and keep what it knows as usual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lopsided.data.inputs import Prepared
from lopsided.evaluation.calibration import (
    Calibration,
    HeldBack,
    bias_between,
    carried_prior,
    fit_calibration,
    prior_of,
)
from lopsided.evaluation.decision import Decision, explain, resolve, through
from lopsided.evaluation.typicality import Bank
from lopsided.facts import Fact, notes
from lopsided.inference.engine import Engine
from lopsided.inference.familiar import known_images
from lopsided.inference.scorer import Scorer
from lopsided.models.model import Model, ModelCard
from lopsided.recipe import Recipe
from lopsided.recipe.rules import parse_rule
from lopsided.training.methods import Trainer

Floats = npt.NDArray[np.float64]


def check_rule(recipe: Recipe, prepared: Prepared) -> None:
    """Raise if the rule of a recipe cannot be used with these data. It is called before training."""
    val = prepared.val
    num_classes = len(prepared.classes)
    held = None
    if val is not None:
        held = HeldBack(np.full((len(val.labels), num_classes), 1 / num_classes), val.labels)
    resolve(recipe.decision.rule, prepared.classes, carried_prior(recipe, prepared.counts()), held)


def settle(trainer: Trainer) -> None:
    """Calibrate the model on the validation images and write its prior, temperature and decision rule on its card.

    Probabilities are also moved from the prior that training gave them to the class shares of the training images, so
    that they mean the same for every loss and sampler. Further images (``data.more``) do not count. With calibration
    "none" they stay as they are. Temperature and biases become part of the linear layer, so that every program that
    uses the weights returns calibrated probabilities.
    """
    recipe, prepared = trainer.recipe, trainer.prepared
    carried, kind = carried_prior(recipe, prepared.counts()), recipe.decision.calibration
    held = None
    if prepared.val is not None:
        size, scorer = recipe.encoder_training.batch_size, trainer.scorer
        if not recipe.spec.pretrained:
            plain = Engine(trainer.model, (), fast=False)
            scorer = Scorer(
                trainer.model, trainer.card, engine=plain, ranks=trainer.ranks, cached="none", batch_size=size
            )
        digests = None if recipe.spec.trains_encoder else prepared.val.digests
        scored = scorer.score(prepared.val.inputs, digests)
        held = HeldBack(scored.probabilities, prepared.val.labels, prepared.val.groups)

    def compute() -> dict[str, Any]:
        change, prior = Calibration(1.0, (0.0,) * len(prepared.classes)), carried
        if kind != "none":
            if held is not None:
                change = fit_calibration(held, carried, biases=kind == "affine")
            prior = prior_of(recipe.spec.counted(prepared.own_counts().tolist()))
            change = replace(change, bias=tuple(np.add(change.bias, bias_between(carried, prior)).tolist()))
        decision = _decision(recipe, prepared, carried, prior, held, change)
        found = {"temperature": change.temperature, "bias": list(change.bias)}
        return {**found, "prior": list(prior), "decision": decision.model_dump()}

    found = trainer.ranks.told(compute)  # All ranks must decide alike despite rounding.
    temperature, bias = float(found["temperature"]), tuple(map(float, found["bias"]))
    with torch.no_grad():
        for parameter in trainer.model.classifier.parameters():
            parameter.div_(temperature)
        trainer.model.classifier.bias.add_(torch.tensor(bias).to(trainer.model.classifier.bias))
    calibrated = held is not None and kind != "none"
    trainer.card = trainer.card.model_copy(
        update={
            "prior": tuple(map(float, found["prior"])),
            "temperature": temperature,
            "bias": bias if any(bias) else None,
            "calibrated_on": len(held.labels) if calibrated and held is not None else 0,
            "decision": Decision.model_validate(found["decision"]),
        }
    )
    card = trainer.card
    trainer.log.fact(decision_note(card.decision, card.classes))
    if calibrated and held is not None:
        absent = [name for label, name in enumerate(card.classes) if label not in held.labels]
        trainer.log.fact(notes.calibrated(card.calibrated_on, "validation", card.temperature, card.bias, absent))
    elif kind != "none" and not recipe.spec.calibrates:
        trainer.log.fact(notes.not_calibrated())


def recalibrate(
    model: Model, card: ModelCard, prior: Sequence[float], change: Calibration, decision: Decision, num: int
) -> ModelCard:
    """Move a settled model to another prior, then calibrate it, in place. Return its card with this decision.

    ``num`` is the number of images that the calibration is fitted to; 0 if it is none.
    """
    move = bias_between(card.prior, prior)
    with torch.no_grad():
        model.classifier.bias.add_(torch.from_numpy(move).to(model.classifier.bias))
        for parameter in model.classifier.parameters():
            parameter.div_(change.temperature)
        model.classifier.bias.add_(torch.tensor(change.bias).to(model.classifier.bias))
    old = np.zeros(len(card.classes)) if card.bias is None else np.asarray(card.bias)
    bias = tuple(((old + move) / change.temperature + change.bias).tolist())
    return card.model_copy(
        update={
            "prior": tuple(prior),
            "temperature": card.temperature * change.temperature,
            "bias": bias if any(bias) else None,
            "calibrated_on": num,
            "decision": decision,
        }
    )


def _decision(
    recipe: Recipe,
    prepared: Prepared,
    carried: Sequence[float],
    prior: Sequence[float],
    held: HeldBack | None,
    change: Calibration,
) -> Decision:
    """Return the decision on calibrated probabilities."""
    rule = parse_rule(recipe.decision.rule)
    if rule.kind == "tuned":  # It contains a calibration of its own, so it is fitted to the original scores.
        return through(resolve(rule, prepared.classes, carried, held), change)
    scores = None if held is None else held.moved(change(held.probabilities))
    return resolve(rule, prepared.classes, prior, scores)


def decision_note(decision: Decision, classes: Sequence[str]) -> Fact:
    """Return the note on how a model decides."""
    return notes.decision(decision.rule, " ".join([explain(decision, classes), *decision.notes]))


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
        trainer.log.fact(notes.typicality(len(bank.scores), bank.is_guessed, bank.num_groups))
    return bank
