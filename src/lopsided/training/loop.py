"""The training loop of a stage: its epochs, what changes in the last ones, and averages of the weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lopsided.data.inputs import Part
from lopsided.data.samplers import BatchSampler
from lopsided.errors import RunError
from lopsided.facts.log import Reporter
from lopsided.losses.deferred import first_epoch
from lopsided.losses.objective import Objective
from lopsided.losses.queue import FeatureQueue
from lopsided.models.machine import evaluating, seeded
from lopsided.models.model import all_finite
from lopsided.ranks import ALONE, Ranks
from lopsided.recipe import Classifier, EncoderTraining
from lopsided.stopping import STOPPING
from lopsided.training.batch_norm import BatchStatistics
from lopsided.training.batches import Batch, Indices, cut, loaded_positions, make_mixer
from lopsided.training.checkpoint import Checkpoint, Midway, midway_tensors, restore_training, summed, training_tensors
from lopsided.training.optimizers import make_optimizer
from lopsided.training.selection import Judged
from lopsided.training.step import Found, Precision, Sharpness, Step


def deferred_epoch(settings: EncoderTraining | Classifier) -> int:
    """Return the first epoch, counted from 0, in which classes are weighted and drawn as in the last one."""
    defers = settings.loss.entry.defers
    shares = [] if defers is None else [float(settings.loss.parameters[defers])]
    if isinstance(settings, EncoderTraining):
        shares += [share for share in (settings.reweight_from, settings.resample_from) if share is not None]
    return max((first_epoch(share, settings.epochs) for share in shares if share < 1), default=0)


def averaged_epoch(settings: EncoderTraining | Classifier) -> int | None:
    """Return the first epoch whose weights are part of an equal average, or None."""
    if not isinstance(settings, EncoderTraining) or settings.swa_from is None:
        return None
    return first_epoch(settings.swa_from, settings.epochs)


def first_kept(settings: EncoderTraining | Classifier) -> int:
    """Return the first epoch whose weights may become the model: earlier ones have another prior, or no average."""
    return max(deferred_epoch(settings), averaged_epoch(settings) or 0)


_PREFIX = "average."


class Average:
    """An exponential moving average (EMA) of the trained parameters of a module.

    After step t, counted from 0, the average is d average + (1 - d) weights, with d the smaller one of ``decay`` and
    (1 + t) / (10 + t). So the first weights do not dominate the average of a short training.

    ``layers`` are batch norm layers whose running statistics are averaged in the same way, as those of timm's averaged
    models are: the statistics of the last weights do not fit averaged weights.
    """

    def __init__(self, module: nn.Module, decay: float, layers: Sequence[_BatchNorm] = ()) -> None:
        self.decay = decay
        self._weights: dict[str, Tensor] = {
            name: weight for name, weight in module.named_parameters() if weight.requires_grad
        }
        statistics = {id(value) for layer in layers for value in (layer.running_mean, layer.running_var)}
        self._statistics = [name for name, buffer in module.named_buffers() if id(buffer) in statistics]
        self._weights |= {name: module.get_buffer(name) for name in self._statistics}
        self._kept = {name: weight.detach().clone() for name, weight in self._weights.items()}

    def update(self, step: int) -> None:
        """Add the weights after a step to the average."""
        self._add(1 - min(self.decay, (1 + step) / (10 + step)))

    def _add(self, share: float) -> None:
        """Move the average by this share of the way to the weights."""
        weights = [weight.detach() for weight in self._weights.values()]
        torch._foreach_lerp_(list(self._kept.values()), weights, share)

    def join(self, ranks: Ranks) -> None:
        """Average the running statistics over the ranks, for ranks that compute their own."""
        if ranks.size > 1 and self._statistics:
            kept = [self._kept[name].div_(ranks.size) for name in self._statistics]
            ranks.sum_(kept)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the module inside the block."""
        with torch.no_grad():
            now = {name: weight.detach().clone() for name, weight in self._weights.items()}
            self.apply()
            try:
                yield
            finally:
                for name, weight in self._weights.items():
                    weight.copy_(now[name])

    def apply(self) -> None:
        """Put the average into the module."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(self._kept[name])

    def statistics(self) -> dict[str, Tensor]:
        """Return the averaged running statistics by name, of which ranks may have their own during an epoch."""
        return {f"{_PREFIX}{name}": self._kept[name] for name in self._statistics}

    def tensors(self) -> dict[str, Tensor]:
        """Return the average by name, for a checkpoint."""
        return {f"{_PREFIX}{name}": value for name, value in self._kept.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of ``tensors``."""
        for name, value in self._kept.items():
            found = tensors[f"{_PREFIX}{name}"]
            if (found.shape, found.dtype) != (value.shape, value.dtype):
                raise ValueError(f"the average of {name} has another shape or dtype")
            value.copy_(found)


