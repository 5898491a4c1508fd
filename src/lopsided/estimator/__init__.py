"""Recipes as scikit-learn estimators, for images and for plain vectors."""

from lopsided.estimator.classifiers import LopsidedClassifier, TwoStageClassifier

__all__ = ["LopsidedClassifier", "TwoStageClassifier"]
