"""Groups of the fields of a recipe: what a hash covers, and which fields have an effect with which method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lopsided.errors import InputError
from lopsided.recipe.second_stage import RETRAINED

if TYPE_CHECKING:
    from lopsided.recipe.schema import Recipe

RUNTIME_FIELDS = frozenset(
    {"description", "device", "threads", "fast", "compile", "compare_default", "track"}
    | {"data.cache", "data.allow_outside"}
)
"""Fields that do not change the result of a run."""
UNHASHED_FIELDS = RUNTIME_FIELDS | {"decision.rule", "decision.calibration"}
"""Fields that do not change what is trained. They are not part of the hash of a recipe."""
TRAINING_FIELDS = tuple(
    f"encoder_training.{name}"
    for name in (
        "reweight_from", "reweight_beta", "resample_from", "mixup", "cutmix", "sam_rho", "ema", "swa_from",
    )
)  # fmt: skip
"""Fields of the training of an encoder that are off by default."""
LOSSES = ("encoder_training.loss", "classifier.loss")
"""The fields that hold a loss."""
LOSS_NAMES = tuple(f"{path}.name" for path in LOSSES)
"""The fields that hold the name of a loss."""
_IDLE = ("augment.", "head.", "encoder_training.", "classifier.", "selection.")
_NOT_IDLE = frozenset({"augment.normalisation"})
"""Sections without effect if the encoder is frozen, and the fields in them that have one."""
_ADAPTER_IDLE = (
    tuple(f"encoder_training.{name}" for name in ("views", "queue", "queue_balanced", "chunk_size", "batch_norm"))
    + TRAINING_FIELDS
)
"""Fields of the training without effect on heads, which are trained on the features of images."""
FROZEN = ("frozen", "adapter")
"""Methods that do not train the encoder."""
OWN_SECTIONS = {"regression": (*FROZEN, "fine-tune"), "adapter": ("adapter",), "fine_tune": ("fine-tune",)}
"""Sections that only some methods use."""
SECOND_STAGE = frozenset({"classifier.kind", "classifier.tau"})
"""Fields that say how the classifier is made, and whether it has a second stage."""
CONTRASTED = frozenset(f"encoder_training.{name}" for name in ("views", "queue", "queue_balanced"))
"""Fields of a batch that only a contrastive loss uses."""


def is_idle(path: str, method: str = "frozen") -> bool:
    """Return whether a field has no effect because ``method`` does not train the encoder."""
    if method not in FROZEN or not path.startswith(_IDLE) or path in _NOT_IDLE or path.startswith("classifier.loss"):
        return False
    if method == "adapter" and path.startswith("encoder_training."):
        return path in _ADAPTER_IDLE
    return True


def why_unused(path: str, method: str, budget: float | None, kind: str = "linear") -> str | None:
    """Return why a field has no effect with a method, or None.

    ``budget`` is that of ``fine_tune``, and ``kind`` that of the classifier.
    """
    nothing = f'{path} has no effect with method "{method}"'
    if path.startswith("fine_tune.") and method != "fine-tune":
        return f"{nothing}. Start from the recipe fine-tune."
    if path.startswith("adapter.") and method != "adapter":
        return f"{nothing}. Use a recipe with heads, such as adapter."
    if is_idle(path, method):
        return f"{nothing}. Use another recipe, such as from-scratch, to train an encoder."
    if method == "fine-tune" and _is_second(path, kind) and not path.startswith("classifier.loss"):
        return f"{nothing}: the classifier starts from a logistic regression."
    if method == "fine-tune" and path == "encoder_training.epochs" and budget is not None:
        do = "Set that field instead, or add --set fine_tune.steps=unset."
        return f"{path} has no effect because fine_tune.steps or fine_tune.minutes is set. {do}"
    return None


def _is_second(path: str, kind: str) -> bool:
    """Return whether only a second stage uses a field, and a classifier of this kind has none of its own."""
    return path.startswith("classifier.") and path not in SECOND_STAGE and kind not in RETRAINED


def why_unused_classifier(path: str, method: str, kind: str) -> str | None:
    """Return why a field of the second stage has no effect on an end-to-end recipe, or None."""
    if method != "end-to-end" or not _is_second(path, kind) or path == "classifier.batch_size":
        return None  # ``--batch-size`` sets the field of both stages.
    nothing = f'{path} has no effect with method "{method}" and classifier.kind "{kind}"'
    return f'{nothing}. Set classifier.kind = "crt" to train the classifier again.'


def check_used(changes: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise if a field is set that has no effect with the method or the budget of the new recipe."""
    old = recipe.fine_tune
    budgets = (changes.get("fine_tune.steps", old.steps), changes.get("fine_tune.minutes", old.minutes))
    budget = next((value for value in budgets if value is not None), None)
    for path, value in changes.items():
        if path == "classifier.batch_size" and changes.get("encoder_training.batch_size") == value:
            continue  # ``--batch-size`` sets the field of both stages, also if there is only one.
        kind = str(changes.get("classifier.kind", recipe.classifier.kind))
        text = why_unused(path, str(changes.get("method", recipe.method)), budget, kind)
        if text is not None:
            raise InputError(text)
