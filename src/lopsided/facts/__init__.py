"""What a run found: notes and cautions with a kind and values. Their words stand in ``notes`` and ``cautions``."""

from lopsided.facts import cautions, notes
from lopsided.facts.fact import KINDS, Fact, merge_folds

__all__ = ["KINDS", "Fact", "cautions", "merge_folds", "notes"]
