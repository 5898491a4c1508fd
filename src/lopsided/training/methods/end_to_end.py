"""End to end: one stage with encoder, linear layer, and a projection head if the loss needs projections."""

from __future__ import annotations

from lopsided.training.loop import Stage
from lopsided.training.methods.staged import StagedTrainer


class EndToEndTrainer(StagedTrainer):
    """Trains the encoder and the classifier together."""

    def first_stage(self) -> Stage:
        """Return the only stage, which validation images judge by the classifier."""
        val = self.prepared.val
        judge = None if val is None else self.judge_by_classifier(val, self.features)
        return self.network_stage("end-to-end", judge)
