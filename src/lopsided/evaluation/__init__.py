"""Metrics with intervals, calibration and decision rules."""
