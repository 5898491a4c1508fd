"""How a trained model is used: by its own decision rule or another one, and at which prevalence. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lopsided.errors import InputError
from lopsided.evaluation.calibration import HeldBack, at_prevalence
from lopsided.evaluation.decision import Decision, resolve
from lopsided.recipe.rules import parse_rule

if TYPE_CHECKING:
    from lopsided.models.model import ModelCard

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Use:
    """A decision rule, and the prior that the reported probabilities carry."""

    decision: Decision
    prior: tuple[float, ...]
    shares: tuple[float, ...] | None = None
    """The expected class shares to which probabilities are moved; None: the prior of the model."""

    def probabilities(self, p: npt.ArrayLike) -> Floats:
        """Return the probabilities of the model, moved to the expected shares if there are any."""
        if self.shares is None:
            return np.asarray(p, dtype=np.float64)
        return at_prevalence(p, self.prior, self.shares)


def choose_use(
    card: ModelCard, rule: str | None = None, prevalence: str | None = None, held: HeldBack | None = None
) -> Use:
    """Return how to use a model: its own rule, or another ``rule``, at its own prior or at a ``prevalence``.

    ``prevalence`` is a text such as ``rare=0.02,other=0.98``. ``held`` are validation images for rules that are fitted.
    """
    if prevalence is None:
        decision = card.decision if rule is None else resolve(rule, card.classes, card.prior, held)
        return Use(decision, card.prior)
    parsed = parse_rule(prevalence if prevalence.startswith("prevalence:") else f"prevalence:{prevalence}")
    if rule is not None and parse_rule(rule).kind == "prevalence":
        raise InputError("--decide prevalence:... and --prevalence both state class shares. Remove one of the two.")
    resolve(parsed, card.classes, card.prior)  # Checks the names of the classes.
    shares = tuple(parsed.values[name] for name in card.classes)
    if held is not None:
        held = held.moved(at_prevalence(held.probabilities, card.prior, shares))
    wanted = rule or card.decision.rule
    if parse_rule(wanted).kind == "prevalence":  # The shares of the option replace those of the model's rule.
        return Use(resolve("plain", card.classes, shares).model_copy(update={"rule": str(parsed)}), card.prior, shares)
    return Use(resolve(wanted, card.classes, shares, held), card.prior, shares)
