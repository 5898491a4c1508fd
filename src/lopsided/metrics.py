"""Figures of predictions: the public door of ``lopsided.evaluation.metrics``."""

from lopsided.evaluation.metrics import accuracy, evaluate, unweighted_accuracy

__all__ = ["accuracy", "evaluate", "unweighted_accuracy"]
