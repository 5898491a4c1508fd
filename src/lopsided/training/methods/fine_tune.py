"""Fine-tune: a logistic regression on the features of a pretrained encoder, and then the training of both.

**Linear first.** A logistic regression on the features of the pretrained encoder is the first classifier, so that the
first steps do not destroy the encoder's features. Then the encoder and the classifier are trained together. A
contrastive loss trains the encoder with a projection head, and the regression is fitted again at the end.

**Rates.** The heads have the rate of ``encoder_training``, the last block ``layer_decay`` times that rate, and each
block before it ``layer_decay`` times the rate of the next one. Weight decay applies to matrices and kernels only, not
to biases and norms.

**Last blocks only.** The frozen front computes the activations of a few augmented views of each image once. They are
kept in memory in float16, and each step draws views at random. The views are rounded to bytes, as images in a file are.

**Budget.** Steps are exact: the last epoch may be a part of an epoch. Minutes become a number of steps before the first
step, by a few trial steps that leave no trace. The checkpoint holds the number, so a resumed run uses the same number.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lopsided.data.inputs import MEMORY_SHARE, Indices, Inputs, MemoryInputs, Part, Prepared, free_memory, row_batches
from lopsided.data.samplers import BatchSampler
from lopsided.errors import InputError, RunError
from lopsided.evaluation.calibration import bias_between, carried_prior, regression_prior
from lopsided.facts import notes
from lopsided.facts.log import Log
from lopsided.inference.engine import Engine
from lopsided.inference.scorer import share_rows
from lopsided.models.cut import Cut, block_numbers, cut_encoder
from lopsided.models.machine import arrange, evaluating
from lopsided.models.model import Model, average, look
from lopsided.ranks import Ranks
from lopsided.recipe import EncoderTraining, Recipe
from lopsided.recipe.sections import USUAL_VIEWS
from lopsided.seeds import derive_seed
from lopsided.training.checkpoint import State, load_strictly
from lopsided.training.finishers import Finisher
from lopsided.training.loop import Loop, Stage
from lopsided.training.methods.frozen import regress
from lopsided.training.methods.staged import StagedTrainer
from lopsided.training.selection import MAX_PROBE

TRIAL_STEPS = 6
"""Steps that are timed to turn minutes into steps. The first one is not counted, because it allocates memory."""
_BATCH = 64


class CappedSampler(BatchSampler):
    """The batches of a stage with a fixed number of steps: the last epoch ends early.

    Batches of one image are left out, because batch norm and contrastive losses cannot use them. ``limit`` is the
    number of steps of the stage; None: whole epochs.
    """

    limit: int | None = None

    def __len__(self) -> int:
        number = super().__len__()
        alone = self.last == "keep" and self.batch_size > 1 and len(self.labels) % self.batch_size == 1
        return max(number - alone, 1) if self.kind != "m-per-class" else number

    def __iter__(self) -> Iterator[Indices]:
        left = len(self) if self.limit is None else self.limit - self.epoch * len(self)
        for step, batch in enumerate(super().__iter__()):
            if step < left and len(batch) > 1:
                yield batch


def fine_tune_sampler(recipe: Recipe, labels: Indices) -> CappedSampler:
    """Return the sampler of the training images."""
    settings = recipe.encoder_training
    return CappedSampler(
        labels,
        settings.batch_size,
        kind=settings.sampler,
        m_per_class=settings.m_per_class,
        last=settings.last_batch,
        seed=derive_seed(recipe.seed, "fine-tune"),
    )


def num_steps(recipe: Recipe, per_epoch: int, settled: int | None) -> int | None:
    """Return the number of steps of a fine-tuning; None if minutes are not settled yet."""
    section = recipe.fine_tune
    if section.minutes is not None:
        return settled
    return section.steps or recipe.encoder_training.epochs * per_epoch


def parameter_groups(
    encoder: nn.Module, trained: nn.Module, settings: EncoderTraining, layer_decay: float
) -> list[dict[str, Any]]:
    """Return groups for the optimizer, with the ``scale`` of the learning rate and the weight decay of each group.

    ``trained`` holds the encoder and all heads. Its parameters outside the encoder have the scale 1.
    """
    numbers = block_numbers(encoder)
    last = max(numbers.values(), default=0)
    scales = {id(weight): layer_decay ** (last + 1 - numbers[name]) for name, weight in encoder.named_parameters()}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for weight in trained.parameters():
        if weight.requires_grad:
            decay = settings.weight_decay if weight.ndim > 1 else 0.0
            groups.setdefault((scales.get(id(weight), 1.0), decay), []).append(weight)
    return [
        {"params": weights, "scale": scale, "weight_decay": decay, "lr": settings.lr * scale}
        for (scale, decay), weights in sorted(groups.items())
    ]


class Activations:
    """Computes activations of a frozen front, and the features of activations."""

    def __init__(self, model: Model, cut: Cut, shape: tuple[int, ...], ranks: Ranks, *, fast: bool) -> None:
        self.cut, self.ranks = cut, ranks
        self.device = model.classifier.weight.device
        front = Model(cut.flat_front, model.classifier, model.mean.flatten().tolist(), model.std.flatten().tolist())
        self.engine = Engine(front.to(self.device).eval(), shape, fast=fast)

    def bytes_of(self, rows: int) -> int:
        """Return the memory of the activations of this many views."""
        return rows * int(np.prod(self.cut.shape)) * 2

    def check(self, images: int, views: int, more: int) -> int:
        """Return the bytes of the activations. Raise if they do not fit into memory.

        ``images`` have ``views`` views each, and ``more`` images have one.
        """
        need, free = self.bytes_of(images * views + more), free_memory()
        if free is not None and need * self.ranks.local_size > MEMORY_SHARE * free:
            room = f"{MEMORY_SHARE * free / self.ranks.local_size / 1e6:,.0f} MB"
            do = "Lower fine_tune.views, fine_tune.blocks or data.image_size."
            what = f"The activations of {views:,} views of {images:,} images take {need / 1e6:,.0f} MB"
            raise InputError(f"{what}, but at most {room} of the free memory may be used. {do}")
        return need

    def compute(
        self,
        inputs: Inputs,
        count: Callable[[int, int], None],
        *,
        views: int = 1,
        augment: Callable[[Tensor, int, int, int], Tensor] | None = None,
        rows: Indices | None = None,
    ) -> Tensor:
        """Return the activations (n, views, ...) of inputs in float16, with the channels last. Ranks share the work.

        The arguments of ``augment`` are images, the view, the position of the first image, and the number of images.
        """
        rows = np.arange(len(inputs)) if rows is None else rows
        share, sizes = share_rows(len(rows), self.ranks)
        shape = self.cut.shape
        found = torch.empty((len(share), views, *_laid(torch.empty(0, *shape)).shape[1:]), dtype=torch.float16)
        own = [share[part] for part in row_batches(len(share), _BATCH)]
        done = 0
        for places, (_, batch) in zip(own, inputs.batches(rows[places] for places in own), strict=True):
            for view in range(views):
                x = batch if augment is None else to_bytes(augment(batch, view, int(places[0]), len(rows)))
                made = torch.from_numpy(self.engine.features(x)).view(len(batch), *shape)
                found[done : done + len(batch), view] = _laid(made).to(torch.float16)
            done += len(batch)
            count(done, len(share))
        if not found.isfinite().all():
            do = 'Set fine_tune.blocks = "all".'
            raise RunError(f"Activations of the encoder do not fit into float16, or are not finite. {do}")
        return self.ranks.gather(found, sizes)

    def features(self, kept: Tensor, batch_size: int) -> Tensor:
        """Return the mean features of activations (n, views, ...) through the rest in eval mode. Ranks share them."""
        share, sizes = share_rows(len(kept), self.ranks)

        def encode(rows: Indices) -> Tensor:
            own = kept[torch.from_numpy(rows)]
            total: Tensor = self.cut.rest(self.batch(own[:, 0]))
            for view in range(1, own.shape[1]):
                total = total + self.cut.rest(self.batch(own[:, view]))
            return total if own.shape[1] == 1 else total / own.shape[1]

        with evaluating(self.cut.rest):
            parts = [encode(share[part]) for part in row_batches(len(share), batch_size)]
            # A rank without a share still needs the width of the features.
            rows = torch.cat(parts) if parts else self.cut.rest(self.batch(kept[:1, 0]))[:0]
        return self.ranks.gather(rows, sizes)

    def batch(self, kept: Tensor) -> Tensor:
        """Return kept activations as the float32 input of the rest, on the device."""
        x = kept.to(self.device).to(torch.float32)
        return x.permute(0, 3, 1, 2) if x.ndim == 4 else x

    def draw(self, kept: Tensor, views: int) -> Callable[[Tensor, torch.Generator, int, int], Tensor]:
        """Return a transform from row numbers to activations: ``views`` different views of each row, at random."""

        def transform(rows: Tensor, generator: torch.Generator, start: int, total: int) -> Tensor:
            order = torch.rand((total, kept.shape[1]), generator=generator).argsort(dim=1)
            drawn = order[start : start + len(rows), :views]
            return self.batch(kept[rows.cpu()[:, None], drawn].flatten(0, 1))

        return transform


def _laid(x: Tensor) -> Tensor:
    """Return maps (n, c, h, w) as (n, h, w, c), the layout in which the rest computes; anything else unchanged."""
    return x.permute(0, 2, 3, 1) if x.ndim == 4 else x


def to_bytes(images: Tensor) -> Tensor:
    """Return images in [0, 1] as uint8, and bytes as they are."""
    if images.dtype == torch.uint8:
        return images
    return images.mul(255).round_().clamp_(0, 255).to(torch.uint8)


def seeded_views(augment: Callable[..., Tensor], seed: int) -> Callable[[Tensor, int, int, int], Tensor]:
    """Return the augmentation of kept views. A view depends on the seed, its number and the position of the image."""

    def transform(batch: Tensor, view: int, start: int, total: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(seed, "augment", "fine-tune view", view))
        return augment(batch, generator, start=start, total=total)

    return transform


class Kept:
    """The inputs of a stage that trains the last blocks of an encoder: activations of the other blocks.

    ``part`` holds row numbers, ``transform`` turns them into activations of random views, and ``features`` returns
    features of images that are not augmented. Activations of validation images are computed at their first use.
    """

    def __init__(
        self, model: Model, prepared: Prepared, recipe: Recipe, augment: Callable[..., Tensor], ranks: Ranks, log: Log
    ) -> None:
        section, train = recipe.fine_tune, prepared.train
        assert section.blocks != "all"
        self.cut = cut_encoder(model.encoder, section.blocks, prepared.shape, recipe.encoder.name)
        for weight in self.cut.frozen:
            weight.requires_grad_(False)
        self._activations = Activations(model, self.cut, prepared.shape, ranks, fast=recipe.fast)
        self._log, self._batch_size = log, recipe.encoder_training.batch_size
        self._plain: dict[int, Tensor] = {}
        self._views, self._scale = model.views, model.scale
        views, more = section.views or USUAL_VIEWS, 0
        if prepared.val is not None:
            more = len(prepared.val)
            if "logits" not in recipe.encoder_training.loss.entry.needs:
                more += int(np.minimum(prepared.counts(), MAX_PROBE).sum())
            more *= len(model.views)
        size = self._activations.check(len(train), views, more)
        frozen = sum(weight.numel() for weight in self.cut.frozen)
        total = sum(weight.numel() for weight in model.encoder.parameters())
        log.fact(
            notes.trained_blocks(
                recipe.encoder.name, int(section.blocks), total - frozen, total, views, len(train), size / 1e6
            )
        )
        kept = self._activations.compute(
            train.inputs,
            partial(log.count, "activations of training images"),
            views=views,
            augment=seeded_views(augment, recipe.seed),
        )
        self.part = Part(MemoryInputs(torch.arange(len(train))), train.labels, train.groups)
        self.transform = self._activations.draw(kept, recipe.encoder_training.views)

    def features(self, inputs: Inputs, rows: Indices | None = None) -> Tensor:
        """Return the mean features of the views of inputs through the rest, in eval mode, scaled as the model does.

        ``rows`` must always be the same for the same inputs.
        """
        if id(inputs) not in self._plain:
            count = partial(self._log.count, "activations of validation images")
            views = self._views
            self._plain[id(inputs)] = self._activations.compute(
                inputs, count, views=len(views), augment=lambda batch, view, *_: look(batch, views[view]), rows=rows
            )
        return self._scale(self._activations.features(self._plain[id(inputs)], self._batch_size))


def settle_steps(
    loop: Loop, judge: Callable[[], object] | None, seconds: float, clock: Callable[[], float] = perf_counter
) -> int:
    """Return how many steps fit into ``seconds``, by trial steps and one evaluation. The loop must not be used again.

    The weights are the same before and after the call. At least one step is returned.
    """
    if judge is not None:
        judge()  # The first evaluation may compute activations.
    stage = loop.stage
    before = {key: value.detach().clone() for key, value in stage.trained.state_dict().items()}
    times = loop.trial(TRIAL_STEPS, clock)
    per_step = statistics.median(times[1:] or times)
    if judge is not None:
        begin = clock()
        judge()
        per_step += (clock() - begin) / len(stage.sampler)
    stage.trained.load_state_dict(before)
    return max(int(seconds / max(per_step, 1e-9)), 1)


_ENCODER = "module.encoder."
"""Start of the names of the encoder's weights in a checkpoint."""


