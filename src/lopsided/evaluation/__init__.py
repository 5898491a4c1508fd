"""Figures with intervals, and information theory."""
