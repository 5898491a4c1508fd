"""Entropy and related measures: the public functions of ``lopsided.evaluation.information``."""

from lopsided.evaluation.information import (
    conditional_cross_entropy,
    conditional_differential_entropy,
    conditional_entropy,
    cross_entropy,
    differential_entropy,
    empirical_distribution,
    entropy,
    feature_information,
    joint_entropy,
    kl_divergence,
    mutual_information,
)

__all__ = [
    "conditional_cross_entropy",
    "conditional_differential_entropy",
    "conditional_entropy",
    "cross_entropy",
    "differential_entropy",
    "empirical_distribution",
    "entropy",
    "feature_information",
    "joint_entropy",
    "kl_divergence",
    "mutual_information",
]
