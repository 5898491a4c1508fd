"""Adapter: contrastive heads on the features of an encoder as it is, and a linear classifier on the heads."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from lopsided.facts import notes
from lopsided.models.encoders import seeded_init
from lopsided.models.heads import Adapter
from lopsided.models.model import AdapterCard
from lopsided.training.adapter import Joined, Rows, fit_adapter
from lopsided.training.checkpoint import Facts, State
from lopsided.training.methods.frozen import tell_choice
from lopsided.training.methods.trainer import FeatureTrainer
from lopsided.training.stage_kinds import objective_of


class AdapterTrainer(FeatureTrainer):
    """Trains the heads, and joins them into one linear classifier."""

    def adapter(self, features: int) -> tuple[AdapterCard, Adapter]:
        """Return the heads, not trained."""
        section = self.recipe.adapter
        heads = AdapterCard(heads=section.heads, hidden=section.hidden, out=section.out, keep=section.blend > 0)
        with seeded_init(self.recipe.seed, "adapter"):
            adapter = Adapter(
                features, **heads.model_dump(), input_dropout=section.input_dropout, dropout=section.dropout
            )
        return heads, adapter

    def train(self, state: State, tensors: dict[str, Tensor]) -> None:
        """Train the heads and fit the classifier."""
        state.history = self._train_heads()
        state.epoch, state.seconds = len(state.history), perf_counter() - self.begin

    def _train_heads(self) -> list[Facts]:
        """Train the heads and fit the classifier. The first rank does it for all ranks. Return the facts of epochs."""
        recipe, train = self.recipe, self.prepared.train
        (features,) = self.training_features([self.model.views])
        adapter, steps = self.model.adapter, -(-len(train) // recipe.encoder_training.batch_size)
        assert adapter is not None
        found: list[Joined] = []

        def fit() -> dict[str, Tensor]:
            self.log.stage("adapter", recipe.encoder_training.epochs, steps)
            joined = fit_adapter(
                adapter,
                Rows(features, train.labels, train.groups, self.num_classes, self.importance),
                recipe,
                lambda labels: objective_of(self, recipe.encoder_training.loss, labels, recipe.adapter.out),
                device=self.device,
                count=lambda done, total: self.log.count("heads", done, total),
            )
            found.append(joined)
            linear = {"weight": joined.linear.weight, "bias": joined.linear.bias}
            state = {f"classifier.{name}": torch.from_numpy(value).float() for name, value in linear.items()}
            return state | {f"adapter.{name}": value for name, value in adapter.state_dict().items()}

        state = self.ranks.spread(fit)
        for name in ("adapter", "classifier"):
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            self.model.get_submodule(name).load_state_dict(own)
        history: list[Facts] = self.ranks.told(lambda: found[0].history)
        for index, facts in enumerate(history, start=1):
            self.log.epoch(index, facts)
        for joined in found:
            if joined.regression is not None:
                tell_choice(self, joined.regression)
            self.log.fact(notes.heads(recipe.adapter.heads, joined.num_folds, recipe.adapter.blend))
        return history
