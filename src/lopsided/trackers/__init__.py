"""Trackers: they show the course of runs in other programs, such as TensorBoard, MLflow and Weights & Biases."""

from lopsided.trackers.tracker import Status, TrackedRun, Tracker

__all__ = ["Status", "TrackedRun", "Tracker"]
