"""The loop over batches that every stage runs, and what it notes down on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lopsided.data.samplers import BatchSampler
from lopsided.errors import RunError, sentence
from lopsided.recipe import Classifier, EncoderTraining
from lopsided.seeds import derive_seed
from lopsided.training.checkpoint import Checkpoint
from lopsided.training.inputs import Part
from lopsided.training.machine import seeded
from lopsided.training.optimizers import make_optimizer
from lopsided.training.reporter import Reporter

_STEPS_PER_LOOK = 20
"""Steps between two looks at the loss on an accelerator, where each look waits for it; on a CPU every step is seen."""


@dataclass(eq=False)
class Stage:
    """One stage of training.

    ``transform`` turns a batch on the device into what ``output`` takes, with random numbers from a generator;
    ``objective`` gives each sample's part of the loss of an output; ``judge`` gives figures on the validation split.
    """

    name: str
    section: str
    module: nn.Module
    settings: EncoderTraining | Classifier
    part: Part
    sampler: BatchSampler
    transform: Callable[[Tensor, torch.Generator], Tensor]
    output: Callable[[Tensor], Tensor]
    objective: nn.Module
    judge: Callable[[], dict[str, float]] | None = None
    contrastive: bool = False
    views: int = 1
    min_batch: int = 1


@dataclass(eq=False)
class Tally:
    """Sums of one epoch. What lies on the device is read once, when the epoch is over."""

    loss: Tensor
    """The loss per class, each batch weighted by its images."""
    steps: list[Tensor] = field(default_factory=list)
    images: int = 0
    alone: int = 0
    """Anchors without a positive: alone of their class in a batch, with a single view."""

    def add(self, parts: Tensor, y: Tensor, labels: npt.NDArray[np.int64], views: int) -> None:
        """Add a batch by each sample's part of its loss."""
        self.loss.index_add_(0, y, parts.to(self.loss.dtype) * len(labels))
        self.images += len(labels)
        if views == 1:
            self.alone += int((np.bincount(labels) == 1).sum())


class Trainer:
    """Runs the epochs of a stage."""

    def __init__(
        self, stage: Stage, *, device: torch.device, seed: int, num_classes: int, minority: int, reporter: Reporter
    ) -> None:
        self.stage, self.device, self.seed, self.reporter = stage, device, seed, reporter
        self.num_classes, self.minority = num_classes, minority
        stage.module.to(device)
        stage.objective.to(device)
        self.optimizer = make_optimizer(stage.module, stage.settings, device)
        self._look = 1 if device.type == "cpu" else _STEPS_PER_LOOK

    def epoch(self, index: int, checkpoint: Checkpoint) -> dict[str, Any]:
        """Train for one epoch, counted from 0, and return the facts about it."""
        stage, begin = self.stage, perf_counter()
        tally = Tally(torch.zeros(self.num_classes, dtype=torch.float64, device=self.device))
        seen = 0
        stage.module.train()
        with seeded(self.device, self.seed, "dropout", stage.name, index):
            for step, (rows, batch) in enumerate(stage.part.inputs.batches(self._batches(index))):
                loss = self._step(index, step, rows, batch, tally)
                tally.steps.append(loss)
                if (step + 1) % self._look == 0:
                    self.reporter.step(self._check(tally, index, checkpoint), tally.images - seen)
                    seen = tally.images
        self._check(tally, index, checkpoint)
        return self._facts(index, tally, perf_counter() - begin)

    def _batches(self, index: int) -> Iterator[npt.NDArray[np.int64]]:
        self.stage.sampler.set_epoch(index)
        # Batch normalisation cannot use a batch of one, and a contrastive loss has nothing to compare there.
        return (rows for rows in self.stage.sampler if len(rows) >= self.stage.min_batch)

    def _step(self, index: int, step: int, rows: npt.NDArray[np.int64], batch: Tensor, tally: Tally) -> Tensor:
        stage = self.stage
        self._set_rate(index, step)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "augment", stage.name, index, step))
        labels = stage.part.labels[rows]
        y = torch.from_numpy(labels).to(self.device)
        parts: Tensor = stage.objective(stage.output(stage.transform(batch.to(self.device), generator)), y)
        loss = parts.sum()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        tally.add(parts.detach(), y, labels, stage.views)
        return loss.detach()

    def _set_rate(self, index: int, step: int) -> None:
        settings = self.stage.settings
        rate = settings.lr
        if settings.schedule == "cosine":
            done = (index * len(self.stage.sampler) + step) / (settings.epochs * len(self.stage.sampler))
            rate *= 0.5 * (1 + math.cos(math.pi * done))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _check(self, tally: Tally, index: int, checkpoint: Checkpoint) -> float:
        """Return the last loss; raise if one since the last look is not finite."""
        if not tally.steps:
            return math.nan
        first = max(len(tally.steps) - self._look, 0)
        losses = torch.stack(tally.steps[first:]).tolist()
        for step, loss in enumerate(losses, start=first + 1):
            if not math.isfinite(loss):
                raise self._broken(f"{loss} in step {step} of epoch {index + 1}", "the loss", checkpoint)
        return float(losses[-1])

    def check_weights(self, finite: bool, index: int, checkpoint: Checkpoint) -> None:
        """Raise unless the weights at the end of an epoch are finite, so that no broken ones are ever saved."""
        if not finite:
            raise self._broken(f"NaN or infinite ones after epoch {index + 1}", "the weights", checkpoint)

    def _broken(self, got: str, what: str, checkpoint: Checkpoint) -> RunError:
        do = f"Lower {self.stage.section}.lr. {checkpoint.last_good()}"
        return RunError(sentence(f"{what} must stay finite", f"{got} of stage {self.stage.name}", do))

    def _facts(self, index: int, tally: Tally, seconds: float) -> dict[str, Any]:
        by_class = tally.loss.tolist()
        total = sum(by_class)
        facts: dict[str, Any] = {
            "stage": self.stage.name,
            "epoch": index + 1,
            "loss": total / tally.images,
            "minority_loss_share": by_class[self.minority] / total if total > 0 else None,
        }
        if self.stage.contrastive:
            facts["anchors_without_positives"] = tally.alone / tally.images
        rate = self.optimizer.param_groups[0]["lr"]
        return {**facts, "lr": rate, "seconds": seconds, "images_per_second": tally.images / seconds}
