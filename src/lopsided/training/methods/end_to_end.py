"""End to end: one stage with encoder, linear layer, and a projection head if the loss needs projections."""

from __future__ import annotations

from lopsided.training.loop import Stage
from lopsided.training.methods.staged import StagedTrainer
from lopsided.training.stage_kinds import judge_by_classifier, network_stage


class EndToEndTrainer(StagedTrainer):
    """Trains the encoder and the classifier together."""

    def first_stage(self) -> Stage:
        """Return the only stage, which validation images judge by the classifier."""
        val = self.prepared.val
        judge = None if val is None else judge_by_classifier(self, val, self.features)
        return network_stage(self, "end-to-end", judge)
