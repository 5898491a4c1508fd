"""Recipes as scikit-learn estimators, for images and for plain vectors."""

from lopsided.estimator.estimators import LopsidedClassifier, TwoStageClassifier

__all__ = ["LopsidedClassifier", "TwoStageClassifier"]