class EqualAverage(Average):
    """The mean of the weights after several epochs: stochastic weight averaging, SWA (Izmailov et al., 2018).

    The running statistics of batch norm are not part of it. They are computed anew for the mean (see ``loop``).
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, 0.0)

    def update(self, step: int) -> None:
        """Add the weights after an epoch. ``step`` is the number of epochs that are in the mean already."""
        self._add(1 / (step + 1))


Pause = Callable[[int, dict[str, Tensor]], None]
"""Saves the tensors of a loop that has done this number of steps of an epoch."""

_ALONE, _SECONDS = "epoch.alone", "epoch.seconds"
_STEPS_PER_LOOK = 20
"""Steps between two checks of the loss on an accelerator, where a check must wait. On a CPU every step is checked."""


@dataclass(eq=False)
class Stage:
    """One stage of training.

    ``transform`` turns images on the device into inputs for ``output``. Its arguments are the images, a random
    generator, the position of the first image in the batch, and the size of the batch. ``output`` returns one row per
    image, (n, w) or (n, views, w): the projections, the logits, or both side by side. ``projected`` is the number of
    columns that are projections. ``objective`` returns each sample's part of the loss. ``judge`` returns figures on the
    validation split.

    ``groups`` are groups of parameters for the optimizer; the learning rate of a group is multiplied by its ``scale``.
    ``frozen`` are modules that stay in eval mode. ``steps`` is the number of steps if the last epoch is not complete,
    and the learning rate rises over the first ``warmup`` steps. ``average`` is the decay of a moving average of the
    weights; if it is not 0, the average is evaluated and kept instead of the weights. ``settings`` may ask for an equal
    average instead (``swa_from``).
    """

    name: str
    section: str
    module: nn.Module
    settings: EncoderTraining | Classifier
    part: Part
    sampler: BatchSampler
    transform: Callable[[Tensor, torch.Generator, int, int], Tensor]
    output: Callable[[Tensor], Tensor]
    objective: Objective
    projected: int = 0
    judge: Callable[[], Judged] | None = None
    views: int = 1
    min_batch: int = 1
    groups: list[dict[str, Any]] | None = None
    frozen: tuple[nn.Module, ...] = ()
    steps: int | None = None
    warmup: int = 0
    average: float = 0.0

    @property
    def training(self) -> EncoderTraining | None:
        """The settings of a stage that trains an encoder, otherwise None."""
        return self.settings if isinstance(self.settings, EncoderTraining) else None

    @property
    def total(self) -> int:
        """The number of steps of the stage."""
        return self.steps or self.settings.epochs * len(self.sampler)

    @property
    def trained(self) -> nn.ModuleDict:
        """Everything with parameters to train: the module, and the objective, whose loss may have parameters."""
        return nn.ModuleDict({"module": self.module, "objective": self.objective})


@dataclass(eq=False)
class Tally:
    """Sums over one epoch. Sums on the device are read once, at the end of the epoch."""

    loss: Tensor
    """The loss of this rank's samples per class; each batch is weighted by its number of images."""
    steps: list[Tensor] = field(default_factory=list)
    """The loss of each batch."""
    images: int = 0
    alone: int = 0
    """Anchors without a positive: the only sample of its class in the batch, one view, no such class in the queue."""
    before: int = 0
    """The steps that were done before the training was interrupted."""
    seconds: float = 0.0
    """The time of those steps."""

    def add(self, found: Found, labels: npt.NDArray[np.int64], views: int, queued: set[int]) -> None:
        """Add the result of a batch with these labels. ``queued`` holds the classes in the queue."""
        self.steps.append(found.loss)
        self.loss.index_add_(0, found.labels, found.parts.to(self.loss.dtype) * len(labels))
        self.images += len(labels)
        if views == 1:
            self.alone += len(set(np.flatnonzero(np.bincount(labels) == 1).tolist()) - queued)


