"""Metrics of predictions: the public functions of ``lopsided.evaluation.metrics``."""

from lopsided.evaluation.metrics import accuracy, evaluate, unweighted_accuracy

__all__ = ["accuracy", "evaluate", "unweighted_accuracy"]