class FineTuneTrainer(StagedTrainer):
    """Fits a regression, and trains the encoder, or its last blocks, with the regression as the first classifier."""

    _blends = False

    @property
    def trains_norms(self) -> bool:
        """Whether batch norm uses the statistics of batches."""
        return self.recipe.fine_tune.batch_norm == "train"

    def epochs(self, state: State) -> dict[str, int]:
        """Return the epochs of each stage; those of a budget depend on the images, and are 0 if not known yet."""
        per_epoch = len(fine_tune_sampler(self.recipe, self.prepared.train.labels))
        epochs = -(-(num_steps(self.recipe, per_epoch, state.steps) or 0) // per_epoch)
        stages = self.recipe.spec.stages(self.recipe)
        return {name: epochs if number is None else number for name, number in stages.items()}

    def finishers(self) -> list[Finisher]:
        """Return what follows the training of the encoder."""
        if self.recipe.fine_tune.blend:
            return [Blending()]
        return super().finishers() if _trains_classifier(self.recipe) else [Regressing()]

    def expect(self) -> None:
        """Give the model two encoders, if the finished one has two."""
        if self.recipe.fine_tune.blend:
            self.model, self.card = average([(copy.deepcopy(self.model), self.card) for _ in range(2)])

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the encoder, and finish the classifier."""
        self._blends = self.recipe.fine_tune.blend > 0  # The recipe of the first stage does not say it.
        super().train(state, tensors)

    def train_first(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the regression, and train the encoder or its last blocks."""
        recipe, section, counts = self.recipe, self.recipe.fine_tune, self.prepared.counts()
        if self.prepared.kind == "vector":
            raise InputError('Method "fine-tune" needs images, got vectors. Use the recipe quick or from-scratch.')
        if tensors:
            own = {key.removeprefix(_ENCODER): value for key, value in tensors.items() if key.startswith(_ENCODER)}
            load_strictly(self.model.encoder, own)  # The front computes the activations with these weights.
        else:
            regress(self, told=not self._blends)
            shift = bias_between(regression_prior(recipe, counts), carried_prior(recipe, counts, early=True))
            with torch.no_grad():
                self.model.classifier.bias.add_(torch.from_numpy(shift).to(self.model.classifier.bias))
        self.replace_model(self.model)  # The encoder changes now.
        sampler = fine_tune_sampler(recipe, self.prepared.train.labels)
        stage = self._stage(sampler)
        steps = num_steps(recipe, len(sampler), state.steps)
        if steps is None:
            seconds = 60 * (section.minutes or 0.0) - (perf_counter() - self.begin)
            found = settle_steps(self.loop(stage), stage.judge, seconds)
            steps = state.steps = self.ranks.told(lambda: found)
            self.log.fact(notes.minutes(section.minutes or 0.0, steps, seconds))
        elif section.minutes is not None:
            self.log.fact(notes.fixed_steps(steps))
        sampler.limit = stage.steps = steps
        stage.settings = recipe.encoder_training.model_copy(update={"epochs": -(-steps // len(sampler))})
        stage.warmup = round(section.warmup * steps)
        self.run_stage(stage, state, tensors)
        self.model.encoder.requires_grad_(True)

    def _stage(self, sampler: BatchSampler) -> Stage:
        """Return the stage that trains the encoder, or its last blocks on the activations of the others."""
        recipe, section, val = self.recipe, self.recipe.fine_tune, self.prepared.val
        kept = None
        if section.blocks != "all":
            kept = Kept(self.model, self.prepared, recipe, self.augment, self.ranks, self.log)
        judge, features = None, self.features if kept is None else kept.features
        if val is not None:
            judge = (self.judge_by_classifier if _trains_classifier(recipe) else self.judge_by_means)(val, features)
        stage = self.network_stage("fine-tune", judge, None if kept is None else kept.cut.rest)
        norms = tuple(child for child in self.model.encoder.modules() if isinstance(child, _BatchNorm))
        frozen = norms if section.batch_norm == "frozen" else ()
        return replace(
            stage,
            part=stage.part if kept is None else kept.part,
            sampler=sampler,
            transform=stage.transform if kept is None else kept.transform,
            frozen=frozen if kept is None else (*frozen, kept.cut.front),
            groups=parameter_groups(self.model.encoder, stage.trained, recipe.encoder_training, section.layer_decay),
            average=section.average,
        )


def _trains_classifier(recipe: Recipe) -> bool:
    return "logits" in recipe.encoder_training.loss.entry.needs


class Regressing(Finisher):
    """Fits the regression again, on the features of an encoder that was trained without a classifier."""

    def finish(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit the regression."""
        regress(trainer, cached=False)
        state.seconds = perf_counter() - trainer.begin


class Blending(Finisher):
    """Averages the logits of a regression on the features of the trained encoder and of the pretrained encoder.

    The features of the trained encoder separate the images that it was trained on, so inner folds cannot choose the
    strength of their regression. It is that of the other regression.
    """

    def finish(self, trainer: StagedTrainer, state: State, tensors: dict[str, Tensor]) -> None:
        """Fit both regressions, and join the two models."""
        tuned, prepared, share = trainer.model, trainer.prepared, trainer.recipe.fine_tune.blend
        encoder, features = trainer.untrained()
        head = trainer.head(trainer.recipe.classifier.loss, features)
        frozen = Model(encoder, head, prepared.mean, prepared.std, views=tuned.views, scaling=tuned.scaling)
        frozen.to(trainer.device)
        if trainer.recipe.fast:
            arrange(frozen.encoder, trainer.device, prepared.shape)
        trainer.replace_model(frozen)
        strength = regress(trainer)
        trainer.replace_model(tuned)
        regress(trainer, cached=False, strength=strength)
        both, trainer.card = average([(frozen, trainer.card), (tuned, trainer.card)], shares=(share, 1 - share))
        trainer.replace_model(both)
        trainer.log.fact(notes.blend(share))
        state.seconds = perf_counter() - trainer.begin
