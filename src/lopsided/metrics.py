"""Metrics of predictions and of feature spaces: public functions of ``lopsided.evaluation``."""

from lopsided.evaluation.alignment import class_alignment_consistency, sample_alignment_accuracy
from lopsided.evaluation.metrics import accuracy, balanced_accuracy, evaluate

__all__ = [
    "accuracy",
    "balanced_accuracy",
    "class_alignment_consistency",
    "evaluate",
    "sample_alignment_accuracy",
]
