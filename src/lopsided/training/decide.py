"""The end of training: calibrate the probabilities, and settle how the model decides for a class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lopsided.data.inputs import Prepared
from lopsided.evaluation.decision import Calibration, Decision, HeldBack, explain, fit_calibration, resolve
from lopsided.inference.probabilities import predict_inputs
from lopsided.recipe import Recipe
from lopsided.training.prior import carried_prior
from lopsided.training.stages import Stages


def check_rule(recipe: Recipe, prepared: Prepared) -> None:
    """Raise if the rule of a recipe cannot be used with these data. It is called before training."""
    val = prepared.val
    num_classes = len(prepared.classes)
    held = None
    if val is not None:
        held = HeldBack(np.full((len(val.labels), num_classes), 1 / num_classes), val.labels)
    resolve(recipe.decision.rule, prepared.classes, carried_prior(recipe, prepared.counts()), held)


def settle(stages: Stages) -> None:
    """Calibrate the model on the validation images and write its prior, temperature and decision rule on its card.

    Temperature and biases become part of the linear layer, so that every program that uses the weights returns
    calibrated probabilities.
    """
    recipe, prepared = stages.recipe, stages.prepared
    prior = carried_prior(recipe, prepared.counts())
    held = None
    if prepared.val is not None:
        size = recipe.encoder_training.batch_size
        engine = stages.engine if recipe.method == "frozen" else None
        probabilities, _ = predict_inputs(stages.model, prepared.val.inputs, size, stages.ranks, engine)
        held = HeldBack(probabilities, prepared.val.labels)

    def compute() -> dict[str, Any]:
        scores, change = held, Calibration(1.0, (0.0,) * len(prepared.classes))
        if held is not None and recipe.decision.calibration != "none":
            change = fit_calibration(held, prior, biases=recipe.decision.calibration == "affine")
            scores = HeldBack(change(held.probabilities), held.labels)
        decision = resolve(recipe.decision.rule, prepared.classes, prior, scores)
        return {"temperature": change.temperature, "bias": list(change.bias), "decision": decision.model_dump()}

    found = stages.ranks.told(compute)  # All ranks must decide alike despite rounding.
    temperature, bias = float(found["temperature"]), tuple(map(float, found["bias"]))
    decision = Decision.model_validate(found["decision"])
    with torch.no_grad():
        for parameter in stages.model.classifier.parameters():
            parameter.div_(temperature)
        stages.model.classifier.bias.add_(torch.tensor(bias).to(stages.model.classifier.bias))
    calibrated = held is not None and recipe.decision.calibration != "none"
    stages.card = stages.card.model_copy(
        update={
            "prior": prior,
            "temperature": temperature,
            "bias": bias if any(bias) else None,
            "calibrated_on": len(held.labels) if calibrated and held is not None else 0,
            "decision": decision,
        }
    )
    for text in _notes(recipe, stages, calibrated=calibrated):
        stages.log.note(text)


def _notes(recipe: Recipe, stages: Stages, *, calibrated: bool) -> list[str]:
    card = stages.card
    notes = [explain(card.decision, card.classes), *card.decision.notes]
    if calibrated:
        notes.append(
            f"The probabilities are calibrated on {card.calibrated_on:,} validation images: temperature "
            f"{card.temperature:.3g}"
            + (f", bias {', '.join(f'{b:+.2f}' for b in card.bias[:6])}." if card.bias is not None else ".")
        )
    elif recipe.decision.calibration != "none":
        notes.append("The probabilities are not calibrated, because there are no validation images.")
    return notes
