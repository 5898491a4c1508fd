"""Training: from a recipe and a source to a model, in two stages or end to end.

Importing this package imports nothing else; take what you need from its modules.
"""
