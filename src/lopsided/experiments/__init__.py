"""Runs and what is done with them: train by a recipe, evaluate, predict, export.

Importing this package imports nothing else; take what you need from its modules.
"""
