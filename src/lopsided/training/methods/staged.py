"""Methods that train an encoder by batches, in stages that are saved in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from time import perf_counter

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lopsided.evaluation.metric_table import figure_of
from lopsided.facts import Fact, notes
from lopsided.models.model import all_finite
from lopsided.training.checkpoint import State, load_strictly, restoring
from lopsided.training.deferred import deferred_epoch, first_kept, training_notes
from lopsided.training.finishers import FINISHERS, Finisher
from lopsided.training.loop import Loop, Stage
from lopsided.training.methods.trainer import Trainer
from lopsided.training.selection import Selection


class StagedTrainer(Trainer):
    """Trains the encoder in a first stage, and finishes the classifier."""

    @property
    def trains_norms(self) -> bool:
        """Whether layers of batch norm compute the statistics of batches."""
        return True

    def first_stage(self) -> Stage:
        """Return the stage that trains the encoder."""
        raise NotImplementedError

    def finishers(self) -> list[Finisher]:
        """Return what follows the first stage."""
        return [FINISHERS[self.recipe.classifier.kind]()]

    def build(self, *, fresh: bool = True) -> None:
        """Build the model, after a look whether the finishers can use the data."""
        for finisher in self.finishers():
            finisher.check(self)
        super().build(fresh=fresh)

    def notes(self) -> Iterator[Fact]:
        """Yield a note for each setting that changes how a batch is computed."""
        settings, num = self.recipe.encoder_training, self.ranks.size
        norm = self.trains_norms and any(isinstance(child, _BatchNorm) for child in self.model.encoder.modules())
        if num > 1:
            yield notes.ranks(num, settings.batch_size)
        if num > 1 and norm:
            yield notes.batch_norm(settings.batch_norm)
        if self.recipe.precision != "float32":
            yield notes.precision(self.recipe.precision)
        if settings.chunk_size is not None:
            batch = "share" if num > 1 and settings.batch_norm == "rank" else "chunk"
            yield notes.chunks(settings.chunk_size, batch if norm else "")
        if settings.queue:
            yield notes.queue(settings.queue, settings.queue_balanced)
        yield from training_notes(settings)

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the encoder, and finish the classifier."""
        finishers = self.finishers()
        resumed = next((finisher for finisher in finishers if finisher.stage == state.stage), None)
        if resumed is not None:
            resumed.restore(self)
        else:
            with self.following(self.recipe.first_stage()):  # The first stage is the same whatever follows.
                self.train_first(state, tensors)
            state.seconds = perf_counter() - self.begin
        for finisher in finishers:
            finisher.finish(self, state, tensors)

    def train_first(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the first stage."""
        self.run_stage(self.first_stage(), state, tensors)

    def loop(self, stage: Stage) -> Loop:
        """Return the loop of a stage."""
        return Loop(
            stage,
            device=self.device,
            seed=self.recipe.seed,
            num_classes=self.num_classes,
            minority=self.prepared.minority,
            reporter=self.log,
            ranks=self.ranks,
            precision=self.recipe.precision,
        )

    def run_stage(self, stage: Stage, state: State, tensors: dict[str, Tensor]) -> None:
        """Train a stage from the epoch of ``state``, select an epoch and save checkpoints when they are due."""
        epochs, first = stage.settings.epochs, first_kept(stage.settings)
        loop = self.loop(stage)
        selection, metric = Selection(patience=self.recipe.selection.patience), self.recipe.selection.metric
        best: dict[str, Tensor] = {}
        if tensors:
            with restoring():
                loop.restore(tensors)
                selection = Selection.from_dict(state.selection, selection.patience, state.epoch)
                if state.chosen is not None:
                    best = self.checkpoint.load_weights(state.chosen)
                    if selection.best is None or not all_finite(best.values()):
                        raise ValueError("the chosen weights were never evaluated, or are not finite")
        written = state.chosen
        self.log.stage(stage.name, epochs, len(stage.sampler))
        while state.epoch < epochs and not selection.exhausted(state.epoch):
            index = state.epoch
            facts = loop.epoch(index, self.checkpoint)
            due = self.checkpoint.due()
            now = loop.tensors()
            if due or stage.judge is not None or index + 1 == epochs:  # Otherwise the next loss shows it.
                loop.check_weights(all_finite(now.values()), index, self.checkpoint)
            self.early = index < deferred_epoch(stage.settings)
            # Without a judge nothing reads the average yet, and its statistics cost a pass over all images.
            with loop.averaged(index) if stage.judge is not None else nullcontext():
                found = stage.judge() if stage.judge is not None else {}
                found = self.ranks.told(partial(dict, found))  # All ranks must select the same epoch despite rounding.
                facts |= {f"val_{name}": value for name, value in found.items()}
                state.history.append(facts)
                rows = [row for row in state.history if row["stage"] == stage.name]
                figure = figure_of(metric, rows[first:])
                if index >= first and selection.update(index, figure) and figure is not None:
                    best = {key: value.detach().clone() for key, value in stage.module.state_dict().items()}
                    state.chosen = f"chosen-{stage.name}-{index + 1}.safetensors"
            state.epoch, state.selection = index + 1, selection.to_dict()
            state.seconds = perf_counter() - self.begin
            self.log.epoch(index + 1, facts)
            if due:
                if state.chosen not in (None, written):
                    self.checkpoint.save_weights(state.chosen, best)
                    written = state.chosen
                self.checkpoint.save(state, now)
        if best:
            load_strictly(stage.module, best)
            value = abs(selection.best or 0.0)
            self.log.fact(notes.kept_epoch(stage.name, selection.chosen + 1, state.epoch, metric, value))
        else:
            loop.keep_average(state.epoch - 1)
