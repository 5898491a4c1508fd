"""The trainers: one file per method, which trains what the method's spec (``lopsided.recipe.methods``) describes."""

from lopsided.training.methods.trainer import Trainer, make_trainer

__all__ = ["Trainer", "make_trainer"]
