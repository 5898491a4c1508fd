"""Finishers: what happens to the classifier after the encoder is trained (Kang et al. 2020), as ``classifier.kind``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lopsided.errors import sentence
from lopsided.recipe.words import amount

if TYPE_CHECKING:
    from lopsided.recipe.losses import LossSettings
    from lopsided.recipe.schema import Recipe

Kind = Literal["linear", "crt", "lws", "tau-norm"]


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
