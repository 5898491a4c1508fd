"""Training: turns a recipe and a source into a model, in two stages or end to end.

This package imports none of its modules. Import the names you need from the modules.
"""