class Loop:
    """Runs the epochs of a stage, on one rank or as one of several."""

    def __init__(
        self,
        stage: Stage,
        *,
        device: torch.device,
        seed: int,
        num_classes: int,
        minority: int,
        reporter: Reporter,
        ranks: Ranks = ALONE,
        precision: str = "float32",
    ) -> None:
        self.stage, self.device, self.seed, self.reporter = stage, device, seed, reporter
        self.num_classes, self.minority, self.ranks = num_classes, minority, ranks
        self.trained = stage.trained.to(device)
        self.optimizer = make_optimizer(self.trained, stage.settings, device, stage.groups)
        self._rate = stage.settings.lr
        settings = stage.training
        self.queue = None
        if settings is not None and settings.queue:
            self.queue = FeatureQueue(settings.queue, balanced=settings.queue_balanced)
        synchronised = settings is not None and settings.batch_norm == "sync"
        self.statistics = BatchStatistics(stage.module, self.ranks, synchronised=synchronised, frozen=stage.frozen)
        if settings is not None and settings.resample_from is not None:
            stage.sampler.balanced_from = first_epoch(settings.resample_from, settings.epochs)
        self._averaged_from = averaged_epoch(stage.settings)
        self.average: Average | None = None
        if self._averaged_from is not None:
            self.average = EqualAverage(stage.module)
        elif stage.average:
            self.average = Average(stage.module, stage.average, self.statistics.layers)
        # A linear classifier on computed features does not benefit from lower precision.
        self.precision = Precision("float32" if settings is None else precision, device)
        self._step = Step(
            stage,
            ranks=self.ranks,
            device=device,
            seed=seed,
            statistics=self.statistics,
            precision=self.precision,
            queue=self.queue,
            mixer=make_mixer(stage.settings, seed),
        )
        rho = 0.0 if settings is None else settings.sam_rho
        self._gradients = Sharpness(self._step, rho).gradients if rho else self._step.gradients
        self._look = 1 if device.type == "cpu" else _STEPS_PER_LOOK
        self._begun: tuple[Tally, Midway] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the next epoch starts from, by name."""
        tensors = training_tensors(self.trained, self.optimizer) | self.precision.tensors()
        tensors |= self.average.tensors() if self.average is not None else {}
        return tensors | (self.queue.tensors() if self.queue is not None else {})

    def restore(self, tensors: Mapping[str, Tensor], index: int = 0, step: int = 0) -> None:
        """Load the result of ``tensors`` into the loop, or what was saved after a ``step`` of the epoch ``index``."""
        restore_training(self.trained, self.optimizer, tensors)
        self.precision.restore(tensors)
        if self.average is not None:
            self.average.restore(tensors)
        if self.queue is not None:
            self.queue.restore(tensors, self.device)
        if step:
            batches = list(self._batches(index))
            if step > len(batches):
                raise ValueError(f"{step} steps of an epoch that has {len(batches)}")
            tally = self._tally()
            tally.images, tally.before = sum(map(len, batches[:step])), step
            tally.alone, tally.seconds = int(tensors[_ALONE]), float(tensors[_SECONDS])
            midway = Midway(tensors, self.ranks)
            midway.check(self._own(tally), self.device)
            self._begun = (tally, midway)

    def _tally(self) -> Tally:
        return Tally(torch.zeros(self.num_classes, dtype=torch.float64, device=self.device))

    def _own(self, tally: Tally) -> dict[str, Tensor]:
        """Return the tensors of which each rank has its own in the middle of an epoch."""
        own = {summed("loss"): tally.loss} | self.statistics.tensors()
        return own | (self.average.statistics() if self.average is not None else {})

    def _pause(self, tally: Tally, step: int, seconds: float, pause: Pause) -> None:
        """Save the state after a step, and interrupt the process."""
        with STOPPING.interrupting():
            now = self.tensors() | midway_tensors(self._own(tally), self.ranks, self.device)
            now |= {_ALONE: torch.tensor(tally.alone), _SECONDS: torch.tensor(seconds, dtype=torch.float64)}
            if all_finite(now.values()):
                pause(step, now)

    def epoch(self, index: int, checkpoint: Checkpoint, pause: Pause | None = None) -> dict[str, Any]:
        """Train for one epoch, or what is left of it, and return its facts. ``index`` counts from 0.

        If the process is asked to stop, ``pause`` gets the number of steps done and the state, and must save it.
        """
        stage, begin = self.stage, perf_counter()
        tally, midway = self._begun or (self._tally(), None)
        self._begun, seen, batches = None, 0, list(self._batches(index))
        self._train_mode()
        # Each rank gets its own seed. With one seed, all ranks would use the same dropout mask for different images.
        names: tuple[str | int, ...] = (stage.name, index)
        if self.ranks.size > 1:
            names = (*names, "rank", self.ranks.rank)
        if midway is not None and not midway.is_exact:
            names = (*names, "from", tally.before)
        with seeded(self.device, self.seed, "dropout", *names), self.statistics.over_ranks():
            if midway is not None:
                midway.restore(self._own(tally))
                self._set_rate(index, tally.before - 1)
            for step, (batch, x) in enumerate(self._loaded(batches[tally.before :]), start=tally.before):
                self._set_rate(index, step)
                self.optimizer.zero_grad(set_to_none=True)
                queued = set() if self.queue is None else self.queue.classes()
                found = self._gradients(batch, x, index, step)
                self.precision.step(self.optimizer)
                if self.average is not None and self._averaged_from is None:
                    self.average.update(index * len(stage.sampler) + step)
                tally.add(found, stage.part.labels[batch.rows], stage.views, queued)
                if (step + 1) % self._look == 0:
                    self.reporter.step(self._check(tally, index, checkpoint), tally.images - seen)
                    seen = tally.images
                    if pause is not None and (STOPPING.requested if found.stops is None else found.stops.item()):
                        self._pause(tally, step + 1, tally.seconds + perf_counter() - begin, pause)
        self._check(tally, index, checkpoint)
        self.ranks.sum_([tally.loss])
        self.statistics.average()
        if self.average is not None and not self.statistics.synchronised:
            self.average.join(self.ranks)
        if self.average is not None and self._averaged_from is not None and index >= self._averaged_from:
            self.average.update(index - self._averaged_from)
        return self._facts(index, tally, tally.seconds + perf_counter() - begin)

    @contextmanager
    def averaged(self, index: int) -> Iterator[None]:
        """Put the average of the weights after an epoch into the module inside the block, if there is an average."""
        if self.average is None or index < (self._averaged_from or 0):
            yield
            return
        with self.average.applied(), self.statistics.preserved():
            self._recompute_statistics(index)
            yield

    def keep_average(self, index: int) -> None:
        """Put the average of the weights after the last epoch into the module, if there is an average."""
        if self.average is not None:
            self.average.apply()
            self._recompute_statistics(index)

    def _recompute_statistics(self, index: int) -> None:
        """Compute the running statistics of an equal average by a pass over the batches of an epoch, not mixed.

        The average has no running statistics of its own. Dropout is off, as it is when the model is used.
        """
        if self._averaged_from is None or not self.statistics.layers:
            return
        with evaluating(self.stage.module), self.statistics.anew():
            for layer in self.statistics.layers:
                layer.train()
            for step, (batch, x) in enumerate(self._loaded(list(self._batches(index)))):
                for chunk in range(len(batch.chunks)):
                    self._step.encode(batch, x, chunk, (self.stage.name, index, "statistics", step))

    def trial(self, steps: int, clock: Callable[[], float] = perf_counter) -> list[float]:
        """Train for a few steps and return the seconds of each step. The weights change."""
        self._train_mode()
        batches = list(itertools.islice(itertools.cycle(list(self._batches(0))), steps))
        times = []
        with seeded(self.device, self.seed, "trial"), self.statistics.over_ranks():
            begin = clock()
            for step, (batch, x) in enumerate(self._loaded(batches)):
                self.optimizer.zero_grad(set_to_none=True)
                self._gradients(batch, x, 0, step)
                self.precision.step(self.optimizer)
                times.append(clock() - begin)
                begin = clock()
        return times

    def _train_mode(self) -> None:
        self.trained.train()
        for module in self.stage.frozen:
            module.eval()

    def _loaded(self, batches: list[Batch]) -> Iterator[tuple[Batch, Tensor]]:
        """Yield batches with the inputs of their rows on this rank."""
        inputs = self.stage.part.inputs.batches(map(self._rows, batches))
        yield from ((batch, x) for batch, (_, x) in zip(batches, inputs, strict=True))

    def _batches(self, index: int) -> Iterator[Batch]:
        """Yield the batches of an epoch. They are the same on every rank."""
        settings = self.stage.training
        chunk_size = None if settings is None else settings.chunk_size
        # Batch statistics need two rows, so a rank with its own statistics must not get a single row.
        least = 1 if self.statistics.exchanged or not self.statistics.layers else 2
        self.stage.sampler.set_epoch(index)
        for rows in self.stage.sampler:
            # Batch normalisation fails on a batch of one image, and a contrastive loss has nothing to compare.
            if len(rows) >= self.stage.min_batch:
                yield cut(rows, self.ranks.size, chunk_size=chunk_size, least=least)

    def _rows(self, batch: Batch) -> Indices:
        """Return the rows of this rank and of missing partners, or one placeholder row if the rank has none."""
        mixed = self._step.mixer is not None
        rank = self.ranks.rank
        rows = batch.rows[loaded_positions(batch, rank) if mixed else batch.positions(rank)]
        return rows if len(rows) else batch.rows[:1]

    def _set_rate(self, index: int, step: int) -> None:
        settings, warmup = self.stage.settings, self.stage.warmup
        rate = settings.lr
        done = index * len(self.stage.sampler) + step
        if self._averaged_from is not None:  # An equal average needs weights that keep moving.
            done = min(done, max(self._averaged_from * len(self.stage.sampler), warmup))
        if done < warmup:
            rate *= (done + 1) / warmup
        elif settings.schedule == "cosine":
            rate *= 0.5 * (1 + math.cos(math.pi * ((done - warmup) / (self.stage.total - warmup))))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        self._rate = rate

    def _check(self, tally: Tally, index: int, checkpoint: Checkpoint) -> float:
        """Return the last loss. Raise if a loss since the last check is not finite."""
        if not tally.steps:
            return math.nan
        first = max(len(tally.steps) - self._look, 0)
        losses = torch.stack(tally.steps[first:]).tolist()
        for step, loss in enumerate(losses, start=tally.before + first + 1):
            if not math.isfinite(loss):
                # A checkpoint does not help in the first step: a run that continues from it would fail again.
                first_ever = step == 1 and not index
                do = self._at_first() if first_ever else self._later(checkpoint)
                raise self._broken(f"The loss is not finite: {loss} in step {step} of epoch {index + 1}", do)
        return float(losses[-1])

    def check_weights(self, finite: bool, index: int, checkpoint: Checkpoint) -> None:
        """Raise if the weights are not finite after an epoch, so that such weights are never saved."""
        if not finite:
            what = f"The weights are not finite: NaN or infinity after epoch {index + 1}"
            raise self._broken(what, self._later(checkpoint))

    def _broken(self, what: str, do: str) -> RunError:
        return RunError(f"{what} of stage {self.stage.name}. {do}")

    def _later(self, checkpoint: Checkpoint) -> str:
        return f"Lower {self.stage.section}.lr. {checkpoint.last_good()}"

    def _at_first(self) -> str:
        """Return what to check if the first loss of a stage is not finite, before the learning rate has any effect."""
        section = self.stage.section
        text = f"Check the inputs, encoder.weights and the parameters of {section}.loss; {section}.lr is not the cause."
        return text if self.precision.dtype == torch.float32 else f'{text} Or set precision to "float32".'

    def _facts(self, index: int, tally: Tally, seconds: float) -> dict[str, Any]:
        by_class = tally.loss.tolist()
        total = sum(by_class)
        facts: dict[str, Any] = {
            "stage": self.stage.name,
            "epoch": index + 1,
            "loss": total / tally.images,
            "minority_loss_share": by_class[self.minority] / total if total > 0 else None,
        }
        if self.stage.projected:
            facts["anchors_without_positives"] = tally.alone / tally.images
        return {**facts, "lr": self._rate, "seconds": seconds, "images_per_second": tally.images / seconds}
