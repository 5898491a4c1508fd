"""Trackers: they show the course of runs in other programs, such as TensorBoard and MLflow."""

from lopsided.trackers.tracker import Status, TrackedRun, Tracker

__all__ = ["Status", "TrackedRun", "Tracker"]
