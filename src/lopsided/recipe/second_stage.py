"""How the classifier of a trained encoder is made again or rescaled (Kang et al. 2020), and where this is possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from lopsided.errors import sentence

if TYPE_CHECKING:
    from lopsided.recipe.schema import Recipe

Kind = Literal["linear", "crt", "lws", "tau-norm"]
RETRAINED = ("crt", "lws")
"""Kinds with a stage of their own after an encoder that was trained together with a classifier."""
_POSSIBLE: dict[str, tuple[str, ...]] = {
    "two-stage": ("linear", "tau-norm"),
    "end-to-end": ("linear", "crt", "lws", "tau-norm"),
    "fine-tune": ("linear", "crt", "lws", "tau-norm"),
}
_WHY = {
    "two-stage": ", whose second stage trains a new classifier anyway",
    "frozen": ", whose classifier is a logistic regression",
    "adapter": ", whose classifier is a logistic regression",
}


def second_stage_conflicts(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for every conflict of the fields ``classifier.kind`` and ``classifier.tau``."""
    section, method, loss = recipe.classifier, recipe.method, recipe.encoder_training.loss
    if section.tau is not None and section.kind != "tau-norm":
        do = 'Set classifier.kind = "tau-norm", or remove classifier.tau.'
        yield sentence(f'classifier.tau must be unset when classifier.kind is "{section.kind}"', section.tau, do)
    if section.kind == "linear":
        return
    possible, why = _POSSIBLE.get(method, ("linear",)), _WHY.get(method, "")
    if method == "fine-tune" and "logits" not in loss.entry.needs:
        possible, why = ("linear",), f" and the loss {loss.name}, which trains no classifier"
    if section.kind not in possible:
        fit = " or ".join(f'"{kind}"' for kind in possible)
        yield f'classifier.kind cannot be "{section.kind}" with method "{method}"{why}. Use {fit}.'
        return
    loss, path = (section.loss, "classifier") if method == "two-stage" else (loss, "encoder_training")
    if section.kind != "crt" and loss.entry.head != "linear":
        what = f"{path}.loss = {loss.name}, which trains a {loss.entry.head} classifier"
        yield f'classifier.kind cannot be "{section.kind}" with {what}. Use "crt", or another loss.'
    if section.kind == "tau-norm" and section.tau is None and recipe.data.val == 0:
        yield "classifier.tau must be set when data.val is 0: there are no validation images to choose it by."
