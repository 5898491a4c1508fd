"""Recipes as scikit-learn estimators, for images and for plain vectors."""

from lopsided.estimator.frozen import LopsidedClassifier
from lopsided.estimator.two_stage import TwoStageClassifier

__all__ = ["LopsidedClassifier", "TwoStageClassifier"]
