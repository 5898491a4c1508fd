"""What changes in the last epochs of a stage: class weights, the sampler, and an equal average of the weights.

Only epochs after all changes can be kept. Earlier ones were trained with another prior, or are no average.
"""

from __future__ import annotations

from collections.abc import Iterator

from lopsided.losses.deferred import first_epoch
from lopsided.recipe import Classifier, EncoderTraining


def deferred_shares(settings: EncoderTraining | Classifier) -> list[float]:
    """Return the shares of the epochs after which classes are weighted or drawn differently."""
    defers = settings.loss.entry.defers
    shares = [] if defers is None else [float(settings.loss.parameters[defers])]
    if isinstance(settings, EncoderTraining):
        shares += [share for share in (settings.reweight_from, settings.resample_from) if share is not None]
    return [share for share in shares if share < 1]


def deferred_epoch(settings: EncoderTraining | Classifier) -> int:
    """Return the first epoch, counted from 0, in which classes are treated as in the last one."""
    return max((first_epoch(share, settings.epochs) for share in deferred_shares(settings)), default=0)


def resampled_epoch(settings: EncoderTraining | Classifier) -> int | None:
    """Return the first epoch whose batches are balanced by deferred re-sampling, or None."""
    if not isinstance(settings, EncoderTraining) or settings.resample_from is None:
        return None
    return first_epoch(settings.resample_from, settings.epochs)


def averaged_epoch(settings: EncoderTraining | Classifier) -> int | None:
    """Return the first epoch whose weights are part of an equal average, or None."""
    if not isinstance(settings, EncoderTraining) or settings.swa_from is None:
        return None
    return first_epoch(settings.swa_from, settings.epochs)


def first_kept(settings: EncoderTraining | Classifier) -> int:
    """Return the first epoch whose weights may become the model."""
    return max(deferred_epoch(settings), averaged_epoch(settings) or 0)


def training_words(settings: EncoderTraining) -> Iterator[str]:
    """Yield a sentence for each of these settings that is on."""
    if settings.reweight_from is not None:
        weights = f"by their effective number (beta = {settings.reweight_beta:g})"
        yield f"After {settings.reweight_from:.0%} of the epochs, the loss weights classes {weights}."
    if settings.resample_from is not None:
        yield f"After {settings.resample_from:.0%} of the epochs, batches are drawn with classes equally."
    if settings.mixup or settings.cutmix:
        named = {"mixup": settings.mixup, "CutMix": settings.cutmix}
        what = " or ".join(f"{name} (alpha = {alpha:g})" for name, alpha in named.items() if alpha)
        yield f"The images of a batch are mixed by {what}."
    if settings.sam_rho:
        yield f"SAM with rho = {settings.sam_rho:g} computes two gradients in every step, which takes twice as long."
    if settings.ema:
        yield f"The model is a moving average of the weights (decay {settings.ema:g})."
    if settings.swa_from is not None:
        after = f"after {settings.swa_from:.0%} of the epochs"
        yield f"The model is the mean of the weights at the end of each epoch {after} (SWA)."
