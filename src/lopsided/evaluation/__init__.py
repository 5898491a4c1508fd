"""Metrics with intervals, and information theory."""
