"""The command: ``lopsided VERB``."""

from lopsided.cli.app import main, run

__all__ = ["main", "run"]
