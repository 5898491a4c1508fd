"""Metrics of predictions and of feature spaces: public functions of ``lopsided.evaluation``."""

from lopsided.evaluation.alignment import class_alignment_consistency, sample_alignment_accuracy
from lopsided.evaluation.metrics import accuracy, evaluate, unweighted_accuracy

__all__ = [
    "accuracy",
    "class_alignment_consistency",
    "evaluate",
    "sample_alignment_accuracy",
    "unweighted_accuracy",
]
