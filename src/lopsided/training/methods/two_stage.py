"""Two stages: the encoder with a projection head, and then a linear layer on the frozen encoder."""

from __future__ import annotations

from lopsided.training.finishers import Finisher, SecondStage
from lopsided.training.loop import Stage
from lopsided.training.methods.staged import StagedTrainer


class TwoStageTrainer(StagedTrainer):
    """Trains the encoder, and then the classifier."""

    def first_stage(self) -> Stage:
        """Return the first stage, which validation images judge by class means: it has no classifier of its own."""
        val = self.prepared.val
        judge = None if val is None else self.judge_by_means(val, self.features)
        # The second stage trains the model's own classifier from the start.
        return self.network_stage("encoder", judge, apart=True)

    def finishers(self) -> list[Finisher]:
        """Return the second stage, and what follows it."""
        return [SecondStage(), *super().finishers()]
