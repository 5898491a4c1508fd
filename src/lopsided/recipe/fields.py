"""Groups of the fields of a recipe."""

from __future__ import annotations

RUNTIME_FIELDS = frozenset(
    {"description", "device", "threads", "fast", "compile", "compare_quick", "track"}
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
SECOND_STAGE = frozenset({"classifier.kind", "classifier.tau"})
"""Fields that say how the classifier is made, and whether it has a second stage."""
CONTRASTED = frozenset(f"encoder_training.{name}" for name in ("views", "queue", "queue_balanced"))
"""Fields of a batch that only a contrastive loss uses."""
